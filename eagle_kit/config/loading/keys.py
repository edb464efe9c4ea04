"""The keys a schema knows, and the nearest of them to a key it does not."""

import difflib
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


def known_keys(schema: type[BaseModel]) -> dict[str, Any]:
    """Dotted key -> annotation of every field of ``schema``, sections and the fields inside them included."""
    return dict(_walk(schema, ""))


def _walk(schema: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in schema.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field.annotation
        section = section_of(field.annotation)
        if section is not None:
            yield from _walk(section, f"{key}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The schema behind ``Section`` or ``Section | None``; None for any other annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        sections = [section_of(part) for part in get_args(annotation)]
        return next((section for section in sections if section is not None), None)
    return None


def unknown_key(raw: dict[str, Any], schema: type[BaseModel], prefix: str = "") -> str | None:
    """The first dotted key of ``raw`` that ``schema`` does not have, depth first; None if all are known."""
    fields = {field.alias or name: field.annotation for name, field in schema.model_fields.items()}
    for key, value in raw.items():
        if key not in fields:
            return f"{prefix}{key}"
        section = section_of(fields[key])
        if section is not None and isinstance(value, dict):
            found = unknown_key(value, section, f"{prefix}{key}.")
            if found is not None:
                return found
    return None


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known key most likely meant: the same name in another section, else the closest spelling.

    Spelling is compared within the key's own section first, then over the last parts of all keys.
    """
    section, _, leaf = key.rpartition(".")
    leaves: dict[str, str] = {}
    for candidate in known:
        leaves.setdefault(candidate.rpartition(".")[2], candidate)
    if leaf in leaves:
        return leaves[leaf]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    for word, choices in ((leaf, siblings), (leaf, leaves)):
        close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
        if close:
            return choices[close[0]]
    return None
