"""Inputs of the checks of operations, attention written out in fp64, and the error of a result."""

from typing import NamedTuple

import torch

from eagle_kit.ops.attention.variant import AttentionVariant, Limits

PLAIN = AttentionVariant(16**-0.5)
"""Attention of heads of 16 elements."""


class Positions(NamedTuple):
    """Positions of queries int64 ``[T]`` and of keys int64 ``[C]``."""

    queries: torch.Tensor
    keys: torch.Tensor


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Draw normal numbers from ``seed`` on the host; return them in ``dtype`` on torch's default device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, device="cpu").to(dtype)
    return drawn.to(torch.get_default_device())


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; NaN where a result is NaN."""
    expected = expected.double()
    return float((got.double() - expected).abs().max() / expected.abs().max())


def largest(*errors: float) -> float:
    """The largest error of several results. It is NaN if one of them is; ``max`` may ignore a NaN."""
    return float(torch.tensor(errors, dtype=torch.float64, device="cpu").max())


def limited_variant(dtype: torch.dtype) -> AttentionVariant:
    """A sliding window of five tokens, capped scores and sinks of six heads."""
    return AttentionVariant(PLAIN.scale, Limits(window=5), 2.0, normal(dtype, 6, seed=9))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    variant: AttentionVariant = PLAIN,
    positions: Positions | None = None,
) -> torch.Tensor:
    """Attention in fp64, written out.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[C, Hkv, D]``.
        seen: bool ``[T, C]``, keys that a query may attend to within the limits of ``variant``.
        positions: default those of the last T of C tokens.

    Returns:
        fp64 ``[T, Hq, D]``.
    """
    num_keys = len(k)
    if positions is None:
        positions = Positions(torch.arange(num_keys - len(q), num_keys), torch.arange(num_keys))
    if variant.limits.window:
        distance = positions.queries[:, None] - positions.keys
        seen = seen & (distance < variant.limits.window)

    # Scores of every query head with the keys of its group.
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, 1)
    values = v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,chd->htc", q.double(), keys) * variant.scale
    if variant.soft_cap is not None:
        scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)

    # The softmax; a sink takes part in its sum.
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if variant.sinks is not None:
        total = total + variant.sinks.double().exp()[:, None, None]
    return torch.einsum("htc,chd->thd", weights / total, values)
