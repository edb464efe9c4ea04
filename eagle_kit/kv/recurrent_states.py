"""States of recurrent layers: one state for each request of a batch, and snapshots for the prefix cache.

As in the paged stores, only committed tokens change a state. A window keeps the columns and updates of its
nodes, and :meth:`StateWindow.commit` applies the accepted path (:mod:`eagle_kit.ops.recurrence`).

Legend: S states, B requests, N window nodes, T prompt tokens, C channels, W width of a convolution, m nodes
of a path.
"""

from collections.abc import Sequence

import torch

from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.recurrence import Hybrid
from eagle_kit.models.cache_specs import StateSpec
from eagle_kit.ops.recurrence import (
    Inputs,
    Text,
    TextPlan,
    Written,
    commit_recurrent,
    convolved_texts,
    moved_tail,
    path_columns,
    recurrent_texts,
    recurrent_window,
    window_convolution,
)


class StatePool:
    """Pool of S states: one for each request, by its slot, then one for padding, then the snapshots.

    Args:
        spec: shapes of the recurrences and convolutions of the target.
        max_batch_size: number of requests that have a state.
        num_snapshots: number of snapshots for the prefix cache.
        dtype: dtype of activations and of ``tails``.
        device: device of the states.

    Attributes:
        first_snapshot: index of the first snapshot.
        states: fp32 ``[S, heads, key size, value size]`` of each recurrence.
        tails: the last input columns ``[S, W - 1, C]`` of each convolution, oldest first.
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
        num_states = self.first_snapshot + num_snapshots
        self.states = [
            torch.zeros(num_states, *recurrence.shape, device=device) for recurrence in spec.recurrences
        ]
        self.tails = [
            torch.zeros(num_states, width - 1, channels, dtype=dtype, device=device)
            for channels, width in spec.convolutions
        ]

    def window(self, attend: Attend, slot_ids: torch.Tensor, ancestors: torch.Tensor) -> "StateWindow":
        """Combine the attention of window nodes with their recurrence.

        Args:
            attend: attention of the nodes.
            slot_ids: int64 ``[B]``, index of each request's state.
            ancestors: int64 ``[B, N]``, bits of the ancestors of each node, as in ``WindowPlan``.
        """
        return StateWindow(attend, self, slot_ids, ancestors)

    def prompts(self, attend: Attend, texts: Sequence[Text]) -> Hybrid:
        """Combine the attention of packed prompts with their recurrence. The forward writes the states.

        Args:
            attend: attention of the prompts.
            texts: tokens of each prompt, the state that it continues from, and the states that it saves.
        """
        return Hybrid(attend, _PromptRecur(self, TextPlan(texts)))


class StateWindow(Hybrid):
    """Attention and recurrence of window nodes. The arguments are those of :meth:`StatePool.window`."""

    def __init__(
        self, attend: Attend, pool: StatePool, slot_ids: torch.Tensor, ancestors: torch.Tensor
    ) -> None:
        self._recurrence = _WindowRecur(pool, slot_ids, ancestors)
        super().__init__(attend, self._recurrence)

    def commit(self, path: torch.Tensor, num_committed: torch.Tensor) -> None:
        """Apply the accepted nodes to the states of the requests.

        Args:
            path: int64 ``[B, m]``, window indices of the nodes on the accepted path.
            num_committed: int64 ``[B]``, number of nodes on the path that are applied.
        """
        self._recurrence.commit(path, num_committed)


class _WindowRecur:
    """Recurrence of window nodes. The states change at :meth:`commit` only."""

    def __init__(self, pool: StatePool, slot_ids: torch.Tensor, ancestors: torch.Tensor) -> None:
        self._pool = pool
        self._slot_ids = slot_ids
        self._ancestors = ancestors

        # Columns that each node reads, by the width of the convolution.
        self._path_columns: dict[int, torch.Tensor] = {}

        # Input columns of each convolution and updates of each recurrence, by their numbers.
        self._columns: dict[int, torch.Tensor] = {}
        self._written: dict[int, Written] = {}

    def convolve(
        self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        # Columns of the path to each node; convolutions of one width share them.
        width = weight.shape[1]
        if width not in self._path_columns:
            self._path_columns[width] = path_columns(self._ancestors, width)

        # Keep the inputs of the nodes for the commit.
        nodes = x.view(*self._ancestors.shape, -1)  # [B, N, C]
        self._columns[number] = nodes

        tails = self._pool.tails[number]
        out = window_convolution(nodes, weight, bias, tails, self._slot_ids, self._path_columns[width])
        return out.flatten(0, 1)

    def recur(self, number: int, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""
        nodes = inputs.view(*self._ancestors.shape)
        states = self._pool.states[number]
        out, written = recurrent_window(nodes, states, self._slot_ids, self._ancestors, delta=delta)
        self._written[number] = written
        return out.flatten(0, 1)

    def commit(self, path: torch.Tensor, num_committed: torch.Tensor) -> None:
        """See :meth:`StateWindow.commit`."""
        # A cycle that lacks memory runs again, so that all memory is taken before the first write.
        moved = {}
        for number, columns in self._columns.items():
            tails = self._pool.tails[number]
            moved[number] = moved_tail(tails, self._slot_ids, columns, path, num_committed)

        # Write the tails and the states.
        for number, tail in moved.items():
            self._pool.tails[number][self._slot_ids] = tail
        for number, written in self._written.items():
            commit_recurrent(self._pool.states[number], self._slot_ids, written, path, num_committed)


class _PromptRecur:
    """Recurrence of packed prompts, which writes the states.

    Args:
        pool: the states.
        plan: plan of the prompts.
    """

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
