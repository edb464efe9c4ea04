"""Configurations of recurrent layers."""

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.recurrence.triton import (
    CHUNK,
    _commit,
    _nodes,
    _num_warps,
    _of_window,
    _sizes,
    _texts,
    _window,
)
from kernel_lab.variant import Variant

BLOCKS = "a block of fp32 keys is two values a thread: more do not fit the registers"


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: layers of Qwen3-Next, in bf16, and of Nemotron-H."""
    made = []
    for title, delta, heads, key_heads, key, value in (
        # The gated delta rule, and Mamba-2 without it.
        ("Qwen3-Next", True, 32, 16, 128, 128),
        ("Nemotron-H", False, 128, 8, 128, 64),
    ):
        sizes = _sizes(heads, key_heads, key, value)
        inputs = {"q": "*fp32", "k": "*fp32", "v": "*bf16", "g": "*fp32", "beta": "*fp32"}
        states = {"states": "*fp32"}
        out = {"out": "*bf16"}
        for count in (1, 16, 32, 64):
            made.append(
                Variant(
                    f"recurrent_window {title} N{count}",
                    _window,
                    {
                        **inputs,
                        **states,
                        **dict.fromkeys(("slots", "ancestors"), "*i64"),
                        **out,
                        **dict.fromkeys(("written", "decays"), "*fp32"),
                        "num_nodes": "i32",
                    },
                    {"DELTA": delta, "NODES": _nodes(count), **_of_window(sizes, _nodes(count), facts)},
                    num_warps=_num_warps(_nodes(count), delta, facts),
                    narrow=BLOCKS,
                )
            )
        made.append(
            Variant(
                f"commit_recurrent {title}",
                _commit,
                {
                    **states,
                    "slots": "*i64",
                    **dict.fromkeys(("k", "written", "decays"), "*fp32"),
                    **dict.fromkeys(("path", "num_committed"), "*i64"),
                    **dict.fromkeys(("num_nodes", "length"), "i32"),
                },
                sizes,
            )
        )
        made.append(
            Variant(
                f"recurrent_texts {title}",
                _texts,
                {
                    **inputs,
                    **states,
                    "passing": "*fp32",
                    **out,
                    **dict.fromkeys(("sources", "firsts", "starts", "counts", "numbers"), "*i64"),
                    "saves": "i32",
                },
                {"DELTA": delta, "NODES": CHUNK, **sizes},
                num_warps=8,
                narrow=BLOCKS,
            )
        )
    return made
