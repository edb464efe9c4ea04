"""Files of a regeneration: replies, and beside them its settings, what was left out, and what was done."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_writable, parse_json, read_object, writing_remedy

T = TypeVar("T")
ANOTHER_FILE = "Give --out another file."
Key = tuple[str, str, int]
"""A conversation's id, its first human turn, since ids alone need not be different, and the sample."""
LATER_SETTINGS: dict[str, Any] = {
    **{"samples": 1, "chat_template_kwargs": [], "skip_refusals": False, "skip_truncated": False},
    "refusals": [],
    **{"near_duplicates": None, "test_prompts": "none"},
}
"""Settings that files of before they existed were made with."""


def check_out(path: Path) -> None:
    """Raise UserError when ``path`` could not be made or appended to, or is no JSONL file, whose ending the
    names of the files beside it are made of and training reads it by; nothing is made."""
    if path.is_dir():
        raise UserError(f"{path} is a folder.", ANOTHER_FILE)
    if path.suffix != ".jsonl":
        raise UserError(f"{path} does not end in .jsonl.", "Give --out a name that does.")
    check_writable(path.parent, ANOTHER_FILE)


class NotWritten(UserError):
    """A file of a regeneration could not be written. It may end in a part of a line, which the next run
    removes."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise NotWritten, which names ``path``, where a file of it cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"The replies of {path} cannot be written: {error.strerror or error}.",
            writing_remedy(error, "give --out another file"),
        ) from error


def append(path: Path, lines: str) -> None:
    """Write lines behind those of ``path``, if there are any, onto the disk."""
    if lines:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def settings_path(path: Path) -> Path:
    """File with the settings of the replies in ``path``."""
    return path.with_suffix(".settings.json")


def manifest_path(path: Path) -> Path:
    """File that says what was done for ``path``, and how much was left out."""
    return path.with_suffix(".manifest.json")


def left_out_path(path: Path) -> Path:
    """File with the conversations that are not in ``path``, or not to their ends, for their replies."""
    return path.with_suffix(".left-out.jsonl")


def check_settings(path: Path, settings: dict[str, Any], num_found: int) -> None:
    """Raise UserError when the replies of an earlier run were made with other settings.

    Args:
        num_found: conversations that it wrote or left out; of 0 there is nothing to compare.
    """
    before = LATER_SETTINGS | read_object(settings_path(path), ANOTHER_FILE) if num_found else {}
    for name, value in settings.items():
        if before.get(name, value) != value and "" not in (before[name], value):
            raise UserError(
                f"The replies in {path} were made with {name} {before[name]}, but now it is {value}.",
                f"Restore it. {ANOTHER_FILE}",
            )


def read_done(path: Path) -> Counter[Key]:
    """Count the conversations in an earlier run's file. Raises UserError for another file."""

    def read(record: dict[str, Any]) -> Key:
        record["finish_reasons"]
        turns = (turn["content"] for turn in record["messages"] if turn["role"] == "user")
        return str(record["id"]), str(next(turns)), int(record.get("sample", 0))

    return Counter(_read_lines(path, read))


def read_left_out(path: Path) -> list[tuple[Key, str, bool]]:
    """Conversations that an earlier run left out, or ended, for a reply, the reason, and whether earlier
    replies of it were kept. Raises UserError for another file."""

    def read(about: dict[str, Any]) -> tuple[Key, str, bool]:
        key = str(about["id"]), str(about["first"]), int(about["sample"])
        return key, str(about["reason"]), bool(about["replies_kept"])

    return _read_lines(path, read)


def count_replies(path: Path, tokenizer: Any) -> tuple[int, int]:
    """Number of conversations in a file of replies, and of the tokens that their target wrote; 0 without a
    file. Raises UserError for another file."""
    conversations = _read_lines(path, lambda record: record["messages"])
    turns = [turn for messages in conversations for turn in messages if turn["role"] == "assistant"]
    if not turns:
        return len(conversations), 0
    texts = [turn.get("generated", turn["content"]) for turn in turns]
    return len(conversations), sum(len(ids) for ids in tokenizer(texts)["input_ids"])


def _read_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Lines of an earlier run's file through ``read``, its half-written last line cut off; none where there
    is no file. Raises UserError for another file."""
    if not path.exists():
        return []
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.", ANOTHER_FILE) from error
    whole = text.rfind(b"\n") + 1
    found = []
    for number, line in enumerate(text[:whole].splitlines(), start=1):
        try:
            found.append(read(parse_json(line, path)))
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise UserError(
                f"{path}, line {number}, was not written by regeneration.", ANOTHER_FILE
            ) from None
    if whole < len(text):
        with path.open("r+b") as file:
            file.truncate(whole)
    return found
