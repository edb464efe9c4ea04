"""Configurations of rotary embeddings with norms and stores."""

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.rope.triton import _blocks, _num_warps, _rope_store
from kernel_lab.variant import SHIPPED, WITH_FP8, Variant


def _variant(
    facts: DeviceFacts,
    kind: str,
    shape: tuple[int, int, int],
    *,
    rotated: int | None = None,
    norm: bool = False,
    norm_kind: str | None = None,
    interleaved: bool = False,
    stored: str | None = None,
    returns: bool = True,
    counts: bool = False,
) -> Variant:
    num_heads, num_kv_heads, head_dim = shape
    rotated = rotated or head_dim
    blocks = _blocks(num_heads, head_dim, rotated)
    marks = [f"E{rotated}"] * (rotated < head_dim) + ["norm"] * norm + ["interleaved"] * interleaved
    marks += [f"in {norm_kind}"] if norm_kind else []
    marks += [f"into {stored}"] * (stored is not None) + ["window"] * counts
    pointers = ("qkv", "q_norm", "k_norm", "q", "k", "v")
    return Variant(
        " ".join(["rope", kind, f"Hq{num_heads} Hkv{num_kv_heads} D{head_dim}", *marks]),
        _rope_store,
        {
            **dict.fromkeys(pointers, f"*{kind}"),
            **dict.fromkeys(("q_norm", "k_norm"), f"*{norm_kind or kind}"),
            **{"positions": "*i64", "inv_freq": "*fp32"},
            **dict.fromkeys(("k_rows", "v_rows"), f"*{stored or kind}"),
            "rows": "*i64",
            **dict.fromkeys(("first_row", "row_stride", "num_nodes", "num_rows"), "i32"),
            **dict.fromkeys(("magnitude", "eps", "k_scale", "v_scale"), "fp32"),
        },
        {
            **{"HQ": num_heads, "HKV": num_kv_heads, "D": head_dim, "E": rotated},
            **{
                "INTERLEAVED": interleaved,
                "HAS_NORM": norm,
                "RETURNS": returns,
                "STORES": stored is not None,
                "COUNTS": counts,
            },
            **blocks,
            "PDL": facts.starts_early,
        },
        num_warps=_num_warps(blocks),
        archs=WITH_FP8 if stored == "fp8e4nv" else SHIPPED,
    )


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: shapes of Llama 3 8B, SmolLM2, Qwen3 and of a partly rotated head;
    fp8 stores need a Hopper GPU."""
    llama = (32, 8, 128)
    qwen3 = (32, 4, 128)
    return [
        # Llama 3 8B: rotation alone, with stores of prompts, and with stores of windows.
        _variant(facts, "bf16", llama),
        _variant(facts, "bf16", llama, stored="bf16", returns=False),
        _variant(facts, "bf16", llama, stored="bf16", returns=False, counts=True),
        _variant(facts, "bf16", llama, stored="fp8e4nv", returns=False, counts=True),
        _variant(facts, "fp16", llama, stored="fp16"),
        _variant(facts, "fp32", llama, stored="fp32"),
        # Other shapes: SmolLM2, Qwen3 with norms, and a head of 80.
        _variant(facts, "bf16", (9, 3, 64), stored="bf16", returns=False),
        _variant(facts, "bf16", qwen3, norm=True, stored="bf16", returns=False),
        _variant(facts, "bf16", qwen3, norm=True, stored="fp8e4nv"),
        _variant(facts, "bf16", (32, 32, 80), stored="bf16", returns=False),
        # Heads rotated in part, heads of 256 with norms, and interleaved pairs.
        _variant(
            facts, "bf16", (16, 2, 256), rotated=64, norm=True, norm_kind="fp32", stored="bf16", returns=False
        ),
        _variant(facts, "bf16", (32, 8, 96), rotated=48, norm=True, stored="bf16"),
        _variant(facts, "bf16", (16, 8, 256), norm=True, stored="bf16", returns=False),
        _variant(facts, "bf16", llama, interleaved=True, stored="bf16", returns=False),
    ]
