"""How a layer's attention differs from plain causal attention: an argument of every operation over keys."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


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


def key_bits(words: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Which window keys are ancestors of nodes, or the nodes themselves.

    Args:
        words: int64 ``[B, N, W]``, see :class:`~eagle_kit.ops.attention.window.WindowPlan`.
        key: int64 ``[B, C]``, numbers of window keys, 0 to 64 W - 1.

    Returns:
        bool ``[B, N, C]``.
    """
    if words.shape[2] == 1:
        return (words >> key[:, None]) & 1 == 1
    word = words.gather(2, (key // 64)[:, None].expand(-1, words.shape[1], -1))
    return (word >> (key % 64)[:, None]) & 1 == 1


def seen_within(
    limits: Limits, prefix_lens: torch.Tensor, words: torch.Tensor, num_keys: int, columns: torch.Tensor
) -> torch.Tensor:
    """Which keys are within the limits of the nodes of windows.

    The position of an ancestor is the prefix's length plus the number of ancestors before it. Keys behind a
    node's own (of a block that attends both ways) count on from there, so they are within every limit.

    Args:
        prefix_lens: int64 ``[B]``.
        words: int64 ``[B, N, W]``, see :class:`~eagle_kit.ops.attention.window.WindowPlan`.
        num_keys: M; the nodes are the last N of the window's keys.
        columns: int64 ``[C]``; column c is position c of a prefix, the first key of a window lies behind it.

    Returns:
        bool ``[B, N, C]``; of no meaning where a key is no ancestor.
    """
    # Positions of all window keys, as each node counts them, and of the nodes.
    batch, nodes, _ = words.shape
    all_keys = torch.arange(num_keys, device=words.device).expand(batch, -1)
    window_positions = prefix_lens[:, None, None] - 1 + key_bits(words, all_keys).cumsum(2)  # [B, N, M]
    own_key = all_keys[:, num_keys - nodes :, None]
    position = window_positions.gather(2, own_key)  # [B, N, 1]

    # Positions of the columns.
    key = columns - prefix_lens[:, None]
    window_column = key.clamp(0, num_keys - 1)[:, None].expand(-1, nodes, -1)
    column_position = torch.where((key < 0)[:, None], columns, window_positions.gather(2, window_column))
    return column_position >= limits.firsts(position)
