"""How a layer's attention differs from plain causal attention: an argument of every operation over keys."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

ALL_BUT_SIGN = 0x7FFFFFFFFFFFFFFF


class Limits(NamedTuple):
    """Positions that a query may attend to, 0 where there is no limit.

    Attributes:
        window: a query attends to the last ``window`` positions, its own included.
        chunk: a query attends to positions of its own run of ``chunk``.
    """

    window: int = 0
    chunk: int = 0

    def first(self, position: int) -> int:
        """First position that a query at ``position`` attends to."""
        first = 0
        if self.window:
            first = max(position + 1 - self.window, 0)
        if self.chunk:
            first = max(first, position // self.chunk * self.chunk)
        return first

    def firsts(self, positions: torch.Tensor) -> torch.Tensor:
        """:meth:`first` of int64 ``positions``."""
        firsts = torch.zeros_like(positions)
        if self.window:
            firsts = (positions + 1 - self.window).clamp(min=0)
        if self.chunk:
            firsts = torch.maximum(firsts, positions // self.chunk * self.chunk)
        return firsts

    def span(self, num_queries: int) -> int | None:
        """Most positions that ``num_queries`` consecutive queries attend to together; None for all."""
        reaches = [limit for limit in self if limit]
        return min(reaches) + num_queries if reaches else None


NO_LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """Attention of a layer: causal, and

    Attributes:
        scale: factor of the scores.
        limits: positions that a query may attend to.
        soft_cap: scores are ``soft_cap tanh(scale q k / soft_cap)``.
        sinks: ``[Hq]``, a score of each query head that takes part in its softmax without a value.
    """

    scale: float
    limits: Limits = NO_LIMITS
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_softmax(self) -> bool:
        """True for an ordinary softmax of scaled scores, whatever the limits."""
        return self.soft_cap is None and self.sinks is None

    @property
    def is_plain(self) -> bool:
        """True for an ordinary softmax over all earlier positions."""
        return self.is_softmax and not any(self.limits)

    def __str__(self) -> str:
        parts = [f"scale {self.scale:.4g}"]
        if self.limits.window:
            parts.append(f"window {self.limits.window}")
        if self.limits.chunk:
            parts.append(f"chunk {self.limits.chunk}")
        if self.soft_cap:
            parts.append(f"soft cap {self.soft_cap:g}")
        if self.sinks is not None:
            parts.append("sinks")
        return ", ".join(parts)


def as_variant(variant: AttentionVariant | float) -> AttentionVariant:
    """Return a variant; a number is the scale of plain attention."""
    return variant if isinstance(variant, AttentionVariant) else AttentionVariant(variant)


def count_bits(bits: torch.Tensor) -> torch.Tensor:
    """Number of set bits of int64 words."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (bits * 0x0101010101010101) >> 56


def seen_within(
    limits: Limits, prefix_lens: torch.Tensor, ancestors: torch.Tensor, num_keys: int, columns: torch.Tensor
) -> torch.Tensor:
    """Which keys are within the limits of the nodes of windows.

    A node's position is the prefix's length plus the number of its ancestors. The position of its ancestor j
    is counted back from there: the ancestors behind j are the set bits above bit j, up to the node's own.
    Keys behind the node's own (of a block that attends both ways) are within every limit.

    Args:
        prefix_lens: int64 ``[B]``.
        ancestors: int64 ``[B, N]``, see :class:`~eagle_kit.ops.attention.window.WindowPlan`.
        num_keys: M; the nodes are the last N of the window's keys.
        columns: int64 ``[C]``; column c is position c of a prefix, the first key of a window lies behind it.

    Returns:
        bool ``[B, N, C]``; of no meaning where a key is no ancestor.
    """
    # Positions of the nodes.
    nodes = ancestors.shape[1]
    own_key = torch.arange(num_keys - nodes, num_keys, device=ancestors.device)
    before = ancestors & ((torch.ones_like(own_key) << own_key << 1) - 1)
    position = prefix_lens[:, None] + count_bits(before) - 1

    # Positions of the keys, as each node counts them.
    key = columns - prefix_lens[:, None]
    behind = ((before >> 1) & ALL_BUT_SIGN)[:, :, None] >> key.clamp(0, 63)[:, None]
    key_position = torch.where((key < 0)[:, None], columns, position[:, :, None] - count_bits(behind))
    return key_position >= limits.firsts(position)[:, :, None]
