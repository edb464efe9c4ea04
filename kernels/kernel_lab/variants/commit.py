"""Configurations of the kernel that commits accepted paths."""

from eagle_kit.ops.commit.triton import BLOCK, NUM_WARPS, _commit_path
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: rows of Llama 3 8B (16 bits and fp8), SmolLM2, a head of 80 and
    DeepSeek's latent (576, one tensor)."""
    made = []
    for title, row_bytes, has_v in (
        # Stores in bf16 and fp8, a head of 80, and DeepSeek's latents, which have no values.
        ("bf16 D128", 256, True),
        ("fp8 D128", 128, True),
        ("bf16 D80", 160, True),
        ("bf16 latent D576", 1152, False),
    ):
        constants = {"WORDS": row_bytes // 8, "HAS_V": has_v, "SIZE": BLOCK}
        stores = dict.fromkeys(("k", "v"), "*i64")
        counts = dict.fromkeys(("num_planes", "num_rows"), "i32")
        inputs = dict.fromkeys(("page_table", "nodes", "first_position", "num_committed"), "*i64")
        strides = (
            "table_stride",
            "node_stride_b",
            "node_stride_n",
            "scratch_start",
            "scratch_stride",
            "num_nodes",
        )
        made.append(
            Variant(
                f"commit_path {title} page 16",
                _commit_path,
                {**stores, **inputs, **dict.fromkeys(strides, "i32"), **counts},
                {"PAGE_SIZE": 16, **constants},
                num_warps=NUM_WARPS,
            )
        )
    return made
