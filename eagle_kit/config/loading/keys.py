"""Keys of a schema, and the nearest of them to a key that it lacks."""

import difflib
from typing import Any, get_args

from pydantic import BaseModel


def known_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of all fields of ``schema``, of sections and the fields inside them, each once."""
    keys: dict[str, None] = {}
    for name, field in schema.model_fields.items():
        keys[f"{prefix}{name}"] = None
        for section in sections_of(field.annotation):
            keys |= dict.fromkeys(known_keys(section, f"{prefix}{name}."))
    return list(keys)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Schemas that a value of ``annotation`` may have or hold, as of ``Section | None`` or
    ``tuple[Section, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


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
