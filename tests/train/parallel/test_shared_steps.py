"""Optimiser steps that two processes share over gloo, against the same steps of one process alone."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from fork_server import FORK_SERVER
from rank_processes import run_ranks
from tiny import tiny_head, tiny_target
from tiny_run import PackedRows, packed_row_of

from eagle_kit.config.train import DataConfig, TrainConfig, TrainingConfig
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.parallel.processes import make_accelerator
from eagle_kit.train.run.checkpoint import TrainState
from eagle_kit.train.run.setup import TrainingComponents
from eagle_kit.train.run.step import Stepper, StepResult

NUM_STEPS = 3


class Trained(NamedTuple):
    """What a process has after its steps."""

    results: list[StepResult]
    state: TrainState
    weights: dict[str, torch.Tensor]


def make_data() -> PackedRows:
    """Rows whose prompts and replies differ much in length, so that processes have unequal shares."""
    rng = np.random.default_rng(3)
    rows = []
    for number in range(8):
        prompt = rng.integers(3, 131, size=2 + number).tolist()
        reply = rng.integers(3, 131, size=6 + 7 * (number % 4)).tolist()
        rows.append(packed_row_of(prompt, reply))
    return PackedRows(rows)


def train_tiny(ranks: Any, normalisation: str) -> Trained:
    """Take :data:`NUM_STEPS` steps of four rows in one process of ``ranks``, or alone where that is None."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run, or of the forked parent's
    if ranks is not None:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # accelerate asks for it, though the processes have met
    training = TrainingConfig(
        ttt_length=3,
        sequences_per_step=4,
        learning_rate=1e-3,
        max_steps=NUM_STEPS,
        loss_normalisation=normalisation,
        precision="float32",
    )
    config = TrainConfig(
        target="tiny", output_dir="unused", data=DataConfig(source="unused"), training=training
    )
    accelerator = make_accelerator(config)
    assert accelerator.num_processes == (1 if ranks is None else ranks.size)
    target = tiny_target()
    data = make_data()
    components = TrainingComponents(target, Path(), None, data)  # type: ignore[arg-type]
    head = tiny_head(target)
    stepper = Stepper(config, accelerator, components, head, Schedule.from_config(training, len(data)))
    state = TrainState()
    results = [stepper.step(state) for _ in range(NUM_STEPS)]
    stepper.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    weights = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    return Trained(results, state, weights)


@pytest.mark.essential
@pytest.mark.parametrize("normalisation", ["tokens", "sequence"])
def test_two_processes_take_the_steps_of_one(normalisation: str) -> None:
    alone = train_tiny(None, normalisation)
    both: list[Trained] = run_ranks(2, train_tiny, normalisation, processes=FORK_SERVER)

    for mine in both:
        for ours, theirs in zip(mine.results, alone.results, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
            assert ours.loss_per_step == pytest.approx(theirs.loss_per_step, rel=1e-6)
            assert ours.learned_per_step == theirs.learned_per_step
            assert ours.match_per_step == theirs.match_per_step
            assert ours.simulated_accept_length == pytest.approx(theirs.simulated_accept_length)
        assert mine.state.tokens == alone.state.tokens
        assert mine.state.supervised_tokens == alone.state.supervised_tokens
        for name, weight in alone.weights.items():
            torch.testing.assert_close(mine.weights[name], weight, rtol=1e-4, atol=2e-5)
    assert all(torch.equal(both[0].weights[name], both[1].weights[name]) for name in alone.weights)
