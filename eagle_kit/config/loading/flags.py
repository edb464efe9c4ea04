"""Flags of the command line, made from the fields of pydantic models.

The name, type, limits, default and documentation of a flag are those of its field. Annotations
(:class:`Flag`, :class:`FlagsOf`) add what only a command line has.
"""

import argparse
import difflib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from eagle_kit.config.options import OptionError, Options
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json

UNRECOGNIZED = "unrecognized arguments: "
"""Beginning of argparse's message about words that are no arguments."""
METAVARS = {int: "N", float: "X", Path: "FILE"}
SchemaT = TypeVar("SchemaT", bound=Options)


@dataclass(frozen=True)
class Flag:
    """Annotation of a field: properties of its flag that the field does not have.

    Attributes:
        name: name of the flag; default the field's, with dashes.
        metavar: name of the value in the help; default by the field's type.
        group: heading in the help.
        is_positional: the value is given without a flag.
        is_repeated: the flag takes one value and may be given several times.
        alone: value of a flag that is given without one; None if it needs one.
        example: JSON object for messages about a value that is not JSON.
    """

    name: str = ""
    metavar: str = ""
    group: str = ""
    is_positional: bool = False
    is_repeated: bool = False
    alone: Any = None
    example: str = '{"enable_thinking": false}'


@dataclass(frozen=True)
class FlagsOf:
    """Annotation of a field that is a section: the flags of the command that set fields of the section. The
    field's default is a section with the defaults of the command.

    Attributes:
        flags: flag by the name of a field of the section.
        group: heading in the help.
    """

    flags: Mapping[str, str] = field(default_factory=dict)
    group: str = ""


