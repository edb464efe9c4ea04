"""Files of a regeneration: responses, settings, conversations that were left out, and counts."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_writable, parse_json, read_object, writing_remedy

T = TypeVar("T")
ANOTHER_FILE = "Give --out another file."
Key = tuple[str, str, int]
"""Identity of a conversation: id, first human turn (because ids may repeat), and number of the sample."""
LATER_SETTINGS: dict[str, Any] = {
    "samples": 1,
    "chat_template_kwargs": [],
    "skip_refusals": False,
    "skip_truncated": False,
    "refusals": [],
    "near_duplicates": None,
    "test_prompts": "none",
}
"""Settings that older files lack, with the values that those had."""


def check_out(path: Path) -> None:
    """Check that responses can be written to ``path``; no file is created.

    Raises:
        UserError: the file could not be created or appended to, or its name does not end in ``.jsonl``. The
            files beside it are named after it, and training reads it by its ending.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder.", ANOTHER_FILE)
    if path.suffix != ".jsonl":
        raise UserError(f"{path} does not end in .jsonl.", "Give --out a name that does.")
    check_writable(path.parent, ANOTHER_FILE)


class NotWritten(UserError):
    """A file of a regeneration could not be written.

    It may end in a part of a line, which the next run removes.
    """


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context that raises :class:`NotWritten` if a file of the responses ``path`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"The responses of {path} cannot be written: {error.strerror or error}.",
            writing_remedy(error, "give --out another file"),
        ) from error


def append(path: Path, lines: str) -> None:
    """Append ``lines`` to ``path`` and flush them to the disk; without lines, no file is created."""
    if lines:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def settings_path(path: Path) -> Path:
    """File with the settings of the responses in ``path``."""
    return path.with_suffix(".settings.json")


def manifest_path(path: Path) -> Path:
    """File with the counts of the responses in ``path``, and of what was left out."""
    return path.with_suffix(".manifest.json")


def left_out_path(path: Path) -> Path:
    """File with the conversations that were left out of ``path``, or shortened, because of a response."""
    return path.with_suffix(".left-out.jsonl")


def check_settings(path: Path, settings: dict[str, Any], num_found: int) -> None:
    """Compare the settings of an earlier run with those of now; an empty value is not compared.

    Args:
        settings: settings of now.
        num_found: conversations that the earlier run wrote or left out; with 0 nothing is compared.

    Raises:
        UserError: a setting differs.
    """
    if not num_found:
        return
    before = LATER_SETTINGS | read_object(settings_path(path), ANOTHER_FILE)
    for name, value in settings.items():
        if before.get(name, value) != value and "" not in (before[name], value):
            raise UserError(
                f"The responses in {path} were made with {name} {before[name]}, but now it is {value}.",
                f"Restore it. {ANOTHER_FILE}",
            )


def read_done(path: Path) -> Counter[Key]:
    """Count the conversations in the file of an earlier run. Raises UserError for another file."""

    def read(record: dict[str, Any]) -> Key:
        record["finish_reasons"]  # only files of regeneration have them
        turns = [message for message in record["messages"] if message["role"] == "user"]
        return str(record["id"]), str(turns[0]["content"]), int(record.get("sample", 0))

    return Counter(_read_lines(path, read))


class LeftOut(NamedTuple):
    """A conversation that an earlier run left out or shortened.

    Attributes:
        key: its identity.
        reason: why its last response was left out.
        is_shortened: True if earlier responses of it were written.
    """

    key: Key
    reason: str
    is_shortened: bool


def read_left_out(path: Path) -> list[LeftOut]:
    """Read the list of what an earlier run left out. Raises UserError for another file."""

    def read(record: dict[str, Any]) -> LeftOut:
        key = (str(record["id"]), str(record["first"]), int(record["sample"]))
        return LeftOut(key, str(record["reason"]), bool(record["replies_kept"]))

    return _read_lines(path, read)


def count_responses(path: Path, tokenizer: Any) -> tuple[int, int]:
    """Count conversations and response tokens in a file of responses. Raises UserError for another file.

    Returns:
        Number of conversations, and of the tokens that the target generated; zeros if there is no file.
    """
    conversations = _read_lines(path, lambda record: record["messages"])
    texts = []
    for messages in conversations:
        for message in messages:
            if message["role"] == "assistant":
                texts.append(message.get("generated", message["content"]))
    if not texts:
        return len(conversations), 0
    return len(conversations), sum(len(ids) for ids in tokenizer(texts)["input_ids"])


def _read_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Read the lines of an earlier run's file, and cut a half-written last line off.

    Args:
        read: turns the object of a line into an entry of the result.

    Returns:
        The entries; none if there is no file.

    Raises:
        UserError: the file cannot be read, or is not one of regeneration.
    """
    if not path.exists():
        return []
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.", ANOTHER_FILE) from error

    # Whole lines.
    size = text.rfind(b"\n") + 1
    entries = []
    for number, line in enumerate(text[:size].splitlines(), start=1):
        try:
            entries.append(read(parse_json(line, path)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise UserError(
                f"{path}, line {number}, was not written by regeneration.", ANOTHER_FILE
            ) from None

    # The rest is half a line.
    if size < len(text):
        with path.open("r+b") as file:
            file.truncate(size)
    return entries
