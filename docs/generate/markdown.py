"""Markdown out of docstrings: paragraphs, first sentences, lists and tables."""

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "eagle_kit"
LINE = 118
"""Width of lines, except help texts and tables."""


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a paragraph; words and code are not cut."""
    return textwrap.wrap(text, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def without_double_blanks(lines: list[str]) -> list[str]:
    """The lines without a blank one behind another."""
    return [line for number, line in enumerate(lines) if line or number == 0 or lines[number - 1]]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def code(text: str) -> str:
    """Docstring text with Markdown's marks of code in place of those of reStructuredText."""
    return re.sub(r":\w+:`[~.]*([^`]*)`", r"`\1`", text).replace("``", "`")


def docstring(path: Path) -> str:
    """Docstring of a module, which is not imported."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def first_sentence(text: str) -> str:
    """First sentence of a docstring, in Markdown; a first paragraph without a full stop is one."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:?])\s+(?=[A-Z])", paragraph)[0]
    return code(sentence)
