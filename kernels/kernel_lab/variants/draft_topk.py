"""Configurations of the output layer that ends in the k best tokens."""

import torch
import triton

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.draft_topk.triton import PROGRAMS, _merge, _merge_options, _options, _tiles
from kernel_lab.variant import Variant


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: heads of 32,000 and of all 151,936 ids over 4,096, and of 8,192 over
    SmolLM2's 576."""
    found = []
    for kind, dtype, num_rows, vocab, size, topk in (
        # Chains (K = 1) and trees (K > 1) of a 32,000-token head.
        ("bf16", torch.bfloat16, 1, 32000, 4096, 1),
        ("bf16", torch.bfloat16, 16, 32000, 4096, 4),
        ("bf16", torch.bfloat16, 32, 32000, 4096, 8),
        # A whole vocabulary, and the small heads of SmolLM2 in every dtype.
        ("bf16", torch.bfloat16, 64, 151936, 4096, 16),
        ("bf16", torch.bfloat16, 64, 8192, 576, 10),
        ("fp16", torch.float16, 16, 8192, 576, 4),
        ("fp32", torch.float32, 16, 8192, 576, 4),
    ):
        options = _options(num_rows, vocab, size, dtype, facts)
        warps = options.pop("num_warps")
        stages = options.pop("num_stages")
        types = {"x": f"*{kind}", "weight": f"*{kind}", "keys": "*i64", "sums": "*fp32"}
        integers = ("num_rows", "vocab", "size", "tiles", "topk")
        found.append(
            Variant(
                f"draft_topk tiles {kind} T{num_rows} Vd{vocab} H{size} K{topk}",
                _tiles,
                {**types, **dict.fromkeys(integers, "i32")},
                {
                    **{"NORMALIZED": topk > 1, "EVEN": size % options["DEPTH"] == 0},
                    **options,
                    "PDL": facts.starts_early,
                },
                aligned=("size", "vocab"),
                num_warps=warps,
                num_stages=stages,
                wgmma=kind != "fp32",
                programs=1 if num_rows > 32 and facts.capability >= 100 else PROGRAMS,
            )
        )
    # One launch that merges the tiles' best tokens: a chain, a tree, and the largest vocabulary.
    for vocab, topk in ((32000, 1), (32000, 8), (151936, 16)):
        options = _merge_options(topk, triton.cdiv(vocab, 128))
        warps = options.pop("num_warps")
        types = {"keys": "*i64", "sums": "*fp32", "token_map": "*i64", "ids": "*i64", "scores": "*fp32"}
        found.append(
            Variant(
                f"draft_topk merge Vd{vocab} K{topk}",
                _merge,
                {**types, "tiles": "i32", "topk": "i32"},
                {
                    **{"NORMALIZED": topk > 1, "HAS_MAP": topk > 1, "TILE": 128},
                    **options,
                    "PDL": facts.starts_early,
                },
                num_warps=warps,
                narrow="a key of each tile that is chosen",
            )
        )
    return found
