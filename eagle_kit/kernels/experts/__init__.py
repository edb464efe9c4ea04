"""The routed experts of a mixture: every token through its own few of E SwiGLU networks.

On a CPU the host reads who goes where and multiplies each expert's rows. On a GPU nothing is read, so that it
can be in a CUDA graph: rows sorted by expert and two grouped matmuls in bf16, which read the weights of the
experts that are hit; in other types all experts over all rows, E / K times the work.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from eagle_kit.kernels.experts import reference
from eagle_kit.kernels.linear import can_pack, onednn, takes_packed
from eagle_kit.kernels.recording import is_recording, keep_alive, library

__all__ = ["PackedExperts", "experts", "pack_experts"]


_numbers = itertools.count()
_packed: "WeakValueDictionary[int, PackedExperts]" = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Copies of every expert's weights in oneDNN's layout for few rows. An operation, whose arguments are
    tensors and numbers, knows them by ``number``."""

    gate_up: Sequence[onednn.Packed]
    down: Sequence[onednn.Packed]
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _packed[self.number] = self


def _by_number(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    return _by_packed_expert(x, ids, weights, _packed[number])


def _by_packed_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    return reference.by_expert(x, ids, weights, packed.gate_up, packed.down, multiply=onednn.packed_matmul)


library.define("by_packed_expert(Tensor x, Tensor ids, Tensor weights, int number) -> Tensor")
library.impl("by_packed_expert", _by_number, "CPU")
library.define("by_expert(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down) -> Tensor")
library.impl("by_expert", reference.by_expert, "CPU")


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts | None:
    """The weights of :func:`experts`, packed; None where oneDNN is not what multiplies them."""
    if not (can_pack(gate_up) and can_pack(down)):
        return None
    return PackedExperts(
        [onednn.pack(weight) for weight in gate_up], [onednn.pack(weight) for weight in down]
    )


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
        if is_recording():  # of the operation, not of who goes where this time
            keep_alive(packed)
            return torch.ops.eagle_kit_cpu.by_packed_expert(x, ids, weights, packed.number)  # type: ignore[no-any-return]
        return _by_packed_expert(x, ids, weights, packed)
    if x.device.type == "cpu" and not isinstance(x, torch._subclasses.FakeTensor):
        if is_recording():
            return torch.ops.eagle_kit_cpu.by_expert(x, ids, weights, gate_up, down)  # type: ignore[no-any-return]
        return reference.by_expert(x, ids, weights, gate_up, down)
    if x.is_cuda and x.dtype == gate_up.dtype == torch.bfloat16:
        return reference.grouped(x, ids, weights, gate_up, down)
    return reference.dense(x, ids, weights, gate_up, down)
