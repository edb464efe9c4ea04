"""Configurations of attention of windows."""

from eagle_kit.ops.attention.window.merge import merge
from eagle_kit.ops.attention.window.sizes import (
    MIN_KEYS,
    Parts,
    WindowBlocks,
    are_merged,
    block_d,
    choose_blocks,
    merged_rows,
    values_per_element,
)
from eagle_kit.ops.attention.window.triton import _window
from eagle_kit.ops.capability import DeviceFacts
from kernel_lab.variant import SHIPPED, WITH_FP8, Variant


def narrow_loads(blocks: WindowBlocks, store: str) -> str:
    """Why keys and values are loaded by less than 16 bytes at a time; empty where they are not."""
    if store == "fp8e4nv" and blocks.m >= 64:
        return "64 rows of mma.sync take fp8 swizzled by 8 bytes"
    return ""


def _variant(
    kind: str,
    size: int,
    group: int,
    nodes: int,
    page: int,
    store: str,
    split: bool,
    facts: DeviceFacts,
    **variant: int,
) -> Variant:
    widths = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}
    blocks = choose_blocks(nodes * group, size, widths[kind], widths[store], facts)
    merged, parts = merged_rows(nodes * group, size, blocks)
    if not split or not are_merged(Parts.even(8), min(nodes * group, blocks.m) * size):
        merged = 0
    pair = values_per_element(blocks, widths[kind], widths[store])
    counts: tuple[str, ...] = ("num_rows", "store_rows", "table_stride", "bits_stride_b", "bits_stride_n")
    counts += ("scratch_start", "scratch_stride", "num_keys", "usual_splits", "longest_part")
    return Variant(
        f"window_attention {kind} D{size} G{group} N{nodes} page {page}"
        + (" fp8" if store == "fp8e4nv" else "")
        + (" split" if split else "")
        + (" merged" if merged else "")
        + "".join(f" {name.lower()} {value}" for name, value in variant.items()),
        _window,
        {
            **{"q": f"*{kind}", "k_rows": f"*{store}", "page_table": "*i64"},
            "v_rows": "*i16" if pair == 2 else f"*{store}",
            **{
                "prefix_lens": "*i64",
                "ancestors": "*i64",
                "sinks": f"*{kind}",
                "out": f"*{kind}",
                **dict.fromkeys(("partial", "lse"), "*fp32"),
                "arrivals": "*i32",
            },
            **{"factor": "fp32", "cap": "fp32", "v_scale": "fp32"},
            **dict.fromkeys(counts, "i32"),
        },
        {
            **{"G": group, "HKV": 8, "D": size, "PAGE": page, "FIRST": 0, "SPLIT": split},
            "PAIR": pair,
            **{"MIN_BLOCKS": MIN_KEYS // blocks.n, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n},
            "BLOCK_D": block_d(size),
            **{"WINDOW": 0, "CHUNK": 0, "CAPPED": False, "SINKS": False},
            **{"MERGED": merged, "BLOCK_S": parts, "WORDS": 1, "PDL": facts.starts_early},
            **variant,
        },
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        max_registers=blocks.max_registers,
        wgmma=blocks.m >= 64,
        programs=blocks.resident,
        narrow=narrow_loads(blocks, store),
        archs=WITH_FP8 if store == "fp8e4nv" else SHIPPED,
    )


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: decoding and windows of 8, 16 and 32 nodes of Llama 3 8B; other head
    sizes, pages and stores; gpt-oss's, Gemma 2's and Llama 4's layers; draft steps of more than 64 nodes."""
    # The merge of runs that the attention kernel does not merge itself.
    merging = Variant(
        "window_attention merge bf16 D128 G4",
        merge,
        {
            **{"partial": "*fp32", "lse": "*fp32", "prefix_lens": "*i64", "out": "*bf16", "v_scale": "fp32"},
            **dict.fromkeys(("num_rows", "num_keys", "splits", "usual_splits", "longest_part"), "i32"),
        },
        {
            **{"G": 4, "HKV": 8, "D": 128, "MIN_BLOCKS": 2, "BLOCK_N": 64, "BLOCK_S": 16, "BLOCK_D": 128},
            **{"WINDOW": 0, "CHUNK": 0, "PDL": facts.starts_early},
        },
    )
    return [
        merging,
        # Llama 3 8B: one node and windows, pages of 1, 16 and 64, bf16 and fp8 stores.
        _variant("bf16", 128, 4, 1, 16, "bf16", True, facts),
        _variant("bf16", 128, 4, 8, 64, "bf16", True, facts),
        _variant("bf16", 128, 4, 16, 1, "bf16", False, facts),
        _variant("bf16", 128, 4, 32, 16, "bf16", True, facts),
        _variant("bf16", 128, 4, 1, 16, "fp8e4nv", True, facts),
        _variant("bf16", 128, 4, 16, 64, "fp8e4nv", True, facts),
        # Other head sizes, groups and dtypes.
        _variant("fp16", 64, 3, 64, 16, "fp16", True, facts),
        _variant("bf16", 80, 1, 5, 16, "bf16", True, facts),
        _variant("bf16", 96, 5, 64, 1, "bf16", True, facts),
        _variant("bf16", 256, 16, 8, 64, "bf16", True, facts),
        _variant("fp32", 128, 4, 8, 16, "fp32", True, facts),
        # Layers of gpt-oss (window and sinks), Gemma 2 (window and cap) and Llama 4 (chunks).
        _variant("bf16", 64, 8, 8, 16, "bf16", True, facts, WINDOW=128, SINKS=True),
        _variant("bf16", 256, 2, 8, 16, "bf16", True, facts, WINDOW=4096, CAPPED=True),
        _variant("bf16", 128, 5, 16, 16, "bf16", True, facts, CHUNK=8192),
        _variant("bf16", 128, 5, 1, 16, "bf16", True, facts, CHUNK=8192),
        # Steps of 10 nodes of a draft of more than 64.
        _variant("bf16", 128, 4, 10, 16, "bf16", True, facts, WORDS=2),
        _variant("bf16", 128, 4, 10, 16, "fp8e4nv", True, facts, WORDS=2),
        _variant("fp32", 64, 3, 10, 16, "fp32", True, facts, WORDS=2),
        _variant("bf16", 64, 8, 10, 16, "bf16", True, facts, WORDS=2, WINDOW=128, SINKS=True),
        _variant("bf16", 128, 5, 10, 16, "bf16", True, facts, WORDS=2, CHUNK=8192),
    ]
