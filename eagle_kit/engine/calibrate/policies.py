"""Policies of engines: costs and acceptance that were measured before, or a short measurement now."""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from eagle_kit.autotune.chooser import ShapeChooser
from eagle_kit.autotune.costs import CostTable, join
from eagle_kit.autotune.files import (
    Costs,
    MeasuredAcceptance,
    average_acceptance,
    find_acceptance,
    find_costs,
    save_costs,
)
from eagle_kit.autotune.shapes import MOST_STEPS, choose_candidates
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import writing_remedy
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.switches import disabled_parts
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.engine.calibrate.cycle_timing import Plan, Point, time_cycles
from eagle_kit.engine.engine import Engine
from eagle_kit.models.loading.source import SET_CACHE
from eagle_kit.ops.backend import uses_cpp
from eagle_kit.report.environment import cpu_model, now, package_versions

QUICK_SHAPES = tuple(map(SpecShape.parse, ("1,1,2", "4,1,5", "4,4,12")))
QUICK_CONTEXT = 64
QUICK_ROUNDS = 8
"""Most rounds of a batch size: as many as fit into :data:`QUICK_SECONDS`, and two at least, because single
cycles vary."""
QUICK_CYCLES = 2
QUICK_SECONDS = 3.0
SHAPES = tuple(
    map(SpecShape.parse, ("1,1,2", "2,1,3", "4,1,5", "7,1,8", "3,2,6", "3,4,8", "5,4,16", "5,8,32"))
)
CONTEXTS = 64, 1024
TIMED_TOKENS = 128
"""Tokens that are decoded after the context when a point is timed."""
COST_VERSION = 5
"""Version of what cycles cost, part of the key of measured costs. Raise it when a change makes cycles faster
or slower, so that older measurements, also shipped ones, are not used any more."""
NUM_HASHED = 512
"""Numbers of each weight that are hashed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """What a policy is made of."""

    costs: Costs
    acceptance: MeasuredAcceptance
    is_average_head: bool

    @property
    def origin(self) -> str:
        """Where the numbers come from."""
        how = "a short measurement" if self.costs.is_quick else "costs measured"
        text = "an average head's acceptance" if self.is_average_head else "the draft's acceptance"
        return f"{how} on {self.costs.date[:10]}, {text}"


def can_tune(engine: Engine) -> bool:
    """Return True for drafts whose shape can change from cycle to cycle."""
    return engine.runner.drafter is not None and engine.runner.drafter.has_any_shape


def chooses_ngram(engine: Engine) -> bool:
    """Return True where plain decoding is chosen beside n-grams. Where cycles are captured the n-grams'
    window is part of the graphs, and costs about what one token does."""
    return engine.ngram is not None and not engine.runner.graphs.has_fixed_shapes


def tuned_policy(engine: Engine, draft_folder: Path | None) -> ShapeChooser:
    """Make the policy of an engine from what is known of its costs and its draft, or else from a short
    measurement, whose result is kept.

    Args:
        draft_folder: of the draft, where there is one.
    """
    assert engine.draft is not None

    # Acceptance: the draft's, or that of an average head.
    acceptance = find_acceptance(draft_key(engine.draft), draft_folder)
    is_average_head = acceptance is None
    if acceptance is None:
        acceptance = average_acceptance()

    # Costs, and the batch sizes that they lack.
    costs = find_costs(engine_key(engine), draft_folder)
    plan = quick_plan(engine)
    largest = 0
    if costs is not None:
        largest = max((timing.batch_size for timing in costs.timings), default=0)
    missing = [point for point in plan.points if point.batch_size > largest]

    # Measure these, then the candidate shapes that follow from them.
    if costs is None or missing:
        _log.info("Measuring this engine's cycles, once, for seconds; `eagle-kit tune` measures more.")
        plan = plan._replace(points=missing)
        costs = measure_costs(engine, plan, before=costs)
        more = plan_of_candidates(engine, Tuned(costs, acceptance, is_average_head), plan)
        costs = measure_costs(engine, more, before=costs)
        try:
            save_costs(costs)
        except OSError as error:
            text = "What was measured cannot be kept, and is measured at each start: %s. %s"
            _log.warning(text, error, writing_remedy(error, SET_CACHE))
    return policy_of(engine, Tuned(costs, acceptance, is_average_head))


def policy_of(engine: Engine, tuned: Tuned) -> ShapeChooser:
    """Make a policy over the shapes that an engine can run."""
    config = engine.config
    costs = tuned.costs.table
    acceptance = tuned.acceptance.table
    shapes = runnable(engine, acceptance.shapes)
    shapes_by_size = {}
    for size in config.batch_sizes:
        fitting = [shape for shape in shapes if size * shape.tokens <= config.most_rows]
        shapes_by_size[size] = choose_candidates(costs.seconds, acceptance, size, fitting)
    return ShapeChooser(
        costs.seconds,
        acceptance,
        shapes_by_size,
        tuned.origin,
        costs.backfill_seconds,
        is_average_head=tuned.is_average_head,
    )


def runnable(engine: Engine, shapes: Iterable[SpecShape]) -> list[SpecShape]:
    """List those of ``shapes`` that the draft can fill."""
    drafter = engine.runner.drafter
    assert drafter is not None and engine.draft is not None
    found = []
    for shape in shapes:
        try:
            drafter.check_shape(engine.draft, shape)
        except UserError:
            continue
        if shape.steps <= MOST_STEPS:
            found.append(shape)
    return found


def measure_costs(engine: Engine, plan: Plan, *, before: Costs | None = None) -> Costs:
    """Time a plan of seconds and fit a table, to what was measured ``before`` as well."""
    with tqdm(
        total=len(plan.visits), desc="timing cycles", disable=None, leave=False, dynamic_ncols=True
    ) as bar:
        found = time_cycles(engine, plan, on_visit=lambda visit, timings: bar.update())
    timed = join(before.timings, found) if before else found
    tuned_to = before.tuned_to if before else 0
    return Costs(engine_key(engine), CostTable.fit(timed), tuple(timed), now(), tuned_to)


def plan_of_candidates(engine: Engine, tuned: Tuned, plan: Plan) -> Plan:
    """Plan to time the candidate shapes of a plan's batch sizes that the plan has not timed."""
    sizes = {point.batch_size for point in plan.points}
    policy = policy_of(engine, tuned)
    candidates = {shape for size in sizes for shape in policy.shapes_at(size) if shape.steps}
    shapes = candidates - set(plan.shapes)
    points = plan.points if shapes else []
    return plan._replace(shapes=sorted(shapes), points=points, first_pass=plan.num_passes)


