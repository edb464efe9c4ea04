"""Write the reference pages of this folder from schemas, command line and modules: ``make reference``.

The text of an option stands under its field (``eagle_kit/config``, ``eagle_kit/cli``), what a module holds in
its docstring, and nowhere else. The pages are text of Markdown; a test holds them to what this program
writes.
"""

import argparse
import ast
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from eagle_kit.cli.app import DELEGATED, build_parser
from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.drafts import HEADS
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.server import ServerConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.config.training import TrainingConfig
from eagle_kit.train.__main__ import build_parser as build_train_parser

FOLDER = Path(__file__).with_name("reference")
PACKAGE = Path(__file__).parents[1] / "eagle_kit"
COLUMNS = 100
"""Width of help texts."""
LINE = 118
"""Width of other lines."""
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


def config_page() -> str:
    """Keys of the YAML files, and options of the engine, server, evaluation and diagnosis."""
    written = (
        "Written by `make reference` from `eagle_kit/config`. Keys of YAML files can be replaced on the "
        "command line as `section.key=value`."
    )
    lines = ["# Options", "", *_wrapped(written)]
    for command, schema in FILES.items():
        lines += ["", f"## File of {command}", "", *section_lines(schema, "")]
        if schema is TrainConfig:
            lines += head_lines()
    for heading, schema in KEYWORDS.items():
        lines += ["", f"## {heading}", "", *section_lines(schema, "")]
    return "\n".join(lines) + "\n"


def command_page() -> str:
    """The help of every command."""
    lines = ["# Commands", "", "Written by `make reference`: what `--help` prints."]
    for name, parser in _parsers(build_parser(), "eagle-kit"):
        help_text = parser.format_help().replace(str(Path.home()), "~").rstrip()
        lines += ["", f"## `{name}`", "", "```", help_text, "```"]
    return "\n".join(lines) + "\n"


def module_page() -> str:
    """Every module of the package with the first sentence of its docstring, by folder."""
    lines = ["# Modules", "", "Written by `make reference` from the docstrings of `eagle_kit`."]
    for folder in [PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if path.is_dir())]:
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        package = folder / "__init__.py"
        if not package.exists():
            continue
        name = folder.relative_to(PACKAGE.parent).as_posix()
        lines += ["", f"## `{name}`", "", *_wrapped(_first_sentence(package))]
        if modules:
            lines.append("")
        for path in modules:
            lines += _wrapped(f"* `{path.name}`: {_first_sentence(path)}", indent="  ")
    return "\n".join(_without_double_blanks(lines)) + "\n"


def _first_sentence(path: Path) -> str:
    """First sentence of a module's docstring, in Markdown; a first paragraph without a full stop is one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:?])\s+(?=[A-Z])", paragraph)[0]
    return re.sub(r":\w+:`[~.]*([^`]*)`", r"`\1`", sentence).replace("``", "`")


def _parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of commands and of commands inside of them, with their names. A command that runs by itself
    too, as ``bench`` beside ``bench serve``, has its own parser here."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for word, inner in action.choices.items():
            if word in DELEGATED and name == "eagle-kit":
                inner = build_train_parser()
            groups = [each for each in inner._actions if isinstance(each, argparse._SubParsersAction)]
            if not any(group.required for group in groups):
                yield f"{name} {word}", inner
            if groups:
                yield from _parsers(inner, f"{name} {word}")


def head_lines() -> list[str]:
    """Lines of the keys that depend on ``head.kind``, with what a kind adds to ``training``."""
    lines: list[str] = []
    for kind, schema in HEADS.items():
        training = schema.training_schema
        lines += ["", f"### `head` and `training` of the kind `{kind}`", "", *section_lines(schema, "head.")]
        added = [name for name in training.model_fields if name not in TrainingConfig.model_fields]
        lines += ["", *section_lines(training, "training.", added)]
    return _without_double_blanks(lines)


def section_lines(schema: type[BaseModel], prefix: str, names: Sequence[str] | None = None) -> list[str]:
    """Lines of a schema: its text, its keys, and then those of the sections inside of it.

    Args:
        names: of the keys; None for all.
    """
    text = " ".join((schema.__doc__ or "").partition("\n\n")[0].split())
    lines = [*_wrapped(text), ""]
    inner: list[str] = []
    for name in schema.model_fields if names is None else names:
        field = schema.model_fields[name]
        key = f"{prefix}{name}"
        if schema is TrainConfig and name == "head":  # its keys depend on its kind
            continue
        section = _section_of(field.annotation)
        about = " ".join((field.description or "").split()).replace("``", "`")
        if section is not None:
            inner += ["", f"### `{key}`", "", *_wrapped(about), "", *section_lines(section, f"{key}.")]
        else:
            lines += _wrapped(f"* **`{key}`** ({_type(field)}{_default(field)}): {about}", indent="  ")
    return _without_double_blanks([*lines, *inner])


def _without_double_blanks(lines: list[str]) -> list[str]:
    """The lines without a blank one behind another."""
    return [line for number, line in enumerate(lines) if line or number == 0 or lines[number - 1]]


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a paragraph; words and code are not cut."""
    return textwrap.wrap(text, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The schema that a value of ``annotation`` is, or has; None of other values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_of(part) for part in get_args(annotation))
    return next((section for section in found if section is not None), None)


def _type(field: FieldInfo) -> str:
    """What a field takes, with its limits."""
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
    """The default behind the type, or that there is none."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "; required"
    if default is None:
        return "; null"
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"; `{list(shown) if isinstance(shown, tuple) else shown}`"


def main() -> int:
    """Write the pages."""
    os.environ["COLUMNS"] = str(COLUMNS)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "options.md").write_text(config_page(), encoding="utf-8")
    (FOLDER / "commands.md").write_text(command_page(), encoding="utf-8")
    (FOLDER / "modules.md").write_text(module_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
