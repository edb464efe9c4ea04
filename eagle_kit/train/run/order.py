"""Packed rows of every optimiser step: a pure function of the seed and the step counter."""

import numpy as np


class DataOrder:
    """Seeded order of the data without end: one permutation per epoch, laid end to end.

    Nothing has to be stored to resume: step ``s`` takes places ``s * sequences_per_step`` and following,
    whatever the number of processes. Every row is taken once per epoch.

    Args:
        num_rows: packed rows of the data set, >= 1.
        sequences_per_step: rows of one optimiser step over all processes.
        seed: of the permutations.
    """

    def __init__(self, num_rows: int, sequences_per_step: int, seed: int) -> None:
        self.num_rows, self.sequences_per_step, self.seed = num_rows, sequences_per_step, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def rows_of_step(self, step: int) -> list[int]:
        """The rows of the step that follows ``step`` finished ones."""
        first = step * self.sequences_per_step
        return [self._row_at(place) for place in range(first, first + self.sequences_per_step)]

    def share_of(self, step: int, process: int, num_processes: int) -> list[int]:
        """The rows that one of ``num_processes`` processes takes; an equal, contiguous share of the step."""
        share = self.sequences_per_step // num_processes
        return self.rows_of_step(step)[process * share : (process + 1) * share]

    def epoch_of(self, step: int) -> float:
        """Passes over the data after ``step`` finished steps."""
        return step * self.sequences_per_step / self.num_rows

    def _row_at(self, place: int) -> int:
        epoch, index = divmod(place, self.num_rows)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            self._epoch, self._permutation = epoch, generator.permutation(self.num_rows)
        return int(self._permutation[index])
