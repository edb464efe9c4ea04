"""Configurations of the backward pass of rotary embeddings."""

import triton

from eagle_kit.ops.rope.triton_backward import HEADS, _rotate
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: heads of Llama, of small models, and one rotated in part."""
    return [
        Variant(
            f"rope_rotate {kind} D{size} E{rotated}{' interleaved' if interleaved else ''}",
            _rotate,
            {
                **dict.fromkeys(("x", "out"), f"*{kind}"),
                **{"cos": "*fp32", "sin": "*fp32", "heads": "i32", "num_rotated": "i32"},
            },
            {
                **{"D": size, "E": rotated, "INTERLEAVED": interleaved, "INVERSE": True},
                **{"BLOCK_H": HEADS, "BLOCK_D": triton.next_power_of_2(size)},
            },
        )
        for kind, size, rotated, interleaved in (
            # Llama, small models, a head rotated in part, DeepSeek's pairs, and fp32.
            ("bf16", 128, 128, False),
            ("bf16", 64, 64, False),
            ("bf16", 80, 32, False),
            ("bf16", 192, 64, True),
            ("fp32", 128, 128, False),
        )
    ]
