"""Configurations of the kernels of mixtures of experts."""

from typing import Any

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.experts.triton import (
    ALIGN_BLOCK,
    COMBINE_BLOCK,
    COMBINE_WARPS,
    _combine,
    _down,
    _gate_up,
    _sort_by_expert,
    choose_blocks,
)
from kernel_lab.variant import Variant


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: Mixtral's 8 experts and DeepSeek-V3's 256, few rows and many, for the
    GPUs whose grouped matmul reads on the host, and for Hopper in other dtypes than bf16; fp8 weights with
    scales of outputs and of blocks for all."""
    integers = ("num_experts", "chosen", "hidden", "size", "count", "group_rows", "group_size")
    made = []

    def add(name, kernel, kinds, constants, **options):
        types = {
            each: kinds.get(each, "i32" if each in integers else f"*{kinds['']}")
            for each in kernel.arg_names
            if not each.isupper()
        }
        aligned = tuple(each for each in ("hidden", "size", "group_size") if each in types)
        made.append(Variant(f"experts {name}", kernel, types, constants, aligned=aligned, **options))

    routing = {"order": "*i32", "starts": "*i32", "ids": "*i64", "weights": "*fp32"}
    add(
        "sort",
        _sort_by_expert,
        {"": "i32", **routing},
        {"BLOCK": ALIGN_BLOCK},
        narrow="ids of a few hundred bytes",
    )
    fp8 = "fp8e4nv" if facts.converts_fp8 else "i8"
    for kind, experts, rows, *scaling in (
        # bf16 and fp16 weights: few rows and many, of Mixtral and of DeepSeek-V3.
        ("bf16", 8, 2),
        ("bf16", 256, 2),
        ("bf16", 8, 400),
        ("fp16", 64, 40),
        # fp8 weights with scales of blocks (DeepSeek-V3), and with scales of outputs.
        ("bf16", 256, 2, "blocks"),
        ("bf16", 256, 40, "blocks"),
        ("bf16", 256, 400, "blocks"),
        ("bf16", 8, 2, "outputs"),
        ("fp16", 64, 40, "outputs"),
        ("bf16", 8, 400, "outputs"),
    ):
        blocks = choose_blocks(rows, 2, narrow=bool(scaling))
        constants = {
            "EXPERTS": experts,
            "ROWS": blocks.rows,
            "OUTPUTS": blocks.outputs,
            "BLOCK": blocks.block,
            "SCALED": "outputs" in scaling,
            "GROUPED": "blocks" in scaling,
        }
        options: dict[str, Any] = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
        options["max_registers"] = blocks.max_registers
        types = {"": kind, **routing}
        if scaling:
            types |= {"weight": f"*{fp8}", "scales": "*fp32"}
            options["converts"] = "fp8 is widened on its way to the matrix instruction"
        for name, kernel in (("gate up", _gate_up), ("down", _down)):
            add(
                " ".join((name, kind, f"E{experts}", f"rows {blocks.rows}", *(f"fp8 {x}" for x in scaling))),
                kernel,
                types,
                constants,
                **options,
            )
    add("combine", _combine, {"": "bf16", **routing}, {"BLOCK": COMBINE_BLOCK}, num_warps=COMBINE_WARPS)
    return made
