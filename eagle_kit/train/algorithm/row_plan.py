"""Rows of a packed row that carry loss, and the plan of their attention: known before any model runs.

Legend: T packed tokens, K steps, R_k rows with loss at step k, C_k computed rows.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from eagle_kit.kernels.ttt_attention import QueryPlan, plan_rows
from eagle_kit.train.algorithm.align import published_rows, supervised_rows, teacher_of


@dataclass(frozen=True)
class RowPlan:
    """Row indices of training-time test for one packed row.

    Attributes:
        rows: rows that carry loss at each step, int64 ``[R_k]``.
        computed: rows that carry loss at each step or at one after it, int64 ``[C_k]``, nested; the same as
            ``rows`` where those are nested.
        kept: for k >= 1, where the computed rows of step k are among those of step k - 1, int64 ``[C_k]``.
        attention: attention plan of each step, of the computed rows.
        needed: bool ``[T]``, positions that some row learns from.
        doc_start: int64 ``[T]``.
    """

    rows: list[torch.Tensor]
    computed: list[torch.Tensor]
    kept: list[torch.Tensor]
    attention: list[QueryPlan]
    needed: torch.Tensor
    doc_start: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """R_k of each step."""
        return [int(rows.shape[0]) for rows in self.rows]


def plan_row(
    reply: torch.Tensor, doc_start: torch.Tensor, ttt_length: int, loss_rows: str = "serving"
) -> RowPlan:
    """Plan of a packed row.

    Args:
        reply, doc_start: int64 ``[T]``, see :mod:`eagle_kit.train.algorithm.align`.
        ttt_length: K.
        loss_rows: ``serving`` or ``published``, see there.
    """
    if loss_rows == "published":
        rows = published_rows(reply, doc_start, ttt_length)
        computed = [torch.unique(torch.cat(rows[k:])) for k in range(ttt_length)]
    else:
        rows = computed = supervised_rows(reply, ttt_length)
    kept = [torch.searchsorted(before, after) for before, after in pairwise(computed)]
    needed = torch.zeros_like(reply, dtype=torch.bool)
    for step, mine in enumerate(rows):
        needed[teacher_of(mine, step)] = True
    attention = [plan_rows(r, doc_start) for r in computed]
    return RowPlan(rows, computed, [computed[0], *kept], attention, needed, doc_start)
