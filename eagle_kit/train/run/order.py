"""Data order of training: the packed sequences of an optimiser step, a pure function of seed and step number.

A slot is one place of a step for a packed sequence. Step ``s`` has the slots from ``s * sequences_per_step``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eagle_kit.config.train import DataConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.dataset import PreparedData

GOLDEN = 0.6180339887498949
"""Step of the additive sequence that draws parts. The fractions of its multiples fill [0, 1) more evenly than
random numbers do, so every stretch of a run has the configured shares."""
NOBODY = -1
"""Part of a slot for which no part may be drawn."""


@dataclass(frozen=True)
class DataPart:
    """Packed sequences that are drawn together: one source of a mixture, or all rows without a mixture.

    Attributes:
        first: number of the first row.
        num_rows: number of rows, >= 1.
        weight: share of the drawn rows, relative to the other parts' weights.
        phase: (start, end) of the part's share of the schedule, in [0, 1].
        max_rows: maximum number of rows drawn over the run; None is unbounded.
        name: name in error messages.
    """

    first: int
    num_rows: int
    weight: float = 1.0
    phase: tuple[float, float] = (0.0, 1.0)
    max_rows: int | None = None
    name: str = ""


def parts_of(settings: DataConfig, data: PreparedData) -> list[DataPart]:
    """Parts of ``data`` with the weights of ``data.mix``; one part without a mixture.

    The weights of ``data.mix`` are shares of tokens, so a part with shorter rows is drawn more often.

    Raises:
        UserError: ``data.mix`` has another number of sources than the packed sequences.
    """
    if not settings.mix:
        return [DataPart(0, len(data))]
    if len(settings.mix) != len(data.parts):
        raise UserError(
            f"data.mix has {len(settings.mix)} sources, and the rows were packed of {len(data.parts)}.",
            "Name the sources that the store was captured from, or leave data.mix out.",
        )

    parts = []
    for source, packed in zip(settings.mix, data.parts, strict=True):
        max_rows = None
        if source.max_repeats is not None:
            max_rows = int(source.max_repeats * packed.num_rows)
        part = DataPart(
            first=packed.first,
            num_rows=packed.num_rows,
            weight=source.weight * packed.num_rows / packed.num_tokens,
            phase=source.phase,
            max_rows=max_rows,
            name=packed.name,
        )
        parts.append(part)
    return parts


class DataOrder:
    """Seeded order of the packed sequences.

    A part is drawn for every slot of the run, and the slot takes the next row of that part. The rows of a
    part come in a new permutation on each pass over it. The order does not depend on the number of processes,
    and a checkpoint stores nothing of it.

    Args:
        parts: one or more, end to end.
        sequences_per_step: rows of one optimiser step over all processes.
        seed: seed of the permutations and of the draws.
        num_steps: optimiser steps of the schedule; phases are shares of it.

    Raises:
        UserError: every part that may be drawn has reached its ``max_rows`` before the end.
    """

    def __init__(self, parts: Sequence[DataPart], sequences_per_step: int, seed: int, num_steps: int) -> None:
        self.parts = list(parts)
        self.sequences_per_step = sequences_per_step
        self.seed = seed
        self.num_rows = sum(part.num_rows for part in parts)

        # Part of every slot, and how many slots before it have the same part.
        self._drawn = self._draw(num_steps * sequences_per_step)
        self._ordinal = np.empty(len(self._drawn), dtype=np.int64)
        for number in range(len(self.parts)):
            slots = np.flatnonzero(self._drawn == number)
            self._ordinal[slots] = np.arange(len(slots))

        # The last permutation of each part: number of the pass, and the rows.
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}

    def rows_of_step(self, step: int) -> list[int]:
        """Numbers of the rows in optimiser step ``step``, counted from 0."""
        return [self._row_at(slot) for slot in self._slots(step)]

    def share_of(self, step: int, process: int, num_processes: int) -> list[int]:
        """Numbers of the rows that ``process`` takes: an equal, contiguous share of the step."""
        size = self.sequences_per_step // num_processes
        first = process * size
        return self.rows_of_step(step)[first : first + size]

    def ends_pass(self, step: int) -> bool:
        """True if the step takes the last row of a pass over some part."""
        for slot in self._slots(step):
            part = self.parts[self._drawn[slot]]
            num_taken = self._ordinal[slot] + 1
            if num_taken % part.num_rows == 0:
                return True
        return False

    def num_drawn(self) -> list[int]:
        """Number of rows that the whole schedule draws of each part."""
        return np.bincount(self._drawn, minlength=len(self.parts)).tolist()

    def _slots(self, step: int) -> range:
        """Slots of an optimiser step."""
        first = step * self.sequences_per_step
        return range(first, first + self.sequences_per_step)

    def _draw(self, num_slots: int) -> np.ndarray:
        """Draw the part of every slot, int16 ``[num_slots]``.

        A part that exceeds its ``max_rows`` ends at the slot where it reaches the bound, and the draw is
        repeated with that end. One part ends per round, the one that reaches its bound first.
        """
        start = np.random.Generator(np.random.PCG64(self.seed)).random()
        uniform = (start + GOLDEN * np.arange(num_slots)) % 1.0
        ends = [num_slots] * len(self.parts)
        while True:
            drawn = self._draw_until(ends, uniform)

            # Parts beyond their bound, as (first slot too many, number of the part).
            exceeded = []
            for number, part in enumerate(self.parts):
                slots = np.flatnonzero(drawn == number)
                if part.max_rows is not None and len(slots) > part.max_rows:
                    exceeded.append((int(slots[part.max_rows]), number))
            if exceeded:
                slot, number = min(exceeded)
                ends[number] = slot
                continue

            # Every slot must have a part.
            is_empty = drawn == NOBODY
            if is_empty.any():
                raise self._exhausted(int(is_empty.argmax()), num_slots, ends)
            return drawn

    def _draw_until(self, ends: Sequence[int], uniform: np.ndarray) -> np.ndarray:
        """Draw the part of every slot, none beyond its end; ``NOBODY`` where no part may be drawn.

        Args:
            ends: first slot of each part at which it is no longer drawn.
            uniform: a number in [0, 1) for each slot.
        """
        # Slots in which each part may be drawn.
        num_slots = len(uniform)
        spans = []
        for part, end in zip(self.parts, ends, strict=True):
            first = round(part.phase[0] * num_slots)
            last = min(round(part.phase[1] * num_slots), end)
            spans.append((first, last))

        # Between two borders of spans the weights are constant.
        borders = {0, num_slots}
        for span in spans:
            borders.update(span)
        drawn = np.full(num_slots, NOBODY, dtype=np.int16)
        for begin, end in pairwise(sorted(borders)):
            weights = []
            for part, (first, last) in zip(self.parts, spans, strict=True):
                is_drawn = first <= begin and end <= last
                weights.append(part.weight if is_drawn else 0.0)
            if any(weights):
                shares = np.cumsum(weights) / sum(weights)
                numbers = np.searchsorted(shares, uniform[begin:end], side="right")
                drawn[begin:end] = numbers.clip(max=len(weights) - 1)
        return drawn

    def _exhausted(self, slot: int, num_slots: int, ends: Sequence[int]) -> UserError:
        """Error for the first slot for which no part may be drawn."""
        used = [part.name for part, end in zip(self.parts, ends, strict=True) if end < num_slots]
        return UserError(
            f"After step {slot // self.sequences_per_step} of {num_slots // self.sequences_per_step} no "
            f"source of data.mix may be drawn: {', '.join(used)} gave all that max_repeats allows.",
            "Raise max_repeats, lengthen the phase of another source, or lower training.max_steps or epochs.",
        )

    def _row_at(self, slot: int) -> int:
        """Number of the row in a slot. Keeps the permutation for the next one."""
        number = int(self._drawn[slot])
        part = self.parts[number]
        epoch, index = divmod(int(self._ordinal[slot]), part.num_rows)
        known = self._permutations.get(number)
        if known is None or known[0] != epoch:
            seeds = np.random.SeedSequence([self.seed, epoch, number])
            generator = np.random.Generator(np.random.PCG64(seeds))
            known = (epoch, generator.permutation(part.num_rows))
            self._permutations[number] = known
        permutation = known[1]
        return part.first + int(permutation[index])
