"""Estimate of the device memory that CUDA graphs take, made before any is captured.

Graphs share one pool of memory for what a cycle computes, so it is as large as the largest cycle needs. Each
takes memory of its own for its launches, and keeps its inputs and outputs. An estimate, not a measurement: no
graph of this engine has been weighed on a GPU.

Legend: B requests of a batch, S steps, N window nodes, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eagle_kit.autotune.shapes import MAX_CANDIDATES
from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.config.server import WarmUpExtent
from eagle_kit.core.sampling_params import MAX_LOGPROBS
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.engine.graphs.batch_kind import BatchKind, kinds
from eagle_kit.engine.padded_prompts import prompt_shapes, reason_against_graphs
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
    """Estimate the graphs of a warm-up.

    Args:
        config: resolved; batches have the sizes and shapes in it.
        chooses_shapes: whether shapes are measured later, so that a size has up to ``MAX_CANDIDATES``
            of them and plain decoding.
    """
    number = total = 0
    wanted = [] if extent == "none" else list(kinds(extent, can_have_grammars=True))
    for size in config.batch_sizes:
        shapes = [config.shape.at(size)]
        if chooses_shapes:
            shapes = [*shapes * MAX_CANDIDATES, NO_SPECULATION]
        for shape in shapes:
            proposals = 2 if config.sampled_drafts and draft is not None else 1
            if config.algorithm == "NGRAM" and shape.steps:
                proposals = 0
            of_window = _bytes_of_window(target, draft, config, shape)
            num_shard_sizes = len(config.shard_batch_sizes(size))
            total += size * num_shard_sizes * len(wanted) * _bytes_of_output(shape)
            launched = _launches(target, draft, shape)
            for launches, num_windows in _graphs(wanted, *launched, proposals, num_shard_sizes):
                number += 1
                total += launches * BYTES_OF_LAUNCH + size * num_windows * of_window
    of_prompts = NO_GRAPHS
    if wanted:
        of_prompts = _graphs_of_prompts(target, draft, config, chooses_shapes=chooses_shapes)
    return Graphs(number + of_prompts.number, total + of_prompts.bytes)


def _graphs_of_prompts(
    target: TargetConfig, draft: DraftModel | None, config: ResolvedConfig, *, chooses_shapes: bool
) -> Graphs:
    """Estimate the graphs of prompt steps: one of the target for each shape, and one of a draft."""
    if reason_against_graphs(target, draft, config) is not None:
        return NO_GRAPHS
    _, verified = _launches(target, draft, NO_SPECULATION)
    launches = [verified]
    if draft is not None and (chooses_shapes or config.shape.steps):
        launches.append(_launches(target, draft, ONE_STEP)[0] + LAUNCHES_AROUND)
    shapes = prompt_shapes(config)
    return Graphs(len(shapes) * len(launches), len(shapes) * sum(launches) * BYTES_OF_LAUNCH)


def _graphs(
    wanted: Sequence[BatchKind], drafted: int, verified: int, proposals: int, num_shard_sizes: int
) -> Iterator[tuple[int, int]]:
    """Iterate over the graphs of a size and a shape: launches, and windows that it keeps for each request.
    Grammars split a cycle, and n-grams, which have no graphs of ``proposals``: one for all kinds with
    grammars, or for each where drafts are sampled. Functions with attention have a graph for each of
    ``num_shard_sizes`` batch sizes of a DP-attention shard."""
    for kind in wanted:
        one = (verified, 1) if kind.has_grammar or not proposals else (drafted + verified, 0)
        yield from [one] * num_shard_sizes
    if any(kind.has_grammar for kind in wanted):
        yield from [(drafted, 1)] * proposals


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
