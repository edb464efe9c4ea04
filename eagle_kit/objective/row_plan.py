"""Supervised rows of a packed sequence at each step, and their attention plans.

A plan depends on the loss mask alone, so it is made before any model runs. It is made on the host and copied
to the device in one transfer: Python reads sizes and borders of the host's tensors, and never waits for a
GPU.

Legend: T packed tokens, K steps (``ttt_length``), R_k supervised rows of step k, C_k computed rows of step k,
M rows of all steps in a block, P distinct teacher positions.
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
from eagle_kit.ops.attention.ttt import QueryPlan, plan_queries
from eagle_kit.ops.transfer import to_device


class LossBlock(NamedTuple):
    """Rows of all steps whose loss is computed together, because they share teachers.

    Attributes:
        bounds: K pairs (start, stop): the block's rows among the R_k rows of each step. Joined in this order
            they are the M rows of the block.
        teachers: position whose target distribution each row learns, int64 ``[M]``.
        unique_teachers: the distinct values of ``teachers``, ascending, int64 ``[P]``.
        teacher_index: index of each row's teacher in ``unique_teachers``, int64 ``[M]``.
    """

    bounds: list[tuple[int, int]]
    teachers: torch.Tensor
    unique_teachers: torch.Tensor
    teacher_index: torch.Tensor

    def select(self, steps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the block's rows of K tensors ``[R_k, ...]`` to one ``[M, ...]``."""
        parts = []
        for rows, (start, stop) in zip(steps, self.bounds, strict=True):
            parts.append(rows[start:stop])
        return torch.cat(parts)


@dataclass(frozen=True)
class RowPlan:
    """Row indices of training-time test for one packed sequence.

    Attributes:
        rows: K tensors int64 ``[R_k]``, ascending: the supervised rows of each step.
        computed: K tensors int64 ``[C_k]``, ascending: the rows that are supervised in this step or in a
            later one. Each is a subset of the one before. They are the tensors of ``rows`` if those are
            nested.
        index_in_previous: K tensors. For k >= 1, int64 ``[C_k]``: index of each computed row of step k among
            the computed rows of step k - 1. The first is not used.
        attention: K attention plans of the computed rows.
        is_teacher: bool ``[T]``, True at positions whose target distribution a row learns. On the host.
        doc_start: int64 ``[T]``, first token of each token's document.
        keep_rates: K numbers, the share of rows that conditional drop kept at each step; 1 without it.
        host: the same plan on the host; None if this plan is on the host.
    """

    rows: list[torch.Tensor]
    computed: list[torch.Tensor]
    index_in_previous: list[torch.Tensor]
    attention: list[QueryPlan]
    is_teacher: torch.Tensor
    doc_start: torch.Tensor
    keep_rates: tuple[float, ...]
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
    def teacher_positions(self) -> torch.Tensor:
        """Positions whose target distribution a row learns, ascending, int64 ``[P]``."""
        found = torch.nonzero(self.on_host.is_teacher)[:, 0]
        return _moved([found], self.doc_start.device)[0]

    def blocks(self, size: int) -> list[LossBlock]:
        """Cut the rows into blocks, each with the rows of all steps in one range of ``size`` computed rows
        of step 0. The tensors are on the plan's device."""
        host = self.on_host
        first = host.computed[0]
        bounds: list[list[tuple[int, int]]] = []
        tensors: list[torch.Tensor] = []
        for start in range(0, first.shape[0], size):
            # The block's range of row indices, and where it begins and ends among the rows of each step.
            last = min(start + size, first.shape[0]) - 1
            ends = torch.stack((first[start], first[last] + 1))
            block_bounds = []
            teachers = []
            for step, rows in enumerate(host.rows):
                begin, end = torch.searchsorted(rows, ends).tolist()
                block_bounds.append((begin, end))
                teachers.append(teacher_of(rows[begin:end], step))
            bounds.append(block_bounds)

            # Teachers of the block, and each of them once.
            block_teachers = torch.cat(teachers)
            unique_teachers, teacher_index = torch.unique(block_teachers, return_inverse=True)
            tensors += [block_teachers, unique_teachers, teacher_index]

        # All blocks go to the device in one copy; each has three tensors.
        moved = _moved(tensors, self.doc_start.device)
        blocks = []
        for number, block_bounds in enumerate(bounds):
            block_teachers, unique_teachers, teacher_index = moved[3 * number : 3 * number + 3]
            blocks.append(LossBlock(block_bounds, block_teachers, unique_teachers, teacher_index))
        return blocks

    def to(
        self, device: torch.device, ids: torch.Tensor, group: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, "RowPlan"]:
        """Copy ``ids``, ``group`` and this plan from the host to ``device``, in one transfer."""
        if device.type == "cpu":
            return ids, group, self

        # Everything in one list. Computed rows are sent only if they are not the supervised rows.
        num_steps = len(self.rows)
        is_nested = self.rows is self.computed
        parts = [ids, group, self.doc_start, self.teacher_positions]
        parts += self.rows
        parts += self.index_in_previous[1:]
        if not is_nested:
            parts += self.computed

        # The same list on the device, taken apart.
        ids, group, doc_start, teacher_positions, *moved = _moved(parts, device)
        rows = moved[:num_steps]
        index_in_previous = moved[num_steps : 2 * num_steps - 1]
        computed = rows
        if not is_nested:
            computed = moved[2 * num_steps - 1 :]

        attention = [plan_queries(step_rows, doc_start) for step_rows in computed]
        plan = RowPlan(
            rows=rows,
            computed=computed,
            index_in_previous=[computed[0], *index_in_previous],
            attention=attention,
            is_teacher=self.is_teacher,
            doc_start=doc_start,
            keep_rates=self.keep_rates,
            host=self,
        )
        vars(plan)["teacher_positions"] = teacher_positions  # fills the cached property
        return ids, group, plan


