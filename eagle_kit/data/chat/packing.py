"""Packing of whole conversations side by side into rows of one length.

Legend: T tokens of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_kit.data.chat.renderer import TokenizedChat

OPEN_ROWS = 16
"""Rows that are filled at the same time. With more of them rows are fuller, and documents move further from
their order."""


@dataclass
class PackedRow:
    """Tokens of documents side by side.

    Attributes:
        ids: int32 ``[T]``.
        response: int32 ``[T]``, number of the response that must produce the token, unique within the row; -1
            for given tokens.
        doc_start: int32 ``[T]``, index in the row at which the document of the token starts. The position of
            the token is its index less ``doc_start``.
        group: int32 ``[T]``, group of the document.
    """

    ids: np.ndarray
    response: np.ndarray
    doc_start: np.ndarray
    group: np.ndarray


def pack(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Pack documents into rows, first fit in order over a few open rows.

    Args:
        lengths: of the documents, each at most ``capacity``.
        capacity: tokens of a row.

    Returns:
        The numbers of the documents of each row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (row, room left), oldest first
    for document, length in enumerate(lengths):
        assert length <= capacity, "documents are cut before packing"
        for slot, (row, room) in enumerate(open_rows):
            if length <= room:
                rows[row].append(document)
                open_rows[slot] = (row, room - length)
                break
        else:
            rows.append([document])
            open_rows.append((len(rows) - 1, capacity - length))
            if len(open_rows) > OPEN_ROWS:
                open_rows.remove(min(open_rows, key=lambda item: item[1]))
    return rows


def join(chats: list[TokenizedChat], groups: Sequence[int]) -> PackedRow:
    """Lay documents side by side in a row. ``groups`` has a number for each of them."""
    responses = []
    starts = []
    offset = 0
    num_responses = 0
    for chat in chats:
        responses.append(np.where(chat.response >= 0, chat.response + num_responses, -1))
        starts.append(np.full(len(chat.ids), offset))
        offset += len(chat.ids)
        num_responses += chat.num_responses
    lengths = [len(chat.ids) for chat in chats]
    return PackedRow(
        ids=np.concatenate([chat.ids for chat in chats]).astype(np.int32),
        response=np.concatenate(responses).astype(np.int32),
        doc_start=np.concatenate(starts).astype(np.int32),
        group=np.repeat(np.asarray(groups, dtype=np.int32), lengths),
    )
