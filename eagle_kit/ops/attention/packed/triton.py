"""Packed attention by the flash kernels of training-time test: every token is a query row without own keys.

Row t of a document that begins at s attends to keys ``s .. t``; blocks of keys that all rows of a block
attend to are not masked. Forward and backward; the maths, the bytes and the memory (e Hq D + 4 Hq bytes kept
per token) are those of :mod:`eagle_kit.ops.attention.ttt.triton` with R = T and J = 0.

Legend: T packed tokens, Hq / Hkv heads, D head size.
"""

import torch

from eagle_kit.ops.attention.ttt import triton as flash
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.transfer import to_device


def document_starts(spans: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """First token of each token's document, int32 ``[T]``, from (start, stop) of each document; built without
    reading the device."""
    starts, stops = torch.tensor(spans, dtype=torch.int32).view(-1, 2).unbind(1)
    counts = to_device(stops - starts, device, torch.int32)
    num_tokens = spans[-1][1] if spans else 0
    return torch.repeat_interleave(to_device(starts, device, torch.int32), counts, output_size=num_tokens)


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_start: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """Packed attention of ``q [T, Hq, D]``, ``k [T, Hkv, D]`` and ``v [T, Hkv, Dv]``, Dv at most D, ->
    ``[T, Hq, Dv]``; ``doc_start`` int32 ``[T]`` is the first token of each token's document. Differentiable
    where the softmax is ordinary."""
    tokens, kv_heads, size = k.shape
    if v.shape[-1] < size:  # latent attention: the kernel has one size of head
        wide = torch.nn.functional.pad(v, (0, size - v.shape[-1]))
        return packed_attention(q, k, wide, doc_start, variant)[..., : v.shape[-1]]
    none = k.new_empty(tokens, kv_heads, 0, size)
    stops = torch.arange(1, tokens + 1, dtype=torch.int32, device=k.device)
    starts = doc_start + variant.limits.firsts(stops - 1 - doc_start)
    return flash.ttt_attention(
        q, k, v, none, none, starts, stops, variant.scale, variant.soft_cap, variant.sinks
    )
