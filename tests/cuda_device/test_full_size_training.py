"""Plans of training recipes at full size beside the bytes that torch's allocator takes.

Whole runs take a few steps, validate, capture states into a store, and learn from it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.gpus import RUNTIME_BYTES
from eagle_kit.datagen.hidden_states import capture as captures
from eagle_kit.datagen.hidden_states.capture import CaptureOptions, capture
from eagle_kit.train.parallel.placement import load_placed
from eagle_kit.train.plan.costs import ProcessLayout, RunCosts
from eagle_kit.train.plan.estimate import RunEstimate
from eagle_kit.train.run import loop
from eagle_kit.train.run.loop import Ending, RunOptions, train
from eagle_kit.train.run.new_head import head_architecture
from eagle_kit.train.run.setup import TrainingComponents
from tests.cuda_device.device import memory_of
from tests.cuda_device.engines import made_up_results
from tests.cuda_device.full_size import DEVICE, GB, Measured, measured
from tests.cuda_device.published import publish
from tests.cuda_device.ranks import first_of
from tests.cuda_device.recipes import recipe, unsaved

pytestmark = pytest.mark.usefixtures("memory_of_its_own")
STEPS = 2


@contextmanager
def estimated(found: Measured) -> Iterator[list[RunEstimate]]:
    """Within, a run's own estimate is kept, and the peaks begin behind it, when everything is loaded."""
    kept: list[RunEstimate] = []
    estimate_run = loop.estimate_run

    def keep(*args: Any) -> RunEstimate:
        kept.append(estimate_run(*args))
        found.restart()
        return kept[-1]

    with mock.patch.object(loop, "estimate_run", keep):
        yield kept


def run(config: TrainConfig, memory: int) -> Measured:
    """Train a few steps on a device of ``memory`` bytes -> its peaks beside the run's own estimate."""
    with memory_of(memory), unsaved(), measured() as found, estimated(found) as estimates, made_up_results():
        assert train(config, RunOptions(max_steps=STEPS)) is Ending.MAX_STEPS
        found.planned = estimates[0].peak - RUNTIME_BYTES
        print(f"\n{estimates[0].report()}")
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == STEPS and not any(row.get("skipped") for row in rows), "the optimizer has run"
    assert rows[0]["tokens"] > 0.97 * STEPS * config.data.max_length
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama-3.1-8b-eagle3", "qwen3-8b-dflash", "qwen3-30b-a3b-eagle3"])
def test_steps_of_a_recipe_take_what_is_planned(name, tmp_path, record_property):
    """Rows are full of responses; of blocks, as many anchors are drawn as the recipe says."""
    memory = 141 * GB if "30b" in name else 80 * GB
    run(recipe(name, tmp_path, "validation.every=0"), memory).check(record_property)


def private_bytes() -> int:
    """Bytes of main memory of this process that are no pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.nightly
def test_one_process_of_eight_loads_its_shards_of_a_70b_target(tmp_path, record_property):
    """An eighth of the layers and both ends on the GPU, and next to nothing in main memory: it took 89 GB."""
    folder = publish("meta-llama/Llama-3.3-70B-Instruct", tmp_path / "target")
    process: Any = SimpleNamespace(process_index=0, is_local_main_process=True, device=DEVICE)
    with memory_of(80 * GB), unsaved(), first_of(8), measured() as found:
        before = private_bytes()
        target = load_placed(folder, "fsdp", process, torch.bfloat16)
        assert private_bytes() - before < 1 * GB
        layers = sum(weight.numel() for weight in target.layers.parameters() if weight.ndim > 1)
        ends = target.embed_tokens.weight.numel() + target.lm_head.weight.numel()
        assert 70 * GB < layers + ends < 71 * GB
        found.planned = 2 * (layers / 8 + ends)
    found.check(record_property)


@pytest.mark.nightly
def test_capture_and_training_from_a_store_take_what_is_planned(tmp_path, record_property):
    """The states of a 70B target are captured where it fits, and a head learns from them on 80 GB."""
    config = recipe("llama-3.3-70b-eagle3", tmp_path, "training.state_format=fp8")
    store = tmp_path / "store"
    load_components = captures.load_components

    with memory_of(282 * GB), unsaved(), measured() as captured:

        def load(*args: Any, **options: bool) -> TrainingComponents:
            components = load_components(*args, **options)
            architecture = components.target.config
            costs = RunCosts(config, architecture, head_architecture(config, architecture, None), is_gpu=True)
            forward = costs.target_forward(components.data.row_length(0))
            captured.planned = costs.target_bytes(ProcessLayout()) + forward
            captured.restart()
            return components

        with mock.patch.object(captures, "load_components", load):
            assert capture(config, CaptureOptions(store)) == 0
    captured.check(record_property)

    learned = recipe("llama-3.3-70b-eagle3", tmp_path, f"data.store={store}", "training.state_format=fp8")
    run(learned, 80 * GB).check(record_property)
