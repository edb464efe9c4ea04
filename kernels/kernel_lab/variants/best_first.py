"""Configurations of the best-first search of a tree's nodes."""

import triton

from eagle_kit.ops.best_first.triton import _best_first, _block, _num_warps
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: a usual tree, one whose scores depend on the node above, and the
    largest."""
    found = []
    # The default tree; scores that depend on the node above (P = K); the most candidates and nodes.
    for topk, given, nodes in ((4, 1, 16), (4, 4, 16), (16, 16, 64)):
        block = _block(nodes, topk)
        constants = {"TOPK": topk, "GIVEN": given, "NODES": triton.next_power_of_2(nodes), "BLOCK": block}
        types = {
            arg: "*fp32" if arg == "scores" else "i32" if arg in ("steps", "nodes") else "*i64"
            for arg in _best_first.arg_names
            if arg not in constants
        }
        name = f"best_first K{topk} P{given} N{nodes}"
        found.append(
            Variant(
                name,
                _best_first,
                types,
                constants,
                num_warps=_num_warps(block),
                narrow="the K scores of a node's children",
            )
        )
    return found