class ConfigFlags(Options):
    """Arguments of a command that reads a YAML file."""

    config: Annotated[str, Flag(is_positional=True, metavar="config")]
    """YAML file, or the name of one that ships, such as smollm2-135m-eagle3."""

    overrides: Annotated[tuple[str, ...], Flag(is_positional=True, metavar="key=value")] = ()
    """Settings that replace those of the file."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`UserError`.

    Attributes:
        translate: replaces flags of other engines in the words of the command line; None to parse them as
            they are.
        hint: remedy for other unknown arguments; empty to name the help alone.
    """

    translate: Callable[[argparse.ArgumentParser, Sequence[str]], list[str]] | None = None
    hint: str = ""

    _words: Sequence[str] | None = None
    """The command line that is being parsed; of a sub-command, the words after its name; None before."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; keep the words for :meth:`error`."""
        self._words = list(sys.argv[1:] if args is None else args)
        asks_for_help = "-h" in self._words or "--help" in self._words
        if self.translate is not None and not asks_for_help:
            self._words = self.translate(self, self._words)
        return super().parse_known_args(self._words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UserError for an error of argparse.

        A flag with underscores is answered with ours. Otherwise the first flag that does not exist is named,
        since argparse may have taken its value for something else. Without one, words that are too many are
        named, or the message is argparse's.
        """
        parser = self._innermost()
        remedy = f"{parser.hint} See {parser.prog} --help.".strip()
        cause = f"{message[:1].upper()}{message[1:]}."

        # Flags that are written with underscores.
        if message.startswith(UNRECOGNIZED):
            words = message.removeprefix(UNRECOGNIZED).split()
            remedy_of_flags = parser._remedy(words)
            if remedy_of_flags:
                raise UserError(cause, remedy_of_flags)
            if not any(word.startswith("-") for word in words):
                cause = f"{parser.prog} was given more words than it takes: {' '.join(words)}."
                raise UserError(cause, remedy)

        # Flags that do not exist.
        unknown = parser._unknown_flag()
        if unknown is None:
            raise UserError(cause, remedy)
        if parser.translate is not None:
            remedy = f"SGLang and vLLM have no such flag either. {remedy}"
        known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        near = difflib.get_close_matches(unknown, known, n=1)
        if near:
            remedy = f"Did you mean {near[0]}? {remedy}"
        raise UserError(f"{parser.prog} has no flag {unknown}.", remedy)

    def _remedy(self, words: Sequence[str]) -> str:
        """Remedy for the flags among ``words``; empty if there is none for any of them."""
        found = {}
        for word in words:
            if not word.startswith("-"):
                continue
            flag = word.partition("=")[0]
            name = flag.lstrip("-").replace("-", "_")
            with_dashes = f"--{name.replace('_', '-')}"
            if with_dashes in self._option_string_actions:
                found[flag] = f"Write {with_dashes}."
        if len(found) == 1:
            return next(iter(found.values()))
        return " ".join(f"{flag}: {remedy}" for flag, remedy in found.items())

    def _sub_commands(self) -> dict[str, "Parser"]:
        """Parsers of the sub-commands by their names."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return {}

    def _innermost(self) -> "Parser":
        """The parser of the sub-command that was parsed last; this one without sub-commands."""
        for sub in self._sub_commands().values():
            if sub._words is not None:
                return sub._innermost()
        return self

    def _unknown_flag(self) -> str | None:
        """The first word with two dashes that is neither a flag here nor the beginning of one. None if there
        is none before ``--``."""
        for word in self._words or ():
            flag = word.partition("=")[0]
            if flag == "--":
                return None
            is_known = any(known.startswith(flag) for known in self._option_string_actions)
            if flag.startswith("--") and not is_known:
                return flag
        return None


def add_options(parser: argparse.ArgumentParser, schema: type[Options]) -> dict[str, Any]:
    """Declare a flag for every field of ``schema``, and those of its sections.

    Returns:
        The groups of the help by their headings.
    """
    groups: dict[str, Any] = {"": parser}
    for name, info in schema.model_fields.items():
        section = _annotation(info, FlagsOf)
        about = section or _annotation(info, Flag) or Flag()
        if about.group not in groups:
            groups[about.group] = parser.add_argument_group(about.group)
        group = groups[about.group]
        if section is None:
            _add_field(group, name, info, about, info.default, is_required=info.is_required())
        else:
            add_flags(group, type(info.default), section.flags, **_changed(info.default))
    return groups


def add_flags(parser: Any, schema: type[Options], flags: Mapping[str, str], **defaults: Any) -> None:
    """Declare a flag for each of the named fields of ``schema``, with the field's documentation as its help.

    The value of a flag that is not given is the command's own default in ``defaults``, or None, which
    :func:`options_of` replaces by the default of the schema. A flag that begins with ``--no-`` switches its
    field off.
    """
    for name, flag in flags.items():
        info = schema.model_fields[name]
        about = replace(_annotation(info, Flag) or Flag(), name=flag)
        _add_field(parser, name, info, about, defaults.get(name, info.default))
        parser.set_defaults(**{name: defaults.get(name)})


def options_of(
    args: argparse.Namespace, schema: type[SchemaT], flags: Mapping[str, str] | None = None, **more: Any
) -> SchemaT:
    """Make a ``schema`` of the flags that were given.

    Args:
        flags: fields of the schema and their flags, as for :func:`add_flags`; None for all fields, as
            :func:`add_options` declares them.
        more: values of fields that were not given as flags.

    Raises:
        UserError: a wrong value; the cause names the flag.
    """
    if flags is None:
        flags, more = _flags_of(args, schema, more)
    given = dict(more)
    for name, flag in flags.items():
        value = getattr(args, name)
        if value is None:
            continue
        info = schema.model_fields[name]
        given[name] = value
        if isinstance(value, str) and get_origin(_without_none(info)) is dict:
            about = _annotation(info, Flag) or Flag()
            given[name] = json_object(value, flag, about.example)
    try:
        return schema(**given)
    except OptionError as error:
        flag = flags.get(error.name, error.name)
        raise UserError(error.cause.replace(error.name, flag, 1), error.remedy) from None


def json_object(text: str, flag: str, example: str) -> dict[str, Any]:
    """The object of a flag's JSON. Raises UserError with the flag and the example."""
    value = parse_json(text, flag, f"Give a JSON object such as {example}.")
    if not isinstance(value, dict):
        raise UserError(f"{flag} is no JSON object.", f"Give one such as {example}.")
    return value


def _flags_of(
    args: argparse.Namespace, schema: type[Options], more: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Flags of the fields of ``schema`` by name, and ``more`` with the sections of the schema."""
    flags = {}
    sections = {}
    for name, info in schema.model_fields.items():
        section = _annotation(info, FlagsOf)
        if section is not None:
            default = info.default
            sections[name] = options_of(args, type(default), section.flags, **_changed(default))
            continue
        about = _annotation(info, Flag) or Flag()
        flags[name] = about.metavar if about.is_positional else _flag(name, about)
    return flags, {**sections, **more}


def _add_field(
    parser: Any, name: str, info: FieldInfo, about: Flag, default: Any, *, is_required: bool = False
) -> None:
    """Declare the flag of a field. Its value is None if it is not given."""
    flag = _flag(name, about)
    kind = _kind(info)
    text = _help_text(info) + _default_text(default)
    options: dict[str, Any] = {"help": text}

    # A switch.
    if kind is bool:
        is_off = flag.startswith("--no-") and not name.startswith("no_")
        if is_off:
            options["help"] = f"do not {text.partition(';')[0]}"
        parser.add_argument(flag, dest=name, action="store_const", const=not is_off, **options)
        return

    # How the value is written: by the type of the field.
    options["metavar"] = about.metavar or METAVARS.get(kind, flag.split("-")[-1].upper())
    if kind in METAVARS:
        options["type"] = kind
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
        if not about.metavar:
            del options["metavar"]
    elif get_origin(kind) is dict:
        options["metavar"] = "JSON"
    elif get_origin(kind) is tuple and about.is_repeated:
        options["action"] = "append"
        options["metavar"] = about.metavar or "TEXT"
    elif get_origin(kind) is tuple:
        is_optional = about.is_positional and not info.is_required()
        options["nargs"] = "*" if is_optional else "+"
        options["metavar"] = about.metavar or name.removesuffix("s").upper()
    if about.alone is not None:
        options["nargs"] = "?"
        options["const"] = about.alone

    if about.is_positional:
        parser.add_argument(name, **options)
        return
    if options.get("nargs") == "+":
        options["action"] = "extend"
    parser.add_argument(flag, dest=name, required=is_required, **options)


def _flag(name: str, about: Flag) -> str:
    """The flag of a field."""
    return about.name or f"--{name.replace('_', '-')}"


def _kind(info: FieldInfo) -> Any:
    """Type of the value on the command line: text if a validator reads it, else the type of the field."""
    reads_text = any(isinstance(each, BeforeValidator) for each in info.metadata)
    return str if reads_text else _without_none(info)


def _without_none(info: FieldInfo) -> Any:
    """Type of a field; of ``T | None`` it is ``T``."""
    annotation = info.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def _help_text(info: FieldInfo) -> str:
    """Documentation of a field as the help of a flag, which begins with a small letter."""
    text = " ".join((info.description or "").split()).replace("%", "%%").rstrip(".")
    begins_with_word = text[1:2].islower()
    if not begins_with_word:
        return text
    return text[:1].lower() + text[1:]


def _default_text(default: Any) -> str:
    """The default of a flag, for the end of its help; empty for switches and for values of other types."""
    if isinstance(default, tuple) and all(isinstance(each, str) for each in default):
        default = " ".join(default)
    if isinstance(default, bool) or not isinstance(default, str | int | float | Path) or default == "":
        return ""
    return f" (default {default})"


def _annotation(info: FieldInfo, kind: type[Any]) -> Any:
    """The annotation of a field that is a ``kind``; None if there is none."""
    return next((each for each in info.metadata if isinstance(each, kind)), None)


def _changed(section: Options) -> dict[str, Any]:
    """The fields of a section that were set, which are a command's own defaults."""
    return {name: getattr(section, name) for name in section.model_fields_set}
