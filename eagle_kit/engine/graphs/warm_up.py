"""Warm-up of an engine before the first request, so that no request waits for a capture or a compilation.

On a GPU it captures a graph for every batch size, shape and kind of batch, and for prompts of few rows. It
measures the backends of linear layers and of prefill, and computes prompts of representative lengths. A CPU
compiles no kernels and records its cycles as they come. On both it makes the compiler of grammars, which
takes seconds to read a large vocabulary.
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
from eagle_kit.engine.request import Request
from eagle_kit.ops.backend import current_device
from eagle_kit.ops.compilations import count_compilations

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
    """

    works: tuple[Work, ...] = ()
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"warm-up    {number:6d} {what:<44s} {seconds:7.1f} s" for what, number, seconds in self.works
        ]
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


def warm_up(
    engine: Engine,
    extent: WarmUpExtent = "all",
    on_step: Callable[[int, int], None] = lambda number, total: None,
) -> Prepared:
    """Warm up an idle engine in its current shapes. Its counters and its prefix cache are empty afterwards.

    Args:
        extent: batches and prompts to prepare.
        on_step: called with the number of steps done and their total.
    """
    works = list(_grammars(engine, extent))
    runner = engine.runner
    if runner.device.type != "cuda" and not runner.graphs.has_fixed_shapes:
        return Prepared(tuple(works))

    with torch.inference_mode(), current_device(runner.device), count_compilations() as compiled:
        # Cycles of every kind, whose graphs are captured.
        cycles = list(_cycles(engine, extent))
        prompts = [] if extent == "none" else list(representative_prompts(engine))
        shapes = [] if extent == "none" else runner.prompt_shapes[::-1]
        total = len(cycles) + len(shapes) + len(prompts)
        seconds: dict[str, tuple[int, float]] = {}
        num_graphs = engine.num_graphs
        for number, each in enumerate(cycles, 1):
            begun = time.perf_counter()
            runner.run_idle(*each, engine.ngram)
            name = _name(each.kind)
            captured = engine.num_graphs - num_graphs
            num_graphs = engine.num_graphs
            before = seconds.get(name, (0, 0.0))
            seconds[name] = before[0] + captured, before[1] + time.perf_counter() - begun
            on_step(number, total)
        works += [Work(f"graphs of {name}", *done) for name, done in seconds.items()]

        # Prompt steps of few rows, whose graphs are captured.
        begun = time.perf_counter()
        for number, shape in enumerate(shapes, len(cycles) + 1):
            runner.run_idle_prompt(shape)
            on_step(number, total)
        if shapes:
            captured = engine.num_graphs - num_graphs
            works.append(Work("graphs of prompts", captured, time.perf_counter() - begun))

        # Draft backfill.
        begun = time.perf_counter()
        forwards = 0
        if extent != "none":
            forwards = runner.warm_up_backfill()
        if forwards:
            works.append(Work("forwards of draft backfill", forwards, time.perf_counter() - begun))

        # Prompts of several lengths, without graphs. Prefill backends are measured on the way.
        begun = time.perf_counter()
        for number, requests in enumerate(prompts, len(cycles) + len(shapes) + 1):
            with runner.prefill_backends.measuring(), runner.unpadded_prompts():
                engine.prefill(requests)
            on_step(number, total)

        # Empty the counters and the prefix cache.
        engine.drain()
        engine.page_pool.clear()
        engine.totals = EngineTotals()
        if prompts:
            works.append(Work("prefills", len(prompts), time.perf_counter() - begun))

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
    return Prepared(tuple(works), tuple(_left_out(engine, extent, works)))


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


def _cycles(engine: Engine, extent: WarmUpExtent) -> Iterator[_Cycle]:
    """Iterate over the cycles to run, the largest batches first: the others reuse their memory."""
    if extent == "none":
        return
    wanted = list(kinds(extent, can_have_grammars=can_have_grammars(engine)))
    if engine.target.ranks is not None:
        wanted = engine.target.ranks.agree(wanted)
    for size in sorted(engine.config.batch_sizes, reverse=True):
        for shard_size in reversed(engine.config.shard_batch_sizes(size)):
            for shape in engine.shapes_at(size):
                yield from (_Cycle(size, shard_size, shape, kind) for kind in wanted)


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


def _name(kind: BatchKind) -> str:
    level = ("greedy", "drawn", "filtered", "penalties, biases")[kind.level]
    if kind in USUAL_KINDS:
        return f"batches: {level}"
    return f"batches: {level}, {'grammar' if kind.has_grammar else 'logprobs'}"


def _left_out(engine: Engine, extent: WarmUpExtent, works: Sequence[Work]) -> Iterator[str]:
    """Iterate over sentences on what was not prepared, and what that costs a request."""
    graphs = [work for work in works if work.what.startswith("graphs")]
    count = sum(work.number for work in graphs)
    seconds = sum(work.seconds for work in graphs)
    price = f"about {seconds / count:.1f} s each" if count else "some tenths of a second each"
    later = f"captured when first needed, {price}, while all requests wait"
    if not engine.runner.graphs.has_fixed_shapes:
        yield "graphs, which are off: every cycle runs from Python, and may compile kernels for new lengths"
    elif extent == "none":
        yield f"anything: graphs are {later}, and kernels compiled"
    elif extent == "usual":
        yield f"batches with logprobs or grammars ({len(LOGPROBS_KINDS) + len(GRAMMAR_KINDS)} kinds): {later}"
    backends = engine.runner.prefill_backends
    if extent == "none" and backends.libraries and backends.forced is None:
        yield f"times of prefill backends: {backends.default} computes all prompts"
    if not can_have_grammars(engine):
        yield "grammars: without llguidance or a tokenizer such requests are refused"
