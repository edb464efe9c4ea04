"""``python benchmarks decode --tensor-parallel N``: cycles of N ranks beside those of one process, and the
bytes that a rank gives to collectives in one.

Both engines are loaded; the one that is not measured waits.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.case import Case, Form, Machine
from benchmarks.decode import CONTEXT, SHAPES
from benchmarks.engine.load import ROOM, decoding, random_prompts
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.engine.llm import LLM

BATCHES = (1, 8)
FIRST_STEPS = 4
"""Untimed; in the first ones some requests of a batch may sit out."""


def make_cases(target: str, draft: str | None, size: int) -> list[Case]:
    """Load a target, and a draft if there is one, once in this process and once on ``size`` ranks."""
    options: dict[str, Any] = {"max_batch_size": BATCHES[-1], "max_context": CONTEXT + ROOM}
    options["mixed_prefill_tokens"] = CONTEXT  # or the first would have decoded hundreds of cycles by then
    shared = LLM(target, draft, tensor_parallel=size, **options)
    return list(cases(shared, LLM(target, draft, **options)))


def cases(shared: LLM, alone: LLM) -> Iterator[Case]:
    """Cycles of plain decoding and of drafts, for one request and for a batch."""
    assert shared.group is not None
    size = shared.group.ranks.size
    shapes = [NO_SPECULATION, *(map(SpecShape.parse, SHAPES) if shared.draft is not None else ())]
    for batch in BATCHES:
        for shape in shapes:
            about = {"batch": batch, "shape": str(shape), "ranks": size}
            yield Case(
                "ranks",
                f"{size}, batch {batch}, {shape}",
                partial(_compare, shared, alone, shape, batch),
                about,
            )


def _compare(shared: LLM, alone: LLM, shape: SpecShape, batch: int, machine: Machine) -> dict[str, Any]:
    assert shared.group is not None
    ranks, prompts = shared.group.ranks, random_prompts(alone, batch, CONTEXT, machine.seed)
    with decoding(shared, prompts, shape) as several, decoding(alone, prompts, shape) as one:
        volumes = []
        for _ in range(FIRST_STEPS):
            before = ranks.volume.total()
            several.step()
            volumes.append(ranks.volume.total() - before)
        forms = {f"{ranks.size} ranks": several, "one process": one}
        found = machine.compare({name: partial(Form, each.step, "in a row") for name, each in forms.items()})
    ours, theirs = (time["median"] for time in found["times_us"].values())
    figures = {"times the speed of one process": theirs / ours, "kB given to collectives": max(volumes) / 1e3}
    return {**found, "figures": figures}
