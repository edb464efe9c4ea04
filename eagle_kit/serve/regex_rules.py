"""Regular expressions that a grammar may have. xgrammar ignores some of what they say without a word, and
takes seconds per token over others; both are found here, before anything is compiled.

A regex is refused when it repeats a repetition with nothing fixed between the rounds, as ``(a+)+`` does:
every text has then many ways to match, and the matcher follows all of them.
"""

import re
from typing import NamedTuple

from eagle_kit.core.errors import UserError

MAX_REGEX_CHARS = 4096
MAX_REGEX_SIZE = 4096
"""Characters and classes of a regex when its counted repetitions are written out."""
MAX_GROUPS = 32
_COUNTED = re.compile(r"\{(\d+)(,(\d*))?\}")
_ESCAPES = frozenset("dDwWsSnrtvf0cxubBpPk")
"""Letters and digits with a meaning behind a backslash; xgrammar itself refuses the last five."""


class _Part(NamedTuple):
    """A piece of a regex: its ``size`` written out, whether it may be empty, and whether it may be one
    repetition and nothing else."""

    size: int
    may_be_empty: bool
    may_be_run: bool


def check_regex(text: str) -> None:
    """Raises UserError for a regex that would be read differently from what it says, or cost too much."""
    if len(text) > MAX_REGEX_CHARS:
        raise UserError(
            f"The regex has {len(text)} characters, {MAX_REGEX_CHARS} are allowed.", "Write a shorter one."
        )
    _Regex(text).check()


class _Regex:
    """Reads a regex once, from left to right. What is ill-formed is left to xgrammar, which says why."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def check(self) -> None:
        while self._at < len(self._text):
            self._alternatives(0)
            self._at += 1  # a bracket that closes nothing

    def _alternatives(self, depth: int) -> _Part:
        if depth > MAX_GROUPS:
            raise UserError(f"The regex has more than {MAX_GROUPS} groups in each other.", "Use fewer.")
        whole = self._sequence(depth)
        while self._text.startswith("|", self._at):
            self._at += 1
            part = self._sequence(depth)
            whole = _Part(
                whole.size + part.size,
                whole.may_be_empty or part.may_be_empty,
                whole.may_be_run or part.may_be_run,
            )
        return whole

    def _sequence(self, depth: int) -> _Part:
        first, parts = self._at, []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            self._check_anchor(depth, first)
            part = self._atom(depth)
            while (again := self._quantified(part)) is not None:
                part = again
            parts.append(part)
        must = [part for part in parts if not part.may_be_empty]
        # With one part that has to be there it is the run, or nothing is; otherwise any of them may be.
        may_be_run = len(must) < 2 and any(part.may_be_run for part in must or parts)
        return _Part(sum(part.size for part in parts), not must, may_be_run)

    def _check_anchor(self, depth: int, first: int) -> None:
        sign = self._text[self._at]
        behind = self._text[self._at + 1 : self._at + 2]
        if (sign == "^" and (depth or self._at != first)) or (sign == "$" and (depth or behind not in "|")):
            raise UserError(
                f"The regex has {sign} at position {self._at}, inside of what it matches.",
                "Leave it out, since a regex always matches the whole reply.",
            )

    def _atom(self, depth: int) -> _Part:
        text, start = self._text, self._at
        self._at += 1
        if text[start] in "^$":
            return _Part(0, True, False)
        if text[start] == "(":
            if named := re.match(r"\?(?::|<\w+>)", text[self._at :]):
                self._at += named.end()
            inside = self._alternatives(depth + 1)
            self._at += 1
            return inside
        if text[start] == "[":
            self._skip_class()
        elif text[start] == "\\":
            self._skip_escape()
        return _Part(1, False, False)

    def _skip_class(self) -> None:
        text = self._text
        while self._at < len(text) and text[self._at] != "]":
            if text.startswith("[:", self._at):
                raise UserError(
                    "The regex has a class such as [:alpha:].", "Write its characters, as in a-z."
                )
            self._at += 1
            if text[self._at - 1] == "\\":
                self._skip_escape()
        self._at += 1

    def _skip_escape(self) -> None:
        text = self._text
        letter = text[self._at : self._at + 1]
        if letter.isascii() and letter.isalnum() and letter not in _ESCAPES and not letter.isdigit():
            raise UserError(
                f"The regex has \\{letter}, which is not supported.", f"Write {letter} for the letter itself."
            )
        braces = re.match(r"[upP]\{[^}]*\}", text[self._at :])
        self._at += braces.end() if braces else 1

    def _quantified(self, part: _Part) -> _Part | None:
        text = self._text
        sign = text[self._at : self._at + 1]
        if sign == "?":
            self._at += 1
            return part._replace(may_be_empty=True)
        counted = _COUNTED.match(text, self._at)
        if not counted and (not sign or sign not in "*+"):
            return None
        start, low, high = self._at, int(sign == "+"), None
        self._at += 1
        if counted:
            self._at = counted.end()
            low = _count(counted[1])
            high = low if counted[2] is None else _count(counted[3]) if counted[3] else None
        if part.may_be_run and high not in (0, 1):
            raise UserError(
                f"The regex repeats a repetition at position {start} with nothing fixed between the rounds.",
                "Write one repetition, such as [a-z ]+ for ([a-z]+ ?)+, or put a separator into every round.",
            )
        size = part.size * max(low, high or 0, 1)
        if size > MAX_REGEX_SIZE:
            raise UserError(
                f"The regex has a repetition that is longer than {MAX_REGEX_SIZE} characters when it is "
                "written out.",
                "Repeat less often, or without a bound.",
            )
        is_run = high not in (0, 1) and (low != high or part.may_be_empty)
        return _Part(size, low == 0 or part.may_be_empty, is_run)


def _count(digits: str) -> int:
    return int(digits[:9])
