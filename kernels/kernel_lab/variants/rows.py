"""Configurations of the kernel that copies rows of several tables."""

from eagle_kit.ops.rows.triton import BLOCK, NUM_WARPS, _copy_rows
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: the slots of a draft's cycle, gathered, and written back."""
    found = []
    for name, kinds, writes in (
        # Dtypes of the tables of a cycle's slots; a write has those that the cycle changes.
        ("gather", ("i64", "i64", "i64", "i8", "i64", "i64", "i64"), False),
        ("write", ("i64", "i64", "i64", "i64", "i64"), True),
    ):
        tables = tuple(f"*{kind}" for kind in kinds)
        types: dict[str, str | tuple[str, ...]] = {"rows": "*i64"}
        types |= {"sources": tables, "targets": tables, "words": ("i32",) * len(kinds)}
        constants = {"WRITES": writes, "BLOCK": BLOCK}
        found.append(Variant(f"rows {name}", _copy_rows, types, constants, num_warps=NUM_WARPS))
    return found
