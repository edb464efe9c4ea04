"""Recurrence as an argument of a model's forward, beside attention.

Legend: T packed tokens, C channels, W width of a convolution, H heads, V value size.
"""

from typing import Any, Protocol

import torch

from eagle_kit.models.blocks.layers import Attend
from eagle_kit.ops.recurrence import Inputs, Text, TextPlan, convolved_texts, recurrent_texts


class Recur(Protocol):
    """What recurrent layers remember of earlier tokens, which models do not depend on.

    Convolutions and recurrences are numbered each for themselves, in the order of the forward.
    """

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Causal depthwise convolution of ``x [T, C]`` by ``weight [C, W]`` and ``bias [C]`` -> ``[T,
        C]``."""

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """Outputs ``[T, H, V]`` of a recurrence, see :mod:`eagle_kit.ops.recurrence`."""


class HybridAttend(Attend, Recur, Protocol):
    """Attention and recurrence of a forward."""


class Hybrid:
    """:class:`HybridAttend` of an ``attend`` and a ``recur``."""

    def __init__(self, attend: Attend, recur: Recur) -> None:
        self._attend, self._recur = attend, recur

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
        """What else the attention has, such as ``kv_slots``."""
        return getattr(self.__dict__["_attend"], name)


def recur_of(attend: Attend) -> Recur:
    """The recurrence that comes with an attention; a target with recurrent layers needs one."""
    assert hasattr(attend, "recur"), "recurrent layers need a recurrence beside the attention"
    return attend  # type: ignore[return-value]


class TextRecur:
    """Recurrence of texts that are whole in the forward.

    Args:
        spans: (start, stop) of each text, in order; None for one text.
    """

    def __init__(self, spans: list[tuple[int, int]] | None = None) -> None:
        self._plan = None if spans is None else TextPlan([Text(*span) for span in spans])

    def _plan_of(self, count: int) -> TextPlan:
        if self._plan is None:
            self._plan = TextPlan([Text(0, count)])
        return self._plan

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`Recur`."""
        return convolved_texts(x, weight, bias, None, self._plan_of(len(x)))

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`Recur`."""
        return recurrent_texts(inputs, None, self._plan_of(len(inputs.v)), delta=delta)