def _moved(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 tensors ``[n_i]`` to ``device`` as one tensor; unchanged if they are there already."""
    if not parts or parts[0].device.type == device.type:
        return parts
    whole = to_device(torch.cat(parts), device)
    ends = accumulate((len(part) for part in parts), initial=0)
    return [whole[a:b] for a, b in pairwise(ends)]


def make_row_plan(
    response: torch.Tensor,
    doc_start: torch.Tensor,
    ttt_length: int,
    loss_rows: str = "serving",
    keep_rates: tuple[float, ...] | None = None,
    uniforms: torch.Tensor | None = None,
    most: int | None = None,
) -> RowPlan:
    """Make the plan of a packed sequence, on the host.

    Args:
        response: int64 ``[T]``, number of the response each token belongs to, -1 elsewhere: the loss mask,
            see :mod:`eagle_kit.objective.align`.
        doc_start: int64 ``[T]``, first token of each token's document.
        ttt_length: K.
        loss_rows: ``serving`` or ``published``, see :mod:`eagle_kit.objective.align`.
        keep_rates: K shares of rows that conditional drop keeps; None keeps all.
        uniforms: fp32 ``[T]``, the draw of a :class:`~eagle_kit.objective.row_drop.RowDrop`; None keeps all.
        most: anchors of a document at most, for blocks (DFlash); None keeps all.
    """
    keep_rates = keep_rates or (1.0,) * ttt_length
    is_published = loss_rows == "published"

    # Supervised rows.
    if is_published:
        rows = published_rows(response, doc_start, ttt_length)
    else:
        rows = supervised_rows(response, ttt_length)

    # Rows that the draw keeps.
    if uniforms is not None and most is not None:
        anchors = anchors_of(rows[0], doc_start, uniforms, most)
        rows = [step_rows[torch.isin(step_rows, anchors)] for step_rows in rows]
    if uniforms is not None:
        rows = [
            step_rows[uniforms[step_rows] < rate] for step_rows, rate in zip(rows, keep_rates, strict=True)
        ]

    # Rows that run: published rows are not nested, and later steps need the states of earlier ones.
    computed = rows
    if is_published:
        computed = [torch.unique(torch.cat(rows[k:])) for k in range(ttt_length)]
    index_in_previous = [torch.searchsorted(before, after) for before, after in pairwise(computed)]

    # Positions that they learn from.
    is_teacher = torch.zeros_like(response, dtype=torch.bool)
    for step, step_rows in enumerate(rows):
        is_teacher[teacher_of(step_rows, step)] = True

    return RowPlan(
        rows=rows,
        computed=computed,
        index_in_previous=[computed[0], *index_in_previous],
        attention=[plan_queries(step_rows, doc_start) for step_rows in computed],
        is_teacher=is_teacher,
        doc_start=doc_start,
        keep_rates=keep_rates,
    )
