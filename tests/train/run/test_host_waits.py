"""Places where a step of the trainer has the host wait for a GPU, counted without one."""

import pytest
import torch
from tiny import tiny_head, tiny_target

from benchmarks.waits import BUDGETS, LENGTH, TTT_LENGTH, PackedRow, count_step
from eagle_kit.kernels.backend import use
from eagle_kit.train.algorithm.batch import make_micro_batch, row_weights
from eagle_kit.train.algorithm.loss import Objective, TTTBatch, ttt_loss
from eagle_kit.train.algorithm.target_features import TargetFeatures
from kernel_lab.host_waits import THERE, OnDevice, PretendGPU


def loss_of_a_row(gpu: PretendGPU | None, loss: str, rule: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and figures of a packed row over states that are made up, and gradients of states and weights."""
    place = (lambda x: x) if gpu is None else OnDevice
    target = tiny_target()
    head = tiny_head(target, 101)
    by, size = torch.Generator().manual_seed(2), head.config.hidden_size
    batch = make_micro_batch(
        PackedRow(), [7], TTT_LENGTH, torch.device("cpu" if gpu is None else THERE), rule
    )  # type: ignore[arg-type]
    width = target.config.hidden_size
    hidden, argmax = torch.randn(LENGTH, width, generator=by), torch.randint(0, 131, (LENGTH,), generator=by)
    hidden[~head.t2d[argmax]] = torch.inf
    hidden, argmax = place(hidden), place(argmax)
    outputs = [place(torch.randn(n, size, generator=by)).requires_grad_() for n in batch.plan.counts]
    if gpu is not None:
        gpu.put(target)
        gpu.put(head)
    rows = target.head_weight[head.target_ids]
    weights = row_weights(batch, [1.0, 0.8, 0.64][:TTT_LENGTH], "tokens", batch.plan.counts, 3)
    features = TargetFeatures(hidden[:, :0], hidden, argmax)
    given = TTTBatch(batch.ids, batch.plan, weights, features, target.embed_tokens.weight, rows)
    out = ttt_loss(head, outputs, given, Objective.of(loss, 3.0, head, target.head_weight))
    out.loss.backward()
    figures = torch.cat((out.loss.detach().double()[None], out.figures)).cpu()
    learned = [*outputs, head.lm_head.weight, head.norm.weight]
    return figures, [x.grad.held if gpu else x.grad for x in learned]


def test_other_losses_weights_and_rows_cost_no_more(triton_device: str) -> None:
    gpu = count_step("tv", "sequence", "published")
    assert gpu.operations > 300
    assert gpu.phases == BUDGETS["trainer's step"], gpu.table()


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
def test_rows_of_the_weight_0_change_nothing_whatever_their_teachers_are(loss: str, rule: str) -> None:
    with use("reference"):
        figures, grads = loss_of_a_row(None, loss, rule)
        with PretendGPU() as gpu:
            theirs, their_grads = loss_of_a_row(gpu, loss, rule)
    learned = figures[1 + 3 * TTT_LENGTH :]
    counts = make_micro_batch(PackedRow(), [7], TTT_LENGTH, torch.device("cpu"), rule).plan.counts  # type: ignore[arg-type]
    assert 0 < int(learned[0]) < counts[0]  # some cannot be said
    torch.testing.assert_close(theirs, figures, rtol=1e-6, atol=1e-6)
    for ours, other in zip(grads, their_grads, strict=True):
        assert ours.abs().max() > 1e-4
        assert (other - ours).abs().max() <= 1e-6 * ours.abs().max()


def test_what_waits_is_counted() -> None:
    host, mask = torch.arange(4), torch.tensor([True, False, True, True])
    with PretendGPU() as gpu:
        x, seen = OnDevice(host.clone()), OnDevice(mask)
        counted = {
            "item": lambda: int(x[0]),
            "tolist": lambda: x.tolist(),
            "nonzero": lambda: torch.nonzero(seen),
            "boolean index": lambda: x[seen],
            "unique": lambda: torch.unique(x),
            "copy to the host": lambda: x.cpu(),
            "copy from pageable memory": lambda: host.to(THERE),
            "index of the host": lambda: x[host],
            "repeat_interleave": lambda: x.repeat_interleave(x),
        }
        for name, call in counted.items():
            gpu.waits.clear()
            call()
            assert [what for what, _ in gpu.waits] == [name] and gpu.waits.total() == 1
        gpu.waits.clear()
        pinned = torch.empty(4, dtype=torch.int64, pin_memory=True)
        assert torch.equal(pinned.copy_(x, non_blocking=True), host) and gpu.waits.total() == 0
        pinned.copy_(x)
        assert list(gpu.waits) == [("copy to the host", "?")]
        gpu.waits.clear()
        assert host.pin_memory().to(THERE, non_blocking=True).is_cuda
        assert (x[x] + x.new_zeros(4)).device == THERE
        x.repeat_interleave(x, output_size=6)
        assert gpu.waits.total() == 0
        with pytest.raises(AssertionError, match="mixes tensors"):
            torch.add(x, host)
        with pytest.raises(AssertionError, match="say in READS"):
            torch.allclose(x.float(), x.float())
