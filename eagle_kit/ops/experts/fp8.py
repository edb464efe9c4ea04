"""Routed experts whose weights stay in e4m3.

On a GPU Triton reads them as they are, for any number of rows. On a CPU each active expert is widened, a
piece at a time; so is every expert on a GPU where Triton does not support the scales.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

from collections.abc import Sequence

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_triton
from eagle_kit.ops.cpu.guards import is_recording, library
from eagle_kit.ops.experts import reference
from eagle_kit.ops.fp8 import FP8Weight
from eagle_kit.ops.small_linear import scales_fit


def fp8_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: FP8Weight,
    down: FP8Weight,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """:func:`~eagle_kit.ops.experts.experts` with ``gate_up [E, 2 I, H]`` and ``down [E, H, I]`` in fp8;
    differentiable in ``x`` and ``weights``."""
    fits = scales_fit(gate_up) and scales_fit(down)
    if (
        uses_triton("experts", x, backend)
        and not is_differentiated(x, weights)
        and (backend is not None or fits)
    ):
        from eagle_kit.ops.experts import triton

        return triton.routed_experts(
            x.contiguous(), ids.contiguous(), weights.contiguous(), *_operands(gate_up), *_operands(down)
        )
    if x.device.type != "cpu" or isinstance(x, torch._subclasses.FakeTensor):
        return reference.dense_fp8(x, ids, weights, gate_up, down)
    if is_recording():
        return torch.ops.eagle_kit_cpu.by_fp8_expert(x, ids, weights, *gate_up, *down)  # type: ignore[no-any-return]
    return reference.by_expert(x, ids, weights, gate_up.unbind(), down.unbind())


def _operands(weight: FP8Weight) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Values, scales and block as Triton's operator takes them; an empty block means scales of rows."""
    return weight.values, weight.scales, [] if weight.is_by_row else list(weight.block)


def _by_fp8_expert(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_block: Sequence[int],
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_block: Sequence[int],
) -> torch.Tensor:
    first = FP8Weight(gate_up, gate_up_scales, (gate_up_block[0], gate_up_block[1]))
    second = FP8Weight(down, down_scales, (down_block[0], down_block[1]))
    return reference.by_expert(x, ids, weights, first.unbind(), second.unbind())


library.define(
    "by_fp8_expert(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scales, "
    "int[] gate_up_block, Tensor down, Tensor down_scales, int[] down_block) -> Tensor"
)
library.impl("by_fp8_expert", _by_fp8_expert, "CPU")
