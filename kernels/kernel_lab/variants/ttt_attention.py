"""Configurations of training's attention, forward and backward."""

from typing import Any

import triton

from eagle_kit.ops.attention.ttt.triton import (
    _backward_kv,
    _backward_own,
    _backward_q,
    _blocks,
    _forward,
    _own_rows,
)
from eagle_kit.ops.capability import DeviceFacts
from kernel_lab.variant import Variant


def _variant(
    name: str, kernel: Any, kind: str, size: int, facts: DeviceFacts, block: int = 1, **constants: int
) -> Variant:
    """Kernel for 32 query and 8 key heads, in the blocks it runs with; each of ``block`` rows of a block."""
    types = {
        "lse": "*fp32",
        "delta": "*fp32",
        "scale": "fp32",
        "cap": "fp32",
        "num_own": "i32",
        "rows": "i32",
        "tokens": "i32",
    }
    types |= dict.fromkeys(("starts", "stops", "bounds"), "*i32")
    types = {x: types.get(x, f"*{kind}") for x in kernel.arg_names if x.islower()}
    block_d = triton.next_power_of_2(size)
    constants |= {"HQ": 32 * block, "HKV": 8, "D": size, "BLOCK_D": block_d}
    if kernel is _backward_own:
        block_r, num_warps = _own_rows(4 * block, block_d)
        constants |= {"BLOCK_R": block_r, "BLOCK_G": 4 * block}
        narrow = "16 values of a thread, of several heads"
        return Variant(f"{name} {kind} D{size}", kernel, types, constants, num_warps=num_warps, narrow=narrow)
    of = {_forward: "forward", _backward_q: "q", _backward_kv: "kv"}[kernel]
    blocks = _blocks(of, block_d, 4 if kind == "fp32" else 2, facts)
    constants |= {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}
    return Variant(
        f"{name} {kind} D{size}",
        kernel,
        types,
        constants,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        max_registers=blocks.max_registers,
        spills="two registers; with one stage, which needs none, each block of keys would be waited for"
        if facts.capability == 100 and size == 256 and constants.get("OWN") and of == "forward"
        else "",
        wgmma=kind != "fp32",
        narrow="log-sums and limits of rows, which lie in L1" if of == "kv" else "",
        converts="limits of rows, beside products without tensor cores" if kind == "fp32" else "",
    )


def forward_variant(
    name: str, kind: str, size: int, facts: DeviceFacts, own: bool, capped: bool = False, sinks: bool = False
) -> Variant:
    """Forward kernel with or without own keys, a soft cap and sinks."""
    name += " capped" * capped + " sinks" * sinks
    return _variant(name, _forward, kind, size, facts, OWN=own, CAPPED=capped, SINKS=sinks)


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: draft heads of Llama (D 128), of Gemma (256), of small models
    (64)."""
    # Llama and Gemma; the keys' gradient in small heads and fp32 too.
    every = [("bf16", 128, facts), ("bf16", 256, facts)]
    return [
        *(forward_variant("ttt_attention", *at, own=True) for at in every),
        *(_variant("ttt_attention dq", _backward_q, *at, OWN=True) for at in every),
        *(
            _variant("ttt_attention dk dv", _backward_kv, *at, BRANCH=facts.multiplies_in_groups)
            for at in (*every, ("bf16", 64, facts), ("fp32", 128, facts))
        ),
        _variant("ttt_attention own keys", _backward_own, "bf16", 128, facts),
        _variant("ttt_attention own keys of blocks", _backward_own, "bf16", 128, facts, block=16),
    ]
