"""Configurations of the kernels that accept tokens."""

import triton

from eagle_kit.ops.accept.triton import (
    _block,
    _excess,
    _follow,
    _follow_warps,
    _outcome_of,
    _walk,
    _walk_warps,
)
from eagle_kit.ops.sampling.triton import chunk_size, num_chunks
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time, for Llama 3's vocabulary: distributions over bf16 logits, and
    probabilities for drafts of other engines."""
    found = []
    # Types of the arguments of every kernel, by their names.
    integers = ("nodes", "vocab", "chunks", "steps", "q_nodes", "uniform_stride")
    longs = ("tokens", "parents", "path", "emitted", "num_accepted", "rejected")
    doubles = ("sums", "q_sums", "uniforms", "bonus_uniforms", "scales", "parts", "excess")
    types = {
        **dict.fromkeys(integers, "i32"), **dict.fromkeys(longs, "*i64"), **dict.fromkeys(doubles, "*fp64"),
        "stats": "*fp32", "last": "*i32", "q": "*fp32", "values": "*fp32", "ids": "*i32",
    }  # fmt: skip
    chunk = chunk_size(128256)
    chunks = triton.next_power_of_2(num_chunks(128256))
    row = {"CHUNK": chunk, "CPAD": chunks}

    def add(name, kernel, dense, constants, warps=chunk // 512, narrow=""):
        described = {**types, "rows": "*fp32" if dense else "*bf16"}
        names = {a: described[a] for a in kernel.arg_names if a not in constants and a != "DENSE"}
        found.append(
            Variant(
                f"accept {name}", kernel, names, {**constants, "DENSE": dense}, aligned=("vocab",),
                num_warps=warps, narrow=narrow,
            )
        )  # fmt: skip

    # What a cycle emitted, from the accepted path of up to 8 nodes.
    numbers = ("path", "tokens", "num_accepted", "seq_lens", "num_emitted", "roots", "new_lens")
    found.append(
        Variant(
            "accept outcome", _outcome_of,
            {
                "best": "*bf16", **dict.fromkeys(numbers, "*i64"),
                **dict.fromkeys(("active", "finite"), "*u8"), **dict.fromkeys(("nodes", "length"), "i32"),
            },
            {"BLOCK": 8}, num_warps=1,
        )
    )  # fmt: skip
    # Greedy decoding follows the best tokens; others read bf16 logits, or dense probabilities.
    greedy = {"GREEDY": True, "CHUNK": 1, "CPAD": chunks}
    add("greedy N64", _follow, True, {**greedy, "NPAD": 64}, 1)
    links = "the loops follow children, a token at a time; rows are read where one is rejected"
    for name, dense in (("bf16", False), ("dense", True)):
        options = {**row, "GREEDY": False, "NPAD": 64}
        add(f"target only {name}", _follow, dense, options, _follow_warps(chunk))
        trial = {**row, "SINGLE": 1.0, "ACC": 1.0, "NPAD": 32}
        add(f"rejection {name}", _walk, dense, {**trial, "RELAXED": False}, _walk_warps(chunk, False), links)
        add(f"relaxed {name}", _walk, dense, {**trial, "RELAXED": True}, _walk_warps(chunk, True), links)
        add(f"excess {name}", _excess, dense, {**row, "SPAD": 8})
        add(f"block {name}", _block, dense, {**row, "SPAD": 8})
    return found
