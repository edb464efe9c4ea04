"""Warm-up of an engine before the first request, so that no request waits for a capture or a compilation.

On a GPU it captures the graphs of cycles and of short prompts that fit into their budget, and runs other
cycles once, so that their kernels are compiled. It measures the backends of linear layers and of prefill, and
computes prompts of representative lengths. A CPU compiles no kernels and records its cycles as they come. On
both it makes the compiler of grammars, which takes seconds to read a large vocabulary.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

from eagle_kit.config.server import WarmUpExtent
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.engine import Engine, EngineTotals
from eagle_kit.engine.graphs.batch_kind import GRAMMAR_KINDS, LOGPROBS_KINDS, USUAL_KINDS, BatchKind, kinds
from eagle_kit.engine.graphs.graph_selection import GraphSelection, GraphUnit, describe, main_sizes
from eagle_kit.engine.memory.graph_memory import PROMPT_SHARE, graphs_of_prompts
from eagle_kit.engine.request import Request
from eagle_kit.ops.backend import current_device
from eagle_kit.ops.compilations import count_compilations
from eagle_kit.ops.device_memory import clear_frames

PARAMS = (
    SamplingParams(max_tokens=1, ignore_eos=True, seed=0),
    SamplingParams(max_tokens=1, ignore_eos=True, seed=0, temperature=1.0),
    SamplingParams(max_tokens=1, ignore_eos=True, seed=0, temperature=1.0, top_p=0.9),
    SamplingParams(
        max_tokens=1, ignore_eos=True, seed=0, temperature=1.0, repetition_penalty=1.1, logprobs=1
    ),
)
"""Sampling parameters of first tokens, one for each level; seeded, so that the engine draws no seed."""


class Work(NamedTuple):
    """Part of a warm-up.

    Attributes:
        what: kind of things that were prepared.
        number: how many.
        seconds: time that they took.
    """

    what: str
    number: int
    seconds: float


class Prepared(NamedTuple):
    """Result of a warm-up, whose text is for people.

    Attributes:
        works: what was prepared.
        left_out: sentences on what was not prepared, and what that costs a request.
        memory: sentence on the memory of the graphs, measured and planned; empty if none was captured.
    """

    works: tuple[Work, ...] = ()
    left_out: tuple[str, ...] = ()
    memory: str = ""

    def __str__(self) -> str:
        rows = [
            f"warm-up    {number:6d} {what:<44s} {seconds:7.1f} s" for what, number, seconds in self.works
        ]
        if self.memory:
            rows.append(f"warm-up    {self.memory}")
        return "\n".join([*rows, *(f"warm-up    not prepared: {line}" for line in self.left_out)])

    @property
    def num_graphs(self) -> int:
        """Number of graphs that were captured."""
        return sum(work.number for work in self.works if work.what.startswith("graphs"))


class _Cycle(NamedTuple):
    """A cycle to run: batch size, requests of a DP-attention shard, shape, and kind of batch."""

    size: int
    shard_size: int
    shape: SpecShape
    kind: BatchKind


class _Progress:
    """Counts steps, and things that were prepared with the time that they took.

    Args:
        total: number of steps.
        on_step: called with the number of steps done and their total.
    """

    def __init__(self, total: int, on_step: Callable[[int, int], None]) -> None:
        self._number = 0
        self._total = total
        self._on_step = on_step
        self._works: dict[str, tuple[int, float]] = {}

    def step(self, count: int = 1) -> None:
        """Note that ``count`` steps are done."""
        if count:
            self._number += count
            self._on_step(self._number, self._total)

    def add(self, what: str, number: int, seconds: float) -> None:
        """Add things that were prepared; all of the same name are one work."""
        before = self._works.get(what, (0, 0.0))
        self._works[what] = before[0] + number, before[1] + seconds

    @property
    def works(self) -> list[Work]:
        """What was prepared."""
        return [Work(what, *done) for what, done in self._works.items() if done[0]]


def warm_up(
    engine: Engine,
    extent: WarmUpExtent = "all",
    on_step: Callable[[int, int], None] = lambda number, total: None,
) -> Prepared:
    """Warm up an idle engine in its current shapes. Its counters and its prefix cache are empty afterwards.

    Kernels and prompts are always prepared, graphs as far as their budget allows.

    Args:
        extent: batches whose graphs are captured.
        on_step: called with the number of steps done and their total.
    """
    works = list(_grammars(engine, extent))
    runner = engine.runner
    if runner.device.type != "cuda" and not runner.graphs.has_fixed_shapes:
        return Prepared(tuple(works))

    with torch.inference_mode(), current_device(runner.device), count_compilations() as compiled:
        # Graphs of prompts and of cycles. Cycles without a graph run once, so that kernels are compiled.
        units = _wanted_units(engine)
        prompts = list(representative_prompts(engine))
        num_shapes = 0 if extent == "none" else len(runner.prompt_shapes)
        progress = _Progress(num_shapes + len(units) + len(prompts), on_step)
        if extent != "none":
            _capture_prompts(engine, progress)
        attempted = _capture_graphs(engine, units, extent, progress)
        _compile_cycles(engine, [unit for unit in units if unit not in attempted], progress)

        # Draft backfill.
        begun = time.perf_counter()
        progress.add("forwards of draft backfill", runner.warm_up_backfill(), time.perf_counter() - begun)

        # Prompts of several lengths, without graphs. Prefill backends are measured on the way.
        for requests in prompts:
            begun = time.perf_counter()
            with runner.prefill_backends.measuring(), runner.unpadded_prompts():
                engine.prefill(requests)
            progress.add("prefills", 1, time.perf_counter() - begun)
            progress.step()

        # Empty the counters and the prefix cache.
        engine.drain()
        engine.page_pool.clear()
        engine.totals = EngineTotals()
        works += progress.works

        # Report what was measured and compiled on the way.
        linear = runner.linear_backends
        if linear.table:
            works.append(Work("linear sizes timed (within the above)", len(linear.table), linear.seconds))
        backends = runner.prefill_backends
        if backends.table:
            works.append(
                Work("prefill sizes timed (within the above)", len(backends.table), backends.seconds)
            )
        if compiled.count:
            works.append(Work("kernels compiled (within the above)", compiled.count, compiled.seconds))
    left_out = tuple(_left_out(engine, extent, units, works))
    return Prepared(tuple(works), left_out, _memory_of_graphs(engine))


def _wanted_units(engine: Engine) -> list[GraphUnit]:
    """List the batch sizes and kinds of batches that requests may lead to.

    The largest sizes come first: the others reuse their memory.
    """
    wanted = list(kinds("all", can_have_grammars=can_have_grammars(engine)))
    if engine.target.ranks is not None:
        wanted = engine.target.ranks.agree(wanted)
    sizes = sorted(engine.config.batch_sizes, reverse=True)
    return [GraphUnit(size, kind) for size in sizes for kind in wanted]


def _cycles_of(engine: Engine, unit: GraphUnit) -> Iterator[_Cycle]:
    """Iterate over the cycles of a unit, the largest first."""
    for shard_size in reversed(engine.config.shard_batch_sizes(unit.size)):
        for shape in engine.shapes_at(unit.size):
            yield _Cycle(unit.size, shard_size, shape, unit.kind)


def _capture_prompts(engine: Engine, progress: _Progress) -> None:
    """Capture the graphs of prompt steps, the largest first, until they have their share of the budget.

    Steps of shapes that are left out are padded to the next larger one.
    """
    runner = engine.runner
    budget = engine.config.graph_memory
    captured = []
    for shape in reversed(runner.prompt_shapes):
        if budget is None or runner.graphs.node_bytes <= PROMPT_SHARE * budget:
            begun = time.perf_counter()
            num_graphs = engine.num_graphs
            runner.run_idle_prompt(shape)
            num_captured = engine.num_graphs - num_graphs
            progress.add("graphs of prompts", num_captured, time.perf_counter() - begun)
            captured.append(shape)
        progress.step()
    runner.prompt_shapes = captured[::-1]

    # Cycles get what is left.
    if runner.graph_selection is not None:
        planned = graphs_of_prompts(engine.target.config, engine.draft, engine.config, budget).bytes
        runner.graph_selection.reserve(max(0, runner.graphs.node_bytes - planned))


def _capture_graphs(
    engine: Engine, units: Sequence[GraphUnit], extent: WarmUpExtent, progress: _Progress
) -> set[GraphUnit]:
    """Capture the graphs of ``units`` that are in ``extent`` and fit into the budget.

    Which fit is decided again behind every unit, by the memory that graphs have taken by then.

    Returns:
        The units whose capture was attempted.
    """
    attempted: set[GraphUnit] = set()
    selection = engine.runner.graph_selection
    if extent == "none" or selection is None:
        return attempted
    kinds_of_extent = set(kinds(extent, can_have_grammars=True))
    wanted = [unit for unit in units if unit.kind in kinds_of_extent]
    while True:
        fitting = (unit for unit in wanted if unit in selection.chosen and unit not in attempted)
        unit = next(fitting, None)
        if unit is None:
            return attempted
        attempted.add(unit)
        _capture_unit(engine, unit, selection, progress)
        progress.step()


def _capture_unit(engine: Engine, unit: GraphUnit, selection: GraphSelection, progress: _Progress) -> None:
    """Capture the graphs of a unit, unless the device has too little memory for them."""
    runner = engine.runner
    begun = time.perf_counter()
    num_graphs = engine.num_graphs
    node_bytes = runner.graphs.node_bytes
    for cycle in _cycles_of(engine, unit):
        try:
            runner.run_idle(*cycle, engine.ngram)
        except torch.OutOfMemoryError as error:
            # Not even an eager run fits. Other ranks would wait for this one.
            if engine.target.ranks is not None:
                raise
            clear_frames(error)
            selection.note_out_of_memory(unit)
        if not selection.may_capture(unit):
            break
    else:
        # Graphs that were there before have not been measured.
        num_captured = engine.num_graphs - num_graphs
        is_new = num_captured == selection.cost([unit]).number
        measured = runner.graphs.node_bytes - node_bytes
        if num_captured:
            selection.note_captured(unit, measured if is_new else None)
    seconds = time.perf_counter() - begun
    progress.add(f"graphs of batches: {unit.kind.name}", engine.num_graphs - num_graphs, seconds)


def _compile_cycles(engine: Engine, units: Sequence[GraphUnit], progress: _Progress) -> None:
    """Run cycles of ``units`` eagerly, so that their kernels are compiled and their linear layers measured.

    Kernels of sampling depend little on the batch size, so sizes between powers of two run greedily only.
    """
    runner = engine.runner
    main = main_sizes(engine.config.batch_sizes)
    for unit in units:
        begun = time.perf_counter()
        is_needed = unit.size in main or unit.kind == USUAL_KINDS[0]
        num_cycles = 0
        for cycle in _cycles_of(engine, unit) if is_needed else ():
            if runner.serving_unit(unit, cycle.shape) == unit:  # batches are not padded to larger ones
                try:
                    runner.run_idle(*cycle, engine.ngram, may_capture=False)
                except torch.OutOfMemoryError as error:
                    # Traffic runs such a step in parts. Other ranks would wait for this one.
                    if engine.target.ranks is not None:
                        raise
                    clear_frames(error)
                    torch.cuda.empty_cache()
                    break
                num_cycles += 1
        progress.add("cycles without a graph", num_cycles, time.perf_counter() - begun)
        progress.step()


def _grammars(engine: Engine, extent: WarmUpExtent) -> Iterator[Work]:
    """Make the compiler of grammars, if requests may have grammars."""
    if extent != "all" or not can_have_grammars(engine):
        return
    begun = time.perf_counter()
    try:
        engine.prepare_grammars()
    except UserError as error:  # the tokenizer cannot be used; requests with grammars get the same error
        logging.getLogger(__name__).warning("%s %s", error.cause, error.remedy)
        return
    yield Work("compiler of grammars", 1, time.perf_counter() - begun)


def can_have_grammars(engine: Engine) -> bool:
    """Return True if requests may bring grammars."""
    return engine.takes_grammars and find_spec("llguidance") is not None


def representative_prompts(engine: Engine) -> Iterator[list[Request]]:
    """Iterate over lists of requests that are computed together.

    Lengths and numbers of prompts are the powers of two, for every tile size of a kernel. Others fill a step
    or more than one, have a cached prefix, or sample their first token at another level. The longest prompts
    come first: the others fit into the memory that they reserved.
    """
    config = engine.config
    rng = random.Random(0)
    pool_tokens = (config.num_shard_pages - 2) * config.page_size
    most = min(config.max_context - 2, pool_tokens - config.num_lookahead_tokens(63))
    if most < 1:  # no room for a prompt
        return
    step = min(config.prefill_tokens, most)
    numbers = iter(range(-1, -(1 << 30), -1))  # of requests; callers have none below 0
    top = engine.target.config.vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(top) for _ in range(count)]

    def together(prompts: Sequence[list[int]], params: SamplingParams = PARAMS[0]) -> list[Request]:
        first = next(numbers)
        made = [Request(first, prompts[0], params, group=first)]
        for prompt in prompts[1:]:
            number = next(numbers)
            made.append(Request(number, prompt, params, group=number))
        return made

    lengths = {*_powers(step), step, min(step + 1, most), most}
    for length in sorted(lengths, reverse=True):
        yield together([tokens(length)])
    known = tokens(step)
    yield together([known])
    yield together([[*known[: max(0, most - 1)], *tokens(1)]])  # behind it, as far as it fits
    counts = {*_powers(config.max_batch_size), config.max_batch_size}
    for count in sorted(counts, reverse=True):
        yield together([tokens(min(3, most)) for _ in range(count)])
    for params in PARAMS[1:]:
        yield together([tokens(min(3, most))], params)


def _powers(most: int) -> list[int]:
    """Powers of two up to ``most``."""
    return [1 << i for i in range(most.bit_length())]


def _left_out(
    engine: Engine, extent: WarmUpExtent, units: Sequence[GraphUnit], works: Sequence[Work]
) -> Iterator[str]:
    """Iterate over sentences on what was not prepared, and what that costs a request."""
    graphs = [work for work in works if work.what.startswith("graphs")]
    count = sum(work.number for work in graphs)
    seconds = sum(work.seconds for work in graphs)
    price = f"about {seconds / count:.1f} s each" if count else "some tenths of a second each"
    later = f"captured when first needed, {price}, while all requests wait"
    if not engine.runner.graphs.has_fixed_shapes:
        yield "graphs, which are off: every cycle runs from Python, and may compile kernels for new lengths"
    elif extent == "none":
        yield f"graphs: {later}"
    elif extent == "usual":
        num_kinds = len(LOGPROBS_KINDS) + len(GRAMMAR_KINDS)
        yield f"graphs of batches with logprobs or grammars ({num_kinds} kinds): {later}"
    yield from _beyond_budget(engine, units)
    if not can_have_grammars(engine):
        yield "grammars: without llguidance or a tokenizer such requests are refused"


def _beyond_budget(engine: Engine, units: Sequence[GraphUnit]) -> Iterator[str]:
    """Iterate over sentences on graphs that have no place in their budget or in the device's memory."""
    runner = engine.runner
    selection = runner.graph_selection
    if selection is None:
        return
    padded: list[GraphUnit] = []
    eager: list[GraphUnit] = []
    for unit in selection.left_out({unit.kind for unit in units}):
        shapes = engine.shapes_at(unit.size)
        is_served = all(runner.serving_unit(unit, shape) != unit for shape in shapes)
        (padded if is_served else eager).append(unit)
    place = "for lack of memory"
    if selection.budget is not None:
        place = f"in the {selection.budget / 1e9:.2f} GB of graphs"
    if padded:
        yield f"graphs {place} for {' and '.join(describe(padded))}: those of larger batches are used"
    if eager:
        yield f"graphs {place} for {' and '.join(describe(eager))}: such batches run without a graph"


def _memory_of_graphs(engine: Engine) -> str:
    """Say what the driver took for graphs, beside what was planned for it."""
    runner = engine.runner
    selection = runner.graph_selection
    if selection is None or not selection.is_measured:
        return ""
    planned = selection.planned_node_bytes
    if runner.prompt_shapes:
        planned += graphs_of_prompts(engine.target.config, engine.draft, engine.config, None).bytes
    return (
        f"{runner.graphs.node_bytes / 1e9:.2f} GB taken by the driver for {engine.num_graphs} graphs, "
        f"{planned / 1e9:.2f} GB planned"
    )
