"""Engines and cases of ``python benchmarks tune``."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Machine
from benchmarks.options import Options
from benchmarks.runner import Benchmark, conduct
from benchmarks.tune.cells import (
    compare,
    compare_cold,
    compare_peers,
    forget_graphs,
    start_peers,
    time_choosing,
)
from benchmarks.tune.judge import verdicts
from benchmarks.tune.plot import plot
from benchmarks.tune.prompts import MAX_CONTEXT, make_prompts
from benchmarks.tune.sizes import AUTO, PLAIN, Sizes
from eagle_kit.core.errors import UserError
from eagle_kit.engine.llm import LLM

PEER_BATCHES = 1, 8

Prompts = Mapping[str, Sequence[list[int]]]
"""Token ids of prompts by task."""


def main(target: str, drafts: Sequence[str], sizes: Sizes, options: Options) -> int:
    """Measure -> exit code, 1 when a case failed.

    Raises:
        UserError: a task or a model that cannot be loaded, or two drafts of one name.
    """
    if len({name_of(draft) for draft in drafts}) < len(drafts):
        raise UserError("Two drafts have one name.", "Give folders with different names.")
    most: dict[str, Any] = {"max_batch_size": max(sizes.batches), "max_context": MAX_CONTEXT}
    plain = LLM(target, shape=PLAIN, **most)
    current: list[DraftEngines] = []
    llms = {
        name_of(draft): DraftEngines(partial(_settings, plain, draft, sizes, most), current)
        for draft in drafts
    }
    prompts = {Path(task).stem: make_prompts(plain, task, options.seed) for task in sizes.tasks}
    alone = replace(sizes, compare=False)
    settings = {"target": target, "drafts": list(drafts), **sizes.__dict__}
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    made = [
        case
        for draft, sizes in zip(drafts, (sizes, *[alone] * len(drafts)), strict=False)
        for case in cases_of(target, draft, llms[name_of(draft)], prompts, sizes, most)
    ]
    benchmark = Benchmark("tune", made, settings, partial(verdicts, sizes.shapes), plot)
    return conduct(benchmark, Machine.here(options.seed), options)


def name_of(draft: str) -> str:
    """Name of a draft, that of its run where it lies in one."""
    path = Path(draft)
    return path.parent.name if path.name == "draft" else path.name


class DraftEngines(Mapping[str, LLM]):
    """Engines of one draft, made when they are first asked for. Those of the draft before go then: the pools
    of two may not fit.

    Args:
        make: makes the engines.
        current: holds the draft whose engines there are; shared by all drafts.
    """

    def __init__(self, make: Callable[[], dict[str, LLM]], current: "list[DraftEngines]") -> None:
        self._make, self._current = make, current
        self._made: dict[str, LLM] = {}

    def __getitem__(self, setting: str) -> LLM:
        if setting not in self._made:
            for other in self._current:
                other._made = {}
            self._current[:] = [self]
            gc.collect()
            self._made = self._make()
        return self._made[setting]

    def keep(self, setting: str) -> None:
        """Drop all engines but one; they are made anew where they are asked for again."""
        llm = self[setting]
        self._made = {}
        gc.collect()
        self._made = {setting: llm}

    def __iter__(self) -> Iterator[str]:
        self[PLAIN]
        return iter(self._made)

    def __len__(self) -> int:
        self[PLAIN]
        return len(self._made)


def _settings(plain: LLM, draft: str, sizes: Sizes, most: dict[str, Any]) -> dict[str, LLM]:
    """Make an engine for every setting; they share the weights. Graphs are made at the first run and kept, as
    by one that has been running."""
    auto = LLM(plain.target, draft, tokenizer=plain.tokenizer, **most)
    fixed = {
        shape: LLM(plain.target, auto.draft, tokenizer=plain.tokenizer, shape=shape, **most)
        for shape in sizes.shapes
    }
    llms = {PLAIN: plain, **fixed, AUTO: auto}
    forget_graphs(llms)
    return llms


def cases_of(
    target: str, draft: str, llms: DraftEngines, prompts: Prompts, sizes: Sizes, most: dict[str, Any]
) -> Iterator[Case]:
    """Cases of a draft: every batch size and task; the first responses of a new engine, its recordings not
    made yet; what choosing costs beside a cycle; and, where asked for, two batch sizes beside other
    engines."""
    name, first = name_of(draft), next(iter(prompts))
    warm: set[int] = set()
    for batch in sizes.batches:
        for task, texts in prompts.items():
            values = {"draft": name, "batch": batch, "task": task}
            measure = partial(compare, llms, texts, batch, sizes, warm)
            yield Case(f"{name}, batch {batch}", task, measure, values)
    values = {"draft": name, "batch": 1, "task": first}
    yield Case(f"{name}, cold", first, partial(compare_cold, llms, prompts[first], sizes, most), values)
    for batch in sizes.batches:
        values = {"draft": name, "batch": batch}
        measure = partial(time_choosing, llms, prompts[first], batch, sizes)
        yield Case(f"{name}, choosing", f"batch {batch}", measure, values)
    for batch in (size for size in PEER_BATCHES if sizes.compare and size <= max(sizes.batches)):
        values = {"draft": name, "batch": batch, "task": first, "peers": True}
        started = partial(start_peers, target, draft, llms, sizes)
        measure = partial(_beside_peers, llms, started, prompts[first], batch, sizes)
        yield Case(f"{name}, beside others", f"batch {batch}", measure, values)


def _beside_peers(llms: DraftEngines, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """:func:`compare_peers`, whose engines have room only without those of fixed shapes."""
    llms.keep(AUTO)
    return compare_peers(llms, *args, **kwargs)
