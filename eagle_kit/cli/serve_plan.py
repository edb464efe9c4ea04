"""`eagle-kit serve --plan`: memory of engines on GPUs that are not at hand, by number of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import GPUS, RUNTIME_BYTES, find_gpu

if TYPE_CHECKING:
    from eagle_kit.engine.memory.rank_memory import Planner, RankPlan

SIZES = (1, 2, 4, 8, 16)
"""Ranks that are compared where no number is given."""
NAME_WIDTH, CELL_WIDTH = 30, 12
HONESTY = (
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
        options: of the engine; a ``tensor_parallel`` above 1 is the only number of ranks that is planned.
        gpu: a kind of :data:`~eagle_kit.core.gpus.GPUS`.
        expert_parallel: share experts by number only; else both ways are compared.
        data_parallel_attention: of all numbers of ranks above one.

    Raises:
        UserError: an unknown GPU or target, or one that cannot be planned or shared at all.
    """
    from eagle_kit.engine.memory.rank_memory import Planner
    from eagle_kit.models.loading.known_targets import target_architecture

    find_gpu(gpu)
    planner = Planner(target, draft, options)
    wanted = (options.tensor_parallel,) if options.tensor_parallel > 1 else SIZES
    plans, refused = _plans(planner, wanted, expert_parallel, data_parallel_attention)
    first = next(iter(plans.values()))
    dtype = first.target.weight_format
    config = first.config
    print(f"target  {target}, {dtype}; sizes from {target_architecture(target)[1]}")
    print(
        f"draft   {draft or options.algorithm if first.draft is not None else 'none'}, shape {config.shape}"
    )
    print(f"engine  context {config.max_context}, batch {config.max_batch_size}; ranks as columns,")
    print("        e: experts by number (--enable-expert-parallel)")
    if data_parallel_attention:
        print("        latents of a request on one of several ranks (--enable-dp-attention)")
    lines = [*_memory(plans, gpu), "", *_tokens(plans)]
    if planner.config.mla is not None:
        lines += ["", *_latents(planner, plans, gpu)]
    print("\n".join(["", *lines, "", *refused, HONESTY]))


def _plans(
    planner: "Planner", wanted: Sequence[int], expert_parallel: bool, data_parallel_attention: bool
) -> "tuple[dict[str, RankPlan], list[str]]":
    """Plans by the names of their columns, and why others are none. Raises UserError where there is none."""
    ways = (False, True) if planner.config.moe is not None else (False,)
    if expert_parallel:
        ways = (True,)
    plans, refused = {}, {}
    for size in wanted:
        for by_number in ways:
            by_number, own = by_number and size > 1, data_parallel_attention and size > 1
            name = f"{size}e" if by_number else f"{size}"
            if name in plans or name in refused:
                continue
            try:
                plans[name] = planner.plan(size, expert_parallel=by_number, data_parallel_attention=own)
            except UserError as error:
                refused[name] = error
    if not plans:
        raise next(iter(refused.values()))
    return plans, [f"not with {name}: {error.cause}" for name, error in refused.items()]


def _row(name: str, cells: "Sequence[str]") -> str:
    return f"{name:{NAME_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)


def _memory(plans: "Mapping[str, RankPlan]", gpu: str) -> Iterator[str]:
    """Lines of the memory of each rank, in GB."""
    kind = find_gpu(gpu)
    found = {name: plan.on(kind) for name, plan in plans.items()}
    yield _row(f"GB of each rank on {gpu}", [*plans])
    for part in next(iter(plans.values())).weights:
        sizes = [plan.weights[part] for plan in plans.values()]
        if any(sizes):
            yield _row(f"  {part}", [f"{size / 1e9:.2f}" for size in sizes])
    yield _row("  runtime", [f"{RUNTIME_BYTES / 1e9:.2f}"] * len(plans))
    for use in ("pool", "scratch", "logits", "activations", "states", "graphs"):
        cells = [None if memory is None else getattr(memory, use) for memory in found.values()]
        cells = [getattr(size, "bytes", size) for size in cells]
        if use != "states" or any(cells):
            yield _row(f"  {use}", ["-" if size is None else f"{size / 1e9:.2f}" for size in cells])
    heads = []
    for plan, memory in zip(plans.values(), found.values(), strict=True):
        if memory is None:
            heads.append("no fit")
            continue
        parts = memory.pool, memory.scratch, memory.logits, memory.activations, memory.states
        heads.append(f"{(plan.free(kind) - sum(parts) - memory.graphs.bytes) / 1e9:.2f}")
    yield _row("  head room", heads)
    sizes_of = attrgetter("kv_tokens", "bytes_per_token")
    there = [None if memory is None else sizes_of(memory) for memory in found.values()]
    yield _row("tokens of the pool", ["-" if each is None else f"{each[0]:,}" for each in there])
    yield _row("kB of a token", ["-" if each is None else f"{each[1] / 1e3:.1f}" for each in there])


def _fit(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "no fit"


def _tokens(plans: "Mapping[str, RankPlan]") -> Iterator[str]:
    """Lines of the tokens of cache that fit on each kind of GPU."""
    yield _row("tokens of cache that fit", [*plans])
    for name, gpu in GPUS.items():
        yield _row(f"  {name}", [_fit(plan.tokens(gpu)) for plan in plans.values()])


def _latents(planner: "Planner", plans: "Mapping[str, RankPlan]", gpu: str) -> Iterator[str]:
    """Lines that compare a replica of the latents on every rank with latents by request."""
    kind, found = find_gpu(gpu), []
    for plan in plans.values():
        size, by_number = plan.sharding.share.size, plan.sharding.expert_parallel
        own = replica = None
        with suppress(UserError):  # heads or blocks that are not cut so
            own = replica = planner.plan(size, expert_parallel=by_number)
        if size > 1:
            own = planner.plan(size, expert_parallel=by_number, data_parallel_attention=True)
        tokens = ["-" if each is None else _fit(each.tokens(kind)) for each in (replica, own)]
        more = "-"
        if own is not None and replica is not None:
            more = f"{(own.weights['attention'] - replica.weights['attention']) / 1e9:.2f}"
        found.append((*tokens, more))
    names = "tokens, a replica of all", "tokens, --enable-dp-attention", "GB of attention it adds"
    yield _row(f"latents on {gpu}", [*plans])
    for name, cells in zip(names, zip(*found, strict=True), strict=True):
        yield _row(f"  {name}", cells)
