"""Records as tokenised documents, by several processes where there are many."""

import hashlib
import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from eagle_kit.core.errors import UserError
from eagle_kit.core.process import num_cores
from eagle_kit.data.chat.forms import Conversation, RawText, Record
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.renderer import ChatRenderer, TokenizedChat
from eagle_kit.data.tasks.excluded import ExcludedSets

ALONE = 2000
"""Records that are tokenised by this process before others are started, which takes seconds."""
CHUNK = 32
"""Records that a process is handed at a time."""
MOST_WORKERS = 32
TEXT_PROMPT = 32
"""Most tokens of a text that are its prompt where it is held out."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that a document begins with.

    Attributes:
        key: equal for equal messages and tools.
        row: which of the document's rows it begins.
        length: its tokens.
    """

    key: int
    row: int
    length: int


@dataclass
class Tokenized:
    """What came of a record.

    Attributes:
        label: what the record is counted as.
        rows: none where it was left out for the ``reason``.
        prompts: of the replies in its rows, in order, as far as they fill at most half a row.
        keys: of all prompts that the record holds, in order.
    """

    label: str
    record: Record
    rows: list[TokenizedChat] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    reason: str = ""
    remarks: Counter[str] = field(default_factory=Counter)


class Tokenizing:
    """Tokenises records in their order.

    Args:
        renderer: renders and tokenises; every process gets a copy.
        num_workers: processes; None for as many as this one has cores, 1 for none beside it.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        excluded: ExcludedSets,
        max_length: int,
        num_workers: int | None = None,
    ) -> None:
        self._work = (renderer, excluded, max_length)
        self._num_workers = min(num_cores(), MOST_WORKERS) if num_workers is None else num_workers
        self._num_done = 0
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Tokenizing":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, records: Iterable[tuple[str, Record]]) -> Iterator[Tokenized]:
        """Tokenise labelled records.

        Raises:
            UserError: as :meth:`ChatRenderer.tokenize`, or a process ended.
        """
        records = iter(records)
        alone = ALONE - self._num_done if self._num_workers > 1 else None
        for label, record in islice(records, alone if alone is None else max(0, alone)):
            self._num_done += 1
            yield tokenize_record(*self._work, label, record)
        first = next(records, None)
        if first is not None:
            yield from self._run_many(chain([first], records))

    def _run_many(self, records: Iterator[tuple[str, Record]]) -> Iterator[Tokenized]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_workers, multiprocessing.get_context("spawn"), _begin, self._work
            )
        waiting: deque[Future[list[Tokenized]]] = deque()
        try:
            while True:
                # Some chunks for each process are on their way, so that memory has a bound.
                while len(waiting) < 3 * self._num_workers:
                    piece = list(islice(records, CHUNK))
                    if not piece:
                        break
                    waiting.append(self._pool.submit(_tokenize_piece, piece))
                if not waiting:
                    return
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                f"A process that tokenises has ended ({error}).", "Set data.num_workers=1."
            ) from error


_given: tuple[ChatRenderer, ExcludedSets, int]


def _begin(*work: Any) -> None:
    """Keep what every record of this process is tokenised with."""
    global _given
    _given = work  # type: ignore[assignment]


def _tokenize_piece(piece: list[tuple[str, Record]]) -> list[Tokenized]:
    return [tokenize_record(*_given, label, record) for label, record in piece]


def tokenize_record(
    renderer: ChatRenderer, excluded: ExcludedSets, max_length: int, label: str, record: Record
) -> Tokenized:
    """Rows and prompts of one record."""
    found = Tokenized(label, record)
    try:
        excluded.check(record)
        found.rows = renderer.tokenize(record, max_length, found.remarks)
    except Unusable as reason:
        found.reason = str(reason)
        return found
    prompts = _prompts(record, found.rows)
    found.keys = [prompt.key for prompt in prompts]
    if isinstance(record, Conversation):
        keys = _turn_keys(record)
        replies = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
        found.keys = [keys[turn] for turn in replies]
    found.prompts = [prompt for prompt in prompts if 0 < prompt.length <= max_length // 2]
    return found


def _prompts(record: Record, rows: list[TokenizedChat]) -> list[Prompt]:
    """Prompts of the replies of a record; of a text, its beginning."""
    if isinstance(record, RawText):
        ids = rows[0].ids
        length = min(TEXT_PROMPT, len(ids) // 2)
        return [Prompt(_hash(ids[:length].tobytes()), 0, length)]
    keys = _turn_keys(record) if isinstance(record, Conversation) else None
    found = []
    for number, row in enumerate(rows):
        replies, firsts = np.unique(row.reply, return_index=True)
        for reply, first in zip(replies.tolist(), firsts.tolist(), strict=True):
            if reply < 0:
                continue
            key = _hash(row.ids[:first].tobytes()) if keys is None else keys[row.turns[reply]]
            found.append(Prompt(key, number, first))
    return found


def _turn_keys(conversation: Conversation) -> list[int]:
    """For each message, a number that conversations share whose tools and messages before it are equal."""
    digest = hashlib.sha256(json.dumps(list(conversation.tools)).encode())
    keys = []
    for message in conversation.messages:
        keys.append(int.from_bytes(digest.digest()[:8], "big"))
        digest.update(json.dumps(message).encode())
    return keys


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
