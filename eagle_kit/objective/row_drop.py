"""Rows that an optimiser step trains, drawn anew for each.

Conditional drop of deeper rows (COD; P-EAGLE, arXiv 2602.01469, section 4): depth d of a draft is trained at
a share max(r^d, floor) of the rows that could learn there, so that K depths cost little more than a few. A
row's uniform random number decides for all depths, so rows of a depth are among those of the depth before,
whose keys they attend to. What a head is fed back comes from its own row alone, so heads whose steps are run
one after another train the same way at the rows that are left.

Anchors (DFlash, arXiv 2602.06036, section 4): the rows of a document with the smallest numbers, at most
``most`` of them, at all depths.

The number depends on the seed, the optimiser step and the packed row's number alone: not on the process that
has the row, nor on the rows beside it. So a run resumes to the bit.

Legend: T packed tokens of a micro_batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eagle_kit.config.training import RowSampling

_STREAM = 0x64726F70
"""Keeps these draws apart from others that begin with the run's seed."""


class RowDrop(NamedTuple):
    """Draw of the rows that are kept in the optimiser step after ``step`` finished ones of a run with
    ``seed``."""

    sampling: RowSampling
    seed: int
    step: int

    def uniforms(self, numbers: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A number in [0, 1) for each token of the packed rows ``numbers`` of ``lengths`` tokens, fp32
        ``[T]``; a row stays at the depths whose share is above its number."""
        parts = [
            torch.rand(length, generator=row_generator(_STREAM, self.seed, self.step, number))
            for number, length in zip(numbers, lengths, strict=True)
        ]
        return torch.cat(parts)


def anchors_of(
    rows: torch.Tensor, doc_start: torch.Tensor, uniforms: torch.Tensor, most: int
) -> torch.Tensor:
    """At most ``most`` of the ``rows`` of every document, those with the smallest ``uniforms [T]``: int64
    ``[R]`` ascending -> int64 ``[A]`` ascending."""
    document = doc_start[rows]
    order = torch.argsort(uniforms[rows], stable=True)
    order = order[torch.argsort(document[order], stable=True)]
    first = torch.searchsorted(document, document[order])  # documents ascend with rows
    rank = torch.arange(len(order), device=rows.device) - first
    return rows[order[rank < most].sort().values]


def row_generator(stream: int, seed: int, step: int, number: int) -> torch.Generator:
    """Generator for the packed row ``number`` in one optimiser step of one purpose, the ``stream``."""
    words = np.random.SeedSequence([stream, seed, step, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)
