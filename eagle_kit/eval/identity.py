"""Comparison of an answer with the plain greedy one: first different token, and the gap of the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eagle_kit.core.output import RequestOutput
from eagle_kit.engine.token_names import TokenNames


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer leaves the plain greedy one.

    Attributes:
        position: index in the reply, 0 for its first token.
        plain_token, token: token ids of both answers there; None where an answer has already ended.
        plain_text, text: those tokens as text.
        logit_gap: target logit of the plain token minus that of the other one, from one forward over the
            shared prefix. Near 0 it is a tie that rounding decided; None where an answer had ended.
    """

    position: int
    plain_token: int | None
    token: int | None
    plain_text: str
    text: str
    logit_gap: float | None


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token (the shorter length when one is a prefix), None when equal."""
    for position, (a, b) in enumerate(zip_longest(plain, other)):
        if a != b:
            return position
    return None


def compare_outputs(engine: Any, plain: RequestOutput, other: RequestOutput) -> Difference | None:
    """Compare two answers to one prompt; ``engine`` gives logits and tokenizer when they differ."""
    position = first_difference(plain.token_ids, other.token_ids)
    if position is None:
        return None
    a = plain.token_ids[position] if position < len(plain.token_ids) else None
    b = other.token_ids[position] if position < len(other.token_ids) else None
    gap = None
    if a is not None and b is not None:
        row = engine.logits(plain.prompt_ids + plain.token_ids[:position])[-1]
        gap = float(row[a]) - float(row[b])
    return Difference(position, a, b, _token_text(engine, a), _token_text(engine, b), gap)


def describe(record: dict[str, Any]) -> str:
    """One sentence for an answer record that holds a difference."""
    found = record["difference"]
    gap = "" if found["logit_gap"] is None else f" (logit gap {found['logit_gap']:.3g})"
    return (
        f"{record['task']} {record['id']}, turn {record['turn'] + 1}, {record['draft']} {record['shape']}: "
        f"token {found['position']} of the reply is {_shown(found['token'], found['text'])}, "
        f"plain decoding has {_shown(found['plain_token'], found['plain_text'])}{gap}."
    )


def _shown(token: int | None, text: str) -> str:
    return "nothing more" if token is None else f"{token} {text!r}"


def _token_text(engine: Any, token: int | None) -> str:
    if token is None or engine.tokenizer is None:
        return ""
    return TokenNames(engine.tokenizer).of(token)[0]
