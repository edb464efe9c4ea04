"""Configurations of SwiGLU, forward and backward."""

from eagle_kit.ops.capability import DeviceFacts
from eagle_kit.ops.swiglu.triton import _blocks, _swiglu, _swiglu_backward
from kernel_lab.variant import Variant


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: sizes of SmolLM2 and Llama 3 8B."""
    made = []
    for kernel, pointers in (
        (_swiglu, ("gate_up", "out")),
        (_swiglu_backward, ("d_out", "gate_up", "d_gate_up")),
    ):
        for kind, itemsize, size in (
            # SmolLM2, and Llama 3 8B in every dtype.
            ("bf16", 2, 1536),
            ("bf16", 2, 14336),
            ("fp16", 2, 14336),
            ("fp32", 4, 14336),
        ):
            blocks = _blocks(size, itemsize)
            made.append(
                Variant(
                    f"{kernel.__name__.strip('_')} {kind} I{size}",
                    kernel,
                    {**dict.fromkeys(pointers, f"*{kind}"), "size": "i32"},
                    {"BLOCK": blocks["BLOCK"], "PDL": facts.starts_early},
                    aligned=("size",),
                    num_warps=blocks["num_warps"],
                )
            )
    return made
