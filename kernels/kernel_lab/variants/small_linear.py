"""Configurations of linear layers over few rows."""

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.small_linear.triton import PROGRAMS, _add_up, _multiply, choose_blocks
from kernel_lab.variant import Variant


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: every bucket of M in both dtypes of weight, with and without runs of
    K."""
    made = []
    pointers = ("x", "weight", "scales", "bias", "out")
    integers = ("num_rows", "num_outputs", "size", "weight_stride", "splits", "group_rows", "group_size")
    fp8 = "fp8e4nv" if facts.converts_fp8 else "i8"
    for kind, stored, rows, split, even, *special in (
        # bf16 and fp16 weights, with and without runs of K; blocks do not divide the fourth's K.
        ("bf16", "bf16", 16, True, True),
        ("bf16", "bf16", 32, True, True),
        ("bf16", "bf16", 64, True, True),
        ("bf16", "bf16", 16, False, False),
        ("fp16", "fp16", 64, False, True),
        # fp8 weights with a scale for each output.
        ("bf16", fp8, 16, True, True),
        ("bf16", fp8, 64, False, True),
        ("fp16", fp8, 32, True, True),
        # Gate and up projections in one launch, with SwiGLU behind (gated).
        ("bf16", "bf16", 16, False, True, "gated"),
        ("bf16", "bf16", 64, True, True, "gated"),
        ("bf16", fp8, 64, False, True, "gated"),
        # fp8 weights with scales of blocks (grouped).
        ("bf16", fp8, 16, True, True, "grouped"),
        ("bf16", fp8, 32, False, False, "grouped"),
        ("fp16", fp8, 64, True, True, "grouped"),
        ("bf16", fp8, 16, False, True, "grouped", "gated"),
        ("bf16", fp8, 64, False, True, "grouped", "gated"),
    ):
        is_fp8 = stored != kind
        grouped = "grouped" in special
        gated = "gated" in special
        blocks = choose_blocks(rows, 1 if is_fp8 else 2, facts)
        finish = {"SCALED": is_fp8 and not grouped, "BIASED": not is_fp8, "GATED": gated}
        finish["PDL"] = facts.starts_early
        types = (
            dict.fromkeys(pointers, f"*{kind}") | dict.fromkeys(integers, "i32") | {"weight": f"*{stored}"}
        )
        types |= ({"out": "*fp32"} if split else {}) | ({"scales": "*fp32"} if is_fp8 else {})
        constants = {"ROWS": rows, "OUTPUTS": blocks.outputs, "BLOCK": blocks.block, "EVEN": even}
        words = ("split" if split else "", "" if even else "odd", *special)
        made.append(
            Variant(
                " ".join(("small_linear", kind, "weight", stored, f"M{rows}", *filter(None, words))),
                _multiply,
                {name: types[name] for name in _multiply.arg_names if name in types},
                {**constants, **finish, "GROUPED": grouped, "SPLIT": split},
                aligned=("size", "weight_stride", "num_outputs", "group_size"),
                num_warps=blocks.num_warps,
                num_stages=blocks.num_stages,
                wgmma=True,
                programs=PROGRAMS,
                narrow="the compiler swizzles fp8 by 8 bytes" if is_fp8 and (rows == 16 or not even) else "",
                converts="fp8 is widened on its way to the matrix instruction" if is_fp8 else "",
            )
        )
    # Sums of the runs of K: plain, with scales of outputs, and gated.
    for scaled, paired in ((False, False), (True, False), (False, True)):
        types = dict.fromkeys(("bias", "out"), "*bf16") | {"partial": "*fp32"}
        types |= {"scales": "*fp32" if scaled else "*bf16"}
        types |= dict.fromkeys(("num_rows", "num_outputs", "splits"), "i32")
        made.append(
            Variant(
                f"small_linear add up{' scaled' if scaled else ''}{' gated' if paired else ''}",
                _add_up,
                types,
                {
                    **{"SCALED": scaled, "BIASED": not scaled, "GATED": paired},
                    **{"BLOCK": 512, "PDL": facts.starts_early},
                },
                aligned=("num_outputs",),
            )
        )
    return made
