"""`eagle-kit serve --plan`: memory of engines on GPUs that are not at hand, by number of ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import GPUS, RUNTIME_BYTES, find_gpu

if TYPE_CHECKING:
    from eagle_kit.engine.memory.engine_memory import MemoryPlan
    from eagle_kit.engine.memory.rank_memory import Planner, RankPlan

T = TypeVar("T")
SIZES = (1, 2, 4, 8, 16)
"""Ranks that are compared where no number is given."""
NAME_WIDTH = 30
CELL_WIDTH = 12
CAVEAT = (
    "Estimates: no plan has been compared with a GPU. Sizes of GPUs are their makers'. The rank shown "
    "is the one with the most bytes of weights; tokens that fit would be in a pool for larger batches or "
    "contexts."
)


def print_plan(
    target: str,
    draft: str | None,
    options: EngineConfig,
    gpu: str,
    *,
    expert_parallel: bool = False,
    data_parallel_attention: bool = False,
) -> None:
    """Print what each rank would hold on GPUs of one kind, and how many tokens would fit on others.

    Args:
        target: a folder, or a name whose ``config.json`` is known; no weights are read.
        draft: its weights are read.
        options: of the engine. A ``tensor_parallel`` above 1 is the only number of ranks that is
            planned.
        gpu: a kind of :data:`~eagle_kit.core.gpus.GPUS`.
        expert_parallel: share experts by number only; else that is compared with cutting each
            expert.
        data_parallel_attention: of all numbers of ranks above one.

    Raises:
        UserError: an unknown GPU or target, or one that cannot be planned or shared at all.
    """
    from eagle_kit.engine.memory.rank_memory import Planner
    from eagle_kit.models.loading.known_targets import target_architecture

    find_gpu(gpu)
    planner = Planner(target, draft, options)
    sizes = (options.tensor_parallel,) if options.tensor_parallel > 1 else SIZES
    planned = _plan_ranks(planner, sizes, expert_parallel, data_parallel_attention)
    first = next(iter(planned.plans.values()))

    # Print what all columns have in common.
    config = first.config
    draft_name = "none"
    if first.draft is not None:
        draft_name = draft or options.algorithm
    print(f"target  {target}, {first.target.weight_format}; sizes from {target_architecture(target)[1]}")
    print(f"draft   {draft_name}, shape {config.shape}")
    sizes_of_plan = f"context {config.max_context:,}, batch {config.max_batch_size}"
    if options.gpu_memory_utilization is not None:
        sizes_of_plan += f" at most, {options.gpu_memory_utilization:.0%} of each GPU"
    print(f"engine  {sizes_of_plan}; ranks as columns,")
    print("        e: experts by number (--enable-expert-parallel)")
    if data_parallel_attention:
        print("        latents of a request on one of several ranks (--enable-dp-attention)")

    # Print tables with a column for each number of ranks.
    lines = ["", *_memory(planned.plans, gpu), "", *_tokens(planned.plans)]
    if planner.config.mla is not None:
        lines += ["", *_latents(planner, planned.plans, gpu)]
    lines += ["", *planned.refusals, CAVEAT]
    print("\n".join(lines))


class _Planned(NamedTuple):
    """Plans by the names of their columns, and a sentence for each number of ranks that has
    none."""

    plans: "dict[str, RankPlan]"
    refusals: list[str]


def _plan_ranks(
    planner: "Planner", sizes: Sequence[int], expert_parallel: bool, data_parallel_attention: bool
) -> _Planned:
    """Plan a rank of each of ``sizes``; a target with experts in both ways to share them, or by
    number only with ``expert_parallel``. Raises UserError where no plan is possible."""
    columns = []
    for size in sizes:
        if size == 1:
            columns.append((size, False))
            continue
        if not expert_parallel:
            columns.append((size, False))
        if expert_parallel or planner.config.moe is not None:
            columns.append((size, True))

    plans = {}
    errors = {}
    for size, by_number in columns:
        name = f"{size}e" if by_number else str(size)
        try:
            plans[name] = planner.plan(
                size,
                expert_parallel=by_number,
                data_parallel_attention=data_parallel_attention and size > 1,
            )
        except UserError as error:
            errors[name] = error
    if not plans:
        raise next(iter(errors.values()))
    return _Planned(plans, [f"not with {name}: {error.cause}" for name, error in errors.items()])


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:{NAME_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def _memory(plans: "Mapping[str, RankPlan]", gpu: str) -> Iterator[str]:
    """Lines of the memory of each rank, in GB (1e9 bytes)."""
    kind = find_gpu(gpu)
    memories = [plan.on(kind) for plan in plans.values()]

    # Weights by part, and the runtime.
    yield _row(f"GB of each rank on {gpu}", plans)
    for part in next(iter(plans.values())).weights:
        sizes = [plan.weights[part] for plan in plans.values()]
        if any(sizes):
            yield _row(f"  {part}", map(_gb, sizes))
    yield _row("  runtime", [_gb(RUNTIME_BYTES)] * len(plans))

    # The engine's memory by use. Plans of targets without recurrent layers have no states.
    yield _row("  pool", _cells(memories, lambda memory: _gb(memory.pool)))
    yield _row("  scratch", _cells(memories, lambda memory: _gb(memory.scratch)))
    yield _row("  logits", _cells(memories, lambda memory: _gb(memory.logits)))
    yield _row("  activations", _cells(memories, lambda memory: _gb(memory.activations)))
    if any(memory is not None and memory.states for memory in memories):
        yield _row("  states", _cells(memories, lambda memory: _gb(memory.states)))
    yield _row("  graphs", _cells(memories, lambda memory: _gb(memory.graphs.bytes)))
    head_room = []
    for plan, memory in zip(plans.values(), memories, strict=True):
        head_room.append("no fit" if memory is None else _gb(plan.free(kind) - _used(memory)))
    yield _row("  head room", head_room)

    # Sizes of the engine, and tokens.
    configs = [plan.sizes_on(kind) for plan in plans.values()]
    yield _row("requests of a batch", _cells(configs, lambda config: f"{config.max_batch_size:,}"))
    yield _row("context", _cells(configs, lambda config: f"{config.max_context:,}"))
    yield _row("tokens of the pool", _cells(memories, lambda memory: f"{memory.kv_tokens:,}"))
    yield _row("kB of a token", _cells(memories, lambda memory: f"{memory.bytes_per_token / 1e3:.1f}"))


def _cells(plans: "Sequence[T | None]", text_of: "Callable[[T], str]") -> Iterator[str]:
    """A text of each plan; a dash where the engine does not fit."""
    for plan in plans:
        yield "-" if plan is None else text_of(plan)


def _used(memory: "MemoryPlan") -> int:
    """Bytes of an engine beside its weights."""
    tensors = memory.pool + memory.scratch + memory.logits + memory.activations + memory.states
    return tensors + memory.graphs.bytes


def _fit(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "no fit"


def _tokens(plans: "Mapping[str, RankPlan]") -> Iterator[str]:
    """Lines of the tokens of cache that fit on each kind of GPU."""
    yield _row("tokens of cache that fit", plans)
    for name, gpu in GPUS.items():
        yield _row(f"  {name}", [_fit(plan.tokens(gpu)) for plan in plans.values()])


def _latents(planner: "Planner", plans: "Mapping[str, RankPlan]", gpu: str) -> Iterator[str]:
    """Lines that compare latents of all requests on every rank with latents of a request on one
    rank."""
    kind = find_gpu(gpu)
    replica_tokens = []
    sharded_tokens = []
    added_weights = []
    for plan in plans.values():
        size = plan.sharding.share.size
        by_number = plan.sharding.expert_parallel
        replica = None
        with suppress(UserError):  # heads or blocks cannot be cut among so many
            replica = planner.plan(size, expert_parallel=by_number)
        sharded = replica
        if size > 1:
            sharded = planner.plan(size, expert_parallel=by_number, data_parallel_attention=True)
        replica_tokens.append("-" if replica is None else _fit(replica.tokens(kind)))
        sharded_tokens.append("-" if sharded is None else _fit(sharded.tokens(kind)))
        if replica is None or sharded is None:
            added_weights.append("-")
        else:
            added_weights.append(_gb(sharded.weights["attention"] - replica.weights["attention"]))
    yield _row(f"latents on {gpu}", plans)
    yield _row("  tokens, a replica of all", replica_tokens)
    yield _row("  tokens, --enable-dp-attention", sharded_tokens)
    yield _row("  GB of attention it adds", added_weights)
