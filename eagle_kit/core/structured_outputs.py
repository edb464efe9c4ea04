"""Constraints on the text of a response: the form for callers, and the grammar that the engine follows."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from eagle_kit.core.errors import UserError, first_line, shown

META = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Signs that mean something in a regular expression."""


class Thought(NamedTuple):
    """Token ids that bound the reasoning at the beginning of a response.

    Attributes:
        end: tokens that end it, one directly after the other.
        opener: first token of a response that has reasoning; None if the prompt has begun the reasoning.
        others: tokens that may follow the first one of ``end`` without ending the reasoning.
    """

    end: tuple[int, ...]
    opener: int | None = None
    others: tuple[int, ...] = ()

    def num_tokens_of(self, token_ids: Sequence[int]) -> int:
        """Number of a response's tokens that are reasoning, the opener and the end excluded.

        These are all tokens before the end; none where the response has no reasoning.
        """
        first = 0
        if self.opener is not None:
            if not token_ids or token_ids[0] != self.opener:
                return 0
            first = 1
        start = first
        try:
            while True:
                start = token_ids.index(self.end[0], start)
                if tuple(token_ids[start : start + len(self.end)]) == self.end:
                    return start - first
                start += 1
        except ValueError:  # there is no end yet
            return len(token_ids) - first


class ThinkingBudget(NamedTuple):
    """Most tokens of a response's reasoning, after which its end is forced.

    Attributes:
        thought: bounds of the reasoning.
        num_tokens: the opener and the end excluded.
    """

    thought: Thought
    num_tokens: int


class Grammar(NamedTuple):
    """Constraint as the engine follows it.

    Attributes:
        kind: any JSON object, a JSON schema, a regular expression, or a grammar in llguidance's Lark syntax.
        text: the schema as JSON, the expression or the grammar.
        thought: bounds of the response's reasoning; the constraint holds for the text after it.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""
    thought: Thought | None = None


@dataclass(frozen=True)
class StructuredOutputs:
    """Constraint on a response; exactly one of the attributes is given. The names are vLLM's.

    Attributes:
        json: JSON schema of the response, as a dict or as JSON text.
        regex: regular expression that the whole response matches.
        choice: texts, one of which is the response.
        grammar: grammar in llguidance's Lark syntax, whose rule ``start`` the whole response matches.
        json_object: the response is any JSON object.

    Raises:
        UserError: none or several of them are given, or one is of another type.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        # Exactly one constraint is given.
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            problem = f"has {', '.join(given)}" if given else "is empty"
            raise UserError(
                f"The constraint of structured_outputs {problem}.", f"Give exactly one of {names}."
            )

        # It is of its type.
        if self.json is not None:
            object.__setattr__(self, "json", _read_schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _read_choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise UserError(
                    f"The {name} of structured_outputs is {shown(value)}, which is no text.", "Give a text."
                )

    @classmethod
    def read(cls, given: Any) -> "StructuredOutputs":
        """Take a constraint, or a mapping of its attributes. Raises UserError for anything else."""
        if isinstance(given, cls):
            return given
        remedy = "Give StructuredOutputs(json=...), or with regex, choice, grammar or json_object."
        if not isinstance(given, Mapping):
            raise UserError(f"structured_outputs is {shown(given)}, which is no constraint.", remedy)
        names = [each.name for each in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise UserError(f"structured_outputs has the unknown name {shown(unknown[0])}.", remedy)
        return cls(**given)

    def as_grammar(self) -> Grammar:
        """Make the grammar that the engine follows."""
        if self.json is not None:
            return Grammar("json_schema", json.dumps(self.json))
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("regex", choice_pattern(self.choice))
        if self.grammar is not None:
            return Grammar("lark", self.grammar)
        return Grammar("json_object")


def choice_pattern(texts: Sequence[str]) -> str:
    """Make a regular expression of which exactly these texts are matches."""
    return "|".join(META.sub(r"\\\g<0>", text) for text in texts)


def _read_schema(given: Any) -> dict[str, Any]:
    """Read a JSON schema. Raises UserError."""
    remedy = "Give a JSON schema as a dict or as JSON text, such as {'type': 'object'}."
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"The JSON schema of structured_outputs is no JSON ({first_line(error)}).", remedy
            ) from None
    if not isinstance(given, Mapping):
        raise UserError(f"The JSON schema of structured_outputs is {shown(given)}.", remedy)
    try:
        json.dumps(given)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The JSON schema of structured_outputs cannot be written as JSON ({first_line(error)}).", remedy
        ) from None
    return dict(given)


def _read_choices(given: Any) -> tuple[str, ...]:
    """Read the texts of a choice. Raises UserError."""
    remedy = "Give a list of one text or more."
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"The choice of structured_outputs is {shown(given)}.", remedy)
    if not given or not all(isinstance(text, str) and text for text in given):
        raise UserError(f"The choice of structured_outputs is {shown(given)}.", remedy)
    return tuple(given)
