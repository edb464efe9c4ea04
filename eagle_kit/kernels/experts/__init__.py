"""The routed experts of a mixture: every token through its own few of E SwiGLU networks.

On a CPU the host reads who goes where and multiplies each expert's rows. On a GPU nothing is read, so that it
can be in a CUDA graph: rows sorted by expert and two grouped matmuls in bf16, which read the weights of the
experts that are hit; in other types all experts over all rows, E / K times the work.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.kernels.experts import reference
from eagle_kit.kernels.linear import can_pack, onednn, takes_packed

__all__ = ["PackedExperts", "experts", "pack_experts"]


class PackedExperts(NamedTuple):
    """Copies of every expert's weights in oneDNN's layout for few rows."""

    gate_up: Sequence[onednn.Packed]
    down: Sequence[onednn.Packed]


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts | None:
    """The weights of :func:`experts`, packed; None where oneDNN is not what multiplies them."""
    if not (can_pack(gate_up) and can_pack(down)):
        return None
    return PackedExperts(*([onednn.pack(weight) for weight in stack] for stack in (gate_up, down)))


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    packed: PackedExperts | None = None,
) -> torch.Tensor:
    """The weighted sum of a token's experts.

    Args:
        x: ``[T, H]``.
        ids: int64 ``[T, K]``, a token's experts, each once.
        weights: fp32 ``[T, K]``, theirs.
        gate_up: ``[E, 2 I, H]``, the gate first.
        down: ``[E, H, I]``.
        packed: both again as :func:`pack_experts` made them, for few rows and no gradients.

    Returns:
        ``[T, H]`` in the dtype of ``x``.
    """
    if packed is not None and takes_packed(x):
        return reference.by_expert(x, ids, weights, *packed, multiply=onednn.packed_matmul)
    if x.device.type == "cpu" and not isinstance(x, torch._subclasses.FakeTensor):
        return reference.by_expert(x, ids, weights, gate_up, down)
    if x.is_cuda and x.dtype == gate_up.dtype == torch.bfloat16:
        return reference.grouped(x, ids, weights, gate_up, down)
    return reference.dense(x, ids, weights, gate_up, down)
