"""Regular expressions that a grammar may have. xgrammar ignores some of what they say without a word, and
takes seconds per token over others; both are found here, before anything is compiled.

A regex is refused when it repeats a repetition with nothing fixed between the rounds, as ``(a+)+`` does:
every text has then many ways to match, and the matcher follows all of them.

A pattern of a JSON schema is searched for, and stands between quotes: what is not anchored gets ``.*``, and
characters that JSON escapes are refused, since xgrammar would write them as they are. Of classes and of the
dot it leaves them out by itself.

Compiling takes time for every place where a reply can be, most for classes that many tokens match. The
estimates are milliseconds of one core with 49,152 tokens, and rather too high.
"""

import re
from typing import NamedTuple

from eagle_kit.core.errors import UserError

MAX_REGEX_CHARS = 4096
MAX_REGEX_SIZE = 4096
"""Characters and classes of a regex when its counted repetitions are written out."""
MAX_GROUPS = 32
MAX_REGEX_MS = 3000.0
"""Estimated time to compile one regex."""
MAX_BOUNDED_RUN = 64
"""A repetition with an end may be repeated when all of it is at most so long."""
LITERAL_MS, NARROW_MS, WIDE_MS = 0.1, 1.5, 7.0
FOLDED = 128
"""Larger counts are not written out by xgrammar."""
FOLDED_MS, FOLDED_SQUARE_MS = 20.0, 0.6e-3
"""Of a larger count n in a pattern: ``FOLDED_MS + n * n * FOLDED_SQUARE_MS``; in a regex only the former."""
DOT = r"[^\n]"
_NOT_IN_JSON = frozenset({*range(0x20), 0x22, 0x5C})
REMEDY = "Leave quotes, backslashes and control characters out of patterns, or check the reply instead."
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_CONTROLS = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "0": 0}
_COUNTED = re.compile(r"\{(\d+)(,(\d*))?\}")
_ESCAPES = frozenset("dDwWsSnrtvf0cxubBpPk")
"""Letters and digits with a meaning behind a backslash; xgrammar itself refuses the last five."""


class _Part(NamedTuple):
    """A piece of a regex: its ``size`` written out, whether it may be empty, whether it may be one repetition
    and nothing else, whether its length has an end, and what it takes to compile."""

    size: int
    may_be_empty: bool
    may_be_run: bool
    has_end: bool
    ms: float


_NOTHING = _Part(0, True, False, True, 0.0)


class Checked(NamedTuple):
    """A regex as xgrammar is to read it, and the estimated time to compile it."""

    text: str
    ms: float


def check_regex(text: str) -> Checked:
    """A regex that is matched by a whole reply. Raises UserError for one that would be read differently from
    what it says, or cost too much."""
    return _checked(text, in_json=False)


def check_pattern(text: str) -> Checked:
    """A regex that is searched for in a JSON string -> one that the whole string matches. Raises UserError
    also for one with characters that are escaped in JSON."""
    return _checked(text, in_json=True)


def _checked(text: str, in_json: bool) -> Checked:
    if len(text) > MAX_REGEX_CHARS:
        raise UserError(
            f"The regex has {len(text)} characters, {MAX_REGEX_CHARS} are allowed.", "Write a shorter one."
        )
    return _Regex(text, in_json).check()


