"""Configurations of the RMS norm."""

import triton

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.norm.triton import _num_warps, _rms_norm
from kernel_lab.variant import Variant


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: sizes of SmolLM2, of Qwen3's q and k norms, of Llama 3 8B and 70B."""
    pointers = ("x", "residual", "weight", "out", "total")
    return [
        Variant(
            f"rms_norm {kind} H{size}{' residual' if residual else ''}",
            _rms_norm,
            {**dict.fromkeys(pointers, f"*{kind}"), "eps": "fp32", "size": "i32"},
            {"HAS_RESIDUAL": residual, "BLOCK": triton.next_power_of_2(size), "PDL": facts.starts_early},
            aligned=("size",),
            num_warps=_num_warps(triton.next_power_of_2(size)),
        )
        for kind, size, residual in (
            # Without a residual: norms of queries and keys, and the first norm.
            ("bf16", 128, False),
            ("bf16", 4096, False),
            # With a residual, whose sum is written too: SmolLM2, Llama 3 8B and 70B.
            ("bf16", 576, True),
            ("bf16", 4096, True),
            ("bf16", 8192, True),
            ("fp16", 4096, True),
            ("fp32", 4096, True),
        )
    ]
