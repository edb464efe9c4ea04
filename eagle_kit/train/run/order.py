"""Packed rows of every optimiser step: a pure function of the seed and the step counter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eagle_kit.config.train import DataConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.dataset import PreparedData

GOLDEN = 0.6180339887498949
"""Step of the sequence that draws parts: the fractions of its multiples fill [0, 1) more evenly than random
numbers do, so that any stretch of a run has the shares that were asked for."""
NOBODY = -1
"""The part of a place that no part is drawn for."""


@dataclass(frozen=True)
class Part:
    """Rows that are drawn together: a source of a mixture, or all rows where there is none.

    Attributes:
        first, num_rows: the rows; ``num_rows`` >= 1.
        weight: share of the rows that are drawn, relative to the other parts'.
        phase: (start, end) of the schedule in which it is drawn, in [0, 1].
        max_rows: most rows that are drawn; None is any number.
        name: for messages.
    """

    first: int
    num_rows: int
    weight: float = 1.0
    phase: tuple[float, float] = (0.0, 1.0)
    max_rows: int | None = None
    name: str = ""


def parts_of(settings: DataConfig, data: PreparedData) -> list[Part]:
    """Parts of ``data`` as ``data.mix`` draws them; one part without a mixture. Weights are shares of tokens,
    so a part with short rows is drawn more often."""
    if not settings.mix:
        return [Part(0, len(data))]
    if len(settings.mix) != len(data.parts):
        raise UserError(
            f"data.mix has {len(settings.mix)} sources, and the rows were packed of {len(data.parts)}.",
            "Name the sources that the store was captured from, or leave data.mix out.",
        )
    return [
        Part(
            part.first,
            part.num_rows,
            source.weight * part.num_rows / part.num_tokens,
            source.phase,
            None if source.max_repeats is None else int(source.max_repeats * part.num_rows),
            part.name,
        )
        for source, part in zip(settings.mix, data.parts, strict=True)
    ]


class DataOrder:
    """Seeded order of the data: every part is a series of permutations, one for each pass over it, and every
    place of the run takes the next row of the part that is drawn for it.

    Nothing has to be stored to resume: step ``s`` takes places ``s * sequences_per_step`` and following,
    whatever the number of processes. A row is taken again when all of its part have been.

    Args:
        parts: one or more, end to end.
        sequences_per_step: rows of one optimiser step over all processes.
        seed: of the permutations and of the draws.
        num_steps: length of the schedule, which phases are shares of.

    Raises:
        UserError: every part that may be drawn was drawn as often as it may.
    """

    def __init__(self, parts: Sequence[Part], sequences_per_step: int, seed: int, num_steps: int) -> None:
        self.parts, self.sequences_per_step, self.seed = list(parts), sequences_per_step, seed
        self.num_rows = sum(part.num_rows for part in parts)
        self._drawn = self._draw(num_steps * sequences_per_step)
        self._ordinal = np.empty(len(self._drawn), dtype=np.int64)
        for number in range(len(self.parts)):
            places = np.flatnonzero(self._drawn == number)
            self._ordinal[places] = np.arange(len(places))
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}

    def rows_of_step(self, step: int) -> list[int]:
        """The rows of the step that follows ``step`` finished ones."""
        return [self._row_at(place) for place in self._places(step)]

    def share_of(self, step: int, process: int, num_processes: int) -> list[int]:
        """The rows that one of ``num_processes`` processes takes; an equal, contiguous share of the step."""
        share = self.sequences_per_step // num_processes
        return self.rows_of_step(step)[process * share : (process + 1) * share]

    def ends_pass(self, step: int) -> bool:
        """True when the step takes the last row of a pass over some part."""
        return any(
            (self._ordinal[place] + 1) % self.parts[self._drawn[place]].num_rows == 0
            for place in self._places(step)
        )

    def num_drawn(self) -> list[int]:
        """Rows that the whole schedule draws of each part."""
        return np.bincount(self._drawn, minlength=len(self.parts)).tolist()

    def _places(self, step: int) -> range:
        first = step * self.sequences_per_step
        return range(first, first + self.sequences_per_step)

    def _draw(self, num_places: int) -> np.ndarray:
        """The part of every place, int16."""
        start = np.random.Generator(np.random.PCG64(self.seed)).random()
        uniform = (start + GOLDEN * np.arange(num_places)) % 1.0
        ends = [num_places] * len(self.parts)  # where a part was drawn as often as it may
        drawn = np.zeros(num_places, dtype=np.int16)
        while True:
            spans = [
                (round(part.phase[0] * num_places), min(round(part.phase[1] * num_places), end))
                for part, end in zip(self.parts, ends, strict=True)
            ]
            borders = sorted({0, num_places, *(place for span in spans for place in span)})
            for a, b in pairwise(borders):
                weights = [
                    part.weight if first <= a and b <= last else 0.0
                    for part, (first, last) in zip(self.parts, spans, strict=True)
                ]
                drawn[a:b] = NOBODY
                if any(weights):
                    shares = np.cumsum(weights) / sum(weights)
                    places = np.searchsorted(shares, uniform[a:b], side="right")
                    drawn[a:b] = places.clip(max=len(weights) - 1)
            over = [
                (places[part.max_rows], number)
                for number, part in enumerate(self.parts)
                if part.max_rows is not None
                and len(places := np.flatnonzero(drawn == number)) > part.max_rows
            ]
            if not over:
                if (drawn == NOBODY).any():
                    raise self._exhausted(int((drawn == NOBODY).argmax()), num_places, ends)
                return drawn
            place, number = min(over)
            ends[number] = int(place)

    def _exhausted(self, place: int, num_places: int, ends: Sequence[int]) -> UserError:
        used = [part.name for part, end in zip(self.parts, ends, strict=True) if end < num_places]
        return UserError(
            f"After step {place // self.sequences_per_step} of {num_places // self.sequences_per_step} no "
            f"source of data.mix may be drawn: {', '.join(used)} gave all that max_repeats allows.",
            "Raise max_repeats, lengthen the phase of another source, or lower training.max_steps or epochs.",
        )

    def _row_at(self, place: int) -> int:
        number = int(self._drawn[place])
        part = self.parts[number]
        epoch, index = divmod(int(self._ordinal[place]), part.num_rows)
        known = self._permutations.get(number)
        if known is None or known[0] != epoch:
            seeds = np.random.SeedSequence([self.seed, epoch, number])
            known = epoch, np.random.Generator(np.random.PCG64(seeds)).permutation(part.num_rows)
            self._permutations[number] = known
        return part.first + int(known[1][index])
