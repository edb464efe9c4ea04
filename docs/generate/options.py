"""``options.md``: keys of YAML files and options of the engine, the server, evaluations and diagnoses."""

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.drafts import HEADS
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.server import ServerConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.config.training import TrainingConfig
from generate.markdown import code, without_double_blanks, wrapped

FILES = {"`eagle-kit train`": TrainConfig}
"""Command -> schema of the YAML file that it reads."""
KEYWORDS = {
    "The engine": EngineConfig,
    "The server": ServerConfig,
    "An evaluation": EvalConfig,
    "A diagnosis": DiagnoseConfig,
}
"""Heading -> schema whose fields are flags, and keywords of Python."""
TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "file"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def options_page() -> str:
    """Keys of the YAML files, and options of the engine, server, evaluation and diagnosis."""
    written = (
        "Written by `make reference` from `eagle_kit/config`. Keys of YAML files can be replaced on the "
        "command line as `section.key=value`."
    )
    lines = ["# Options", "", *wrapped(written)]
    for command, schema in FILES.items():
        lines += ["", f"## File of {command}", "", *section_lines(schema, "")]
        if schema is TrainConfig:
            lines += head_lines()
    for heading, schema in KEYWORDS.items():
        lines += ["", f"## {heading}", "", *section_lines(schema, "")]
    return "\n".join(lines) + "\n"


def head_lines() -> list[str]:
    """Lines of the keys that depend on ``head.kind``, with what a kind adds to ``training``."""
    lines: list[str] = []
    for kind, schema in HEADS.items():
        training = schema.training_schema
        lines += ["", f"### `head` and `training` of the kind `{kind}`", "", *section_lines(schema, "head.")]
        added = [name for name in training.model_fields if name not in TrainingConfig.model_fields]
        lines += ["", *section_lines(training, "training.", added)]
    return without_double_blanks(lines)


def section_lines(schema: type[BaseModel], prefix: str, names: Sequence[str] | None = None) -> list[str]:
    """Lines of a schema: its text, its keys, and then those of the sections inside of it.

    Args:
        names: of the keys; None for all.
    """
    text = " ".join((schema.__doc__ or "").partition("\n\n")[0].split())
    lines = [*wrapped(text), ""]
    inner: list[str] = []
    for name in schema.model_fields if names is None else names:
        field = schema.model_fields[name]
        key = f"{prefix}{name}"
        if schema is TrainConfig and name == "head":  # its keys depend on its kind
            continue
        section = _section_of(field.annotation)
        about = code(" ".join((field.description or "").split()))
        if section is not None:
            inner += ["", f"### `{key}`", "", *wrapped(about), "", *section_lines(section, f"{key}.")]
        else:
            lines += wrapped(f"* **`{key}`** ({_type(field)}{_default(field)}): {about}", indent="  ")
    return without_double_blanks([*lines, *inner])


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The schema that a value of ``annotation`` is, or has; None of other values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_of(part) for part in get_args(annotation))
    return next((section for section in found if section is not None), None)


def _type(field: FieldInfo) -> str:
    """Type of a field in words, with its limits."""
    limits = []
    for each in field.metadata:
        limits += [f"{word} {getattr(each, name)}" for name, word in LIMITS.items() if hasattr(each, name)]
    return ", ".join([_name_of(field.annotation), *limits])


def _name_of(annotation: Any) -> str:
    """A type in words."""
    if annotation is type(None):
        return "null"
    if annotation in TYPES:
        return TYPES[annotation]
    parts = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_name_of(part) for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {_name_of(parts[0])}"
    if origin is tuple:
        return f"list of {len(parts)} of {_name_of(parts[0])}"
    if origin is dict:
        return "mapping"
    return f"`{getattr(annotation, '__name__', annotation)}`"


def _default(field: FieldInfo) -> str:
    """The default as it stands after the type; "required" without one."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "; required"
    if default is None:
        return "; null"
    shown = default
    if isinstance(default, bool):
        shown = str(default).lower()
    elif isinstance(default, tuple):
        shown = list(default)
    return f"; `{shown}`"
