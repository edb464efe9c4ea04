"""Packing keeps every document whole and once, never overfills a row, and keeps responses apart."""

import random

import numpy as np
import pytest

from eagle_kit.data.chat.packing import OPEN_ROWS, join, pack
from eagle_kit.data.chat.renderer import TokenizedChat


@pytest.mark.parametrize("capacity", [8, 64, 1024])
@pytest.mark.parametrize("seed", range(3))
def test_every_document_once_and_never_over_capacity(capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((1, capacity, rng.randint(1, capacity))) for _ in range(300)]
    rows = pack(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(300))
    assert all(sum(lengths[document] for document in row) <= capacity for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert rows == pack(lengths, capacity)


def test_short_documents_fill_rows() -> None:
    lengths = [10] * 1000
    assert len(pack(lengths, 100)) == 100
    rng = random.Random(0)
    lengths = [rng.randint(1, 512) for _ in range(2000)]
    assert len(pack(lengths, 1024)) < 1.1 * sum(lengths) / 1024


def test_only_a_few_rows_stay_open() -> None:
    """The room in a row that was closed is not used any more, so documents stay near their order."""
    rows = pack([60] * (OPEN_ROWS + 1) + [30] * (OPEN_ROWS + 1), 100)
    assert len(rows) == OPEN_ROWS + 2
    assert len(pack([60] * OPEN_ROWS + [30] * OPEN_ROWS, 100)) == OPEN_ROWS
    assert pack([], 100) == []


def test_the_row_that_is_closed_is_the_fullest() -> None:
    """Whichever was opened last, a document of all the room that is left finds it."""
    for fullest in (0, OPEN_ROWS):
        lengths = [60] * (OPEN_ROWS + 1)
        lengths[fullest] = 90
        rows = pack([*lengths, *[40] * OPEN_ROWS], 100)
        assert len(rows) == OPEN_ROWS + 1 and rows[fullest] == [fullest]


def test_a_document_longer_than_a_row_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        pack([5, 9], 8)


def chat(response: list[int], first_id: int) -> TokenizedChat:
    ids = np.arange(first_id, first_id + len(response), dtype=np.int32)
    return TokenizedChat(ids, np.array(response, dtype=np.int32))


def test_responses_are_unique_and_borders_are_known() -> None:
    row = join(
        [
            chat([-1, 0, 0, -1, 1], 10),
            chat([-1, -1], 20),
            chat([-1, 0], 30),
            chat([-1, 0, -1, 1, 1, -1, 2], 40),
        ],
        [3, 0, 3, 1],
    )
    assert row.group.tolist() == [3] * 5 + [0] * 2 + [3] * 2 + [1] * 7
    assert row.ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 30, 31, *range(40, 47)]
    assert row.response.tolist() == [-1, 0, 0, -1, 1, -1, -1, -1, 2, -1, 3, -1, 4, 4, -1, 5]
    assert row.doc_start.tolist() == [0] * 5 + [5] * 2 + [7] * 2 + [9] * 7
    assert row.ids.dtype == row.response.dtype == row.doc_start.dtype == row.group.dtype == np.int32


def test_joining_leaves_the_documents_as_they_were() -> None:
    one, other = chat([-1, 0], 1), chat([-1, 0], 5)
    join([one, other], [0, 0])
    assert other.response.tolist() == [-1, 0]
