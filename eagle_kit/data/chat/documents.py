"""Tokenised documents of records, made by several processes if there are many records."""

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
"""Records that this process tokenises alone; to start other processes takes seconds."""
CHUNK = 32
"""Records that a process gets at a time."""
MOST_WORKERS = 32
TEXT_PROMPT = 32
"""Most tokens of a text that are its prompt where it is held out."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that a document begins with.

    Attributes:
        key: equal for equal messages and tools.
        row: index of the document's row that it begins.
        length: number of its tokens.
    """

    key: int
    row: int
    length: int


@dataclass
class Tokenized:
    """Result of tokenising a record.

    Attributes:
        label: name under which the record is counted.
        rows: its rows of tokens; empty if it is skipped.
        prompts: prompts of the responses in its rows, in order, that fill at most half a row.
        keys: keys of all prompts of the record, in order.
        reason: why the record is skipped; empty if it is not.
        remarks: counts of remarks about parts that are left out.
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
        excluded: evaluation sets; records with one of their prompts are skipped.
        max_length: tokens at which rows are cut.
        num_workers: processes; None for the number of cores, 1 for this process alone.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        excluded: ExcludedSets,
        max_length: int,
        num_workers: int | None = None,
    ) -> None:
        self._work = (renderer, excluded, max_length)
        if num_workers is None:
            num_workers = min(num_cores(), MOST_WORKERS)
        self._num_workers = num_workers
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

        # The first records, or all of them without other processes.
        num_alone = None
        if self._num_workers > 1:
            num_alone = max(ALONE - self._num_done, 0)
        for label, record in islice(records, num_alone):
            self._num_done += 1
            yield tokenize_record(*self._work, label, record)

        # Start processes only if there are more.
        first = next(records, None)
        if first is not None:
            yield from self._run_many(chain([first], records))

    def _run_many(self, records: Iterator[tuple[str, Record]]) -> Iterator[Tokenized]:
        """Tokenise records by the processes of a pool, in their order."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_workers, multiprocessing.get_context("spawn"), _begin, self._work
            )
        waiting: deque[Future[list[Tokenized]]] = deque()
        try:
            while True:
                # A few chunks for each process are in flight, which bounds the memory.
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


_work: tuple[ChatRenderer, ExcludedSets, int]
"""First arguments of :func:`tokenize_record` in a process of the pool."""


def _begin(*work: Any) -> None:
    """Set ``_work`` at the start of a process of the pool, so that it is not pickled for every chunk."""
    global _work
    _work = work  # type: ignore[assignment]


def _tokenize_piece(piece: list[tuple[str, Record]]) -> list[Tokenized]:
    """Tokenise a chunk of records in a process of the pool."""
    return [tokenize_record(*_work, label, record) for label, record in piece]


def tokenize_record(
    renderer: ChatRenderer, excluded: ExcludedSets, max_length: int, label: str, record: Record
) -> Tokenized:
    """Tokenise one record and find its prompts."""
    found = Tokenized(label, record)
    try:
        excluded.check(record)
        found.rows = renderer.tokenize(record, max_length, found.remarks)
    except Unusable as reason:
        found.reason = str(reason)
        return found

    # A conversation has prompts whose responses are in no row.
    prompts = _prompts(record, found.rows)
    found.prompts = [prompt for prompt in prompts if 0 < prompt.length <= max_length // 2]
    if isinstance(record, Conversation):
        keys = _turn_keys(record)
        for turn, message in enumerate(record.messages):
            if message["role"] == "assistant":
                found.keys.append(keys[turn])
    else:
        found.keys = [prompt.key for prompt in prompts]
    return found


def _prompts(record: Record, rows: list[TokenizedChat]) -> list[Prompt]:
    """Prompts of the responses of a record; of a text, its beginning."""
    # A text.
    if isinstance(record, RawText):
        ids = rows[0].ids
        length = min(TEXT_PROMPT, len(ids) // 2)
        return [Prompt(_hash(ids[:length].tobytes()), 0, length)]

    # Each response of each row, where its first token is.
    keys = _turn_keys(record) if isinstance(record, Conversation) else None
    found = []
    for number, row in enumerate(rows):
        responses, firsts = np.unique(row.response, return_index=True)
        for response, first in zip(responses.tolist(), firsts.tolist(), strict=True):
            if response < 0:
                continue
            if keys is None:
                key = _hash(row.ids[:first].tobytes())
            else:
                key = keys[row.turns[response]]
            found.append(Prompt(key, number, first))
    return found


def _turn_keys(conversation: Conversation) -> list[int]:
    """For each message, a number that is equal for conversations with the same tools and the same messages
    before it."""
    digest = hashlib.sha256(json.dumps(list(conversation.tools)).encode())
    keys = []
    for message in conversation.messages:
        keys.append(int.from_bytes(digest.digest()[:8], "big"))
        digest.update(json.dumps(message).encode())
    return keys


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
