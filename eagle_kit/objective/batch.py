"""Packed sequences of an optimiser step as micro-batches, end to end, and the weight of every row's loss.

Legend: T packed tokens of a micro-batch, K steps of training-time test, R_k supervised rows of step k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle_kit.data.chat.dataset import PreparedData
from eagle_kit.objective.row_drop import RowDrop
from eagle_kit.objective.row_plan import RowPlan, make_row_plan
from eagle_kit.ops.transfer import to_device


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward in one process: packed sequences end to end. Documents do not attend to others.

    Attributes:
        numbers: number of each packed sequence in the data.
        lengths: tokens of each packed sequence.
        ids: token ids, int64 ``[T]``.
        doc_start: first token of each token's document, int64 ``[T]``.
        plan: the supervised rows of each step.
        group: group of each token in the statistics, int64 ``[T]``, below ``num_groups``.
        group_counts: number of supervised rows at step 0 in each group.
    """

    numbers: list[int]
    lengths: list[int]
    ids: torch.Tensor
    doc_start: torch.Tensor
    plan: RowPlan
    group: torch.Tensor
    group_counts: list[int]

    @property
    def num_groups(self) -> int:
        """Number of groups in the data."""
        return len(self.group_counts)

    @property
    def num_documents(self) -> int:
        """Documents with at least one supervised row."""
        plan = self.plan.on_host
        return int(torch.unique_consecutive(plan.doc_start[plan.rows[0]]).shape[0])


def make_micro_batch(
    data: PreparedData,
    numbers: list[int],
    ttt_length: int,
    device: torch.device,
    loss_rows: str = "serving",
    drop: RowDrop | None = None,
) -> MicroBatch:
    """Lay packed sequences end to end, and plan which of their rows are supervised.

    Args:
        numbers: numbers of the packed sequences.
        ttt_length: K.
        device: device of the result.
        loss_rows: rule for the supervised rows, see :mod:`eagle_kit.objective.align`.
        drop: supervised rows that are left out; None keeps all.
    """
    # Lay the sequences end to end. Responses are numbered on from those of the sequences before.
    lengths: list[int] = []
    ids_parts: list[np.ndarray] = []
    response_parts: list[np.ndarray] = []
    start_parts: list[np.ndarray] = []
    group_parts: list[np.ndarray] = []
    num_responses = 0
    for number in numbers:
        row = data.row(number)
        offset = sum(lengths)
        row_response = np.asarray(row.response, dtype=np.int64)
        response_parts.append(np.where(row_response >= 0, row_response + num_responses, -1))
        num_responses = max(num_responses, int(response_parts[-1].max()) + 1)
        ids_parts.append(np.asarray(row.ids, dtype=np.int64))
        start_parts.append(np.asarray(row.doc_start, dtype=np.int64) + offset)
        group_parts.append(np.asarray(row.group, dtype=np.int64))
        lengths.append(len(row.ids))
    ids = torch.from_numpy(np.concatenate(ids_parts))
    response = torch.from_numpy(np.concatenate(response_parts))
    doc_start = torch.from_numpy(np.concatenate(start_parts))
    group = torch.from_numpy(np.concatenate(group_parts))

    # Supervised rows.
    keep_rates = None
    uniforms = None
    most = None
    if drop is not None:
        keep_rates = drop.sampling.shares(ttt_length)
        uniforms = drop.uniforms(numbers, lengths)
        most = drop.sampling.most
    plan = make_row_plan(response, doc_start, ttt_length, loss_rows, keep_rates, uniforms, most)
    group_counts = torch.bincount(group[plan.rows[0]], minlength=len(data.groups)).tolist()

    # Copy everything to the device.
    ids, group, plan = plan.to(device, ids, group)
    return MicroBatch(
        numbers=numbers,
        lengths=lengths,
        ids=ids,
        doc_start=plan.doc_start,
        plan=plan,
        group=group,
        group_counts=group_counts,
    )


def row_weights(
    micro_batch: MicroBatch,
    weights: Sequence[float],
    normalisation: str,
    counts: Sequence[float],
    num_documents: float,
) -> list[torch.Tensor]:
    """Weight of every row's loss at every step. The weighted sum over the global batch is its loss.

    With step weights w, D documents and R_k rows of step k in the global batch, and in the row's own document
    R_kd rows of step k and T_d tokens, the weight of a row by ``normalisation`` is::

        tokens       w_k / (sum w * R_k)
        sequence     w_k / (sum w * D * R_kd)
        published    w_k / (D * T_d)

    Args:
        weights: w, K numbers.
        normalisation: ``tokens``, ``sequence`` or ``published``.
        counts: R_k of the global batch, K numbers.
        num_documents: D.

    Returns:
        K tensors fp32, as long as ``micro_batch.plan.rows``.
    """
    shares = [weight / sum(weights) for weight in weights]

    # All rows of a step weigh the same.
    if normalisation == "tokens":
        full = []
        for rows, share, count in zip(micro_batch.plan.rows, shares, counts, strict=True):
            weight = share / max(1.0, count)
            full.append(torch.full(rows.shape, weight, dtype=torch.float32, device=rows.device))
        return full

    # The weight depends on the row's document.
    plan = micro_batch.plan.on_host
    num_tokens = torch.bincount(plan.doc_start)
    num_documents = max(1.0, num_documents)
    parts = []
    for step, rows in enumerate(plan.rows):
        documents = plan.doc_start[rows]
        if normalisation == "published":
            parts.append(weights[step] / num_documents / num_tokens[documents].float())
        else:
            num_rows = torch.bincount(documents)
            parts.append(shares[step] / num_documents / num_rows[documents].float())

    # One copy to the device.
    whole = to_device(torch.cat(parts), micro_batch.ids.device, torch.float32)
    return list(whole.split(plan.counts))
