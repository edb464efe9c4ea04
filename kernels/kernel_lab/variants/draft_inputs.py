"""Configurations of the kernel that makes a head's inputs."""

import triton

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.draft_inputs.triton import _draft_inputs, _num_warps
from kernel_lab.variant import Variant


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: sizes of SmolLM2, and of Llama 3 8B and 70B."""
    pointers = ("features", "embedding", "token_norm", "feature_norm", "out", "taken")
    return [
        Variant(
            f"draft_inputs {kind} H{size}{' gathered' if gathers else ''}",
            _draft_inputs,
            {
                **dict.fromkeys(pointers, f"*{kind}"),
                **{"feature_rows": "*i64", "tokens": "*i64", "eps": "fp32", "size": "i32"},
            },
            {"GATHERS": gathers, "BLOCK": triton.next_power_of_2(size), "PDL": facts.starts_early},
            aligned=("size",),
            num_warps=_num_warps(triton.next_power_of_2(size)),
        )
        for kind, size, gathers in (
            # Features gathered by rows, or one for each token; Llama 3 8B and 70B, SmolLM2.
            ("bf16", 4096, True),
            ("bf16", 4096, False),
            ("bf16", 8192, True),
            ("fp16", 576, True),
            ("fp32", 4096, True),
        )
    ]
