"""Rows that an optimiser step trains, drawn anew for each.

Conditional drop of deeper rows (COD; P-EAGLE, arXiv 2602.01469, section 4): depth d of a draft is trained at
a share max(r^d, floor) of the supervised rows, so that K depths cost little more than a few. One uniform
random number of a row decides for all depths. So the rows of a depth are among those of the depth before,
whose keys they attend to. A head that runs step by step reads its own row alone, so the rows that are left
train it as before.

Anchors (DFlash, arXiv 2602.06036, section 4): the rows of a document with the smallest numbers, at most
``most`` of them, at all depths.

The number depends on the seed, the optimiser step and the number of the packed sequence alone. It does not
depend on the process or on other sequences, so a resumed run is bitwise the uninterrupted one.

Legend: T packed tokens of a micro-batch, R supervised rows, A anchors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eagle_kit.config.training import RowSampling

_STREAM = 0x64726F70
"""First word of the seeds of these draws, so that they differ from other draws of the run."""


class RowDrop(NamedTuple):
    """Draw of the rows that one optimiser step trains.

    Attributes:
        sampling: shares of rows by depth, and number of anchors.
        seed: seed of the run.
        step: finished optimiser steps.
    """

    sampling: RowSampling
    seed: int
    step: int

    def uniforms(self, numbers: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Draw a number in [0, 1) for each token, fp32 ``[T]``.

        A row is trained at the depths whose share is above its number.

        Args:
            numbers: numbers of the packed sequences.
            lengths: tokens of each packed sequence.
        """
        parts = []
        for number, length in zip(numbers, lengths, strict=True):
            generator = row_generator(_STREAM, self.seed, self.step, number)
            parts.append(torch.rand(length, generator=generator))
        return torch.cat(parts)


def anchors_of(
    rows: torch.Tensor, doc_start: torch.Tensor, uniforms: torch.Tensor, most: int
) -> torch.Tensor:
    """Choose the anchors of every document: the rows with the smallest numbers.

    Args:
        rows: supervised rows at step 0, ascending, int64 ``[R]``.
        doc_start: first token of each token's document, int64 ``[T]``.
        uniforms: number of each token, fp32 ``[T]``.
        most: maximum number of anchors of a document.

    Returns:
        The anchors, ascending, int64 ``[A]``.
    """
    # Rows by document, and in a document by their number.
    document = doc_start[rows]  # [R]
    order = torch.argsort(uniforms[rows], stable=True)  # [R]
    order = order[torch.argsort(document[order], stable=True)]

    # Rank of each row in its document. Documents ascend with rows.
    first = torch.searchsorted(document, document[order])  # [R]
    rank = torch.arange(len(order), device=rows.device) - first
    return rows[order[rank < most].sort().values]


def row_generator(stream: int, seed: int, step: int, number: int) -> torch.Generator:
    """Generator for the draws of one packed sequence in one optimiser step.

    Args:
        stream: purpose of the draws.
        seed: seed of the run.
        step: finished optimiser steps.
        number: number of the packed sequence.
    """
    words = np.random.SeedSequence([stream, seed, step, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)
