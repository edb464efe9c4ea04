"""A trainer's steps with true values: losses, gradients and weights are those of the CPU's steps."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tiny import tiny_head, tiny_target

from eagle_kit.config.drafts.fused_states import Eagle3TrainingConfig
from eagle_kit.objective.batch import make_micro_batch, row_weights
from eagle_kit.objective.loss import Objective
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.strategy import Replicated
from tests.cuda_device.device import phase
from tests.cuda_device.values.models import SIZES

TTT_LENGTH = 3
DRAFT_VOCAB_SIZE = 101
MICRO_BATCHES = ([[0, 1], [2]], [[3], [4, 5]])
"""Packed rows of the forwards of each optimizer step."""
LEARNING_RATE = 1e-3
CLIP_NORM = 4e-4
STD = 0.05
"""Standard deviation of random weights. With larger ones rounding to bf16 grows to a tenth of a gradient."""


class Tolerance(NamedTuple):
    """Largest relative differences of two steps: losses, and norms of tensors."""

    loss: float
    gradient: float
    change: float
    """Of what the steps changed in all weights."""


TOLERANCES = {
    "float32": Tolerance(loss=1e-6, gradient=1e-5, change=1e-3),
    "bfloat16": Tolerance(loss=1e-3, gradient=3e-2, change=2e-1),
}

SMALL = 1e-7
"""Difference of losses that is always allowed: a divergence is the difference of sums of size 5 in fp32."""


class PackedRows:
    """Packed rows of three documents, of a prompt and a response each."""

    groups = ("all",)

    def row(self, number: int) -> SimpleNamespace:
        """Row ``number``, from a generator of this seed."""
        generator = np.random.default_rng(number)
        length = 37 + 4 * number
        doc_start = np.zeros(length, np.int64)
        response = np.full(length, -1)
        borders = [0, length // 3, length - 11, length]
        for document in range(3):
            start = borders[document]
            stop = borders[document + 1]
            doc_start[start:stop] = start
            response[start + 3 : stop] = document
        return SimpleNamespace(
            ids=generator.integers(0, DRAFT_VOCAB_SIZE, length),
            response=response,
            doc_start=doc_start,
            group=np.zeros(length, np.int32),
        )


class Step(NamedTuple):
    """What an optimizer step computed, on the host in fp32.

    Attributes:
        gradients: before clipping.
        norm: of all gradients.
        weights: after the step.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    weights: dict[str, torch.Tensor]


class Trainer:
    """The trainer's parts for a small head, from the same weights on every device."""

    def __init__(self, device: torch.device, precision: str, loss: str, checkpointing: str) -> None:
        self.device = device
        self.config = Eagle3TrainingConfig(
            ttt_length=TTT_LENGTH, precision=precision, loss=loss, gradient_checkpointing=checkpointing
        )
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.target = tiny_target(512, **SIZES, std=STD).to(device, dtype).requires_grad_(False)
        self.head = tiny_head(self.target, DRAFT_VOCAB_SIZE, std=STD).to(device).requires_grad_(True)
        objective = Objective.of(self.config.losses, self.config.lk_eta, self.head, self.target.head_weight)
        rows = self.target.head_weight[self.head.token_map]
        module = TTTModule(self.head, self.target.embed_tokens.weight, rows, self.config, objective)
        accelerator = SimpleNamespace(device=device, num_processes=1, process_index=0)
        self.strategy = Replicated(module, self.config, accelerator)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the head's weights."""
        return {name: weight.detach().float().cpu().clone() for name, weight in self.head.named_parameters()}

    def step(self, rows: list[list[int]]) -> Step:
        """Take an optimizer step; gradients of all forwards are added up."""
        data = PackedRows()
        batches = [make_micro_batch(data, numbers, TTT_LENGTH, self.device) for numbers in rows]
        counts = np.sum([batch.plan.counts for batch in batches], axis=0).tolist()
        num_documents = sum(batch.num_documents for batch in batches)

        loss = 0.0
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)
            weights = row_weights(batch, self.config.weights[:TTT_LENGTH], "tokens", counts, num_documents)
            layers = self.head.config.aux_layer_ids
            teachers = batch.plan.teacher_positions
            features = capture_features(
                self.target, batch.ids, batch.doc_start, layers, teachers, batch.plan.spans
            )
            out = self.strategy.forward(batch, features, features.hidden, weights, last=is_last)
            self.strategy.backward(out.loss, last=is_last)
            loss += float(out.loss.detach())

        gradients = {name: weight.grad.float().cpu().clone() for name, weight in self.head.named_parameters()}
        norm = self.strategy.update(LEARNING_RATE, CLIP_NORM)
        return Step(loss, gradients, norm, self.weights())


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference, relative to that of ``theirs``."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("checkpointing", ["off", "steps"])
@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk-hybrid"])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_steps_are_those_of_the_cpu(precision, loss, checkpointing):
    trainers = [Trainer(torch.device(name), precision, loss, checkpointing) for name in ("cuda:0", "cpu")]
    tolerance = TOLERANCES[precision]
    before = trainers[1].weights()
    for rows in MICRO_BATCHES:
        with phase() as found:
            ours = trainers[0].step(rows)
        assert found.counts["uncomputed_launches"] == 0
        assert found.counts["driver_launches"] > 20, "kernels of Triton"
        theirs = trainers[1].step(rows)

        assert theirs.norm > 2 * CLIP_NORM, "the gradient has to be clipped"
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance.loss, abs=SMALL)
        assert ours.norm == pytest.approx(theirs.norm, rel=tolerance.gradient)
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            assert difference(ours.gradients[name], gradient) <= tolerance.gradient, name
        changes = [
            torch.cat([(step.weights[name] - before[name]).flatten() for name in before])
            for step in (ours, theirs)
        ]
        assert difference(*changes) <= tolerance.change


def test_recomputation_changes_no_bit():
    found = [
        Trainer(torch.device("cuda:0"), "bfloat16", "ce", checkpointing).step(MICRO_BATCHES[0])
        for checkpointing in ("off", "steps")
    ]
    assert found[0].loss == found[1].loss and found[0].norm == found[1].norm
    for name, gradient in found[0].gradients.items():
        assert torch.equal(gradient, found[1].gradients[name]), name
