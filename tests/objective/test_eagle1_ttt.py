"""Training of EAGLE-1 heads against the published step in fp64: every loss and every gradient."""

import pytest
import torch
from published_eagle1 import PublishedEagle1, published_losses
from tiny import packed_row, randomise, tiny_target

from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.config.training import FeatureNoise, RegressionConfig
from eagle_kit.drafts.eagle1.head import Eagle1Head
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.models.loading.published import published_names
from eagle_kit.objective.batch import MicroBatch
from eagle_kit.objective.loss import Objective, TTTBatch
from eagle_kit.objective.noise import add_noise
from eagle_kit.objective.regression import regression_loss
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward_backward
from eagle_kit.ops.soft_cross_entropy import Teacher


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


NAMES = ("feature_weight", "token_weight", "topk_weight", "topk")
RECIPES = {
    "eagle": (1, (1.0, 0.1, 0.0, 10), False, True),
    "no bias, three steps": (3, (1.0, 0.1, 0.0, 10), False, False),
    "hass": (3, (1.0, 0.1, 1.0, 10), True, True),
    "only the best tokens": (2, (0.0, 0.0, 1.0, 3), True, True),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_every_gradient_equal_the_published_step(recipe):
    steps, weights, detach, bias = RECIPES[recipe]
    target = tiny_target()
    config = EAGLE1.new_config(Eagle1HeadConfig(fc_bias=bias, intermediate_size=97), target.config)
    head = randomise(Eagle1Head(config), 3, 0.15).bind(target.lm_head)
    ids, response, doc_start = packed_row()
    plan = make_row_plan(response, doc_start, steps)
    features = capture_features(target, ids, doc_start, head.capture, plan.is_teacher)
    read = features._replace(hidden=features.hidden + 0.3 * noise(61, 48, seed=7))
    step_weights = [0.7**k for k in range(steps)]
    result = ttt_forward_backward(
        head,
        TTTBatch(
            ids,
            plan,
            [torch.full((n,), w) for n, w in zip(plan.counts, step_weights, strict=True)],
            features,
            target.embed_tokens.weight,
            target.head_weight,
            inputs=read,
        ),
        Objective(regression=RegressionConfig(**dict(zip(NAMES, weights, strict=True))), detach_steps=detach),
    )

    oracle = PublishedEagle1(EAGLE1.write(head, torch.float64).tensors, config.num_heads, config.num_kv_heads)
    embeds, output = target.embed(ids).double(), target.head_weight.double()
    per_step = [(torch.zeros((), dtype=torch.float64), 0)] * steps
    for start, stop in ((0, 17), (17, 44), (44, 61)):
        part = slice(start, stop)
        mine = published_losses(
            oracle, features.hidden[part].double(), read.hidden[part].double(), embeds[part], output,
            response[part], steps, weights, detach,
        )  # fmt: skip
        per_step = [(a + c, b + d) for (a, b), (c, d) in zip(per_step, mine, strict=True)]
    assert result.matches.tolist() == [hits for _, hits in per_step]
    assert result.learned.tolist() == plan.counts and min(plan.counts) > 5
    sums = torch.stack([total.detach() for total, _ in per_step])
    torch.testing.assert_close(result.losses, sums, rtol=1e-5, atol=1e-4)
    loss = sum(w * total for w, (total, _) in zip(step_weights, per_step, strict=True))
    loss.backward()
    assert float(result.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in head.named_parameters():
        parts = [part if part.startswith("fc.") else f"layers.0.{part}" for part in published_names(name)]
        want = torch.cat([oracle.w(part).grad for part in parts]).float()
        assert want.abs().max() > 1e-3, name
        torch.testing.assert_close(
            parameter.grad, want, rtol=1e-3, atol=2e-4 * max(1.0, float(want.abs().max())),
            msg=lambda m, n=name: f"{n}: {m}",
        )  # fmt: skip
    assert not target.head_weight.requires_grad and target.head_weight.grad is None


@pytest.mark.parametrize("weights", [(1.0, 0.1, 0.0, 10), (0.5, 0.3, 2.0, 4), (0.0, 0.0, 1.0, 500)])
def test_the_loss_equals_autograd_on_its_formula_in_fp64(weights):
    feature, token, best, k = weights
    rows, positions, size, vocab = 401, 37, 48, 1271
    states, output = 2.0 * noise(rows, size), noise(vocab, size, seed=1) * 0.3
    hidden, c = 2.0 * noise(positions, size, seed=2), noise(rows, seed=3).abs()
    index = torch.arange(rows) % positions
    probs = (hidden @ output.T).softmax(-1)

    mine = states.clone().requires_grad_()
    config = RegressionConfig(feature_weight=feature, token_weight=token, topk_weight=best, topk=k)
    result = regression_loss(mine, output, hidden, Teacher(probs.clone(), index, c), config)
    result.loss.backward()

    theirs = states.double().requires_grad_()
    p, log_q = probs.double()[index], (theirs @ output.double().T).log_softmax(-1)
    d = theirs - hidden.double()[index]
    distance = torch.where(d.abs() < 1, d.square() / 2, d.abs() - 0.5).mean(-1)
    keep = p >= p.topk(min(k, vocab)).values[:, -1:]
    row_losses = feature * distance - token * (p * log_q).sum(-1) - best * (p * log_q * keep).sum(-1)
    (row_losses * c).sum().backward()
    torch.testing.assert_close(result.row_losses.double(), row_losses.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(result.best, log_q.argmax(-1))


def forward(numbers, lengths, doc_start=None):
    """Packed rows of ``lengths`` tokens, without tokens or plan."""
    if doc_start is None:
        doc_start = torch.zeros(sum(lengths), dtype=torch.int64)
    return MicroBatch(
        numbers, lengths, ids=None, doc_start=doc_start, plan=None, group=None, group_counts=[0]
    )


def test_noise_on_final_states_depends_on_seed_step_and_row_alone():
    uniform, zeros = FeatureNoise(kind="uniform", amount=0.25), torch.zeros(12, 6)
    drawn = add_noise(zeros, forward([4, 9], [5, 7]), uniform, 1, 1, 2)
    assert (
        torch.equal(drawn[5:], add_noise(zeros[:7], forward([9], [7]), uniform, 1, 1, 2)) and not zeros.any()
    )
    for seed, step in ((1, 3), (2, 2)):
        assert not torch.equal(drawn, add_noise(zeros, forward([4, 9], [5, 7]), uniform, 1, seed, step))
    assert not torch.equal(drawn[:5], drawn[5:10])


def test_noise_has_the_published_distribution():
    """``(rand - 0.5) * 0.2 * 512 / T`` of a conversation of T tokens."""
    lengths = [700, 300]
    doc_start = torch.tensor([0] * 700 + [700] * 300)
    published = FeatureNoise(kind="uniform", amount=0.1, per_tokens=512)
    drawn = add_noise(torch.zeros(1000, 64), forward([0], [1000], doc_start), published, 1, 0, 0)
    for part, length in zip(drawn.split(lengths), lengths, strict=True):
        bound = 0.1 * 512 / length
        assert 0.999 * bound < part.abs().max() <= bound
        assert float(part.std()) == pytest.approx(bound / 3**0.5, rel=0.01)
        assert abs(float(part.mean())) < 0.01 * bound
    with pytest.raises(ValueError, match="nor per_tokens"):
        FeatureNoise(kind="dropout", amount=0.1, per_tokens=512)


def test_a_factor_of_logits_is_no_part_of_the_distance():
    """The same target, its factor in its output layer or beside it."""
    states, hidden, weight = (noise(*shape, seed=i) for i, shape in enumerate([(9, 48), (5, 48), (131, 48)]))
    states.requires_grad_()
    index, row_weights = torch.arange(9) % 5, torch.rand(9, generator=torch.Generator().manual_seed(4))
    config, found = RegressionConfig(feature_weight=1.0, token_weight=0.1), []
    for factor, output, scale in ((1.0, 0.125 * weight, 1.0), (0.125, weight, 0.125)):
        teacher = Teacher((0.125 * hidden @ weight.t()).softmax(-1), index, row_weights)
        out = regression_loss(states * factor, output, hidden, teacher, config, scale)
        found.append((out.loss.detach(), *torch.autograd.grad(out.loss, states)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
