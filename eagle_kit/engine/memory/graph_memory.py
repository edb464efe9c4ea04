"""Estimate of the device memory that CUDA graphs take, made before any is captured.

Graphs share one pool of memory for what a cycle computes, so it is as large as the largest cycle needs. Each
takes memory of its own for its launches, and keeps its inputs and outputs. The warm-up measures what launches
really take and chooses the graphs again by that
(:class:`~eagle_kit.engine.graphs.graph_selection.GraphSelection`).

Legend: B requests of a batch, S steps, N window nodes, V vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from eagle_kit.autotune.shapes import MAX_CANDIDATES
from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.config.server import WarmUpExtent
from eagle_kit.core.sampling_params import MAX_LOGPROBS
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.engine.graphs.batch_kind import GRAMMAR_KINDS, BatchKind, kinds
from eagle_kit.engine.graphs.graph_selection import GraphSelection, GraphUnit, UnitCost, by_frequency
from eagle_kit.engine.padded_prompts import can_replay_prompts, prompt_shapes
from eagle_kit.models.config import TargetConfig

BYTES_OF_LAUNCH = 40 << 10
"""Of a graph for each of its launches. vLLM 0.6.5 logs 0.21 GiB for 35 graphs of Llama-3.2-1B, of some 170
launches each, 37 KB with what it computes in (vllm-project/vllm, pull request 11349). With CUDA 11.2 an empty
kernel took 64 KB (NVIDIA's forum, topic 244901)."""
LAUNCHES = 10
"""Of a layer with attention and an MLP, verified; a head's step has one more layer of glue. Counted: 9.1 of
Llama-3.1-8B, 14 of a step of its head (``python kernels check``)."""
# What some layers have in addition, counted in the small targets of ``tests/benchmarks/test_launches.py``.
LAUNCHES_OF_EXPERTS = 12
LAUNCHES_OF_LATENTS = 22
LAUNCHES_OF_RECURRENCE = 108
LAUNCHES_AROUND = 40
"""Of a cycle outside of layers: slots, embedding, acceptance, filters, draft-extend."""
PROMPT_SHARE = 0.5
"""Most that graphs of prompts take of the memory of all graphs."""
ONE_STEP = SpecShape(1, 1, 2)
"""Shape whose draft costs one forward, as that of a prompt does."""


class Graphs(NamedTuple):
    """Number of graphs, and the bytes that they take without the pool in which they compute."""

    number: int
    bytes: int


NO_GRAPHS = Graphs(0, 0)


def graphs_of(
    target: TargetConfig,
    draft: DraftModel | None,
    config: ResolvedConfig,
    extent: WarmUpExtent,
    *,
    chooses_shapes: bool,
) -> Graphs:
    """Estimate the graphs of a warm-up whose budget has room for all of them.

    Args:
        config: resolved; batches have the sizes and shapes in it.
        chooses_shapes: see :func:`expected_shapes`.
    """
    if extent == "none":
        return NO_GRAPHS
    shapes = expected_shapes(config, chooses_shapes=chooses_shapes)
    costs = unit_costs(target, draft, config, shapes)
    wanted = [unit for unit in costs if unit.kind in kinds(extent, can_have_grammars=True)]
    of_cycles = graphs_in(costs, wanted)
    of_prompts = graphs_of_prompts(target, draft, config, None)
    return Graphs(of_cycles.number + of_prompts.number, of_cycles.bytes + of_prompts.bytes)


def graphs_in(costs: Mapping[GraphUnit, UnitCost], units: Collection[GraphUnit]) -> Graphs:
    """Estimate the graphs of ``units``."""
    total = sum((costs[unit] for unit in units), start=UnitCost())
    return Graphs(total.number, total.num_bytes(BYTES_OF_LAUNCH))


def graphs_of_prompts(
    target: TargetConfig, draft: DraftModel | None, config: ResolvedConfig, budget: int | None
) -> Graphs:
    """Estimate the graphs of prompt steps: one of the target for each shape, and one of a draft.

    Args:
        budget: bytes of all graphs; None is no limit. There are none for prompts if they took more than
            ``PROMPT_SHARE`` of it.
    """
    if not can_replay_prompts(target, draft, config):
        return NO_GRAPHS
    _, verified = _launches(target, draft, NO_SPECULATION)
    launches = [verified]
    if draft is not None:
        launches.append(_launches(target, draft, ONE_STEP)[0] + LAUNCHES_AROUND)
    shapes = prompt_shapes(config)
    num_bytes = len(shapes) * sum(launches) * BYTES_OF_LAUNCH
    if budget is not None and num_bytes > PROMPT_SHARE * budget:
        return NO_GRAPHS
    return Graphs(len(shapes) * len(launches), num_bytes)


def expected_shapes(config: ResolvedConfig, *, chooses_shapes: bool) -> dict[int, list[SpecShape]]:
    """Shapes of each batch size, as far as they are known before an engine is made.

    Args:
        chooses_shapes: whether shapes are measured later, so that a size has up to ``MAX_CANDIDATES``
            of them and plain decoding.
    """
    found = {}
    for size in config.batch_sizes:
        shapes = [config.shape.at(size)]
        if chooses_shapes:
            shapes = [*shapes * MAX_CANDIDATES, NO_SPECULATION]
        found[size] = shapes
    return found


def select_graphs(
    target: TargetConfig,
    draft: DraftModel | None,
    config: ResolvedConfig,
    shapes: Mapping[int, Sequence[SpecShape]],
    budget: int | None,
) -> GraphSelection:
    """Choose the graphs of cycles for ``budget`` bytes, the graphs of prompts included.

    Args:
        shapes: shapes of each batch size.
    """
    costs = unit_costs(target, draft, config, shapes)
    if budget is not None:
        budget -= graphs_of_prompts(target, draft, config, budget).bytes
    return GraphSelection(costs, budget, BYTES_OF_LAUNCH)


def unit_costs(
    target: TargetConfig,
    draft: DraftModel | None,
    config: ResolvedConfig,
    shapes: Mapping[int, Sequence[SpecShape]],
) -> dict[GraphUnit, UnitCost]:
    """Estimate the graphs of each batch size and kind of batch, the most frequent first.

    Args:
        shapes: shapes of each batch size.
    """
    order = by_frequency(config.batch_sizes, list(kinds("all", can_have_grammars=True)))
    costs = {}
    for unit in order:
        cost = UnitCost()
        for shape in shapes[unit.size]:
            cost += _cost(unit, target, draft, config, shape)
        costs[unit] = cost
    return costs


def _cost(
    unit: GraphUnit,
    target: TargetConfig,
    draft: DraftModel | None,
    config: ResolvedConfig,
    shape: SpecShape,
) -> UnitCost:
    """Estimate the graphs of a unit in one shape.

    Grammars split a cycle, and so do n-grams, which have no graphs of proposals. All kinds with grammars
    share one graph of proposals, or have one each where drafts are sampled. Functions with attention have a
    graph for each batch size of a DP-attention shard.
    """
    proposals = _proposals(unit.kind, draft, config, shape)
    is_split = unit.kind.has_grammar or (config.algorithm == "NGRAM" and shape.steps > 0)
    drafted, verified = _launches(target, draft, shape)
    number = len(config.shard_batch_sizes(unit.size))
    launches = number * (verified if is_split else drafted + verified) + proposals * drafted

    # A window is the output of one graph and the input of another.
    tensor_bytes = number * _bytes_of_output(shape)
    num_windows = proposals + (number if is_split else 0)
    tensor_bytes += num_windows * _bytes_of_window(target, draft, config, shape)
    return UnitCost(number + proposals, launches, unit.size * tensor_bytes)


def _proposals(kind: BatchKind, draft: DraftModel | None, config: ResolvedConfig, shape: SpecShape) -> int:
    """Number of graphs of proposals that a kind of batch has for itself."""
    if not kind.has_grammar or (config.algorithm == "NGRAM" and shape.steps > 0):
        return 0
    is_sampled = config.sampled_drafts and draft is not None
    return int(is_sampled or kind == GRAMMAR_KINDS[0])


def _launches(target: TargetConfig, draft: DraftModel | None, shape: SpecShape) -> tuple[int, int]:
    """Launches of a proposal, and of the rest of a cycle."""
    of_draft = 0 if draft is None else LAUNCHES * (draft.cache.num_layers // draft.num_modules) + 4
    layers = LAUNCHES * target.num_layers
    if target.moe is not None:
        layers += LAUNCHES_OF_EXPERTS * target.num_layers
    if target.mla is not None:
        layers += LAUNCHES_OF_LATENTS * target.num_layers
    layers += LAUNCHES_OF_RECURRENCE * (target.num_layers - target.num_attention_layers)
    return of_draft * shape.steps, layers + LAUNCHES_AROUND


def _bytes_of_window(
    target: TargetConfig, draft: DraftModel | None, config: ResolvedConfig, shape: SpecShape
) -> int:
    """Bytes of a request's window: four integers a node, and the probabilities of sampled drafts."""
    probs = 4 * shape.steps * target.vocab_size if config.sampled_drafts and draft is not None else 0
    return 4 * 8 * shape.tokens + probs


def _bytes_of_output(shape: SpecShape) -> int:
    """Bytes of what a request's cycle emits, with all log-probabilities."""
    return (shape.steps + 1) * (8 + 4 + 12 * MAX_LOGPROBS)
