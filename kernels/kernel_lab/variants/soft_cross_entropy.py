"""Configurations of the soft cross-entropy."""

from eagle_kit.ops.soft_cross_entropy.triton import BLOCK, NUM_WARPS, _soft_cross_entropy
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: draft vocabularies that divide by 16, whose rows are loaded 16 bytes
    at a time, and others."""
    types = {"probs": "*fp32", "index": "*i64", "row_weights": "*fp32", "losses": "*fp32", "best": "*i64"}
    return [
        Variant(
            f"soft_cross_entropy {kind}{'' if aligned else ' odd Vd'}",
            _soft_cross_entropy,
            {"logits": f"*{kind}", **types, "vocab": "i32"},
            {"BLOCK": BLOCK},
            aligned=("vocab",) if aligned else (),
            num_warps=NUM_WARPS,
            narrow="" if aligned else "rows begin at odd addresses",
        )
        # Vocabularies that 16 divides in every dtype, and one that it does not.
        for kind, aligned in (("bf16", True), ("bf16", False), ("fp16", True), ("fp32", True))
    ]
