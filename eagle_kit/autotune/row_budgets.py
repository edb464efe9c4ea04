"""Budgets of rows: only the likeliest drafts of a batch are verified, in fewer rows than whole windows have.

No engine uses them yet: all verify whole windows. They are for an engine whose target runs over ragged
windows (adaptive verification across the requests of a batch, on a GPU). It will give its ``ShapeChooser`` a
:class:`RowBudgets`, with ``CostTable.row_share`` as costs, and the chooser then takes whole windows or cuts
of chains.

Legend: B requests, C confidence classes, S draft steps.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_kit.core.shape import SpecShape


@dataclass(frozen=True)
class RowBudgets:
    """Numbers of rows to which the target's forward over a batch's chains may be cut; no engine has them yet.

    The rows are those of the likeliest drafts of the batch.

    Attributes:
        rows: ``(batch size, chain)`` -> numbers of rows, roots included, fewer than whole windows have.
        share: ``(batch size, chain, context, rows)`` -> time of such a cycle over that with whole windows.
    """

    rows: Callable[[int, SpecShape], Sequence[int]]
    share: Callable[[int, SpecShape, int, int], float]


def expected_accepted(survival: np.ndarray, histograms: np.ndarray, num_drafts: int) -> float:
    """Expected number of accepted drafts if the likeliest drafts of a batch are verified, averaged over
    confidences.

    Args:
        survival: ``[B, C, S]``, probability that each depth is accepted with all before it.
        histograms: ``[B, C]``, share of each confidence class in the cycles of a request.
        num_drafts: verified drafts of all requests together.
    """
    shares = np.broadcast_to(histograms[:, :, None], survival.shape).ravel()
    order = (-survival).ravel().argsort()
    before = shares[order].cumsum() - shares[order]
    return float(np.clip(num_drafts - before, 0.0, shares[order]) @ survival.ravel()[order])


def tokens_by_num_drafts(survival: Iterable[Sequence[float]]) -> list[float]:
    """Expected tokens of a cycle of a batch, by the number of its likeliest drafts that are verified.

    Args:
        survival: for each of the B requests, the probability that each depth is accepted with all before it.
    """
    requests = list(survival)
    ranked = sorted(itertools.chain(*requests), reverse=True)
    return [*itertools.accumulate(ranked, initial=float(len(requests)))]
