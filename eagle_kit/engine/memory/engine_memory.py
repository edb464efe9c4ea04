"""Memory plan of an engine, made before its pool is allocated: weights, pool, scratch, the largest
buffers."""

import os
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from eagle_kit.autotune.shapes import MOST_STEPS, WIDTHS
from eagle_kit.config.engine import DEFAULT_BATCH_SIZE, DEFAULT_MAX_CONTEXT, ResolvedConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import RUNTIME_BYTES
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.choose_drafter import drafter_class
from eagle_kit.engine.grammar.masks import num_bytes
from eagle_kit.engine.graphs.batch_kind import kinds
from eagle_kit.engine.graphs.graph_selection import describe
from eagle_kit.engine.measured import prefill_backends
from eagle_kit.engine.memory.graph_memory import (
    NO_GRAPHS,
    Graphs,
    expected_shapes,
    graphs_of,
    graphs_of_prompts,
    select_graphs,
)
from eagle_kit.engine.padded_prompts import can_replay_prompts, prompt_shapes
from eagle_kit.kv.latents import PACKED_TOKENS
from eagle_kit.kv.store import KV_DTYPES
from eagle_kit.models.blocks.moe import FP8Experts
from eagle_kit.models.config import DecoderConfig, TargetConfig
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.cpu.memory import promised_memory
from eagle_kit.ops.linear import packed_parts
from eagle_kit.ops.linear.fp8 import working_bytes

FREE_SHARE = {"cpu": 0.5, "cuda": 0.85}
"""Share of the free memory that an engine may take when neither the size of its pool nor the share of a whole
GPU is given."""
TOKENS_OF_REQUEST = 1024
"""Least tokens of the pool for each request, where memory decides how many a batch has: about those of a
prompt of vLLM's load generator."""
SNAPSHOT_SHARE = 0.25
"""Share of what is left for the pool that snapshots of states may take when their number is not given."""
GRAPH_SHARE = 0.15
"""Share of what is left for graphs and the pool that graphs may take where the pool could use all of it."""
BYTES_OF_TABLES = 4 + 4 + 1
"""Of a slot for each token of the vocabulary: counts, biases, and whether it is in the prompt."""
LOGITS_COPIES = 2
"""Logits in fp32 and the probabilities made from them exist at the same time."""

NEED_LESS = "Lower kv_tokens, max_batch_size, max_context or prefill_tokens, or free memory of the GPU."
"""Remedy where an engine has too little memory."""
INT64_BYTES = 8
NUM_PAGE_TABLES = 3
"""Page tables of all slots on a GPU: of engines with and without drafts, and the copy that a cycle reads."""