class _Regex:
    """Reads a regex once, from left to right. What is ill-formed is left to xgrammar, which says why."""

    def __init__(self, text: str, in_json: bool) -> None:
        self._text, self._at, self._in_json = text, 0, in_json
        self._edits: list[tuple[int, int, str]] = []

    def check(self) -> Checked:
        ms = self._alternatives(0).ms
        if self._at < len(self._text):
            raise UserError(
                f"The regex has a bracket at position {self._at} that closes nothing.",
                r"Write \) for the sign.",
            )
        if ms > MAX_REGEX_MS:
            raise UserError(
                f"The regex would take about {ms / 1000:.1f} seconds to compile, "
                f"{MAX_REGEX_MS / 1000:.0f} are allowed.",
                "Use fewer or smaller bounds, smaller classes, or * without a bound.",
            )
        text = self._text
        for start, end, new in reversed(self._edits):
            text = text[:start] + new + text[end:]
        return Checked(text, ms)

    def _replace(self, start: int, end: int, new: str) -> None:
        self._edits.append((start, end, new))

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
                whole.has_end and part.has_end,
                whole.ms + part.ms,
            )
        return whole

    def _sequence(self, depth: int) -> _Part:
        first, parts = self._at, []
        is_searched = self._in_json and depth == 0
        if is_searched and not self._text.startswith("^", first):
            self._replace(first, first, f"{DOT}*")
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            self._check_anchor(depth, first)
            part = self._atom(depth)
            before = self._at
            while (again := self._quantified(part, before)) is not None:
                part = again
            parts.append(part)
        if is_searched and not self._ends_anchored(first):
            self._replace(self._at, self._at, f"{DOT}*")
        must = [part for part in parts if not part.may_be_empty]
        # With one part that has to be there it is the run, or nothing is; otherwise any of them may be.
        may_be_run = len(must) < 2 and any(part.may_be_run for part in must or parts)
        return _Part(
            sum(part.size for part in parts),
            not must,
            may_be_run,
            all(part.has_end for part in parts),
            sum(part.ms for part in parts) + _skipping_ms(parts),
        )

    def _ends_anchored(self, first: int) -> bool:
        read = self._text[first : self._at]
        return read.endswith("$") and (len(read) - len(read[:-1].rstrip("\\"))) % 2 == 1

    def _check_anchor(self, depth: int, first: int) -> None:
        sign = self._text[self._at]
        behind = self._text[self._at + 1 : self._at + 2]
        if (sign == "^" and (depth or self._at != first)) or (sign == "$" and (depth or behind not in "|")):
            raise UserError(
                f"The regex has {sign} at position {self._at}, inside of what it matches.",
                "Write it only at the ends."
                if self._in_json
                else "Leave it out, since a regex always matches the whole reply.",
            )

    def _atom(self, depth: int) -> _Part:
        text, start = self._text, self._at
        self._at += 1
        if text[start] in "^$":
            self._replace(start, self._at, "")  # the whole reply is matched anyway
            return _NOTHING
        if text[start] == "(":
            self._skip_group_name()
            inside = self._alternatives(depth + 1)
            self._at += 1
            return inside
        if text[start] == ".":
            self._replace(start, self._at, DOT)
            return _class(WIDE_MS)
        if text[start] == "[":
            return _class(self._skip_class())
        code: int | None = ord(text[start])
        if text[start] == "\\":
            code = self._skip_escape()
            if code is None:
                return _class(WIDE_MS if text[start + 1 : start + 2] in tuple("DWS") else NARROW_MS)
        if self._in_json and code is not None and code in _NOT_IN_JSON:
            raise UserError(
                f"The regex has the character {chr(code)!r} at position {start}, which JSON escapes.",
                REMEDY,
            )
        return _class(LITERAL_MS)

    def _skip_group_name(self) -> None:
        if not self._text.startswith("?", self._at):
            return
        named = re.match(r"\?(?::|(P?)<[A-Za-z_]\w*>)", self._text[self._at :], re.ASCII)
        if named is None:
            raise UserError(
                f"The regex has {self._text[self._at - 1 : self._at + 2]} at position {self._at - 1}: "
                "look-around, flags and the like are not supported.",
                "Use plain groups, (?:...) or (?<name>...).",
            )
        if named[1]:
            self._replace(self._at + 1, self._at + 2, "")
        self._at += named.end()

    def _skip_class(self) -> float:
        """Goes behind the class -> what it takes to compile."""
        text, start = self._text, self._at - 1
        is_negated = text.startswith("^", self._at)
        self._at += is_negated
        if text.startswith("]", self._at):
            raise UserError("The regex has an empty class.", r"Write \] for a bracket in a class.")
        ends: list[int | None] = []  # of single characters and ranges; None is a class such as \d
        has_other, is_wide = is_negated, is_negated
        while self._at < len(text) and text[self._at] != "]":
            low = self._class_item()
            high = low
            if text.startswith("-", self._at) and text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_item()
                if low is None or high is None:
                    raise UserError(
                        f"The regex has a range with a class at its end, at position {start}.",
                        r"Write \- for the sign itself.",
                    )
            ends.append(high)
            is_wide |= low is None or high is None or high > 0x7F
            has_other |= low is None or high is None or high not in _NOT_IN_JSON or high - low > 0x1F
        self._at += 1
        if self._in_json and ends and not has_other:
            raise UserError(
                f"The regex has a class at position {start} of nothing but characters that a JSON string "
                "escapes.",
                REMEDY,
            )
        return WIDE_MS if is_wide else NARROW_MS

    def _class_item(self) -> int | None:
        """Goes behind one character, or one escape, of a class -> its code, or None for many."""
        text = self._text
        if text.startswith("[:", self._at):
            raise UserError("The regex has a class such as [:alpha:].", "Write its characters, as in a-z.")
        self._at += 1
        if text[self._at - 1] != "\\":
            return ord(text[self._at - 1])
        is_backspace = text.startswith("b", self._at)
        code = self._skip_escape()
        return 8 if is_backspace else code

    def _skip_escape(self) -> int | None:
        """Goes behind an escape -> the character it stands for, or None when it is a class, or ill-formed."""
        text = self._text
        letter = text[self._at : self._at + 1]
        if letter.isascii() and letter.isalnum() and letter not in _ESCAPES and not letter.isdigit():
            raise UserError(
                f"The regex has \\{letter}, which is not supported.", f"Write {letter} for the letter itself."
            )
        if letter == "0" and text[self._at + 1 : self._at + 2].isdigit():
            raise UserError("The regex has an octal number.", r"Write \xHH instead.")
        if numbered := _CODE.match(text, self._at):
            self._at = numbered.end()
            code = int(numbered[1] or numbered[2] or numbered[3], 16)
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                raise UserError(
                    f"The regex has {numbered[0]!r}, which is no character.", r"Write \u{HHHHH} for one."
                )
            return code
        control = letter == "c" and text[self._at + 1 : self._at + 2]
        if control and control.isascii() and control.isalpha():
            self._at += 2
            return ord(control) & 31
        braces = re.match(r"[pP]\{[^}]*\}", text[self._at :])
        self._at += braces.end() if braces else 1
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        return None if not letter or letter in _ESCAPES or letter.isdigit() else ord(letter)

    def _quantified(self, part: _Part, first: int) -> _Part | None:
        """``part`` with the quantifier behind it, if there is one; the first may be at ``first``."""
        text = self._text
        sign = text[self._at : self._at + 1]
        counted = _COUNTED.match(text, self._at)
        if not counted and (not sign or sign not in "*+?"):
            return None
        start, low, high = self._at, int(sign == "+"), 1 if sign == "?" else None
        self._at += 1
        if start != first:
            if sign == "?" and text[start - 1] in "?*+}" and not text.startswith("??", start - 2):
                return part  # not greedy: other texts first, the same ones in all
            raise UserError(
                f"The regex has a second quantifier at position {start}.", "Put brackets around the first."
            )
        if counted:
            self._at = counted.end()
            low = _count(counted[1])
            high = low if counted[2] is None else _count(counted[3]) if counted[3] else None
        rounds = max(low, high or 0, 1)
        size = part.size * rounds
        is_small = part.has_end and high is not None and size <= MAX_BOUNDED_RUN
        if part.may_be_run and high not in (0, 1) and not is_small:
            raise UserError(
                f"The regex repeats a repetition at position {start} with nothing fixed between the rounds.",
                "Write one repetition, such as [a-z ]+ for ([a-z]+ ?)+, or put a separator into every round.",
            )
        if size > MAX_REGEX_SIZE:
            raise UserError(
                f"The regex has a repetition that is longer than {MAX_REGEX_SIZE} characters when it is "
                "written out.",
                "Repeat less often, or without a bound.",
            )
        is_run = high not in (0, 1) and (low != high or part.may_be_empty)
        has_end = part.has_end and high is not None
        ms = self._repeated_ms(part, rounds, size)
        return _Part(size, low == 0 or part.may_be_empty, is_run or part.may_be_run, has_end, ms)

    def _repeated_ms(self, part: _Part, rounds: int, size: int) -> float:
        if rounds > FOLDED:
            return FOLDED_MS + part.ms + (size * size * FOLDED_SQUARE_MS if self._in_json else 0.0)
        return part.ms * rounds + (_skipping_ms([part] * rounds) if part.may_be_empty else 0.0)


def _class(ms: float) -> _Part:
    return _Part(1, False, False, True, ms)


def _skipping_ms(parts: list[_Part]) -> float:
    """Optional parts in a row: from each of them all the later ones can be reached."""
    total, row = 0.0, list[_Part]()
    for part in [*parts, None]:
        if part is not None and part.may_be_empty and part.size:
            row.append(part)
        elif row:
            total += 0.2 * (len(row) - 1) * sum(each.ms for each in row)
            row = []
    return total


def _count(digits: str) -> int:
    return int(digits[:9])
