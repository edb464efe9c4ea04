"""Keys of a schema, and the nearest of them to a key that it lacks."""

import difflib
import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


def known_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of all fields of ``schema``, sections and the fields inside them included."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(f"{prefix}{name}")
        section = _section_of(field.annotation)
        if section is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The schema behind ``Section``, ``Section | None`` or ``tuple[Section, ...]``; None for any other
    annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return next((section for part in get_args(annotation) if (section := _section_of(part))), None)
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
    for choices in (siblings, leaves):
        close = difflib.get_close_matches(leaf, choices, n=1, cutoff=0.6)
        if close:
            return choices[close[0]]
    return None
