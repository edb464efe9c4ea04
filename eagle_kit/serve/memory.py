"""Memory planned once, before anything is taken: weights, pool, scratch, the largest buffers.

Legend: B requests, N window nodes, V vocabulary.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW
from eagle_kit.kernels.linear import packed_parts
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.speculation.propose.draft_model import DraftModel

FREE_SHARE = {"cpu": 0.5, "cuda": 0.85}
"""Share of the free memory that the pool may take when its size is not given."""
LOGITS_COPIES = 2
"""Logits in fp32 and the distribution made from them are there at once."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and the pool's tokens.

    Attributes:
        kv_tokens: tokens that the pool holds.
        bytes_per_token: of the pool, target and draft together.
        draft_bytes_per_token: the draft's part.
        weights, scratch, logits: bytes.
        activations: bytes of a layer's tensors in the largest prefill step.
        free: bytes that were free before the pool, weights already there.
        ngram_log: bytes of host memory that a full log of n-grams takes.
    """

    kv_tokens: int
    bytes_per_token: int
    draft_bytes_per_token: int
    weights: int
    scratch: int
    logits: int
    free: int
    ngram_log: int = 0
    activations: int = 0

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return self.kv_tokens * self.bytes_per_token

    def __str__(self) -> str:
        parts = {"weights": self.weights, "pool": self.pool, "scratch": self.scratch}
        parts |= {"logits": self.logits, "activations": self.activations}
        total = sum(parts.values())
        sizes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        draft = f" (the draft's {self.draft_bytes_per_token / 1e3:.1f})" if self.draft_bytes_per_token else ""
        log = f"; the n-gram log grows to {self.ngram_log / 1e9:.2f} GB" if self.ngram_log else ""
        return (
            f"memory  {total / 1e9:.2f} GB ({sizes}); the pool holds {self.kv_tokens} tokens of "
            f"{self.bytes_per_token / 1e3:.1f} kB{draft}; {self.free / 1e9:.1f} GB were free{log}"
        )


def plan_memory(
    target: LlamaModel,
    draft: DraftModel | None,
    *,
    max_running: int,
    wanted_tokens: int,
    kv_tokens: int | None,
    window: int = 16,
    ngram_log: int = 0,
    kv_dtype: torch.dtype | None = None,
    prefill_tokens: int = 0,
    max_context: int = 0,
) -> MemoryPlan:
    """Size the pool.

    Args:
        max_running: B.
        wanted_tokens: what lets every request reach the context's end; the pool gets this, or what fits.
        kv_tokens: the pool's size when the user gave one.
        window: N that logits are computed for.
        ngram_log: bytes of host memory that a full log of n-grams takes.
        kv_dtype: of the pool; None takes the model's.
        prefill_tokens: most tokens of a prefill step.
        max_context: most tokens of a request, whose latents a prefill step expands.

    Raises:
        UserError: the given size does not fit into the free memory.
    """
    config, weight = target.config, target.embed_tokens.weight
    width = (kv_dtype or weight.dtype).itemsize
    of_draft = 0 if draft is None else draft.cache.values_per_token * width
    per_token = config.cache.values_per_token * width + of_draft
    scratch = per_token * max_running * MAX_WINDOW
    logits = LOGITS_COPIES * max_running * window * config.vocab_size * 4
    values = prefill_tokens * _values_per_row(config) + max_context * _expanded_per_token(config)
    activations = values * weight.element_size()
    needed = scratch + logits + activations
    weights = sum(tensor.nbytes for tensor in _weights(target, draft))
    free = free_memory(weight.device)
    if weight.device.type == "cpu":
        free = max(0, free - ngram_log)
    room = int(FREE_SHARE[weight.device.type] * free) - needed
    if kv_tokens is None and room < per_token:
        raise UserError(
            f"{free / 1e9:.2f} GB are free, and {needed / 1e9:.2f} GB are needed before a token.",
            "Free memory, or lower the batch size or the tokens of a prefill step"
            + (" or the n-gram capacity." if ngram_log else "."),
        )
    if kv_tokens is None:
        kv_tokens = max(1, min(wanted_tokens, room // per_token))
    elif kv_tokens * per_token > free - needed:
        raise UserError(
            f"A pool of {kv_tokens} tokens takes {kv_tokens * per_token / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free.",
            "Lower kv_tokens.",
        )
    return MemoryPlan(kv_tokens, per_token, of_draft, weights, scratch, logits, free, ngram_log, activations)


def _values_per_row(config: TargetConfig) -> int:
    """Values of a token that are there at once in a layer: the residual stream, a sum, its norm, captured
    states, and queries, keys, values and their mix, or the MLP's gate, up, and product."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return 6 * config.hidden_size + max(attention, 3 * config.intermediate_size)


def _expanded_per_token(config: TargetConfig) -> int:
    """Values of the keys and values that latent attention makes of a token for a prefill step."""
    if config.mla is None:
        return 0
    return config.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim)


def _weights(target: LlamaModel, draft: DraftModel | None) -> Iterator[torch.Tensor]:
    """Every weight once, and the copies that a CPU keeps in another layout."""
    parts = () if draft is None else vars(draft).values()
    models = [target, *(part for part in parts if isinstance(part, nn.Module))]
    seen = set()
    for model in models:
        for tensor in (*model.parameters(), *tree_leaves(packed_parts(model))):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
