"""From a YAML file and command-line overrides to a validated, frozen config."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from eagle_kit.config.loading.keys import known_keys, nearest_key, unknown_key
from eagle_kit.config.loading.yaml_file import parse_value, read_mapping
from eagle_kit.core.errors import UserError

Schema = TypeVar("Schema", bound=BaseModel)

_NUMBER = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")


def load_config(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Read ``path``, lay ``overrides`` over it and validate the result against ``schema``.

    Values are validated strictly: text is never taken for a number, nor a fraction for a whole number.

    Args:
        schema: a pydantic model; fields that are models are sections.
        path: a YAML file.
        overrides: ``"section.key=value"``, the value read as YAML; the last one wins.

    Raises:
        UserError: missing or malformed file, unknown key (the nearest known one is named), wrong value.
    """
    raw = read_mapping(Path(path))
    for override in overrides:
        _apply(raw, override)
    return validate(schema, raw, where=str(path))


def validate(schema: type[Schema], raw: dict[str, Any], where: str) -> Schema:
    """Validate a plain mapping, the way :func:`load_config` does. ``where`` names its origin in errors."""
    unknown = unknown_key(raw, schema)
    if unknown is not None:
        known = list(known_keys(schema))
        nearest = nearest_key(unknown, known)
        raise UserError(
            f"{where} has the unknown key `{unknown}`.",
            f"Did you mean `{nearest}`?"
            if nearest
            else f"Use one of: {', '.join(_siblings(unknown, known))}.",
        )
    try:
        return schema.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise _explain(error, where) from None


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(
            f"The override {override!r} is not of the form key=value.",
            "Write for example training.learning_rate=5.0e-4.",
        )
    section = raw
    for depth, part in enumerate(parts[:-1]):
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(
                f"The override {override!r} goes into `{'.'.join(parts[: depth + 1])}`, which is a value.",
                "Override that key itself.",
            )
        section = inner
    section[parts[-1]] = _parse_override(override, text)


def _parse_override(override: str, text: str) -> Any:
    """On a command line everything is text, so there ``3e-4`` is the number it looks like."""
    try:
        value = parse_value(text)
    except yaml.YAMLError:
        raise UserError(
            f"The value of the override {override!r} is not YAML.", "Quote or correct it."
        ) from None
    is_bare_number = isinstance(value, str) and _NUMBER.match(text.strip())
    return float(text) if is_bare_number else value


def _explain(error: ValidationError, where: str) -> UserError:
    """The first problem of a validation as one cause and one remedy."""
    problems = error.errors()
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"]) or "the config"
    more = f" ({len(problems) - 1} more after this one)" if len(problems) > 1 else ""
    value, kind, inner = first.get("input"), first["type"], first.get("ctx", {}).get("error")
    if kind == "missing":
        return UserError(f"{where} lacks the key `{key}`{more}.", f"Add `{key}` to it.")
    if isinstance(inner, UserError):
        return UserError(f"In `{key}` of {where}: {inner.cause}", inner.remedy)
    if (
        isinstance(value, str)
        and _NUMBER.match(value)
        and not kind.startswith(("string", "literal", "value"))
    ):
        return UserError(
            f"`{key}` in {where} is the text {value!r}, not a number{more}.", _number_remedy(value)
        )
    message = str(inner) if inner is not None else first["msg"]
    message = message[:1].lower() + message[1:]
    given = "" if isinstance(value, dict) else f" is {_short(value)}"
    return UserError(f"`{key}` in {where}{given}: {message}{more}.", f"Correct `{key}`.")


def _number_remedy(text: str) -> str:
    mantissa, exponent, power = text.lower().partition("e")
    if exponent and "." not in mantissa:
        return (
            f"Write {mantissa}.0e{power}: YAML takes a number without a point before its exponent for text."
        )
    if exponent and power[:1] not in "+-":
        return f"Write {mantissa}e+{power}: YAML takes an exponent without a sign for text."
    return f"Write {text} without quotes."


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _siblings(key: str, known: list[str]) -> list[str]:
    section = key.rpartition(".")[0]
    return [name for name in known if name.rpartition(".")[0] == section] or known
