"""Rows of an optimiser step as micro_batches: packed rows end to end, and the weight of the loss of every
row.

Legend: T packed tokens of a micro_batch, K steps of training-time test, R_k rows with loss at step k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle_kit.data.chat.dataset import PreparedData
from eagle_kit.objective.row_drop import RowDrop
from eagle_kit.objective.row_plan import RowPlan, plan_row
from eagle_kit.ops.transfer import to_device


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one process: packed rows laid end to end, each document by itself.

    Attributes:
        numbers: the packed rows, by their number in the data.
        lengths: their tokens.
        ids, doc_start: int64 ``[T]``.
        plan: which rows carry loss.
        group: int64 ``[T]``, what each token's document is counted as, below ``num_groups``.
        group_counts: rows with loss at step 0 in each group.
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
        """Documents with at least one row that carries loss."""
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
    """Lay the packed rows ``numbers`` end to end: replies stay different and documents apart; ``drop`` leaves
    rows out."""
    lengths: list[int] = []
    reply: list[np.ndarray] = []
    ids, doc_start, group = [], [], []
    for number in numbers:
        row = data.row(number)
        first, first_reply = sum(lengths), 1 + max((int(part.max()) for part in reply), default=-1)
        ids.append(np.asarray(row.ids, dtype=np.int64))
        mine = np.asarray(row.reply, dtype=np.int64)
        reply.append(np.where(mine >= 0, mine + first_reply, -1))
        doc_start.append(np.asarray(row.doc_start, dtype=np.int64) + first)
        group.append(np.asarray(row.group, dtype=np.int64))
        lengths.append(len(row.ids))
    packed = [torch.from_numpy(np.concatenate(part)) for part in (ids, reply, doc_start, group)]
    keep_rates = uniforms = most = None
    if drop is not None:
        keep_rates = drop.sampling.shares(ttt_length)
        most = drop.sampling.most
        uniforms = drop.uniforms(numbers, lengths)
    plan = plan_row(packed[1], packed[2], ttt_length, loss_rows, keep_rates, uniforms, most)
    counts = torch.bincount(packed[3][plan.rows[0]], minlength=len(data.groups)).tolist()
    moved, groups, plan = plan.to(device, packed[0], packed[3])
    return MicroBatch(numbers, lengths, moved, plan.doc_start, plan, groups, counts)


def row_weights(
    micro_batch: MicroBatch,
    weights: Sequence[float],
    normalisation: str,
    counts: Sequence[float],
    num_documents: float,
) -> list[torch.Tensor]:
    """Weight of the loss of every row at every step, so that their sum over the global batch is the loss.

    ``tokens``: ``w_k / (sum w * R_k)``, R_k the rows of the *global* batch.
    ``sequence``: ``w_k / (sum w * D * R_kd)``, D the documents of the global batch, R_kd the rows of the
    row's own document.
    ``published``: ``w_k / (D * T_d)``, T_d the tokens of the row's own document.

    Args:
        weights: step weights w.
        counts: R_k over all micro_batches and processes, K numbers.
        num_documents: D.

    Returns:
        K tensors fp32 ``[R_k of this micro_batch]``.
    """
    shares = [weight / sum(weights) for weight in weights]
    if normalisation == "tokens":
        return [
            torch.full(rows.shape, share / max(1.0, count), dtype=torch.float32, device=rows.device)
            for rows, share, count in zip(micro_batch.plan.rows, shares, counts, strict=True)
        ]
    plan = micro_batch.plan.on_host
    documents = [plan.doc_start[rows] for rows in plan.rows]
    if normalisation == "published":
        tokens = torch.bincount(plan.doc_start)
        parts = [
            weight / max(1.0, num_documents) / tokens[mine].float()
            for mine, weight in zip(documents, weights, strict=True)
        ]
    else:
        parts = [
            share / max(1.0, num_documents) / torch.bincount(mine)[mine].float()
            for mine, share in zip(documents, shares, strict=True)
        ]
    whole = to_device(torch.cat(parts), micro_batch.ids.device, torch.float32)
    return list(whole.split(plan.counts))
