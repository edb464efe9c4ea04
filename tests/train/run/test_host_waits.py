"""Places where a step of the trainer has the host wait for a GPU, counted without one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_waits import THERE, OnDevice, PretendGPU
from tiny import tiny_head, tiny_target

from eagle_kit.config.train import TrainingConfig
from eagle_kit.kernels.backend import use
from eagle_kit.train.algorithm.batch import make_micro_batch, row_weights
from eagle_kit.train.algorithm.loss import Objective, TTTBatch, ttt_loss
from eagle_kit.train.algorithm.module import TTTModule
from eagle_kit.train.algorithm.target_features import TargetFeatures, capture_features
from eagle_kit.train.optim.strategy import Replicated

LENGTH, STEPS = 40, 2
BUDGET = 3
"""Waits of the host for a packed row."""


class Data:
    """One packed row of three documents with a reply each, of two groups."""

    groups = ("one", "other")

    def row(self, number: int) -> Any:
        generator = np.random.default_rng(number)
        doc_start, reply = np.zeros(LENGTH, np.int64), np.full(LENGTH, -1)
        group = (np.arange(LENGTH) >= 13).astype(np.int32)
        for which, (start, stop) in enumerate(((0, 13), (13, 30), (30, LENGTH))):
            doc_start[start:stop], reply[start + 4 : stop] = start, which
        return SimpleNamespace(
            ids=generator.integers(0, 131, LENGTH), reply=reply, doc_start=doc_start, group=group
        )


class Step:
    """What a step does with a packed row: lay it out, run the target, forward, backward, read the figures."""

    def __init__(
        self, gpu: PretendGPU | None, loss: str = "ce", normalisation: str = "tokens", rule: str = "serving"
    ) -> None:
        self.device, self.rule = torch.device("cpu") if gpu is None else THERE, rule
        self.target = tiny_target()
        self.head = tiny_head(self.target, 101)
        if gpu is not None:
            gpu.put(self.target)
            gpu.put(self.head)
        self.config = TrainingConfig(ttt_length=STEPS, precision="float32", loss_normalisation=normalisation)
        rows, weight = self.target.head_weight[self.head.target_ids], self.target.head_weight
        objective = Objective.of(loss, 3.0, self.head, weight)
        module = TTTModule(self.head, self.target.embed_tokens.weight, rows, self.config, objective)
        alone: Any = SimpleNamespace(device=self.device, num_processes=1)
        self.strategy = Replicated(module, self.config, alone)

    def __call__(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss and its figures in one tensor of the host, and gradients."""
        batch = make_micro_batch(Data(), [7], STEPS, self.device, self.rule)  # type: ignore[arg-type]
        counts, weights = batch.plan.counts, self.config.weights[:STEPS]
        share = row_weights(batch, weights, self.config.loss_normalisation, counts, batch.num_documents)
        features = capture_features(
            self.target,
            batch.ids,
            batch.doc_start,
            self.head.config.aux_layer_ids,
            batch.plan.taught,
            batch.plan.spans,
        )
        out = self.strategy.forward(batch, features, features.hidden, share, last=True)
        self.strategy.backward(out.loss, last=True)
        figures = torch.cat((out.loss.detach().double()[None], out.figures)).cpu()
        return figures, [p.grad for p in self.strategy.parameters]


def loss_of_a_row(gpu: PretendGPU | None, loss: str, rule: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and figures of a packed row over states that are made up, and gradients of states and weights."""
    place = (lambda x: x) if gpu is None else OnDevice
    target = tiny_target()
    head = tiny_head(target, 101)
    by, size = torch.Generator().manual_seed(2), head.config.hidden_size
    batch = make_micro_batch(Data(), [7], STEPS, torch.device("cpu" if gpu is None else THERE), rule)  # type: ignore[arg-type]
    width = target.config.hidden_size
    hidden, argmax = torch.randn(LENGTH, width, generator=by), torch.randint(0, 131, (LENGTH,), generator=by)
    hidden[~head.t2d[argmax]] = torch.inf
    hidden, argmax = place(hidden), place(argmax)
    outputs = [place(torch.randn(n, size, generator=by)).requires_grad_() for n in batch.plan.counts]
    if gpu is not None:
        gpu.put(target)
        gpu.put(head)
    rows = target.head_weight[head.target_ids]
    weights = row_weights(batch, [1.0, 0.8, 0.64][:STEPS], "tokens", batch.plan.counts, 3)
    features = TargetFeatures(hidden[:, :0], hidden, argmax)
    given = TTTBatch(batch.ids, batch.plan, weights, features, target.embed_tokens.weight, rows)
    out = ttt_loss(head, outputs, given, Objective.of(loss, 3.0, head, target.head_weight))
    out.loss.backward()
    figures = torch.cat((out.loss.detach().double()[None], out.figures)).cpu()
    learned = [*outputs, head.lm_head.weight, head.norm.weight]
    return figures, [x.grad.values if gpu else x.grad for x in learned]


def test_a_packed_row_has_the_host_wait_three_times_at_most(triton_device: str) -> None:
    with PretendGPU() as gpu, use("triton"):
        step = Step(gpu)
        gpu.waits.clear()
        step()
        assert gpu.operations > 300
        assert gpu.waits.total() <= BUDGET, gpu.table()


def test_other_losses_weights_and_rows_cost_no_more(triton_device: str) -> None:
    with PretendGPU() as gpu, use("triton"):
        step = Step(gpu, "tv", "sequence", "published")
        gpu.waits.clear()
        step()
        assert gpu.waits.total() <= BUDGET, gpu.table()


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
    learned = figures[1 + 3 * STEPS :]
    counts = make_micro_batch(Data(), [7], STEPS, torch.device("cpu"), rule).plan.counts  # type: ignore[arg-type]
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
        assert host.pin_memory().to(THERE, non_blocking=True).is_cuda
        assert (x[x] + x.new_zeros(4)).device == THERE
        x.repeat_interleave(x, output_size=6)
        assert gpu.waits.total() == 0
        with pytest.raises(AssertionError, match="mixes tensors"):
            torch.add(x, host)
        with pytest.raises(AssertionError, match="say in READS"):
            torch.allclose(x.float(), x.float())
