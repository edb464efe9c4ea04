"""Configurations of attention over latents."""

from eagle_kit.ops.attention.mla.sizes import MAX_SPLITS, choose_blocks
from eagle_kit.ops.attention.mla.triton import _attend, _merge
from eagle_kit.ops.capability import DeviceFacts
from kernel_lab.variant import SHIPPED, WITH_FP8, Variant

_INTEGERS = (
    "num_rows",
    "heads",
    "num_nodes",
    "num_keys",
    "first_position",
    "scratch_start",
    "scratch_stride",
    "row_stride",
    "table_stride",
    "splits",
    "usual_splits",
    "longest_part",
)
_MERGED_INTEGERS = ("num_rows", "num_keys", "first_position", "splits", "usual_splits", "longest_part")


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: DeepSeek's sizes with few, some and many query rows, with and without
    runs, for every dtype of the store."""
    pointers = ("q", "rows", "page_table", "prefix_lens", "kv_lens", "ancestors", "out", "partial", "lse")
    made = []
    for kind, stored, itemsize, num_rows, split, *words in (
        # A bf16 store: few, some and many query rows, the last without runs too.
        ("bf16", "bf16", 2, 16, True),
        ("bf16", "bf16", 2, 32, True),
        ("bf16", "bf16", 2, 128, True),
        ("bf16", "bf16", 2, 128, False),
        # Runs merged by the last program of the launch; keys of the window in pages.
        ("bf16", "bf16", 2, 16, True, "merged"),
        ("bf16", "bf16", 2, 32, True, "merged"),
        ("bf16", "bf16", 2, 128, True, "merged"),
        ("bf16", "bf16", 2, 128, True, "in pages"),
        # Steps of a draft of more than 64 nodes.
        ("bf16", "bf16", 2, 32, True, "two words"),
        ("bf16", "bf16", 2, 128, True, "two words"),
        ("bf16", "fp8e4nv", 1, 128, True, "two words"),
        # fp16, and an fp8 store.
        ("fp16", "fp16", 2, 128, True),
        ("bf16", "fp8e4nv", 1, 16, True),
        ("bf16", "fp8e4nv", 1, 16, True, "merged"),
        ("bf16", "fp8e4nv", 1, 128, True),
    ):
        blocks = choose_blocks(num_rows, itemsize, facts)
        held = "*fp32" if split else f"*{kind}"
        of_pointers = (f"*{kind}", f"*{stored}", *["*i64"] * 4, f"*{kind}", held, held)
        types = dict(zip(pointers, of_pointers, strict=True))
        types["arrivals"] = "*i32"
        constants = {
            "PAGE": 16,
            "LATENT": 512,
            "ROPE": 64,
            "QUERIES": blocks.queries,
            "KEYS": blocks.keys,
            "SWAPPED": blocks.swapped,
            "SPLIT": split,
            "IN_PAGES": "in pages" in words,
            "PRECISION": "ieee",
            "MERGED": "merged" in words,
            "MAX_SPLITS": MAX_SPLITS,
            "WORDS": 2 if "two words" in words else 1,
            "PDL": facts.starts_early,
        }
        made.append(
            Variant(
                f"mla_attention {kind} keys {stored} rows {num_rows}{' split' if split else ''}"
                + "".join(f" {word}" for word in words),
                _attend,
                types | {"scale": "fp32", "out_scale": "fp32"} | dict.fromkeys(_INTEGERS, "i32"),
                constants,
                aligned=("row_stride",),
                num_warps=blocks.num_warps,
                num_stages=blocks.num_stages,
                wgmma=blocks.swapped,
                direct="fp8 keys pass through registers, a tile ahead" if itemsize == 1 else "",
                archs=WITH_FP8 if itemsize == 1 else SHIPPED,
            )
        )
    made.append(
        Variant(
            "mla_attention merge",
            _merge,
            {
                **dict.fromkeys(("partial", "lse"), "*fp32"),
                **dict.fromkeys(("prefix_lens", "kv_lens"), "*i64"),
                "out": "*bf16",
                **dict.fromkeys(_MERGED_INTEGERS, "i32"),
            },
            {
                "LATENT": 512,
                "MAX_SPLITS": MAX_SPLITS,
                "BLOCK": 8,
                "IN_PAGES": False,
                "PDL": facts.starts_early,
            },
        )
    )
    return made
