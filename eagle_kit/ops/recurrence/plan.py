"""Texts of a packed forward, and the states that they begin with and leave behind.

Legend: T packed tokens, W width of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from eagle_kit.ops.transfer import to_device


class Text(NamedTuple):
    """Tokens start..stop-1 of a forward.

    Attributes:
        source: number of the state before the first; None at the beginning of a text.
        saves: (tokens, number of the state): what is saved when so many of its tokens are computed,
            ascending.
    """

    start: int
    stop: int
    source: int | None = None
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.start, self.stop)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of tokens after which states are saved."""
        return tuple(count for count, _ in self.saves)


class Columns(NamedTuple):
    """Columns of a convolution, counted over the ``W - 1`` columns before each text, text after text, and
    then all tokens: those that each token reads, ``read [T, W]``, and those ``saved [saves, W - 1]`` to the
    tails ``numbers``; int64."""

    read: torch.Tensor
    saved: torch.Tensor
    numbers: torch.Tensor


class Chunks(NamedTuple):
    """Texts cut into chunks; int64.

    Attributes:
        sources: number of the state before each text, -1 at the beginning of one.
        firsts: first chunk of each text, and the number of all.
        starts, counts: first token of each chunk, and its tokens, perhaps none.
        numbers: ``[chunks, most]``, states that are saved behind it, -1 for none.
    """

    sources: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    numbers: torch.Tensor


@dataclass(frozen=True)
class TextPlan:
    """Packed ``texts``, in order and without gaps."""

    texts: Sequence[Text]
    _columns: dict[tuple[int, torch.device], Columns] = field(default_factory=dict)
    _chunks: dict[tuple[int, torch.device], Chunks] = field(default_factory=dict)

    def chunks(self, size: int, device: torch.device) -> Chunks:
        """Chunks of at most ``size`` tokens, the same for all layers."""
        key = size, device
        if key not in self._chunks:
            self._chunks[key] = self._make_chunks(size, device)
        return self._chunks[key]

    def _make_chunks(self, size: int, device: torch.device) -> Chunks:
        firsts = [0]
        starts = []
        counts = []
        saved = []
        for text in self.texts:
            length = text.stop - text.start
            saves = dict[int, list[int]]()
            for count, number in text.saves:
                saves.setdefault(count, []).append(number)
            cuts = sorted({*range(0, length, size), *saves, length})
            if 0 in saves:
                cuts.insert(0, 0)  # a chunk of no tokens saves the state before the text
            for first, stop in pairwise(cuts):
                starts.append(text.start + first)
                counts.append(stop - first)
                saved.append(saves.get(stop, []))
            firsts.append(len(starts))
        most = max((len(numbers) for numbers in saved), default=0)
        numbers = [[*each, *[-1] * (most - len(each))] for each in saved]
        sources = [-1 if text.source is None else text.source for text in self.texts]
        parts = (torch.tensor(part, dtype=torch.int64) for part in (sources, firsts, starts, counts, numbers))
        return Chunks(*(to_device(part, device) for part in parts))

    def columns(self, width: int, device: torch.device) -> Columns:
        """Columns of a convolution of ``width``, the same for all layers."""
        key = width, device
        if key not in self._columns:
            self._columns[key] = self._make_columns(width, device)
        return self._columns[key]

    def _make_columns(self, width: int, device: torch.device) -> Columns:
        kept = width - 1
        heads = len(self.texts) * (width - 1)
        reads = []
        saved = []
        numbers = []
        for i, text in enumerate(self.texts):
            own = torch.arange(text.start, text.stop) + heads
            line = torch.cat((torch.arange(i * kept, (i + 1) * kept), own))
            reads.append(line.unfold(0, width, 1))
            for count, number in text.saves:
                saved.append(line[count : count + kept])
                numbers.append(number)
        found = torch.stack(saved) if saved else torch.zeros(0, kept, dtype=torch.int64)
        parts = torch.cat(reads), found, torch.tensor(numbers, dtype=torch.int64)
        return Columns(*(to_device(part, device) for part in parts))
