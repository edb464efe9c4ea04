"""From the target's logits to the law that is sampled, and the coins it is sampled with."""

from eagle_kit.kernels.sampling.coins import (
    DRAFT_COINS,
    TARGET_COINS,
    VERIFY_COINS,
    sample,
    sample_distinct,
    uniforms,
    window_uniforms,
)
from eagle_kit.kernels.sampling.law import (
    SamplingBatch,
    adjust_logits,
    counts_after,
    make_sampling_batch,
    target_probs,
    token_logprobs,
)

__all__ = [
    "DRAFT_COINS",
    "TARGET_COINS",
    "VERIFY_COINS",
    "SamplingBatch",
    "adjust_logits",
    "counts_after",
    "make_sampling_batch",
    "sample",
    "sample_distinct",
    "target_probs",
    "token_logprobs",
    "uniforms",
    "window_uniforms",
]
