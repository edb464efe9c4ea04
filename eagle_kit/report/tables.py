"""Tables of text: aligned for a terminal, as Markdown, as HTML."""

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A head and rows of text.

    Attributes:
        head: titles of the columns; empty ones give a table without a head in HTML.
        rows: one text for each column; an empty row is a gap.
        left: titles of the columns that are aligned to the left; None for the first one alone.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] | None = None

    def text(self) -> str:
        """Aligned columns with a rule under the head."""
        filled = [self.head, *(row for row in self.rows if row)]
        widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
        rule = "  ".join("-" * width for width in widths)
        lines = [self._line(self.head, widths), rule]
        lines += [self._line(row, widths) for row in self.rows]
        return "\n".join(lines)

    def markdown(self) -> str:
        """A Markdown table."""
        rule = [":--" if is_left else "--:" for is_left in self._is_left()]
        lines = [self.head, rule, *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self) -> str:
        """A ``<table>`` element."""
        rows = [_html_row(row, "td") for row in self.rows]
        if any(self.head):
            rows.insert(0, _html_row(self.head, "th"))
        return f"<table>{''.join(rows)}</table>"

    def _is_left(self) -> list[bool]:
        """Whether each column is aligned to the left."""
        left = self.head[:1] if self.left is None else self.left
        return [title in left for title in self.head]

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        """A row with its cells aligned; empty for an empty row."""
        cells = []
        for text, width, is_left in zip(row, widths, self._is_left(), strict=bool(row)):
            cells.append(text.ljust(width) if is_left else text.rjust(width))
        return "  ".join(cells).rstrip()


def _html_row(row: Sequence[str], element: str) -> str:
    """A ``<tr>`` of cells that are ``th`` or ``td``."""
    cells = [f"<{element}>{html.escape(text)}</{element}>" for text in row]
    return f"<tr>{''.join(cells)}</tr>"


def number(value: float | None, digits: int = 2, missing: str = "-") -> str:
    """``value`` with ``digits`` decimals, or ``missing`` for None."""
    return missing if value is None else f"{value:.{digits}f}"


def in_few_digits(value: Any) -> str:
    """A number in about three digits, without decimals from 1000 on; a bool as yes or no; anything
    else as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    is_whole = isinstance(value, int) or value.is_integer()
    if is_whole or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
