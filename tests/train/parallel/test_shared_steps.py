"""Optimiser steps that two processes share over gloo, against the same steps of one process alone."""

import copy
import json
import os
from dataclasses import replace
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
from eagle_kit.core.errors import UserError
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.parallel.launch import sharding_asked_for
from eagle_kit.train.parallel.processes import make_accelerator
from eagle_kit.train.run.checkpoint import TrainState
from eagle_kit.train.run.setup import TrainingComponents
from eagle_kit.train.run.step import Stepper, StepResult

NUM_STEPS = 3
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
ZERO = ((1, ()), (2, ("offload_optimizer",)), (3, ("offload_optimizer", "offload_param")))
MORE_ZERO = ((1, ("offload_optimizer",)), (2, ()), (3, ()), (3, ("offload_optimizer",)))
"""Stages of DeepSpeed's ZeRO, and what is in the memory of the CPU."""


class Trained(NamedTuple):
    """What a process has after its steps.

    Attributes:
        results, state: of the steps, and the counters behind the last one.
        weights: of the whole head after :data:`NUM_STEPS`.
        moments: the whole state of the optimiser then, by name, end to end.
        goes_on: two further steps of this head, and those of a new one that took over weights and moments.
    """

    results: list[StepResult]
    state: TrainState
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    goes_on: list[StepResult]


def make_data() -> PackedRows:
    """Rows whose prompts and responses differ much in length, so that processes have unequal shares."""
    rng = np.random.default_rng(3)
    rows = []
    for number in range(8):
        prompt = rng.integers(3, 131, size=2 + number).tolist()
        response = rng.integers(3, 131, size=6 + 7 * (number % 4)).tolist()
        rows.append(packed_row_of(prompt, response))
    return PackedRows(rows)


def moments_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The moments of all weights in an optimiser's state, by name, end to end."""
    mine = [state["state"][number] for number in sorted(state["state"])]
    names = ("step", "exp_avg", "exp_avg_sq")
    return {name: torch.cat([each[name].flatten() for each in mine]).clone() for name in names}


def train_tiny(ranks: Any, normalisation: str, sharding: str = "none") -> Trained:
    """Take :data:`NUM_STEPS` steps of four rows in one process of ``ranks``, or alone where that is None.
    Two more follow with the same head and with a new one."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run, or of the forked parent's
    if ranks is not None:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # accelerate asks for it, though the processes have met
    training = TrainingConfig(
        ttt_length=3,
        sequences_per_step=4,
        learning_rate=1e-3,
        max_steps=NUM_STEPS + 2,
        loss_normalisation=normalisation,
        clip_norm=0.1,
        eps=1e-3,
        precision="float32",
    )
    config = TrainConfig(
        target="tiny", output_dir="unused", data=DataConfig(source="unused"), training=training
    )
    accelerator = make_accelerator(config)
    assert accelerator.num_processes == (1 if ranks is None else ranks.size)
    target = tiny_target()
    data = make_data()
    components = TrainingComponents(target, Path(), "", None, data)  # type: ignore[arg-type]
    schedule = Schedule.from_config(training, len(data))

    # The steps.
    head = tiny_head(target)
    stepper = Stepper(config, accelerator, components, head, schedule, sharding=sharding)
    if sharding.startswith("zero"):
        check_offloading(stepper.strategy.engine)
    state = TrainState()
    results = [stepper.step(state) for _ in range(NUM_STEPS)]
    after = replace(state)
    whole = stepper.strategy.whole_head()
    weights = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    optimizer_state = copy.deepcopy(stepper.strategy.optimizer_state())
    moments = moments_of(optimizer_state)

    # A new head takes over what is saved, and both go on.
    other = tiny_head(target, seed=5)
    other.load_state_dict(weights, strict=False)
    resumed = Stepper(config, accelerator, components, other, schedule, sharding=sharding)
    resumed.strategy.load_optimizer_state(optimizer_state)
    goes_on = [stepper.step(state) for _ in range(2)]
    state = replace(after)
    goes_on += [resumed.step(state) for _ in range(2)]
    for each in (stepper, resumed):
        each.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    return Trained(results, after, weights, moments, goes_on)


def sums_of_a_step(ranks: Any, sharding: str, forwards: int) -> dict[str, int]:
    """How often each collective that sums is called in the second step of this process, by its name in the
    profiler. A step has two rows of a process in ``forwards`` forwards."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    training = TrainingConfig(
        ttt_length=3,
        sequences_per_step=4,
        gradient_accumulation=forwards,
        max_steps=NUM_STEPS,
        precision="float32",
    )
    config = TrainConfig(
        target="tiny", output_dir="unused", data=DataConfig(source="unused"), training=training
    )
    accelerator = make_accelerator(config)
    target = tiny_target()
    data = make_data()
    components = TrainingComponents(target, Path(), "", None, data)  # type: ignore[arg-type]
    schedule = Schedule.from_config(training, len(data))
    stepper = Stepper(config, accelerator, components, tiny_head(target), schedule, sharding=sharding)
    state = TrainState()
    stepper.step(state)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stepper.step(state)
    stepper.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    return {event.key: event.count for event in profile.key_averages() if "reduce" in event.key}


