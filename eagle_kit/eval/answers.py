"""Answers as records, and their folder, from which an interrupted run is resumed."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    parse_json,
    read_object,
    read_text,
    write_json_atomically,
    write_text_atomically,
)
from eagle_kit.core.stats import SpecStats

ANOTHER_FOLDER = "Give another --out, or delete the folder."
ANSWERS_FILE = "answers.jsonl"
SETTINGS_FILE = "settings.json"
SUMMARY_FILE = "summary.json"


AnswerKey = tuple[str, str, int, float, int]
"""Task, prompt, turn, temperature and seed of an answer."""


class Setting(NamedTuple):
    """One way to decode: plain decoding, or a named setting (a draft, say) with a shape."""

    draft: str | None
    shape: str


PLAIN = Setting(None, "none")


def seed_of_prompt(seed: int, task: str, prompt: str, turn: int) -> int:
    """Seed of the response to one prompt. Each prompt has another one, since random numbers depend on
    the seed and the position alone."""
    text = "\0".join((str(seed), task, prompt, str(turn)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


@dataclass
class Answer:
    """One response of one setting.

    Attributes:
        task: name of the prompt's task.
        id: of the prompt in its task.
        category: of the prompt.
        turn: user turn that is answered, from 0.
        temperature: of the samples; 0 is greedy.
        seed: of the evaluation, which the response's seed was made from (:func:`seed_of_prompt`).
        draft: name of the draft or setting; None for plain decoding.
        shape: speculation shape of the setting.
        num_prompt_tokens: length of the prompt with template and earlier turns.
        token_ids: of the response.
        finish_reason: as in ``RequestOutput``.
        stats: as in ``RequestOutput``.
        prefill_s: seconds to the first token.
        decode_s: seconds from the first token to the last, in which the whole batch was decoded.
        decode_share_s: this answer's part of the batch's decoding seconds; equals decode_s in a batch of one.
        identical: True when the tokens equal the plain ones; None for plain itself.
        difference: fields of :class:`~eagle_kit.eval.identity.Difference`; None where there is
            none.
        text: of the response.
        places: of a sample of a setting that does not promise its text: place of each token in the plain
            target's distribution (:mod:`eagle_kit.eval.distribution`); empty for others.
        total_variations: of a setting with another target, or with keys and values in fp8: distance of its
            distribution from the plain target's at the first positions; empty for others.
    """

    task: str
    id: str
    category: str
    turn: int
    temperature: float
    seed: int
    draft: str | None
    shape: str
    num_prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    stats: SpecStats = field(default_factory=SpecStats)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_share_s: float = 0.0
    identical: bool | None = None
    difference: dict[str, Any] | None = None
    text: str = ""
    places: list[float] = field(default_factory=list)
    total_variations: list[float] = field(default_factory=list)

    @property
    def setting(self) -> Setting:
        """Draft and shape."""
        return Setting(self.draft, self.shape)

    @property
    def key(self) -> AnswerKey:
        """Task, prompt, turn, temperature and seed: the same for every setting."""
        return self.task, self.id, self.turn, self.temperature, self.seed

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that decoding produced: all but the first, which comes from prefill."""
        return max(len(self.token_ids) - 1, 0)

    def to_record(self) -> dict[str, Any]:
        """The record that is written to the file: all fields, those of ``stats`` among them, and
        rates for people."""
        record = asdict(self)
        stats = record.pop("stats")
        token_ids = record.pop("token_ids")
        text = record.pop("text")
        rate = None
        if self.decode_s > 0:
            rate = round(self.num_decode_tokens / self.decode_s, 2)
        return {
            **record,
            "num_tokens": len(token_ids),
            **stats,
            "accept_length": round(self.stats.accept_length, 4),
            "decode_tokens_per_s": rate,
            "token_ids": token_ids,
            "text": text,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Answer":
        """The inverse of :meth:`to_record`; raises KeyError, TypeError or ValueError for any other record."""
        values = {name: record[name] for name in cls.__dataclass_fields__ if name != "stats"}
        values["stats"] = {name: record[name] for name in SpecStats.__dataclass_fields__}
        return TypeAdapter(cls).validate_python(values)


class AnswerStore:
    """The answers of one run in ``folder``; the only writer of answers.jsonl and settings.json.

    Opening reads the answers of an earlier run that was interrupted. Nothing is written before
    :meth:`start`.

    Args:
        folder: of the files.
        settings: everything that decides the answers and their speed.
        runs: the settings with which every prompt is decoded. A prompt that lacks one of them is
            not done.

    Raises:
        UserError: the folder has answers with other settings, or a file that cannot be read.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], runs: Sequence[Setting]) -> None:
        self.folder = folder
        self.settings = settings
        self.about: dict[str, Any] = {}
        self._path = folder / ANSWERS_FILE
        self._by_key: dict[AnswerKey, dict[Setting, Answer]] = {}
        self._started = False
        if self._path.exists() or (folder / SETTINGS_FILE).exists():
            self._check_settings()
            self._read(frozenset(runs))

    @property
    def answers(self) -> list[Answer]:
        """All answers kept so far."""
        return [answer for group in self._by_key.values() for answer in group.values()]

    def get(self, key: AnswerKey) -> dict[Setting, Answer] | None:
        """Answers of all settings to a prompt's turn in a round, or None where one is missing."""
        return self._by_key.get(key)

    def start(self, about: dict[str, Any]) -> None:
        """Write the settings, with ``about`` (machine, versions, command) of the first start beside them."""
        self.about = self.about or about
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomically(self.folder / SETTINGS_FILE, {"settings": self.settings, "about": self.about})
        write_text_atomically(self._path, _as_lines(self.answers))
        self._started = True

    def add(self, answers: Iterable[Answer]) -> None:
        """Append the answers of all settings to one batch of prompts, and flush them to the disk."""
        assert self._started, "start() comes first"
        answers = list(answers)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_as_lines(answers))
            file.flush()
            os.fsync(file.fileno())
        for answer in answers:
            self._by_key.setdefault(answer.key, {})[answer.setting] = answer

    def _check_settings(self) -> None:
        path = self.folder / SETTINGS_FILE
        try:
            saved = read_object(path)
            old = dict(saved["settings"])
            self.about = dict(saved["about"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.folder} holds answers, but its {SETTINGS_FILE} is missing or unreadable.",
                ANOTHER_FOLDER,
            ) from None
        # Through JSON, so that tuples equal the lists that they were saved as.
        new = json.loads(json.dumps(self.settings))
        changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if changed:
            raise UserError(
                f"{self.folder} holds an evaluation with other settings ({', '.join(changed)} differ).",
                "Give another --out, delete the folder, or resume with the settings it was started with.",
            )

    def _read(self, runs: frozenset[Setting]) -> None:
        """Read the answers to prompts that have one of every setting. A last line that a crash cut
        off is left out, and so is its prompt."""
        text = read_text(self._path, ANOTHER_FOLDER) if self._path.exists() else ""
        lines = text.removesuffix("\n").split("\n") if text else []
        groups: dict[AnswerKey, dict[Setting, Answer]] = {}
        for number, line in enumerate(lines, 1):
            try:
                answer = Answer.from_record(parse_json(line, self._path))
            except (ValueError, KeyError, TypeError):
                if number == len(lines):
                    break
                raise UserError(
                    f"Line {number} of {self._path} is not an answer.",
                    ANOTHER_FOLDER,
                ) from None
            groups.setdefault(answer.key, {})[answer.setting] = answer
        self._by_key = {key: group for key, group in groups.items() if runs <= group.keys()}


def _as_lines(answers: Iterable[Answer]) -> str:
    return "".join(json.dumps(answer.to_record(), ensure_ascii=False) + "\n" for answer in answers)


def fingerprint(path: str | Path) -> str | None:
    """Short hash of the JSON and safetensors files of a folder, None for a name that is no folder.

    Files over 256 MiB are hashed by name, size, first and last MiB, others by name, size and
    content.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".json", ".safetensors") or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= 256 << 20:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
            else:
                digest.update(stream.read(1 << 20))
                stream.seek(-(1 << 20), os.SEEK_END)
                digest.update(stream.read())
    return digest.hexdigest()[:16]
