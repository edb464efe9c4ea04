"""Rows of a packed row that carry loss, and the plan of their attention: known before any model runs.

A plan is made on the host, of arrays that are there, and goes to the device in one copy that the host does
not wait for. Whatever Python decides by (lengths, borders, sizes) comes from the host's arrays.

Legend: T packed tokens, K steps, R_k rows with loss at step k, C_k computed rows, M rows of all steps in a
block, P positions that they learn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from eagle_kit.objective.align import published_rows, supervised_rows, teacher_of
from eagle_kit.objective.row_drop import anchors_of
from eagle_kit.ops.attention.packed import document_spans
from eagle_kit.ops.attention.ttt import QueryPlan, plan_rows
from eagle_kit.ops.transfer import to_device


class LossBlock(NamedTuple):
    """Rows of all steps whose teachers exist together.

    Attributes:
        pieces: (start, stop) among the rows of each step, K of them; end to end they are the block's M rows.
        teachers: positions that the rows learn from, int64 ``[M]``.
        wanted: the same, each once, ascending, int64 ``[P]``.
        which: where the teacher of a row is in ``wanted``, int64 ``[M]``.
    """

    pieces: list[tuple[int, int]]
    teachers: torch.Tensor
    wanted: torch.Tensor
    which: torch.Tensor

    def of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The block's rows of K tensors ``[R_k, ...]`` -> ``[M, ...]``."""
        return torch.cat([part[a:b] for part, (a, b) in zip(parts, self.pieces, strict=True)])


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
        shares: part of the rows of each step that was kept, K numbers; 1 without a drop.
        host: the same plan on the host, whose ``needed`` this one shares; None where this one is it.
    """

    rows: list[torch.Tensor]
    computed: list[torch.Tensor]
    kept: list[torch.Tensor]
    attention: list[QueryPlan]
    needed: torch.Tensor
    doc_start: torch.Tensor
    shares: tuple[float, ...]
    host: "RowPlan | None" = None

    @property
    def counts(self) -> list[int]:
        """R_k of each step."""
        return [int(rows.shape[0]) for rows in self.rows]

    @property
    def on_host(self) -> "RowPlan":
        """The plan whose tensors Python may read."""
        return self.host or self

    @cached_property
    def length(self) -> int:
        """Tokens up to the last computed row."""
        return int(self.on_host.computed[0][-1]) + 1

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each document."""
        return document_spans(self.on_host.doc_start)

    @cached_property
    def taught(self) -> torch.Tensor:
        """Positions that some row learns from, int64 ``[P]``."""
        found = torch.nonzero(self.on_host.needed)[:, 0]
        return _moved([found], self.doc_start.device)[0]

    def blocks(self, size: int) -> list[LossBlock]:
        """The rows in blocks of ``size`` computed rows of step 0, on the plan's device."""
        host, device, made = self.on_host, self.doc_start.device, []
        first = host.computed[0]
        for start in range(0, first.shape[0], size):
            ends = torch.stack((first[start], first[min(start + size, first.shape[0]) - 1] + 1))
            pieces = [(int(a), int(b)) for a, b in (torch.searchsorted(rows, ends) for rows in host.rows)]
            parts = [
                teacher_of(rows[a:b], k)
                for k, (rows, (a, b)) in enumerate(zip(host.rows, pieces, strict=True))
            ]
            teachers = torch.cat(parts)
            made.append((pieces, teachers, *torch.unique(teachers, return_inverse=True)))
        tensors = _moved([tensor for _, *three in made for tensor in three], device)
        threes = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        return [LossBlock(pieces, *three) for (pieces, *_), three in zip(made, threes, strict=True)]

    def to(
        self, device: torch.device, ids: torch.Tensor, group: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, "RowPlan"]:
        """``ids``, ``group`` and the plan, all of the host, on ``device``, in one copy."""
        if device.type == "cpu":
            return ids, group, self
        steps, nested = len(self.rows), self.rows is self.computed
        parts = [
            ids,
            group,
            self.doc_start,
            self.taught,
            *self.rows,
            *self.kept[1:],
            *([] if nested else self.computed),
        ]
        ids, group, doc_start, taught, *parts = _moved(parts, device)
        rows, kept, computed = parts[:steps], parts[steps : 2 * steps - 1], parts[2 * steps - 1 :]
        computed = rows if nested else computed
        attention = [plan_rows(mine, doc_start) for mine in computed]
        kept = [computed[0], *kept]
        plan = RowPlan(rows, computed, kept, attention, self.needed, doc_start, self.shares, self)
        vars(plan)["taught"] = taught  # of the same copy
        return ids, group, plan


def _moved(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """int64 tensors on ``device``, in one copy where they are of the host."""
    if not parts or parts[0].device.type == device.type:
        return parts
    whole = to_device(torch.cat(parts), device)
    ends = accumulate((len(part) for part in parts), initial=0)
    return [whole[a:b] for a, b in pairwise(ends)]


def plan_row(
    reply: torch.Tensor,
    doc_start: torch.Tensor,
    ttt_length: int,
    loss_rows: str = "serving",
    shares: tuple[float, ...] | None = None,
    uniforms: torch.Tensor | None = None,
    most: int | None = None,
) -> RowPlan:
    """Plan of a packed row.

    Args:
        reply, doc_start: int64 ``[T]``, see :mod:`eagle_kit.objective.align`.
        ttt_length: K.
        loss_rows: ``serving`` or ``published``, see there.
        shares, uniforms, most: of a :class:`~eagle_kit.objective.row_drop.RowDrop`; None keeps all.
    """
    is_published, shares = loss_rows == "published", shares or (1.0,) * ttt_length
    if is_published:
        rows = published_rows(reply, doc_start, ttt_length)
    else:
        rows = supervised_rows(reply, ttt_length)
    if uniforms is not None and most is not None:
        chosen = anchors_of(rows[0], doc_start, uniforms, most)
        rows = [mine[torch.isin(mine, chosen)] for mine in rows]
    if uniforms is not None:
        rows = [mine[uniforms[mine] < share] for mine, share in zip(rows, shares, strict=True)]
    computed = rows
    if is_published:
        computed = [torch.unique(torch.cat(rows[k:])) for k in range(ttt_length)]
    kept = [torch.searchsorted(before, after) for before, after in pairwise(computed)]
    needed = torch.zeros_like(reply, dtype=torch.bool)
    for step, mine in enumerate(rows):
        needed[teacher_of(mine, step)] = True
    attention = [plan_rows(r, doc_start) for r in computed]
    return RowPlan(rows, computed, [computed[0], *kept], attention, needed, doc_start, shares)
