"""Targets of the figures, and what was measured against them."""

from typing import Any, NamedTuple

Rows = list[dict[str, Any]]


class Verdict(NamedTuple):
    """A target, and what was measured: ``wanted`` is the worst allowed, ``met`` None if it is not judged."""

    target: str
    wanted: float
    measured: float | None
    at: str
    met: bool | None

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.target}: not measured"
        word = "not judged" if self.met is None else "met" if self.met else "MISSED"
        return f"{self.target}: {self.measured:.3g} at {self.at}: {word}"


def at_least(target: str, wanted: float, found: list[tuple[float, str]], *, counts: bool = True) -> Verdict:
    """The smallest of (figure, where it was found), which must reach ``wanted``; ``counts`` False measures
    only."""
    if not found:
        return Verdict(target, wanted, None, "", None)
    measured, at = min(found)
    return Verdict(target, wanted, measured, at, measured >= wanted if counts else None)


def at_most(target: str, wanted: float, found: list[tuple[float, str]], *, counts: bool = True) -> Verdict:
    """The largest of (figure, where it was found), which must not exceed ``wanted``; ``counts`` False
    measures only."""
    if not found:
        return Verdict(target, wanted, None, "", None)
    measured, at = max(found)
    return Verdict(target, wanted, measured, at, measured <= wanted if counts else None)
