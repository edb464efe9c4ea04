"""A packed sequence for a step of training, small enough to count what a step does."""

from types import SimpleNamespace
from typing import Any

import numpy as np

LENGTH = 15
DRAFT_VOCAB_SIZE = 101


class TinyRow:
    """A data set of packed sequences: three documents with a response each, of two groups; token ids below
    101."""

    groups = ("one", "other")

    def row(self, number: int) -> Any:
        """Row ``number``, from a generator of this seed."""
        generator = np.random.default_rng(number)
        doc_start = np.zeros(LENGTH, np.int64)
        response = np.full(LENGTH, -1)
        group = (np.arange(LENGTH) >= 5).astype(np.int32)
        for which, (start, stop) in enumerate(((0, 5), (5, 10), (10, LENGTH))):
            doc_start[start:stop] = start
            response[start + 2 : stop] = which
        ids = generator.integers(0, DRAFT_VOCAB_SIZE, LENGTH)
        return SimpleNamespace(ids=ids, response=response, doc_start=doc_start, group=group)
