"""Uniform random numbers that depend only on a request's seed and a position.

A uniform is a hash of (seed, position, stream). So a response depends neither on its batch, nor on the number
of tokens that a cycle accepted, nor on preemption and recomputation; and every device samples the same.

The hash is MurmurHash3's 64-bit finaliser (public domain), once for the seed and once for the rest.
"""

import torch

from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.sampling.distribution import FilteredLogits, distribution_parts, probabilities

TARGET_UNIFORMS = 0
"""Stream of the target's token at a position."""
DRAFT_UNIFORMS = 1
"""Stream of draft tokens."""
VERIFY_UNIFORMS = 2
"""Stream of the acceptance of sampled draft tokens."""

_MIX = (-0xAE502812AA7333, -0x3B314601E57A13AD)
_GOLDEN = -0x61C8864680B583EB


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 words as unsigned ones."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser of int64 words."""
    for factor in _MIX:
        x = (x ^ _shift_right(x, 33)) * factor
    return x ^ _shift_right(x, 33)


def position_uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int, *, backend: Backend | None = None
) -> torch.Tensor:
    """Uniform random numbers in [0, 1 - 2^-53], fp64 ``[B, n]``.

    Args:
        seeds: int64 ``[B]``.
        positions: int64 ``[B, n]``, positions of the tokens to sample.
        stream: purpose of the numbers; different streams are independent.
    """
    if uses_triton("sampling", seeds, backend):
        from eagle_kit.ops.sampling import triton

        return triton.uniforms(seeds.contiguous(), positions, positions.shape[1], stream, False)
    return _shift_right(_hash(seeds[:, None], positions, stream), 11).double() * 2.0**-53


def window_uniforms(
    seeds: torch.Tensor,
    root_positions: torch.Tensor,
    count: int,
    stream: int,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Uniform random numbers of one cycle, fp64 ``[B, count]``. They depend on the position of its root,
    which grows from cycle to cycle, so that no number used for a rejected draft is used again.

    Args:
        seeds, root_positions: int64 ``[B]``.
        count: numbers per request.
        stream: purpose of the numbers; different streams are independent.
    """
    if uses_triton("sampling", seeds, backend):
        from eagle_kit.ops.sampling import triton

        return triton.uniforms(seeds.contiguous(), root_positions[:, None], count, stream, True)
    index = torch.arange(count, device=seeds.device).expand(seeds.shape[0], count)
    return position_uniforms(_hash(seeds, root_positions, stream), index, stream, backend="reference")


def _hash(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    return _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN + _wrapped(stream * 0x5851F42D4C957F2D))


def sample(
    probs: torch.Tensor | FilteredLogits, uniforms: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Sample by the inverse of the cumulative distribution: the first token whose running sum exceeds the
    uniform.

    The sum is fp64, so that the error of a token's probability is at most the rounding of its own fp32 value.
    A token of probability zero is never sampled.

    Args:
        probs: fp32 ``[..., V]``, not negative, with a positive sum, which need not be one. Or a
            ``FilteredLogits``.
        uniforms: fp64 ``[...]`` in [0, 1).

    Returns:
        int64 ``[...]``, 0..V - 1 also for a row that is no distribution (all zeros, NaN).
    """
    if uses_triton("sampling", uniforms, backend):
        from eagle_kit.ops.sampling import triton

        return triton.sample(uniforms.contiguous(), distribution_parts(probs))
    probs = probabilities(probs)
    sums = probs.cumsum(-1, dtype=torch.float64)
    total = sums[..., -1:]
    # A uniform just below one may round up to the total, which no running sum exceeds.
    bound = torch.minimum(uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, bound, right=True)[..., 0].clamp(max=probs.shape[-1] - 1)


def sample_distinct(
    probs: torch.Tensor, uniforms: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Sample tokens one after another without replacement, such as the siblings of a sampled tree.

    When the distribution has no token left, the lowest ids not sampled yet follow; verifiers skip them
    because their probability is zero. NaN is a probability of zero.

    Args:
        probs: fp32 ``[B, V]``, as for ``sample``.
        uniforms: fp64 ``[B, K]`` in [0, 1), K <= V.

    Returns:
        int64 ``[B, K]``, in the order of sampling, which must be their order in the window.
    """
    if uses_triton("sampling", probs, backend):
        from eagle_kit.ops.sampling import triton

        return triton.sample_distinct(probs.contiguous(), uniforms.contiguous())
    sampled = []
    probs = probs.nan_to_num(0.0, 0.0, 0.0).clamp_(min=0.0)
    unused = torch.ones_like(probs)
    for k in range(uniforms.shape[1]):
        # Without a token left, the uniform 0 takes the lowest unused id.
        left = probs * unused
        is_empty = left.amax(-1, keepdim=True) <= 0
        uniform = torch.where(is_empty[:, 0], 0.0, uniforms[:, k])
        token = sample(torch.where(is_empty, unused, left), uniform, backend="reference")
        unused = unused.scatter(1, token[:, None], 0.0)
        sampled.append(token)
    return torch.stack(sampled, 1)


def _wrapped(number: int) -> int:
    """Convert to the int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
