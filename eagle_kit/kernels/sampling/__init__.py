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
    Law,
    SamplingBatch,
    adjust_logits,
    counts_after,
    law_parts,
    make_sampling_batch,
    probabilities,
    target_law,
    target_probs,
    token_logprobs,
)

__all__ = [
    "DRAFT_COINS",
    "TARGET_COINS",
    "VERIFY_COINS",
    "Law",
    "SamplingBatch",
    "adjust_logits",
    "counts_after",
    "law_parts",
    "make_sampling_batch",
    "probabilities",
    "sample",
    "sample_distinct",
    "target_law",
    "target_probs",
    "token_logprobs",
    "uniforms",
    "window_uniforms",
]
