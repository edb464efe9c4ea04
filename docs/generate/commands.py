"""``commands.md``: the help of every command."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from eagle_kit.cli.app import DELEGATED, build_parser
from eagle_kit.train.__main__ import build_parser as build_train_parser

COLUMNS = 100
"""Width of help texts, given to argparse as the environment variable of that name."""


def commands_page() -> str:
    """The help of every command."""
    lines = ["# Commands", "", "Written by `make reference`: what `--help` prints."]
    for name, parser in _parsers(build_parser(), "eagle-kit"):
        help_text = parser.format_help().replace(str(Path.home()), "~").rstrip()
        lines += ["", f"## `{name}`", "", "```", help_text, "```"]
    return "\n".join(lines) + "\n"


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
