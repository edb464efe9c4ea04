"""Recurrent states of a target: one for every slot of a batch, and snapshots for the prefix cache.

As in the paged stores, only committed tokens change a state. A window keeps the updates of its nodes aside.
:meth:`StateWindow.commit` applies those of the accepted path (:mod:`eagle_kit.ops.recurrence`).

Legend: S states, B requests, N window nodes, T prompt tokens, C channels, W width of a convolution.
"""

from collections.abc import Sequence

import torch

from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.recurrence import Hybrid
from eagle_kit.models.config_parts import StateSpec
from eagle_kit.ops.recurrence import (
    Inputs,
    Text,
    TextPlan,
    Written,
    commit_recurrent,
    commit_tail,
    convolved_texts,
    path_columns,
    recurrent_texts,
    recurrent_window,
    window_convolution,
)


class StatePool:
    """Recurrent states by number: those of the slots, that of the dummy slot, then snapshots.

    Args:
        spec: shapes of the target's recurrences and convolutions.
        max_batch_size: number of slots.
        num_snapshots: number of snapshots.
        dtype: dtype of activations, in which the columns of convolutions are kept.

    Attributes:
        states: fp32 ``[S, heads, key size, value size]`` of each recurrence.
        tails: the last columns ``[S, W - 1, C]`` of each convolution, oldest first.
    """

    def __init__(
        self,
        spec: StateSpec,
        max_batch_size: int,
        num_snapshots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec
        self.first_snapshot = max_batch_size + 1
        count = max_batch_size + 1 + num_snapshots
        self.states = [torch.zeros(count, *each.shape, device=device) for each in spec.recurrences]
        self.tails = [
            torch.zeros(count, width - 1, channels, dtype=dtype, device=device)
            for channels, width in spec.convolutions
        ]

    def window(self, attend: Attend, slots: torch.Tensor, ancestors: torch.Tensor) -> "StateWindow":
        """Join the attention of window nodes with their recurrence.

        Args:
            slots: int64 ``[B]``, the slots of the requests, which are the numbers of their states.
            ancestors: int64 ``[B, N]``, as in ``WindowPlan``.
        """
        return StateWindow(attend, self, slots, ancestors)

    def prompts(self, attend: Attend, texts: Sequence[Text]) -> Hybrid:
        """Join the attention of packed prompts with their recurrence, which writes the states at once."""
        return Hybrid(attend, _PromptRecur(self, TextPlan(texts)))


class StateWindow(Hybrid):
    """Attention and recurrence of window nodes."""

    def __init__(self, attend: Attend, pool: StatePool, slots: torch.Tensor, ancestors: torch.Tensor) -> None:
        self._recurrence = _WindowRecur(pool, slots, ancestors)
        super().__init__(attend, self._recurrence)

    def commit(self, path: torch.Tensor, num_committed: torch.Tensor) -> None:
        """Apply the first ``num_committed [B]`` nodes of ``path [B, m]`` to the requests' states."""
        self._recurrence.commit(path, num_committed)


class _WindowRecur:
    """Recurrence of window nodes. It changes no state until :meth:`commit`."""

    def __init__(self, pool: StatePool, slots: torch.Tensor, ancestors: torch.Tensor) -> None:
        self._pool = pool
        self._slots = slots
        self._ancestors = ancestors
        self._read: dict[int, torch.Tensor] = {}
        self._columns: dict[int, torch.Tensor] = {}
        self._written: dict[int, Written] = {}

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        width = weight.shape[1]
        if width not in self._read:
            self._read[width] = path_columns(self._ancestors, width)
        nodes = self._columns[number] = x.view(*self._ancestors.shape, -1)
        tails = self._pool.tails[number]
        return window_convolution(nodes, weight, bias, tails, self._slots, self._read[width]).flatten(0, 1)

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        nodes, states = inputs.view(*self._ancestors.shape), self._pool.states[number]
        out, self._written[number] = recurrent_window(
            nodes, states, self._slots, self._ancestors, delta=delta
        )
        return out.flatten(0, 1)

    def commit(self, path: torch.Tensor, num_committed: torch.Tensor) -> None:
        """See :meth:`StateWindow.commit`."""
        for number, columns in self._columns.items():
            commit_tail(self._pool.tails[number], self._slots, columns, path, num_committed)
        for number, written in self._written.items():
            commit_recurrent(self._pool.states[number], self._slots, written, path, num_committed)


class _PromptRecur:
    """Recurrence of packed prompts."""

    def __init__(self, pool: StatePool, plan: TextPlan) -> None:
        self._pool = pool
        self._plan = plan

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        return convolved_texts(x, weight, bias, self._pool.tails[number], self._plan)

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        return recurrent_texts(inputs, self._pool.states[number], self._plan, delta=delta)
