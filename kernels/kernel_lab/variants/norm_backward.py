"""Configurations of the backward pass of the RMS norm."""

import triton

from eagle_kit.ops.norm.triton_backward import _backward, _num_warps
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: q and k norms, heads of SmolLM2, of Llama 3 8B and 70B; weights are
    fp32 in a trainer."""
    return [
        Variant(
            f"rms_norm backward {kind} H{size}{' total' if total else ''}",
            _backward,
            {
                **dict.fromkeys(("dy", "dtotal", "x", "dx"), f"*{kind}"),
                **{"weight": "*fp32", "parts": "*fp32", "eps": "fp32", "size": "i32", "rows": "i32"},
            },
            {"HAS_TOTAL": total, "BLOCK": triton.next_power_of_2(size)},
            aligned=("size",),
            num_warps=_num_warps(triton.next_power_of_2(size)),
            narrow="a row of 128 values is 8 bytes for each lane of a warp" if size == 128 else "",
        )
        for kind, size, total in (
            # Norms of queries and keys have no residual (total); layer norms of the heads have one.
            ("bf16", 128, False),
            ("bf16", 576, True),
            ("bf16", 4096, True),
            ("bf16", 8192, True),
            ("fp32", 4096, True),
        )
    ]
