"""Configurations of attention of prefill."""

from eagle_kit.ops.attention.prefill.triton import _prefill
from eagle_kit.ops.attention.window.sizes import (
    block_d,
    choose_blocks,
    values_per_element,
)
from eagle_kit.ops.capability import DeviceFacts
from kernel_lab.variant import SHIPPED, WITH_FP8, Variant
from kernel_lab.variants.window_attention import narrow_loads


def _variant(
    kind: str, size: int, group: int, rows: int, page: int, store: str, facts: DeviceFacts, **variant: int
) -> Variant:
    widths = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}
    blocks = choose_blocks(rows * group, size, widths[kind], widths[store], facts)
    pair = values_per_element(blocks, widths[kind], widths[store])
    return Variant(
        f"prefill_attention {kind} D{size} G{group} rows {rows} page {page}"
        + (" fp8" if store == "fp8e4nv" else "")
        + "".join(f" {name.lower()} {value}" for name, value in variant.items()),
        _prefill,
        {
            **{"q": f"*{kind}", "k_rows": f"*{store}", "v_rows": "*i16" if pair == 2 else f"*{store}"},
            **dict.fromkeys(("page_tables", "cu_rows", "starts"), "*i64"),
            **{"sinks": f"*{kind}", "out": f"*{kind}", "factor": "fp32", "cap": "fp32", "v_scale": "fp32"},
            **dict.fromkeys(("store_rows", "table_stride"), "i32"),
        },
        {
            **{"G": group, "HKV": 8, "D": size, "PAIR": pair, "PAGE": page, "FIRST": 0},
            **{"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_D": block_d(size)},
            **{"WINDOW": 0, "CHUNK": 0, "CAPPED": False, "SINKS": False},
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
    """Kernels to compile ahead of time: chunks of Llama 3 8B and of other head sizes, pages and stores; short
    chunks; gpt-oss's, Gemma 2's and Llama 4's layers."""
    return [
        # Llama 3 8B: long chunks and chunks of 2 rows, bf16 and fp8 stores.
        _variant("bf16", 128, 4, 2048, 16, "bf16", facts),
        _variant("bf16", 128, 4, 2048, 64, "fp8e4nv", facts),
        _variant("bf16", 128, 8, 2, 16, "bf16", facts),
        _variant("bf16", 128, 4, 2, 16, "fp8e4nv", facts),
        # Other head sizes, groups, pages and dtypes.
        _variant("fp16", 64, 3, 2048, 1, "fp16", facts),
        _variant("bf16", 80, 1, 2048, 16, "bf16", facts),
        _variant("bf16", 96, 5, 2048, 64, "bf16", facts),
        _variant("bf16", 256, 4, 2048, 64, "bf16", facts),
        _variant("fp32", 64, 3, 2048, 16, "fp32", facts),
        # Layers of gpt-oss (window and sinks), Gemma 2 (window and cap) and Llama 4 (chunks).
        _variant("bf16", 64, 8, 2048, 16, "bf16", facts, WINDOW=128, SINKS=True),
        _variant("bf16", 256, 2, 2048, 16, "bf16", facts, WINDOW=4096, CAPPED=True),
        _variant("bf16", 128, 5, 2048, 16, "bf16", facts, CHUNK=8192),
    ]
