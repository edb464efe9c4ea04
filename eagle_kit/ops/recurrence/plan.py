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
    """Tokens ``start .. stop - 1`` of a forward.

    Attributes:
        source: number of the state before the first token; None at the beginning of a text.
        saves: pairs (tokens, number of the state), ascending: the state after so many of its tokens is saved
            under the number.
    """

    start: int
    stop: int
    source: int | None = None
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> slice:
        """Its tokens' rows of the forward."""
        return slice(self.start, self.stop)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of tokens after which states are saved."""
        return tuple(count for count, _ in self.saves)


class Columns(NamedTuple):
    """Indices of a convolution's columns, int64. Columns are the ``W - 1`` before each text, text after text,
    and then those of all tokens.

    Attributes:
        read: ``[T, W]``, columns that each token reads.
        saved: ``[saves, W - 1]``, columns that are saved as tails.
        numbers: ``[saves]``, numbers of these tails.
    """

    read: torch.Tensor
    saved: torch.Tensor
    numbers: torch.Tensor


class Chunks(NamedTuple):
    """Texts cut into chunks; int64.

    Attributes:
        sources: ``[texts]``, number of the state before each text, -1 at the beginning of a text.
        firsts: ``[texts + 1]``, first chunk of each text, and the number of chunks.
        starts, counts: ``[chunks]``, first token of each chunk, and its number of tokens, which may be 0.
        numbers: ``[chunks, saves]``, numbers under which the state behind a chunk is saved, -1 for none.
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
            # A chunk ends at ``size`` tokens, where a state is saved, and at the end of the text.
            length = text.stop - text.start
            numbers_after: dict[int, list[int]] = {}
            for count, number in text.saves:
                numbers_after.setdefault(count, []).append(number)
            bounds = sorted({*range(0, length, size), *numbers_after, length})
            if 0 in numbers_after:
                bounds.insert(0, 0)  # a chunk of no tokens saves the state before the text
            for first, stop in pairwise(bounds):
                starts.append(text.start + first)
                counts.append(stop - first)
                saved.append(numbers_after.get(stop, []))
            firsts.append(len(starts))

        # Numbers of all chunks as a rectangle.
        most = max((len(numbers) for numbers in saved), default=0)
        padded = [numbers + [-1] * (most - len(numbers)) for numbers in saved]
        sources = [-1 if text.source is None else text.source for text in self.texts]
        return Chunks(
            sources=to_device(sources, device),
            firsts=to_device(firsts, device),
            starts=to_device(starts, device),
            counts=to_device(counts, device),
            numbers=to_device(torch.tensor(padded, dtype=torch.int64), device),
        )

    def columns(self, width: int, device: torch.device) -> Columns:
        """Columns of a convolution of ``width``, the same for all layers."""
        key = width, device
        if key not in self._columns:
            self._columns[key] = self._make_columns(width, device)
        return self._columns[key]

    def _make_columns(self, width: int, device: torch.device) -> Columns:
        num_before = width - 1  # columns before each text
        first_token = len(self.texts) * num_before  # column of the first token
        reads = []
        saved = []
        numbers = []
        for i, text in enumerate(self.texts):
            # The columns of this text, those before it first.
            before = torch.arange(i * num_before, (i + 1) * num_before)
            columns = torch.cat((before, torch.arange(text.start, text.stop) + first_token))
            reads.append(columns.unfold(0, width, 1))
            for count, number in text.saves:
                saved.append(columns[count : count + num_before])
                numbers.append(number)
        tails = torch.stack(saved) if saved else torch.zeros(0, num_before, dtype=torch.int64)
        return Columns(
            read=to_device(torch.cat(reads), device),
            saved=to_device(tails, device),
            numbers=to_device(numbers, device),
        )
