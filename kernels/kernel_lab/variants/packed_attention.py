"""Configurations of attention over packed texts: the forward of training's attention without own keys."""

from eagle_kit.ops.capability import DeviceFacts
from kernel_lab.variant import Variant
from kernel_lab.variants import ttt_attention as flash


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: the forward at the head sizes of captured targets, gpt-oss's with
    sinks and Gemma 2's with a cap."""
    # Head sizes and dtypes of captured targets.
    shipped = (
        ("bf16", 64, facts),
        ("bf16", 128, facts),
        ("fp16", 128, facts),
        ("bf16", 256, facts),
        ("fp32", 64, facts),
    )
    plain = [flash.forward_variant("packed_attention", *at, own=False) for at in shipped]
    return [
        *plain,
        flash.forward_variant("packed_attention", "bf16", 64, facts, own=False, sinks=True),
        flash.forward_variant("packed_attention", "bf16", 256, facts, own=False, capped=True),
    ]
