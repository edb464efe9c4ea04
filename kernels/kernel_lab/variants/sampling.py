"""Configurations of the sampling kernels."""

import triton

from eagle_kit.ops.sampling.triton import (
    _best,
    _draw,
    _draw_distinct,
    _probs,
    _search,
    _settle,
    _sums,
    _uniforms,
    chunk_size,
    num_chunks,
)
from kernel_lab.variant import Variant


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: the vocabularies of Llama 3 in bf16 and of penalised logits in
    fp32."""
    found = []
    integers = dict.fromkeys(("nodes", "vocab", "chunks", "rows", "round", "shift"), "i32")
    types = {
        **integers, "logits": "*bf16", "values": "*fp32", "ids": "*i32", "temperature": "*fp32",
        "bounds": "*fp32", "lasts": "*i32", "floors": "*fp32", "stats": "*fp32", "last": "*i32",
        "sums": "*fp64", "partial": "*fp32", "lows": "*i32", "bases": "*fp64", "needs": "*fp64",
        "new_bounds": "*fp32", "new_lasts": "*i32", "uniforms": "*fp64", "out": "*i64", "count": "i32",
        "seeds": "*i64", "positions": "*i64", "size": "i32", "row_stride": "i64", "column_stride": "i64",
    }  # fmt: skip

    def add(name, kernel, constants, warps=8, narrow="", **special):
        described = {**types, **special}
        names = {a: described[a] for a in kernel.arg_names if a not in constants}
        aligned = [a for a in ("vocab",) if a in names]
        found.append(
            Variant(
                f"sampling {name}", kernel, names, constants, aligned=aligned, num_warps=warps, narrow=narrow
            )
        )

    chunk = chunk_size(128256)
    chunks = triton.next_power_of_2(num_chunks(128256))
    lanes = "16 sums a lane leave a thread room for 4 lanes"
    filtered_row = {"DENSE": False, "CHUNK": chunk, "CPAD": chunks}
    add("best bf16", _best, {"CHUNK": chunk})
    # Bounds: of top-k over bf16 logits, of top-p over fp32 logits that a top-k limits.
    for name, kind, count, top_p, limit in (
        ("top-k bf16", "bf16", True, False, False),
        ("top-p fp32", "fp32", False, True, True),
    ):
        options = {"TOP_P": top_p, "HAS_LIMIT": limit, "CHUNK": chunk, "CPAD": chunks}
        wanted = {"wanted": "*fp32" if top_p else "*i64", "logits": f"*{kind}"}
        add(f"search {name}", _search, {**options, "COUNT": count, "LANES": 512}, 4, lanes, **wanted)
        add(f"settle {name}", _settle, options, 16, **wanted)
    # Sums of the weights of chunks: of all tokens, and of those that filters keep.
    for name, filtered in (("", False), (" filtered", True)):
        add(
            f"sums bf16{name}",
            _sums,
            {**filtered_row, "HAS_LIMIT": filtered, "HAS_FLOOR": filtered},
            rows="*bf16",
        )
    # Samples from logits and from dense probabilities, distinct samples, and their uniform numbers.
    add("draw bf16", _draw, filtered_row, rows="*bf16")
    add("draw fp32 dense", _draw, {**filtered_row, "DENSE": True}, rows="*fp32")
    add("probs fp32", _probs, {"CHUNK": chunk, "CPAD": chunks}, rows="*fp32", out="*fp32")
    add("draw distinct", _draw_distinct, {"CHUNK": chunk, "CPAD": chunks, "KPAD": 8}, rows="*fp32")
    add("uniforms", _uniforms, {"STREAM": 2, "OF_CYCLE": True, "BLOCK": 256}, 2)
    return found
