"""Predictions beside measurements: prompts that were not recorded, and shapes, batch sizes and contexts that
were not timed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.tasks.sets import Task
from eagle_kit.engine.calibrate.cycle_timing import Plan, Point, time_cycles
from eagle_kit.engine.calibrate.policies import Tuned, runnable
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.llm import LLM

SHAPES = tuple(map(SpecShape.parse, ("1,3,4", "3,1,4", "6,1,7", "2,3,6", "4,2,8", "6,4,20")))
BATCH_SIZES = (1, 3, 6)
CONTEXT = 400
NUM_ROUNDS = 3
NUM_CYCLES = 2
NUM_PASSES = 4


@dataclass(frozen=True)
class Compared:
    """A predicted figure and the measured one: ``what`` it is, in ``unit``."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.predicted:.3g} {self.unit} predicted, {self.measured:.3g} measured, "
            f"{self.error:+.1%}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures, for a file."""
        return {
            "what": self.what,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
        }


def check(llm: LLM, tuned: Tuned, prompts: Sequence[Any], max_tokens: int) -> Iterator[Compared]:
    """Compare predictions with decoding.

    Costs are compared in milliseconds, which also depend on how fast the machine is at the moment,
    and in times a plain cycle, which the choice of a shape depends on.

    Args:
        prompts: chats or token ids that were not recorded.
        max_tokens: of a response, as it was recorded.
    """
    engine = llm.engine("none")
    acceptance = tuned.acceptance.table
    shapes = [shape for shape in runnable(engine, SHAPES) if shape in acceptance.reach]
    if prompts:
        yield from _check_acceptance(llm, acceptance, shapes, prompts, max_tokens)
    yield from _check_costs(engine, tuned, shapes)


def _check_acceptance(
    llm: LLM,
    acceptance: AcceptanceTable,
    shapes: Sequence[SpecShape],
    prompts: Sequence[Any],
    max_tokens: int,
) -> Iterator[Compared]:
    """Accept length of each shape over the responses to ``prompts``."""
    prompt_ids = [llm.tokenize_task(prompt) for prompt in prompts]
    for shape in shapes:
        outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=max_tokens), shape=shape)
        total = SpecStats()
        for output in outputs:
            total.add(output.stats)
        lengths = [output.stats.num_emitted_tokens for output in outputs]
        predicted = tokens_a_cycle(acceptance, shape, lengths)
        yield Compared(str(shape), "tokens a cycle", predicted, total.accept_length)


def _check_costs(engine: Engine, tuned: Tuned, shapes: Sequence[SpecShape]) -> Iterator[Compared]:
    """Time of a cycle of each shape and batch size."""
    sizes = [size for size in BATCH_SIZES if size <= engine.config.max_batch_size]
    context = min(CONTEXT, engine.config.max_context // 3)
    points = [Point(size, context) for size in sizes]
    plan = Plan(points, shapes, NUM_ROUNDS, NUM_CYCLES, NUM_PASSES)
    predicted_plain: dict[int, float] = {}
    measured_plain: dict[int, float] = {}
    for timing in time_cycles(engine, plan):
        predicted = tuned.costs.table.seconds(timing.batch_size, timing.shape, timing.context)
        what = f"batch {timing.batch_size}, {timing.context} tokens, {timing.shape}"
        yield Compared(what, "ms a cycle", 1e3 * predicted, 1e3 * timing.seconds)

        # At each point plain decoding comes first.
        if not timing.shape.steps:
            predicted_plain[timing.batch_size] = predicted
            measured_plain[timing.batch_size] = timing.seconds
            continue
        predicted_ratio = predicted / predicted_plain[timing.batch_size]
        measured_ratio = timing.seconds / measured_plain[timing.batch_size]
        yield Compared(what, "plain cycles", predicted_ratio, measured_ratio)


def tokens_a_cycle(acceptance: AcceptanceTable, shape: SpecShape, lengths: Sequence[int]) -> float:
    """Predict the accept length of responses of ``lengths`` tokens.

    The last cycle of a response is cut. For cycles of n tokens it would have emitted ``E[n (n - 1)] /
    (2 E[n])`` tokens more, by renewal theory.
    """
    reach = acceptance.shares[shape] @ acceptance.reach[shape]
    mean = 1.0 + reach.sum()
    cut = sum(depth * share for depth, share in enumerate(reach, 1)) / mean
    return float(sum(lengths) * mean / sum(length + cut for length in lengths))


def held_out(task: Task, recorded: Task, limit: int | None, seed: int) -> Task | None:
    """Return prompts of a task that were not recorded, None where all were."""
    seen = {prompt.id for prompt in recorded.prompts}
    rest = tuple(prompt for prompt in task.prompts if prompt.id not in seen)
    return Task(task.name, rest).limited(limit, seed) if rest else None
