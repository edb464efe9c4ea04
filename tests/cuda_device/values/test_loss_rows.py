"""Rows whose teacher the draft cannot say: on a GPU they have the weight 0, where a CPU leaves them out."""

import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_row import LENGTH, TinyRow

from eagle_kit.objective.batch import make_micro_batch, row_weights
from eagle_kit.objective.loss import Objective, TTTBatch, ttt_loss
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.ops.backend import use

STEPS = 2


def loss_of_a_row(device: str, loss: str, rule: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and figures of a packed sequence over states that are made up, and gradients of states and
    weights."""
    target = tiny_target()
    head = tiny_head(target, 101)
    generator = torch.Generator().manual_seed(2)
    batch = make_micro_batch(TinyRow(), [7], STEPS, torch.device(device), rule)

    # States of the target. Where its token cannot be said they are infinite.
    hidden = torch.randn(LENGTH, target.config.hidden_size, generator=generator)
    argmax = torch.randint(0, 131, (LENGTH,), generator=generator)
    hidden[~head.t2d[argmax]] = torch.inf
    outputs = [torch.randn(n, head.config.hidden_size, generator=generator) for n in batch.plan.counts]

    # The loss on the device.
    target.to(device)
    head.to(device).requires_grad_(True)
    hidden = hidden.to(device)
    outputs = [output.to(device).requires_grad_() for output in outputs]
    rows = target.head_weight[head.token_map]
    weights = row_weights(batch, [1.0, 0.8], "tokens", batch.plan.counts, 3)
    features = TargetFeatures(hidden[:, :0], hidden, argmax.to(device))
    given = TTTBatch(batch.ids, batch.plan, weights, features, target.embed_tokens.weight, rows)
    out = ttt_loss(head, outputs, given, Objective.of(loss, 3.0, head, target.head_weight))
    out.loss.backward()
    figures = torch.cat((out.loss.detach().double()[None], out.figures)).cpu()
    learned = [*outputs, head.lm_head.weight, head.norm.weight]
    return figures, [each.grad.cpu() for each in learned]


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        ("ce", "serving"),
        ("kl", "published"),
        ("lk-alpha", "serving"),
        ("lk-hybrid", "serving"),
        ("reverse-kl", "serving"),
        ("tv", "published"),
    ],
)
def test_rows_of_the_weight_0_change_nothing_whatever_their_teachers_are(loss, rule):
    with use("reference"):
        figures, gradients = loss_of_a_row("cpu", loss, rule)
        found, others = loss_of_a_row("cuda", loss, rule)
    learned = figures[1 + 3 * STEPS :]
    counts = make_micro_batch(TinyRow(), [7], STEPS, torch.device("cpu"), rule).plan.counts
    assert 0 < int(learned[0]) < counts[0], "some cannot be said"
    torch.testing.assert_close(found, figures, rtol=1e-6, atol=1e-6)
    for ours, other in zip(gradients, others, strict=True):
        assert ours.abs().max() > 1e-4
        assert (other - ours).abs().max() <= 1e-6 * ours.abs().max()
