"""Answers as records, and the folder that keeps them so that a run can be broken off and resumed."""

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
ANSWERS_FILE, SETTINGS_FILE, SUMMARY_FILE = "answers.jsonl", "settings.json", "summary.json"


class Setting(NamedTuple):
    """One way to decode: plain decoding (no draft), or a draft with a shape."""

    draft: str | None
    shape: str


PLAIN = Setting(None, "none")


@dataclass
class Answer:
    """One reply of one setting.

    Attributes:
        task, id, category: of the prompt.
        turn: 0 for the first user turn.
        draft, shape: the setting; draft None is plain decoding.
        num_prompt_tokens: length of the prompt with template and earlier turns.
        token_ids, text, finish_reason, stats: as in RequestOutput.
        prefill_s: seconds to the first token.
        decode_s: seconds from the first token to the last, shared by the batch.
        decode_share_s: this answer's part of the batch's decoding seconds; equals decode_s in a batch of one.
        identical: True when the tokens equal the plain ones; None for plain itself.
        difference: the first difference, see identity.Difference.
    """

    task: str
    id: str
    category: str
    turn: int
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

    @property
    def setting(self) -> Setting:
        """Draft and shape."""
        return Setting(self.draft, self.shape)

    @property
    def key(self) -> tuple[str, str, int]:
        """Names the prompt and turn, the same for every setting."""
        return self.task, self.id, self.turn

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that decoding produced: all but the first, which comes from prefill."""
        return max(len(self.token_ids) - 1, 0)

    def to_record(self) -> dict[str, Any]:
        """As written to the file: the counts flat, rates beside them for people."""
        record = asdict(self)
        stats = record.pop("stats")
        token_ids, text = record.pop("token_ids"), record.pop("text")
        rate = self.num_decode_tokens / self.decode_s if self.decode_s > 0 else None
        return {
            **record,
            "num_tokens": len(token_ids),
            **stats,
            "accept_length": round(self.stats.accept_length, 4),
            "decode_tokens_per_s": rate and round(rate, 2),
            "token_ids": token_ids,
            "text": text,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Answer":
        """The inverse of :meth:`to_record`; raises KeyError, TypeError or ValueError for any other record."""
        stats = {name: record[name] for name in SpecStats.__dataclass_fields__}
        names = [name for name in cls.__dataclass_fields__ if name != "stats"]
        return TypeAdapter(cls).validate_python({"stats": stats, **{name: record[name] for name in names}})


class AnswerStore:
    """The answers of one run in ``folder``; the only writer of answers.jsonl and settings.json.

    Opening reads what an earlier, broken-off run left; nothing is written before the first :meth:`add`.

    Args:
        folder: of the files.
        settings: everything that decides the answers and their speed. A folder with others raises UserError.
        runs: the settings every prompt is decoded with; a prompt that lacks one of them counts as not done.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], runs: Sequence[Setting]) -> None:
        self.folder = folder
        self.settings = settings
        self.about: dict[str, Any] = {}
        self._path = folder / ANSWERS_FILE
        self._by_key: dict[tuple[str, str, int], dict[Setting, Answer]] = {}
        self._started = False
        if self._path.exists() or (folder / SETTINGS_FILE).exists():
            self._check_settings()
            self._read(frozenset(runs))

    @property
    def answers(self) -> list[Answer]:
        """All answers kept so far."""
        return [answer for group in self._by_key.values() for answer in group.values()]

    def get(self, key: tuple[str, str, int]) -> dict[Setting, Answer] | None:
        """Every setting's answer to a prompt and turn, or None when they are not all there."""
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
            old, self.about = dict(saved["settings"]), dict(saved["about"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.folder} holds answers, but its {SETTINGS_FILE} is missing or unreadable.",
                ANOTHER_FOLDER,
            ) from None
        # through JSON, so that tuples compare equal to the lists they were saved as
        new = json.loads(json.dumps(self.settings))
        changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if changed:
            raise UserError(
                f"{self.folder} holds an evaluation with other settings ({', '.join(changed)} differ).",
                "Give another --out, delete the folder, or resume with the settings it was started with.",
            )

    def _read(self, runs: frozenset[Setting]) -> None:
        """Read complete prompts; a line that a crash cut off is dropped together with its prompt."""
        text = read_text(self._path, ANOTHER_FOLDER) if self._path.exists() else ""
        lines = text.removesuffix("\n").split("\n") if text else []
        groups: dict[tuple[str, str, int], dict[Setting, Answer]] = {}
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
    """Short hash of a local checkpoint folder's files, None for a name that is no folder.

    Small files and names count with their content, files over 256 MB with size and both ends.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors") and p.is_file()):
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