def quick_plan(engine: Engine) -> Plan:
    """Plan a measurement of seconds."""
    most = engine.config.max_batch_size
    sizes = sorted({1, min(4, most), most})
    context = min(QUICK_CONTEXT, engine.config.max_context // 4)
    points = [Point(size, context) for size in sizes if _fits(engine, size, context)]
    shapes = runnable(engine, QUICK_SHAPES)
    return Plan(points, shapes, QUICK_ROUNDS, QUICK_CYCLES, seconds=QUICK_SECONDS)


def whole_plan(engine: Engine) -> Plan:
    """Plan a measurement of minutes: powers of two up to the largest batch, a short and a long context."""
    most = engine.config.max_batch_size
    sizes = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    contexts = sorted({min(context, engine.config.max_context // 3) for context in CONTEXTS})
    points = [Point(size, context) for context in contexts for size in sizes if _fits(engine, size, context)]
    return Plan(points, runnable(engine, SHAPES), num_rounds=3, num_cycles=2, num_passes=5)


def _fits(engine: Engine, batch_size: int, context: int) -> bool:
    config = engine.config
    tokens = min(context + TIMED_TOKENS, config.max_context) + config.num_lookahead_tokens(MOST_STEPS)
    of_part = -(-batch_size // config.num_shards)
    return of_part == 1 or of_part * config.num_pages_of(tokens) <= config.num_shard_pages


def engine_key(engine: Engine) -> dict[str, Any]:
    """What decides the costs of an engine's cycles."""
    config = engine.config
    weight = engine.target.embed_tokens.weight
    device = str(weight.device)
    is_gpu = device.startswith("cuda")
    ranks = {} if engine.target.ranks is None else {"tensor_parallel": engine.target.ranks.size}
    vectors = {} if is_gpu else {"vectors": torch.backends.cpu.get_cpu_capability()}
    disabled = {"disabled": sorted(disabled_parts())} if disabled_parts() else {}
    return {
        **ranks,
        **vectors,
        **disabled,
        "device": torch.cuda.get_device_name(weight.device) if is_gpu else cpu_model(),
        "threads": None if is_gpu else torch.get_num_threads(),
        "cpp": uses_cpp(weight.detach()),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "kv_dtype": config.kv_dtype,
        "graph_mode": config.graph_mode,
        "target": _shapes_key([engine.target]),
        "draft": _shapes_key(_modules(engine.draft)),
        "drafter": type(engine.runner.drafter).__name__,
        "cycles": COST_VERSION,
        "versions": package_versions(("eagle_kit", "torch", "triton")),
    }


def draft_key(draft: DraftModel) -> str:
    """Short hash of the weights of a draft and its target, on which acceptance depends: of their names and
    sizes, and of some of their numbers, in bf16 whatever they are loaded as."""
    found = hashlib.sha256()
    for module in _modules(draft):
        for name, weight in sorted(module.state_dict().items()):
            part = weight.detach().flatten()[:: max(1, weight.numel() // NUM_HASHED)][:NUM_HASHED]
            found.update(f"{name}:{tuple(weight.shape)}:".encode())
            found.update(part.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def _modules(draft: DraftModel | None) -> list[nn.Module]:
    return [part for part in vars(draft).values() if isinstance(part, nn.Module)] if draft else []


def _shapes_key(modules: Iterable[nn.Module]) -> str:
    found = hashlib.sha256()
    for module in modules:
        for name, weight in sorted(module.state_dict().items()):
            found.update(f"{name}:{tuple(weight.shape)}:{weight.dtype};".encode())
    return found.hexdigest()[:16]
