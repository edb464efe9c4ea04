"""Tables of text: aligned for a terminal, as Markdown, as HTML."""

import html
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A head and rows of text.

    Attributes:
        head: titles of the columns; empty ones give a table without a head in HTML.
        rows: one text a column; an empty row is a gap.
        left: titles of the columns that are aligned to the left; None is the first one.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] | None = None

    def text(self) -> str:
        """Aligned columns with a rule under the head."""
        lines = [self.head, *(row for row in self.rows if row)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self._line(self.head, widths), rule, *(self._line(r, widths) for r in self.rows)])

    def markdown(self) -> str:
        """A Markdown table."""
        rule = [":--" if is_left else "--:" for is_left in self._is_left()]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.head, rule, *self.rows))

    def html(self) -> str:
        """A ``<table>`` element."""
        head = [self._cells(self.head, "th")] if any(self.head) else []
        return f"<table>{''.join([*head, *(self._cells(row, 'td') for row in self.rows)])}</table>"

    def _is_left(self) -> Iterator[bool]:
        left = self.head[:1] if self.left is None else self.left
        return (title in left for title in self.head)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = zip(row, widths, self._is_left(), strict=bool(row))
        return "  ".join(t.ljust(width) if left else t.rjust(width) for t, width, left in cells).rstrip()

    @staticmethod
    def _cells(row: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in row)}</tr>"


def number(value: float | None, digits: int = 2, missing: str = "-") -> str:
    """``value`` with ``digits`` decimals, or ``missing`` for None."""
    return missing if value is None else f"{value:.{digits}f}"


def in_few_digits(value: Any) -> str:
    """A number in about three digits, from 1000 on whole; yes or no; anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    is_whole = isinstance(value, int) or value.is_integer()
    if is_whole or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
