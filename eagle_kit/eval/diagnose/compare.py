"""A server beside our engine with the same prompts and shape: whether it accepts fewer drafts, and why."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.diagnose.causes import Cause
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.server import ServerResult
from eagle_kit.eval.diagnose.trials import SURE

EARLY = 0.25
"""Share of a response that two engines with the same weights at least begin with alike."""
LEAST_SHARE = 0.05
"""Share of accepted drafts that two engines may differ by without a cause, and share of the
server's tokens that may be of other clients."""
MARKS = re.compile(r"</?think>|\s")
"""Marks that a reasoning parser takes out of a text, and spaces."""


@dataclass(frozen=True)
class Comparison:
    """A server and our engine on the same prompts.

    Attributes:
        seen: what the server did.
        ours: our engine in the server's shape; None where that is not known.
        cause: why the server accepts fewer; None where it does not, or where that cannot be told.
        verdict: in sentences, with what differs besides.
    """

    seen: ServerResult
    ours: Replay | None
    cause: Cause | None
    verdict: str


def compare_server(
    seen: ServerResult,
    ours: Replay | None,
    plain: Sequence[RequestOutput],
    likeness: Callable[[], str] = str,
) -> Comparison:
    """Compare acceptance, prompts and texts.

    Args:
        ours: our engine in the server's shape; None where that is not known.
        plain: our responses, decoded plainly.
        likeness: finds the fault under which our own engine accepts what the server does; empty for none.
    """
    # Prompts and texts.
    pairs = []
    for response, output in zip(seen.responses, plain, strict=True):
        pair = _TextPair(_letters(response.text), _letters(output.text))
        if pair.there and pair.here:
            pairs.append(pair)
    difference = _other_prompts(seen, plain) or _other_texts(seen, pairs)

    # Acceptance.
    cause = None
    verdict = _why_not_compared(seen, ours)
    if ours is not None and not verdict:
        missing = gap(seen, ours.stats)
        if missing > 0:
            verdict = f"{seen.engine} accepts fewer than our engine with this draft: the cause lies there."
            cause = difference or _other_engine(seen, ours, bool(pairs), likeness())
            cause = replace(cause, cost=missing)
        elif missing < 0:
            verdict = f"{seen.engine} accepts more than our engine."
        else:
            verdict = f"{seen.engine} accepts what our engine does."

    # Add what differs besides.
    sentences = [verdict]
    if difference is not None and cause is None:
        sentences.append(f"But {difference.evidence}")
    if not pairs:
        sentences.append("Texts could not be compared: its responses are empty.")
    if seen.other_traffic:
        sentences.append(
            f"It counted {seen.num_counted_tokens} tokens, and these responses have {seen.num_tokens}: its "
            "figures are not of these prompts alone."
        )
    return Comparison(seen, ours, cause, " ".join(sentences))


def gap(seen: ServerResult, stats: SpecStats, errors: float = SURE) -> float:
    """Drafts per verify that ``stats`` has more accepted than the server; 0 where chance explains it.

    Args:
        errors: standard errors that are taken for chance.
    """
    assert seen.accept_length is not None
    there = seen.accept_length - 1
    here = stats.accept_length - 1
    variance = _variance(seen.num_verifies, seen.reach, there)
    variance += _variance(stats.num_verifies, stats.acceptance_per_position, here)
    least = max(errors * sqrt(variance), LEAST_SHARE * max(there, here))
    return here - there if abs(here - there) > least else 0.0


def _variance(count: int, reach: Sequence[float], mean: float) -> float:
    """Variance of the mean number k of accepted drafts over ``count`` verifies, from the share of
    verifies that reach each depth: ``E[k^2] = sum (2 d - 1) P(k >= d)``. Without these shares it is
    taken to be the mean, as that of a Poisson distribution."""
    if not count:
        return 0.0
    square = sum((2 * depth - 1) * share for depth, share in enumerate(reach, 1)) or mean + mean**2
    return max(square - mean**2, 0.0) / count


def _why_not_compared(seen: ServerResult, ours: Replay | None) -> str:
    """A sentence; empty where acceptance can be compared."""
    if seen.accept_length is None:
        return (
            f"{seen.engine} counts no verifies: it runs without speculation, or without metrics "
            "(SGLang needs --enable-metrics)."
        )
    if seen.is_gauge:
        return (
            f"{seen.engine} has a gauge of its log's last interval only, which tells nothing of these "
            "prompts: a newer one counts its verifies."
        )
    if ours is None:
        return (
            f"{seen.engine} emits {seen.accept_length:.2f} tokens per verify and does not say how it drafts: "
            "give --shape to compare with the same."
        )
    if seen.other_traffic > LEAST_SHARE:
        return f"{seen.engine} was used by others meanwhile: run it again when it is idle."
    return ""


def _other_prompts(seen: ServerResult, plain: Sequence[RequestOutput]) -> Cause | None:
    """Prompts of other lengths: another template, or tokens before the first."""
    num_different = 0
    example = ""
    for response, output in zip(seen.responses, plain, strict=True):
        there = response.num_prompt_tokens
        here = len(output.prompt_ids)
        if there and there != here:
            num_different += 1
            if not example:
                example = (
                    f"{seen.engine} makes {there} tokens of a prompt that the target's own template makes "
                    f"{here} of"
                )
    if not num_different:
        return None
    return Cause(
        "chat template",
        f"{example} ({num_different} of {len(plain)} prompts differ).",
        "Start the server with the chat template of the target's folder, and without a second first token.",
    )


class _TextPair(NamedTuple):
    """The letters of a response of the server, and of ours."""

    there: str
    here: str

    @property
    def common_share(self) -> float:
        """Share of the shorter text that both begin with."""
        length = min(len(self.there), len(self.here))
        for index in range(length):
            if self.there[index] != self.here[index]:
                return index / length
        return 1.0


def _other_texts(seen: ServerResult, pairs: Sequence[_TextPair]) -> Cause | None:
    """Greedy responses that part early: the server's target is not the one here."""
    num_parted = sum(pair.common_share < EARLY for pair in pairs)
    if num_parted * 2 <= len(pairs):
        return None
    return Cause(
        "another target",
        f"{num_parted} of {len(pairs)} greedy responses of {seen.engine} part from ours in their first "
        "quarter.",
        "Compare the server's target with the one here: its name, revision, quantisation and dtype.",
    )


def _other_engine(seen: ServerResult, ours: Replay, has_texts: bool, likeness: str) -> Cause:
    """A cause in the server's engine.

    Args:
        has_texts: texts were compared, and agree.
        likeness: the fault under which our engine accepts what the server does; empty for none.
    """
    here = ours.stats.accept_length
    evidence = f"{seen.accept_length:.2f} tokens per verify there and {here:.2f} in our engine"
    alike = []
    if any(response.num_prompt_tokens for response in seen.responses):
        alike.append("prompts")
    if has_texts:
        alike.append("texts")
    if alike:
        evidence += f", though {' and '.join(alike)} agree"
    evidence += "."
    if likeness:
        evidence += f" Ours accepts as much with {likeness}."
    return Cause(
        "the other engine",
        evidence,
        f"Look at {seen.engine}'s own side of the draft: its version, the layout it loads (`eagle-kit export "
        "--format`), the numbering of layer ids, and its speculative options.",
    )


def _letters(text: str) -> str:
    return MARKS.sub("", text)