def check_offloading(engine: Any) -> None:
    """Assert that DeepSpeed offloads what its file says."""
    zero = json.loads(Path(os.environ[FILE]).read_text())["zero_optimization"]
    assert (engine.zero_offload_optimizer() is not None) == ("offload_optimizer" in zero)
    assert (engine.zero_offload_param() is not None) == ("offload_param" in zero)


def train_by_files(ranks: Any, files: dict[str, str]) -> dict[str, Trained]:
    """:func:`train_tiny` by each file of DeepSpeed's own, as a launcher names it; all by one import of it."""
    found = {}
    for name, file in files.items():
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ[FILE] = file
        found[name] = train_tiny(ranks, "tokens", sharding_asked_for(os.environ))
    return found


def refuse_uneven(ranks: Any) -> str:
    """What a process of several says of rows that they cannot share equally."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    said = []
    for training in ({"sequences_per_step": 3}, {"sequences_per_step": 4, "gradient_accumulation": 4}):
        config = TrainConfig(
            target="t",
            output_dir="o",
            data=DataConfig(source="a"),
            training={"precision": "float32", **training},
        )
        with pytest.raises(UserError) as refused:
            make_accelerator(config)
        said.append(refused.value.cause)
    return "\n".join(said)


@pytest.mark.essential
@pytest.mark.parametrize(
    ("normalisation", "sharding"), [("tokens", "none"), ("sequence", "none"), ("tokens", "fsdp2")]
)
def test_two_processes_take_the_steps_of_one(normalisation: str, sharding: str) -> None:
    alone = train_tiny(None, normalisation)
    both: list[Trained] = run_ranks(2, train_tiny, normalisation, sharding, processes=FORK_SERVER)
    check_same(both, alone)


@pytest.mark.parametrize(
    "asked", [pytest.param(ZERO, id="some"), pytest.param(MORE_ZERO, id="more", marks=pytest.mark.nightly)]
)
def test_two_processes_take_the_steps_of_one_by_files_of_deepspeed_s(
    tmp_path: Path, asked: tuple[tuple[int, tuple[str, ...]], ...]
) -> None:
    """ZeRO 1 to 3, with moments or weights too in the memory of the CPU."""
    pytest.importorskip("deepspeed")
    files = {}
    for stage, offloaded in asked:
        name = " ".join([f"stage {stage}", *offloaded])
        zero = {"stage": stage, **{part: {"device": "cpu"} for part in offloaded}}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": 4}))
        files[name] = str(path)
    alone = train_tiny(None, "tokens")
    first, second = run_ranks(2, train_by_files, files, processes=FORK_SERVER)
    assert first.keys() == files.keys()
    for name in files:
        check_same([first[name], second[name]], alone)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_gradients_are_summed_over_processes_once_a_step(sharding: str) -> None:
    """As often with two forwards as with one. FSDP2 has one group of parameters."""
    single, several = (
        run_ranks(2, sums_of_a_step, sharding, forwards, processes=FORK_SERVER)[0] for forwards in (1, 2)
    )
    assert several == single
    scattered = sum(count for name, count in single.items() if name.startswith("c10d::_reduce_scatter"))
    assert scattered == (1 if sharding == "fsdp2" else 0), single


def check_same(both: list[Trained], alone: Trained) -> None:
    """Assert that two processes have taken the steps of one."""
    for mine in both:
        steps = zip((*mine.results, *mine.goes_on), (*alone.results, *alone.goes_on), strict=True)
        for ours, theirs in steps:
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
            assert ours.loss_per_step == pytest.approx(theirs.loss_per_step, rel=1e-6)
            assert ours.learned_per_step == theirs.learned_per_step
            assert ours.match_per_step == theirs.match_per_step
            assert ours.simulated_accept_length == pytest.approx(theirs.simulated_accept_length)
        assert mine.state.tokens == alone.state.tokens
        assert mine.state.supervised_tokens == alone.state.supervised_tokens
        assert mine.weights.keys() == alone.weights.keys()
        for name, weight in alone.weights.items():
            torch.testing.assert_close(mine.weights[name], weight, rtol=1e-4, atol=2e-5)
        for name, moment in alone.moments.items():
            torch.testing.assert_close(mine.moments[name], moment, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(both[0].weights[name], both[1].weights[name]) for name in alone.weights)


def test_rows_that_processes_cannot_share_equally_are_refused_by_all() -> None:
    first, second = run_ranks(2, refuse_uneven, processes=FORK_SERVER)
    assert first == second
    assert "sequences_per_step is 3, which 2 processes cannot share equally" in first
    assert "gradient_accumulation is 4, but a process has 2 rows" in first
