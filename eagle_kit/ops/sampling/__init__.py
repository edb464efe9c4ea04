"""Sampling: from the target's logits to a distribution, and reproducible uniform random numbers to sample it
with.

Requests with a temperature call it: temperature, top-k, top-p and min-p filter the distribution.
"""

from eagle_kit.ops.sampling.distribution import (
    LARGEST,
    FilteredLogits,
    SamplingBatch,
    adjust_logits,
    counts_after,
    distribution_parts,
    make_sampling_batch,
    probabilities,
    target_distribution,
    target_probs,
    token_logprobs,
    write_bias,
)
from eagle_kit.ops.sampling.uniform import (
    DRAFT_UNIFORMS,
    TARGET_UNIFORMS,
    VERIFY_UNIFORMS,
    position_uniforms,
    sample,
    sample_distinct,
    window_uniforms,
)

__all__ = [
    "DRAFT_UNIFORMS",
    "LARGEST",
    "TARGET_UNIFORMS",
    "VERIFY_UNIFORMS",
    "FilteredLogits",
    "SamplingBatch",
    "adjust_logits",
    "counts_after",
    "distribution_parts",
    "make_sampling_batch",
    "position_uniforms",
    "probabilities",
    "sample",
    "sample_distinct",
    "target_distribution",
    "target_probs",
    "token_logprobs",
    "window_uniforms",
    "write_bias",
]
