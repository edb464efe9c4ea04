"""From a YAML file and command-line overrides to a validated, frozen config."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from eagle_kit.config.loading.keys import known_keys, nearest_key
from eagle_kit.config.loading.shipped import find_config
from eagle_kit.config.loading.yaml_file import MAX_BYTES, NotYAML, parse_value, read_mapping
from eagle_kit.core.errors import UserError, first_line, shown

MAX_JSON = 8 * MAX_BYTES
"""Most characters of a config as JSON, in which every alias is written out. A file without aliases always has
fewer."""
Schema = TypeVar("Schema", bound=BaseModel)


def load_config(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Read ``path``, apply ``overrides`` and validate the result against ``schema``.

    Values are validated strictly: text is never taken for a number, nor a fraction for a whole number.

    Args:
        schema: a pydantic model that forbids extra fields; fields that are models are sections.
        path: a YAML file, or the name of a config that ships.
        overrides: ``"section.key=value"``, the value read as YAML; the last one wins.

    Raises:
        UserError: missing or malformed file, unknown key (the nearest known one is named), wrong value.
    """
    return _validated(schema, read_mapping(find_config(Path(path))), overrides, str(path))


def load_settings(schema: type[Schema], settings: Sequence[str], where: str) -> Schema:
    """Validate ``key=value`` settings without a file. Raises UserError as :func:`load_config`.

    Args:
        where: name of the place where they were given, for messages.
    """
    return _validated(schema, {}, settings, where)


def _validated(schema: type[Schema], raw: dict[str, Any], overrides: Sequence[str], where: str) -> Schema:
    """Apply ``overrides`` to ``raw``, which is changed, and validate it. Raises UserError."""
    for override in overrides:
        _apply(raw, override)
    try:
        as_json = _as_json(raw, where)
    except UserError:
        raise
    except (TypeError, ValueError, RecursionError) as error:  # bytes, a list as a key, a list inside itself
        raise UserError(
            f"{where} has a value that no config takes: {first_line(error)}.",
            "Use texts, numbers, true, false, null, lists and mappings of them.",
        ) from None
    try:
        return schema.model_validate_json(as_json, strict=True)
    except ValidationError as error:
        raise _explain(error, schema, where, raw) from None


def _as_json(raw: dict[str, Any], where: str) -> str:
    """Write the values of a config as JSON. Raises UserError if its aliases, written out, are too long."""
    parts = []
    num_chars = 0
    for part in json.JSONEncoder().iterencode(raw):
        num_chars += len(part)
        if num_chars > MAX_JSON:
            raise UserError(
                f"{where} has more than {MAX_JSON >> 20} MiB of values when its aliases are written out.",
                "Use fewer aliases (*name) of lists and mappings that hold others.",
            )
        parts.append(part)
    return "".join(parts)


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set the value of one override in ``raw``. Raises UserError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(
            f"The override {override!r} is not of the form key=value.",
            "Write for example training.learning_rate=5e-4.",
        )

    # Find its section, which is made where the file has none.
    section = raw
    for depth, part in enumerate(parts[:-1]):
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            path = ".".join(parts[: depth + 1])
            raise UserError(
                f"The override {override!r} goes into `{path}`, which is a value.",
                "Override that key itself.",
            )

    try:
        section[parts[-1]] = parse_value(text)
    except NotYAML as error:
        raise UserError(
            f"The value of the override {shown(override)} is not YAML: {error.problem}.",
            "Quote or correct it.",
        ) from None


def _key(problem: Any, raw: Any) -> str:
    """Dotted key of a pydantic problem in ``raw``. Parts of its location that are no keys are left out:
    pydantic inserts names of the types that a value may have."""
    *parts, last = problem["loc"] or ("",)
    keys = []
    for part in parts:
        if _has(raw, part):
            keys.append(str(part))
            raw = raw[part]
    if problem["type"] == "missing" or _has(raw, last):
        keys.append(str(last))
    return ".".join(keys)


def _has(raw: Any, part: Any) -> bool:
    """True if ``part`` is a key of the mapping ``raw``, or an index and ``raw`` a list."""
    if isinstance(raw, dict):
        return part in raw
    return isinstance(raw, list) and isinstance(part, int)


def _explain(error: ValidationError, schema: type[BaseModel], where: str, raw: dict[str, Any]) -> UserError:
    """The error for the first problem of a validation; unknown keys come first."""
    # A value of several types has a problem for each of them. The one that reaches deepest is explained: it
    # is of the type that the value fits best.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    key = _key(problems[0], raw)
    of_key = [problem for problem in problems if f"{_key(problem, raw)}.".startswith(f"{key}.")]
    of_key = of_key or problems[:1]
    first = max(of_key, key=lambda problem: len(problem["loc"]))
    key = _key(first, raw) or "the config"
    num_others = len(problems) - len(of_key)
    more = f" ({num_others} more after this one)" if num_others else ""

    # A key too many, or too few.
    if first["type"] == "extra_forbidden":
        known = known_keys(schema)
        nearest = nearest_key(key, known)
        section = key.rpartition(".")[0]
        siblings = [name for name in known if name.rpartition(".")[0] == section]
        remedy = f"Did you mean `{nearest}`?" if nearest else f"Use one of: {', '.join(siblings)}."
        return UserError(f"{where} has the unknown key `{key}`.", remedy)
    if first["type"] == "missing":
        return UserError(f"{where} lacks the key `{key}`{more}.", f"Add `{key}` to it.")

    # A wrong value.
    value = first.get("input")
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, UserError):
        return UserError(f"In `{key}` of {where}: {inner.cause}", inner.remedy)
    message = str(inner) if inner is not None else first["msg"]
    message = message[:1].lower() + message[1:]
    given = "" if isinstance(value, dict) else f" is {shown(value)}"
    return UserError(f"`{key}` in {where}{given}: {message}{more}.", f"Correct `{key}`.")
