"""Configurations of the kernels that build trees and chains."""

import triton

from eagle_kit.ops.tree_build.triton import (
    _beam_options,
    _chain_build,
    _grow_beam,
    _num_warps,
    _start_beam,
    _tree_build,
)
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: the default tree, wide ones, and the largest that is allowed."""
    floats = ("scores", "next_scores", "new_scores", "all_scores")
    integers = ("n", "nodes", "step", "steps")

    def variant(name, kernel, constants, num_warps, narrow=""):
        types = {
            arg: "*fp32" if arg in floats else "i32" if arg in integers else "*i64"
            for arg in kernel.arg_names
            if arg not in constants
        }
        return Variant(name, kernel, types, constants, num_warps=num_warps, narrow=narrow)

    found = [variant("chain_build", _chain_build, {"BLOCK": 8}, 1)]
    # Beams: the default width, a wide one, the widest; those of drafts of more than 64 nodes.
    for topk, words in ((4, 1), (10, 1), (16, 1), (10, 2), (16, 2)):
        block = triton.next_power_of_2(topk)
        constants = {"TOPK": topk, "WORDS": words}
        name = f"K{topk}" + (" two words" if words == 2 else "")
        found.append(variant(f"start_beam {name}", _start_beam, {**constants, "BLOCK": block}, 1))
        options = _beam_options(topk)
        warps = options.pop("num_warps")
        found.append(
            variant(f"grow_beam {name}", _grow_beam, {**constants, **options}, warps, "a few hundred scores")
        )
    # Trees: the default, a wide one, EAGLE-3's, the largest.
    for steps, topk in ((5, 4), (6, 10), (8, 10), (16, 16)):
        block = triton.next_power_of_2(topk + (steps - 1) * topk**2)
        constants = {"TOPK": topk, "ROUNDS": (steps - 1).bit_length(), "BLOCK": block}
        found.append(variant(f"tree_build S{steps} K{topk}", _tree_build, constants, _num_warps(block)))
    return found
