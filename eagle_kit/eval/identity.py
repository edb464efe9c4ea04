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
        position: index in the response, 0 for its first token.
        plain_token: token id of the plain answer there; None where that answer has ended.
        token: token id of the other answer there; None where that answer has ended.
        plain_text: the plain token as text.
        text: the other token as text.
        logit_gap: target logit of the plain token minus that of the other one, from one forward
            over the shared prefix. A gap near 0 is a tie that rounding decided. None where an
            answer has ended.
    """

    position: int
    plain_token: int | None
    token: int | None
    plain_text: str
    text: str
    logit_gap: float | None


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token (the shorter length when one is a prefix), None when equal."""
    for position, (plain_token, token) in enumerate(zip_longest(plain, other)):
        if plain_token != token:
            return position
    return None


def compare_outputs(engine: Any, plain: RequestOutput, other: RequestOutput) -> Difference | None:
    """Compare two answers to one prompt. ``engine`` computes the logits where they differ."""
    position = first_difference(plain.token_ids, other.token_ids)
    if position is None:
        return None
    plain_token = _token_at(plain, position)
    token = _token_at(other, position)
    logit_gap = None
    if plain_token is not None and token is not None:
        logits = engine.logits(plain.prompt_ids + plain.token_ids[:position])[-1]
        logit_gap = float(logits[plain_token]) - float(logits[token])
    return Difference(
        position,
        plain_token,
        token,
        plain_text=_token_text(engine, plain_token),
        text=_token_text(engine, token),
        logit_gap=logit_gap,
    )


def _token_at(output: RequestOutput, position: int) -> int | None:
    """Token of a response; None after its end."""
    return output.token_ids[position] if position < len(output.token_ids) else None


def describe(record: dict[str, Any]) -> str:
    """One sentence for an answer record that holds a difference."""
    found = record["difference"]
    gap = "" if found["logit_gap"] is None else f" (logit gap {found['logit_gap']:.3g})"
    sample = ""
    if record["temperature"] > 0:
        sample = f", T {record['temperature']:g}, seed {record['seed']}"
    place = f"{record['task']} {record['id']}, turn {record['turn'] + 1}{sample}"
    return (
        f"{place}, {record['draft']} {record['shape']}: "
        f"token {found['position']} of the response is {_shown(found['token'], found['text'])}, "
        f"plain decoding has {_shown(found['plain_token'], found['plain_text'])}{gap}."
    )


def _shown(token: int | None, text: str) -> str:
    return "nothing more" if token is None else f"{token} {text!r}"


def _token_text(engine: Any, token: int | None) -> str:
    if token is None or engine.tokenizer is None:
        return ""
    return TokenNames(engine.tokenizer).of(token)[0]
