"""The table of config keys in docs/training.md has every key of a training run and its default."""

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import pytest
from pydantic import BaseModel

from eagle_kit.config.train import TrainConfig
from eagle_kit.train.run.folder import FREE_TO_CHANGE

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
EXPLAINED_ABOVE = {"target", "output_dir", "seed"}
"""Keys of the paragraph above the table."""


class Row(NamedTuple):
    """Dotted keys of a row of the table, and its cell of defaults."""

    keys: tuple[str, ...]
    default: str


def rows_of_table() -> Iterator[Row]:
    """Rows of the table of config keys; a key without a section is of the one before it."""
    table = PAGE.partition("## Config keys")[2].partition("\n### ")[0]
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        names, default = (cell.strip() for cell in line.split("|")[1:3])
        keys: list[str] = []
        for name in re.findall(r"`([^`]+)`", names):
            section = keys[-1].rpartition(".")[0] + "." if keys else ""
            is_whole = name.partition(".")[0] in TrainConfig.model_fields
            keys.append(name if is_whole else section + name.lstrip("."))
        yield Row(tuple(keys), default)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The section that a value of ``annotation`` is or may be, in a list; nothing for lists of sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is not types.UnionType:
        return []
    return [section for part in get_args(annotation) for section in sections_in(part)]


def settings(schema: type[BaseModel], prefix: str = "", is_null: bool = False) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their defaults; those of a section that is null by default have None."""
    for name, field in schema.model_fields.items():
        sections = sections_in(field.annotation)
        if not sections:
            default = None if is_null or field.is_required() else field.default
            yield prefix + name, default
            continue
        is_optional = field.annotation is not sections[0]
        yield from settings(sections[0], f"{prefix}{name}.", is_null or is_optional)


SETTINGS = dict(settings(TrainConfig))
TABLE = list(rows_of_table())


def parts_of(text: str) -> set[str]:
    """Words and numbers of a cell of defaults; numbers in one form."""
    parts = re.findall(r"[^\s,`\[\]\"()']+", text)
    return {f"{float(part):g}" if re.fullmatch(r"[\d.]+(e-?\d+)?", part) else part.lower() for part in parts}


def test_every_key_is_in_the_table_once() -> None:
    found = [key for row in TABLE for key in row.keys]
    assert sorted(found) == sorted(SETTINGS.keys() - EXPLAINED_ABOVE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.keys[0])
def test_the_table_has_the_defaults_of_the_code(row: Row) -> None:
    values = [SETTINGS[key] for key in row.keys if SETTINGS[key] not in (None, ())]
    for value in values:
        assert parts_of(str(value)) <= parts_of(row.default)


def test_the_page_lists_every_setting_that_a_resumed_run_may_change() -> None:
    listed = PAGE.partition("Free to change: ")[2].partition("\n\n")[0]
    names = {name.rpartition(".")[2] for name in re.findall(r"`([^`]+)`", listed)}
    assert {key.rpartition(".")[2] for key in FREE_TO_CHANGE} <= names
