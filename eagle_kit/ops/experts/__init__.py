"""Routed experts of a mixture: every token passes through its own K of E SwiGLU networks.

On a CPU the routing is read on the host, and each expert multiplies its own rows. On a GPU nothing is read on
the host, so that the operation can be captured in a CUDA graph: rows are sorted by expert, and only the
weights of active experts are read. Torch's grouped matmul does so in bf16 on Hopper and on Blackwell's data
centre GPUs; elsewhere it reads the routing on the host, so Triton is used. Gradients are those of the
reference. Weights in fp8 have :mod:`~eagle_kit.ops.experts.fp8`.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_triton
from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.cpu.guards import is_recording, keep_alive, library
from eagle_kit.ops.experts import reference
from eagle_kit.ops.experts.fp8 import fp8_experts
from eagle_kit.ops.linear import Packed, can_pack, pack, packed_matmul, takes_packed

__all__ = ["PackedExperts", "experts", "fp8_experts", "pack_experts"]


GROUPED_MAJORS = (9, 10)
"""Major compute capabilities on which torch's grouped matmul reads nothing on the host."""
GROUPED_ROW_BYTES = 16
"""Number that the bytes of a row must be a multiple of for torch's grouped matmul."""

_numbers = itertools.count()
_packed: "WeakValueDictionary[int, PackedExperts]" = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Copies of every expert's weights, packed for few rows. The custom op, whose arguments are
    tensors and numbers, looks them up by ``number``."""

    gate_up: Sequence[Packed]
    down: Sequence[Packed]
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _packed[self.number] = self


def _by_packed_expert(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    packed = _packed[number]
    return reference.by_expert(x, ids, weights, packed.gate_up, packed.down, multiply=packed_matmul)


library.define("by_packed_expert(Tensor x, Tensor ids, Tensor weights, int number) -> Tensor")
library.impl("by_packed_expert", _by_packed_expert, "CPU")
library.define("by_expert(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down) -> Tensor")
library.impl("by_expert", reference.by_expert, "CPU")


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts | None:
    """Pack the weights of :func:`experts`; None where they cannot be."""
    if not (can_pack(gate_up) and can_pack(down)):
        return None
    return PackedExperts([pack(weight) for weight in gate_up], [pack(weight) for weight in down])


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    packed: PackedExperts | None = None,
    *,
    are_all: bool = True,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Weighted sum of the outputs of each token's experts.

    Args:
        x: ``[T, H]``.
        ids: int64 ``[T, K]``, the distinct experts of each token; E stands for experts of other processes,
            which add nothing here.
        weights: fp32 ``[T, K]``, their weights.
        gate_up: ``[E, 2 I, H]``, the gate first.
        down: ``[E, H, I]``.
        packed: both weights packed by :func:`pack_experts`, for few rows without gradients.
        are_all: False where ``ids`` may be E.
        backend: as for other operations.

    Returns:
        ``[T, H]`` in the dtype of ``x``.
    """
    if (
        uses_triton("experts", x, backend)
        and not is_differentiated(x, weights, gate_up, down)
        and (backend is not None or not _groups(x, down))
    ):
        from eagle_kit.ops.experts import triton

        return triton.routed_experts(
            x.contiguous(),
            ids.contiguous(),
            weights.contiguous(),
            gate_up.contiguous(),
            None,
            [],
            down.contiguous(),
            None,
            [],
        )
    if packed is not None and takes_packed(x, packed.down[0]):
        if is_recording():  # one recorded operation, independent of the routing
            keep_alive(packed)
            return torch.ops.eagle_kit_cpu.by_packed_expert(x, ids, weights, packed.number)  # type: ignore[no-any-return]
        return _by_packed_expert(x, ids, weights, packed.number)
    if x.device.type == "cpu" and not isinstance(x, torch._subclasses.FakeTensor):
        if is_recording():
            return torch.ops.eagle_kit_cpu.by_expert(x, ids, weights, gate_up, down)  # type: ignore[no-any-return]
        return reference.by_expert(x, ids, weights, gate_up, down)
    reads_nothing = _groups(x, down)
    if reads_nothing or (_fits_groups(x, down) and x.is_cuda and not _is_capturing()):
        return reference.grouped(x, ids, weights, gate_up, down, are_all=are_all)
    return reference.dense(x, ids, weights, gate_up, down)


def _is_capturing() -> bool:
    """Return True in the capture of a CUDA graph, where the host must not read the routing."""
    return torch.cuda.is_current_stream_capturing()


def _fits_groups(x: torch.Tensor, down: torch.Tensor) -> bool:
    """Return True if torch multiplies groups of rows as long as those of ``x`` and those inside experts."""
    sizes = {x.shape[-1] * x.element_size(), down.shape[-1] * down.element_size()}
    return x.dtype == down.dtype == torch.bfloat16 and not any(size % GROUPED_ROW_BYTES for size in sizes)


def _groups(x: torch.Tensor, down: torch.Tensor) -> bool:
    """Return True if torch multiplies groups of rows without reading their sizes on the host."""
    if not x.is_cuda or not _fits_groups(x, down):
        return False
    return device_facts(x.device).capability // 10 in GROUPED_MAJORS