class Place(NamedTuple):
    """Device of an engine.

    Attributes:
        device: the device.
        free: bytes that are free on it beside the weights.
        total: bytes of a GPU.
        taken: those of them that this process has, weights and runtime included.
    """

    device: torch.device
    free: int
    total: int = 0
    taken: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "Place":
        """The device as it is now. Memory that torch keeps of freed tensors is free."""
        free = free_memory(device)
        if device.type != "cuda":
            return cls(device, free)
        total = torch.cuda.mem_get_info(device)[1]
        own = torch.cuda.memory_reserved(device) + int(RUNTIME_BYTES)
        return cls(device, free, total, min(own, total - free))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and the size of the pool in tokens.

    Attributes:
        kv_tokens: tokens that the pool holds.
        bytes_per_token: of the pool, target and draft together; with data-parallel attention the rank's
            share of it.
        draft_bytes_per_token: the draft's part.
        weights, scratch, logits: bytes; the last of the target or, if more, of the draft's candidates.
        activations: bytes of a layer's tensors in the largest prefill step.
        free: bytes that were free before the pool, weights already there.
        ngram_log: bytes of host memory of a full log of n-grams.
        states: bytes of the states of recurrent layers, snapshots included.
        state_snapshots: number of these; None without recurrent layers.
        graphs: CUDA graphs, by estimate, that fit into ``graph_memory``, those of prompts included.
        graph_memory: bytes that CUDA graphs may take; None where there are none.
        graphs_of_all: graphs that a warm-up without a budget would prepare.
        graphs_left_out: phrases on batches without graphs of their own, for lack of ``graph_memory``.
        fp8: bytes of the weights that are in fp8 layers.
        prefill: bytes of ``activations`` that a prefill step needs.
    """

    kv_tokens: int
    bytes_per_token: int
    draft_bytes_per_token: int
    weights: int
    scratch: int
    logits: int
    activations: int
    free: int
    ngram_log: int = 0
    states: int = 0
    state_snapshots: int | None = None
    graphs: Graphs = NO_GRAPHS
    graph_memory: int | None = None
    graphs_of_all: Graphs = NO_GRAPHS
    graphs_left_out: tuple[str, ...] = ()
    fp8: int = 0
    prefill: int = 0

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return self.kv_tokens * self.bytes_per_token

    @property
    def total(self) -> int:
        """Bytes of all uses."""
        used = self.weights + self.pool + self.scratch + self.states + self.logits + self.activations
        return used + self.graphs.bytes

    def smallest(self, plans: "Sequence[MemoryPlan]") -> "MemoryPlan":
        """This plan with the fewest tokens and snapshots, and the least memory of graphs, of all ranks'
        plans."""
        graph_memory = [plan.graph_memory for plan in plans if plan.graph_memory is not None]
        snapshots = [plan.state_snapshots for plan in plans if plan.state_snapshots is not None]
        return replace(
            self,
            kv_tokens=min(plan.kv_tokens for plan in plans),
            state_snapshots=min(snapshots, default=None),
            graph_memory=min(graph_memory, default=None),
        )

    @property
    def sizes(self) -> dict[str, int | None]:
        """Options that it fills in."""
        return {
            "kv_tokens": self.kv_tokens,
            "kv_memory": None,
            "state_snapshots": self.state_snapshots,
            "graph_memory": self.graph_memory,
        }

    def __str__(self) -> str:
        parts = {"weights": self.weights, "pool": self.pool, "scratch": self.scratch}
        if self.state_snapshots is not None:
            parts[f"states with {self.state_snapshots} snapshots"] = self.states
        parts |= {"logits": self.logits, "activations": self.activations}
        if self.graphs_of_all.number:
            parts[f"{self.graphs.number} graphs by estimate"] = self.graphs.bytes
        total = sum(parts.values())
        sizes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        draft = f" (the draft's {self.draft_bytes_per_token / 1e3:.1f})" if self.draft_bytes_per_token else ""
        if self.fp8:
            draft += f"; of the weights {self.fp8 / 1e9:.2f} GB are fp8 layers"
        log = f"; the n-gram log grows to {self.ngram_log / 1e9:.2f} GB" if self.ngram_log else ""
        left_out = ""
        if self.graphs_left_out and self.graph_memory is not None:
            left_out = (
                f"; graphs may take {self.graph_memory / 1e9:.2f} GB, and all {self.graphs_of_all.number} "
                f"would take {self.graphs_of_all.bytes / 1e9:.2f} GB, so there are none for "
                f"{' and '.join(self.graphs_left_out)}"
            )
        return (
            f"memory  {total / 1e9:.2f} GB ({sizes}); the pool holds {self.kv_tokens} tokens of "
            f"{self.bytes_per_token / 1e3:.1f} kB{draft}; {self.free / 1e9:.1f} GB were free{log}{left_out}"
        )


def plan_memory(
    target: Target,
    draft: DraftModel | None,
    config: ResolvedConfig,
    *,
    chooses_shapes: bool = False,
    place: Place | None = None,
) -> MemoryPlan:
    """Size the pool: as the options say, or for every request of a batch to reach the end of the context, or
    as much as fits. With ``gpu_memory_utilization`` and a prefix cache it takes all that fits.

    Args:
        chooses_shapes: whether the engine will choose among several shapes.
        place: where the engine will be; default the device that the target is on.

    Raises:
        UserError: the given size does not fit into the free memory, or no token does.
    """
    model = target.config
    weight = target.embed_tokens.weight
    batch = config.max_batch_size
    place = place or Place.of(weight.device)
    device = place.device
    free = place.free

    # Bytes of a token in the pool, and windows apart from it.
    width = (KV_DTYPES[config.kv_dtype] or weight.dtype).itemsize
    of_draft = 0 if draft is None else draft.cache.values_per_token * width
    of_target = model.cache.values_per_token * width
    scratch = of_target * config.shard_batch_size * MAX_WINDOW + of_draft * batch * config.draft_scratch
    per_token = of_target // config.num_shards + of_draft

    # States that the draft reads later, tables of sampling, and masks of grammars.
    if draft is not None and _waits(draft, config, chooses_shapes=chooses_shapes):
        scratch += (batch + 1) * MAX_WINDOW * draft.state_size * draft.state_dtype.itemsize
    if device.type != "cpu":  # graphs of every kind are captured at the start
        scratch += (batch + 1) * model.vocab_size * BYTES_OF_TABLES
        scratch += (batch + 1) * MAX_WINDOW * num_bytes(model.vocab_size)
        scratch += NUM_PAGE_TABLES * (batch + 1) * config.max_pages * INT64_BYTES

    # Logits of the target, or of the draft's candidates, which exist once the target's are gone.
    logits = LOGITS_COPIES * config.most_rows * model.vocab_size * 4
    if draft is not None:
        logits = max(logits, _draft_logits(draft, config, chooses_shapes=chooses_shapes))

    # Activations of the largest prefill step.
    expanded = config.max_context
    if device.type != "cpu":  # several prompts together
        expanded = max(expanded, min(PACKED_TOKENS, batch * config.max_context))
    per_row = _values_per_row(target, draft)
    expanded_values = max(_expanded_per_token(layer) for layer in _layers(target, draft))
    values = config.prefill_tokens * per_row + expanded * expanded_values
    prefill = values * weight.element_size() + target.working_bytes
    activations = prefill
    activations += prefill_backends.working_bytes(config.prefill_backend, device, target.variants)
    if layers := target.fp8_layers:
        activations += working_bytes(device)

    # States of recurrent layers, without snapshots.
    states = 0
    snapshots = None
    if (spec := model.states) is not None:
        states = (batch + 1) * spec.num_bytes(weight.element_size())
        scratch += config.most_rows * spec.num_bytes_of_node(weight.element_size())
        activations += spec.num_bytes_of_pair * max(MAX_WINDOW**2, batch * config.shape.tokens**2)

    # Graphs of cycles and of prompts compute in memory of their own.
    has_graphs = device.type != "cpu" and config.graph_mode == "cycle"
    if has_graphs:
        graph_rows = config.most_rows
        if can_replay_prompts(model, draft, config):
            prompt_rows = prompt_shapes(config)[-1].rows
            graph_rows = max(graph_rows, prompt_rows)
            if draft is not None:
                scratch += prompt_rows * draft.state_size * draft.state_dtype.itemsize
        activations += graph_rows * per_row * weight.element_size()

    # Memory that is left for the pool.
    needed = scratch + logits + activations + states
    weights = sum(tensor.nbytes for tensor in _weights(target, draft))
    ngram_log = config.ngram.max_bytes if config.algorithm == "NGRAM" else 0
    if device.type == "cpu":
        free = max(0, free - ngram_log)
        if target.ranks is not None:  # which share the machine's memory
            free //= target.ranks.size
    room = usable_bytes(place._replace(free=free), config) - needed

    # Tokens that are given or wanted, and graphs that leave them their share.
    kv_tokens = config.kv_tokens
    if config.kv_memory is not None:
        kv_tokens = max(1, config.kv_memory // per_token)
    is_given = kv_tokens is not None
    all_parts = config.shard_batch_size * config.num_shards
    wanted = all_parts * (config.max_context + config.num_lookahead_tokens(MAX_WINDOW - 1) + config.page_size)
    shared = room if kv_tokens is None else free - needed
    graphs = _NO_GRAPH_PLAN
    if has_graphs:
        budget = _graph_budget(config, shared, (kv_tokens or wanted) * per_token, is_given=is_given)
        graphs = _plan_graphs(model, draft, config, budget, chooses_shapes=chooses_shapes)
    room -= graphs.reserved
    needed += graphs.reserved

    # Snapshots of states take a share of what is left.
    if spec is not None:
        one = spec.num_bytes(weight.element_size())
        snapshots = config.num_snapshots
        if config.state_snapshots is None:
            left = min(SNAPSHOT_SHARE * room, free - needed - (kv_tokens or 0) * per_token)
            snapshots = min(snapshots, max(0, int(left)) // one)
        room -= snapshots * one
        needed += snapshots * one
        states += snapshots * one

    # The pool takes what is given, or what is wanted and fits.
    if kv_tokens is None and room < per_token:
        of_states = f", {states / 1e9:.2f} GB of them for states of recurrent layers" if states else ""
        of_share = ""
        if config.gpu_memory_utilization is not None:
            of_share = f", of which the engine may take {max(0, room + needed) / 1e9:.2f} GB,"
        raise UserError(
            f"{free / 1e9:.2f} GB are free{of_share} and {needed / 1e9:.2f} GB are needed before a "
            f"token{of_states}.",
            "Free memory, "
            + ("raise gpu_memory_utilization, " if of_share else "")
            + "or lower the batch size or the tokens of a prefill step"
            + (" or state_snapshots" if config.state_snapshots else "")
            + (" or graph_memory" if config.graph_memory else "")
            + (" or the n-gram capacity." if ngram_log else "."),
        )
    if kv_tokens is None:
        takes_all = config.gpu_memory_utilization is not None and config.prefix_cache
        kv_tokens = max(1, room // per_token)
        if not takes_all:  # other requests could use nothing of what lies behind
            kv_tokens = min(kv_tokens, wanted)
    elif kv_tokens * per_token > free - needed:
        raise UserError(
            f"A pool of {kv_tokens} tokens takes {kv_tokens * per_token / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free.",
            "Lower kv_tokens or kv_memory"
            + (" or state_snapshots" if config.state_snapshots else "")
            + (" or graph_memory." if config.graph_memory else "."),
        )
    # Graphs may take what is left over.
    graph_memory = config.graph_memory
    if has_graphs and graph_memory is None:
        pool = kv_tokens * per_token
        left = free - needed if is_given else room
        graph_memory = graphs.chosen.bytes + max(0, int(left) - pool)
    return MemoryPlan(
        kv_tokens,
        per_token,
        of_draft,
        weights,
        scratch,
        logits,
        activations,
        free,
        ngram_log,
        states,
        snapshots,
        graphs.chosen,
        graph_memory,
        graphs.wanted,
        graphs.left_out,
        fp8=sum(part.nbytes for layer in layers for part in layer.parameters()),
        prefill=prefill,
    )


def usable_bytes(place: Place, config: ResolvedConfig) -> int:
    """Bytes beside the weights that an engine may take if its pool has no given size; below 0 if the weights
    alone take more than they may."""
    share = config.gpu_memory_utilization
    if share is None:
        return int(FREE_SHARE[place.device.type] * place.free)
    return int(min(share * place.total - place.taken, share * place.free))


def fit_sizes(
    plan: Callable[[ResolvedConfig], MemoryPlan],
    config: ResolvedConfig,
    *,
    lowers_batch: bool,
    lowers_context: bool,
) -> ResolvedConfig:
    """Lower the batch and the context of options to what the memory holds.

    The batch gets the largest of its sizes for which the pool holds :data:`TOKENS_OF_REQUEST` tokens for each
    request, or a whole context if that is shorter. A batch of the default size of other engines needs a plan
    only. The context is the longest that the pool holds beside what prompts of its length need, of halves
    down to the default of other engines.

    Args:
        plan: makes the memory plan of such options.
        lowers_batch, lowers_context: whether the batch and the context may be lowered.

    Raises:
        UserError: not even the smallest sizes fit.
    """
    sizes = list(config.batch_sizes) if lowers_batch else [config.max_batch_size]
    contexts = _halved(config.max_context) if lowers_context else [config.max_context]
    enough = min(DEFAULT_BATCH_SIZE, sizes[-1])

    def is_too_large(size: int, context: int) -> bool:
        """Whether the pool lacks tokens of some requests."""
        try:
            fitted = config.replace(max_context=context).with_batch_size(size)
            num_tokens = plan(fitted).kv_tokens
        except UserError:
            return True
        is_free_choice = lowers_batch and size > enough
        return is_free_choice and num_tokens < size * min(TOKENS_OF_REQUEST, context)

    # What fits in no smaller size is refused with its sentences.
    best = config.replace(max_context=contexts[-1]).with_batch_size(sizes[0])
    plan(best)

    # Enough requests come before a longer context. What is planned for a long context shortens the pool, so
    # a half of it may reach further.
    best_key = (False, 0)
    for context in contexts:
        if best_key[0] and context <= best_key[1]:
            break
        num_fitting = bisect(sizes, False, key=partial(is_too_large, context=context))
        if not num_fitting:
            continue
        fitted = config.replace(max_context=context).with_batch_size(sizes[num_fitting - 1])
        reach = min(context, plan(fitted).kv_tokens)
        key = (fitted.max_batch_size >= enough, reach)
        if key > best_key:
            best_key = key
            # Page tables need not be longer than the pool.
            best = fitted.replace(max_context=max(2, reach)) if lowers_context else fitted
    return best


def _halved(context: int) -> list[int]:
    """``context``, its half and so on, down to the default of engines that do not take a whole GPU."""
    contexts = [context]
    while contexts[-1] > DEFAULT_MAX_CONTEXT:
        contexts.append(max(contexts[-1] // 2, DEFAULT_MAX_CONTEXT))
    return contexts


def _waits(draft: DraftModel, config: ResolvedConfig, *, chooses_shapes: bool) -> bool:
    """Return whether the draft may read tokens of plain cycles later."""
    is_plain_at_times = config.shape.steps and NO_SPECULATION in config.shape.shapes
    return bool(chooses_shapes or is_plain_at_times) and drafter_class(draft, config).supports_deferred_draft


def _draft_logits(draft: DraftModel, config: ResolvedConfig, *, chooses_shapes: bool) -> int:
    """Bytes of the logits of a draft, of the largest batch in the deepest and widest shapes that it may
    have."""
    kind = drafter_class(draft, config)
    shapes = [*config.shape.shapes]
    if chooses_shapes:
        shapes.append(SpecShape(min(MOST_STEPS, kind.most_steps(draft)), max(WIDTHS), MAX_WINDOW))
    spec = kind.candidate_spec(shapes, needs_confidence=chooses_shapes and not config.lag)
    topk = min(spec.topk, draft.draft_vocab_size)
    return kind.logits_bytes(draft, config.max_batch_size, spec._replace(topk=topk))


class _GraphPlan(NamedTuple):
    """Graphs of a plan: those that are chosen, all that are wanted, the bytes to leave to graphs, and phrases
    on what is left out."""

    chosen: Graphs
    wanted: Graphs
    reserved: int
    left_out: tuple[str, ...]


_NO_GRAPH_PLAN = _GraphPlan(NO_GRAPHS, NO_GRAPHS, 0, ())


def _graph_budget(config: ResolvedConfig, shared: int, pool: int, *, is_given: bool) -> int:
    """Bytes that graphs may take.

    Args:
        shared: bytes for graphs and the pool together.
        pool: bytes of the pool that is given or wanted.
        is_given: True if the pool has a given size, which comes before graphs.
    """
    if config.graph_memory is not None:
        return config.graph_memory
    left = max(0, int(shared) - pool)
    return left if is_given else max(left, int(GRAPH_SHARE * max(0, shared)))


def _plan_graphs(
    target: TargetConfig,
    draft: DraftModel | None,
    config: ResolvedConfig,
    budget: int,
    *,
    chooses_shapes: bool,
) -> _GraphPlan:
    """Choose the graphs that fit into ``budget`` bytes, by estimate."""
    shapes = expected_shapes(config, chooses_shapes=chooses_shapes)
    selection = select_graphs(target, draft, config, shapes, budget)
    of_prompts = graphs_of_prompts(target, draft, config, budget)
    wanted = graphs_of(target, draft, config, "all", chooses_shapes=chooses_shapes)

    # A size that the user gave is reserved as it is.
    cost = selection.cost(selection.chosen)
    num_bytes = cost.num_bytes(selection.bytes_of_launch) + of_prompts.bytes
    chosen = Graphs(cost.number + of_prompts.number, num_bytes)
    reserved = chosen.bytes if config.graph_memory is None else config.graph_memory

    # Name what is left out.
    all_kinds = list(kinds("all", can_have_grammars=True))
    left_out = list(describe(selection.left_out(all_kinds)))
    if of_prompts != graphs_of_prompts(target, draft, config, None):
        left_out.append("prompts")
    return _GraphPlan(chosen, wanted, reserved, tuple(left_out))


def _layers(target: Target, draft: DraftModel | None) -> Iterator[DecoderConfig]:
    """Iterate over the architectures of the layers that read whole prompts: the target's, and a head's."""
    yield target.config
    if draft is not None and draft.head is not None:
        yield draft.head.config.layer


def _values_per_row(target: Target, draft: DraftModel | None) -> int:
    """Values of a token that exist at the same time in a layer.

    They are the captured states; the residual stream and its norm, before and behind attention; the output of
    the MLP; and the largest of: queries, keys, values and their mix, of a head too, which no ranks share;
    inputs, sums and fp32 copies of a recurrent layer; gate, up and product of the MLP or of experts. Grouped
    matmuls of experts sort rows, and add up outputs in fp32.
    """
    config = target.config
    num_captured = 0 if draft is None else len(draft.capture)
    attention = max(
        (2 * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in _layers(target, draft)
    )
    channels = max((count for count, _ in config.states.convolutions), default=0) if config.states else 0
    experts = 0
    if (moe := config.moe) is not None:
        has_fp8 = any(isinstance(layer, FP8Experts) for layer in target.fp8_layers)
        outputs = (1 if has_fp8 else 4) * config.hidden_size
        experts = moe.num_experts_per_token * (3 * moe.intermediate_size + outputs)
        experts += 3 * moe.shared_intermediate_size
    largest = max(attention, 3 * config.intermediate_size, experts, 6 * channels)
    return (5 + num_captured) * config.hidden_size + largest


def _expanded_per_token(config: DecoderConfig) -> int:
    """Values of the keys and values that latent attention expands a token to in a prefill step: as they are
    made, and as matrices of one size for the kernel."""
    if (mla := config.mla) is None:
        return 0
    made = mla.qk_nope_head_dim + mla.v_head_dim + mla.qk_head_dim
    return config.num_heads * (made + 2 * max(mla.qk_head_dim, mla.v_head_dim))


def _weights(target: Target, draft: DraftModel | None) -> Iterator[torch.Tensor]:
    """Iterate over every weight once, and over the packed copies that a CPU keeps."""
    parts = () if draft is None else vars(draft).values()
    models = [target, *(part for part in parts if isinstance(part, nn.Module))]
    seen = set()
    for model in models:
        for tensor in (*model.parameters(), *tree_leaves(packed_parts(model))):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def free_memory(device: torch.device) -> int:
    """Bytes that are free on ``device``, those that torch keeps of freed tensors included, and those that
    pools of this process have yet to use left out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return max(int(lines["MemAvailable"].split()[0]) * 1024 - promised_memory(), 0)
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
