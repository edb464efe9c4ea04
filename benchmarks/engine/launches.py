"""Launches of a decode cycle by phase, counted without a GPU: the models are made of fake tensors, so that a
target of any size needs no memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import default_dtype, preset_named
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.engine.cycle import (
    CycleSettings,
    accept_and_commit,
    commit_states,
    draft_extend,
    propose,
    run_target,
)
from eagle_kit.engine.runner import CycleInputs, Runner
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.ops.backend import use
from kernel_lab.launches import LaunchCounter

MODEL = "llama-3.1-8b"
SHAPES = ("5,4,16", "3,1,4", "none")
PHASES = ("gather", "propose", "verify", "accept", "extend", "scatter")
CONTEXT = 8192

Launches = dict[str, Counter[str]]
"""Launches of each phase by name."""


def model_launches(shape: SpecShape, name: str = MODEL) -> Launches:
    """Launches of a cycle of a known model at batch 1, with an EAGLE-3 head where ``shape`` drafts."""
    return cycle_launches(*preset_named(name), shape)


def cycle_launches(config: TargetConfig, draft_vocab_size: int, shape: SpecShape) -> Launches:
    """Launches of a greedy cycle of one request in bf16, by phase (one of ``PHASES``)."""
    with _fake() as counter:
        runner = _runner(config, draft_vocab_size, shape)
        slot_ids = torch.zeros(1, dtype=torch.int64)
        models = runner.models
        settings = CycleSettings(shape, CONTEXT, verifier=runner.verifier(shape))
        with counter.phase("gather"):
            state = runner.slots.gather(slot_ids)
        with counter.phase("propose"):
            window = propose(models.drafter, state, settings, None)
        with counter.phase("verify"):
            output = run_target(models, state, window.tree, settings)
        with counter.phase("accept"):
            verified = accept_and_commit(models, state, window, output, settings)
            commit_states(output, verified)
        with counter.phase("extend"):
            next_state = draft_extend(models.drafter, state, verified, settings)
        with counter.phase("scatter"):
            runner.slots.scatter(slot_ids, next_state, verified.counts)
    return {name: counter.phases[name] for name in PHASES}


def whole_cycle_launches(config: TargetConfig, draft_vocab_size: int, shape: SpecShape) -> int:
    """The same for the function that the engine runs, as a whole."""
    with _fake() as counter:
        runner = _runner(config, draft_vocab_size, shape)
        settings = CycleSettings(shape, CONTEXT, verifier=runner.verifier(shape))
        inputs = CycleInputs(torch.zeros(1, dtype=torch.int64), None)
        with counter.phase("cycle"):
            runner.run_cycle(inputs, settings)
    return counter.phases["cycle"].total()


@contextmanager
def _fake() -> Iterator[LaunchCounter]:
    with torch.no_grad(), use("triton"), FakeTensorMode(), LaunchCounter() as counter:
        yield counter


def _runner(config: TargetConfig, draft_vocab_size: int, shape: SpecShape) -> Runner:
    with default_dtype(torch.bfloat16):
        target = LlamaModel(config)
        head = Eagle3Head(Eagle3Config.for_target(config, draft_vocab_size))
    draft = HeadDraftModel(head, target) if shape.steps else None
    options = EngineConfig(max_batch_size=1, max_context=CONTEXT, kv_tokens=CONTEXT, graph_mode="off")
    runner = Runner(target, draft, options.resolve(on_gpu=True))
    runner.use_shape([shape])
    return runner


def table(count: Callable[[SpecShape], Launches] = model_launches) -> list[str]:
    """Lines of a table: launches of each phase in the shapes of ``SHAPES``."""
    lines = [f"{'shape':10}" + "".join(f"{name:>9}" for name in (*PHASES, "all"))]
    for text in SHAPES:
        counts = [launched.total() for launched in count(SpecShape.parse(text)).values()]
        lines.append(f"{text:10}" + "".join(f"{number:9}" for number in (*counts, sum(counts))))
    return lines
