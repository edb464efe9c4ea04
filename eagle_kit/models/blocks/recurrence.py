"""Recurrence as an argument of a model's forward, beside attention.

An ``attend`` with the methods of :class:`Recur` also computes the convolutions and recurrences of recurrent
layers, whose states it reads and writes.

Legend: T packed tokens, C channels, W width of a convolution, H heads, V value size.
"""

from typing import Any, Protocol

import torch

from eagle_kit.models.blocks.layers import Attend
from eagle_kit.ops.recurrence import Inputs, Text, TextPlan, convolved_texts, recurrent_texts


class Recur(Protocol):
    """Recurrence as an argument of a model's forward: it defines where states lie, which models do not
    depend on.

    Convolutions and recurrences are numbered separately, in the order of the forward.
    """

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute a causal depthwise convolution.

        Args:
            number: index of the convolution in the forward.
            x: ``[T, C]``.
            weight: ``[C, W]``.
            bias: ``[C]``; None without a bias.

        Returns:
            ``[T, C]``.
        """

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """Compute a recurrence; see :mod:`eagle_kit.ops.recurrence`.

        Args:
            number: index of the recurrence in the forward.
            inputs: queries, keys, values, decays and strengths of T tokens.
            delta: True for the gated delta rule, False for a plain sum of decayed updates (Mamba-2).

        Returns:
            ``[T, H, V]``.
        """


class HybridAttend(Attend, Recur, Protocol):
    """Attention and recurrence of a forward."""


class Hybrid:
    """:class:`HybridAttend` from an attention and a recurrence."""

    def __init__(self, attend: Attend, recur: Recur) -> None:
        self._attend = attend
        self._recur = recur

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attend(layer, q, k, v)

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`Recur`."""
        return self._recur.convolve(number, x, weight, bias)

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`Recur`."""
        return self._recur.recur(number, inputs, delta=delta)

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the attention, such as ``kv_rows``."""
        return getattr(self.__dict__["_attend"], name)


def recur_of(attend: Attend) -> Recur:
    """Recurrence of a forward with recurrent layers, whose ``attend`` must have it."""
    assert hasattr(attend, "recur"), "recurrent layers need a recurrence beside the attention"
    return attend  # type: ignore[return-value]


class TextRecur:
    """Recurrence of texts that lie completely in the forward.

    Args:
        spans: (start, stop) of each text, in order; None for a single text.
    """

    def __init__(self, spans: list[tuple[int, int]] | None = None) -> None:
        self._plan: TextPlan | None = None
        if spans is not None:
            self._plan = TextPlan([Text(start, stop) for start, stop in spans])

    def _plan_of(self, num_tokens: int) -> TextPlan:
        """Plan of the texts; of a single one it is made when its length is known."""
        if self._plan is None:
            self._plan = TextPlan([Text(0, num_tokens)])
        return self._plan

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`Recur`."""
        return convolved_texts(x, weight, bias, None, self._plan_of(len(x)))

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`Recur`."""
        return recurrent_texts(inputs, None, self._plan_of(len(inputs.v)), delta=delta)
