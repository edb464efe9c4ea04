"""Responses of servers as records, and their file, from which an interrupted evaluation is resumed."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json, read_text, write_text_atomically
from eagle_kit.eval.answers import ANOTHER_FOLDER
from eagle_kit.eval.counters import DRAFTED, GENERATION_TOKENS, PROMPT_TOKENS, Snapshot
from eagle_kit.eval.servers.measured_server import ServedResponse

SERVERS_FILE = "servers.jsonl"


@dataclass(frozen=True)
class TextDifference:
    """The first place at which a response leaves the plain one of our engine.

    Attributes:
        position: index of the token in the response, 0 for its first.
        character: index of the character in the response's text.
        plain_text: text of the plain response from there on, cut.
        text: text of this response from there on, cut.
        logit_gap: target logit of the plain token minus that of the other one; None where the server
            does not give its tokens, or where a response has ended.
    """

    position: int
    character: int
    plain_text: str
    text: str
    logit_gap: float | None


@dataclass(frozen=True)
class ServedAnswer:
    """A response with its prompt.

    Attributes:
        id: of the prompt in its task.
        category: of the prompt.
        response: of the server.
        decode_share_s: this response's part of its batch's decoding seconds.
        identical: True when the text equals the plain one of our engine; None where they cannot be
            compared (samples of another engine).
        difference: None where there is none.
    """

    id: str
    category: str
    response: ServedResponse
    decode_share_s: float
    identical: bool | None
    difference: TextDifference | None


@dataclass(frozen=True)
class ServedRecord:
    """A batch of prompts that a server decoded: a line of the file.

    Attributes:
        server: name of the server.
        engine: name of its engine.
        version: of its engine; empty where it does not say.
        model: name of its model.
        shape: speculation shape; empty where it is not known, "none" where nothing was drafted.
        round: number of the temperature and seed, from 0.
        task: name of the task.
        turn: user turn that is answered, from 0.
        answers: one to each prompt.
        counted: what the server counted meanwhile.
    """

    server: str
    engine: str
    version: str
    model: str
    shape: str
    round: int
    task: str
    turn: int
    answers: list[ServedAnswer]
    counted: Snapshot

    @property
    def key(self) -> tuple[str, int, str, int, tuple[str, ...]]:
        """Server, round, task, turn and prompts."""
        return (self.server, self.round, self.task, self.turn, tuple(answer.id for answer in self.answers))

    @property
    def num_tokens(self) -> int:
        """Tokens of the responses."""
        return sum(answer.response.num_tokens for answer in self.answers)

    @property
    def num_unexplained(self) -> int:
        """Tokens of prompts and responses that the server counted besides these, at least 0."""
        num_prompt_tokens = sum(answer.response.num_prompt_tokens for answer in self.answers)
        excess = 0
        for name, own in ((GENERATION_TOKENS, self.num_tokens), (PROMPT_TOKENS, num_prompt_tokens)):
            if name in self.counted.counters:
                excess += max(self.counted.count(name) - own, 0)
        return excess


class ServerAnswerStore:
    """The records of an evaluation in ``folder``; the only writer of servers.jsonl.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / SERVERS_FILE
        self._by_key: dict[Any, ServedRecord] = {}
        if self.path.exists():
            for record in self._read():
                self._by_key[record.key] = record

    @property
    def records(self) -> list[ServedRecord]:
        """All records kept so far."""
        return list(self._by_key.values())

    def get(self, server: str, round: int, task: str, turn: int, ids: Sequence[str]) -> ServedRecord | None:
        """The record of a batch; None where there is none."""
        return self._by_key.get((server, round, task, turn, tuple(ids)))

    def start(self) -> None:
        """Write the file without a line that a crash cut off."""
        write_text_atomically(self.path, "".join(_as_line(record) for record in self.records))

    def add(self, record: ServedRecord) -> None:
        """Append a record and flush it to the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_as_line(record))
            file.flush()
            os.fsync(file.fileno())
        self._by_key[record.key] = record

    def _read(self) -> Iterator[ServedRecord]:
        lines = read_text(self.path, ANOTHER_FOLDER).removesuffix("\n").split("\n")
        adapter = TypeAdapter(ServedRecord)
        for number, line in enumerate(lines, 1):
            try:
                yield adapter.validate_python(parse_json(line, self.path))
            except ValueError:
                if number == len(lines):
                    return
                raise UserError(
                    f"Line {number} of {self.path} is not a record of a server.", ANOTHER_FOLDER
                ) from None


def shape_name(counted: Snapshot, shape: object) -> str:
    """Name of a batch's shape for tables; see :class:`ServedRecord`."""
    if shape is not None:
        return str(shape)
    is_plain = not counted.num_verifies and not counted.count(DRAFTED) and counted.gauge is None
    return "none" if is_plain else ""


def _as_line(record: ServedRecord) -> str:
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"
