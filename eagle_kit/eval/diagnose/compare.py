"""A server beside our engine: same prompts, same shape; where it accepts fewer, and what that points to."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.stats import SpecStats
from eagle_kit.eval.diagnose.causes import Cause
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.server import ServerReading
from eagle_kit.eval.diagnose.trials import SURE

EARLY = 0.25
"""Share of a reply's text by which two engines with the same weights have not parted."""
LEAST_SHARE = 0.05
"""Share of accepted drafts that two engines may differ by without a cause, and of the server's tokens that
may be somebody else's."""
MARKS = re.compile(r"</?think>|\s")
"""What a reasoning parser takes out of a text, and spaces."""


@dataclass(frozen=True)
class Comparison:
    """A server and our engine on the same prompts.

    Attributes:
        ours: our engine in the server's shape; None where that is not known.
        cause: why the server accepts fewer; None where it does not, or where that cannot be told.
        verdict: in sentences, with what differs besides.
    """

    seen: ServerReading
    ours: Replay | None
    cause: Cause | None
    verdict: str


def compare_server(
    seen: ServerReading,
    ours: Replay | None,
    plain: Sequence[RequestOutput],
    likeness: Callable[[], str] = str,
) -> Comparison:
    """Compare acceptance, prompts and texts.

    Args:
        ours: our engine in the server's shape; None where that is not known.
        plain: our replies, decoded plainly.
        likeness: finds the fault under which our own engine accepts what the server does; empty for none.
    """
    pairs = [
        (_letters(reply.text), _letters(output.text))
        for reply, output in zip(seen.replies, plain, strict=True)
    ]
    pairs = [pair for pair in pairs if all(pair)]
    differs = _other_prompts(seen, plain) or _other_texts(seen, pairs)
    verdict = _why_not_compared(seen, ours)
    cause = None
    if ours is not None and not verdict:
        missing = gap(seen, ours.stats)
        verdict = f"{seen.engine} accepts {'more than our engine' if missing else 'what our engine does'}."
        if missing > 0:
            verdict = f"{seen.engine} accepts fewer than our engine with this draft: the cause lies there."
            cause = replace(differs or _other_engine(seen, ours, bool(pairs), likeness()), cost=missing)
    said = [verdict]
    if differs is not None and cause is None:
        said.append(f"But {differs.evidence}")
    if not pairs:
        said.append("Texts could not be compared: its replies are empty.")
    if seen.other_traffic:
        said.append(
            f"It counted {seen.num_counted_tokens} tokens, and these replies have {seen.num_tokens}: its "
            "figures are not of these prompts alone."
        )
    return Comparison(seen, ours, cause, " ".join(said))


def gap(seen: ServerReading, stats: SpecStats, errors: float = SURE) -> float:
    """Drafts per verify that ``stats`` has more accepted than the server; 0 where chance explains it.

    Args:
        errors: standard errors that are taken for chance.
    """
    assert seen.accept_length is not None
    there, here = seen.accept_length - 1, stats.accept_length - 1
    variance = _variance(seen.num_verifies, seen.reach, there)
    variance += _variance(stats.num_verifies, stats.acceptance_per_position, here)
    worth = max(errors * sqrt(variance), LEAST_SHARE * max(there, here))
    return here - there if abs(here - there) > worth else 0.0


def _variance(count: int, reach: Sequence[float], mean: float) -> float:
    """Variance of a mean number of accepted drafts, from the share of verifies that reach each depth:
    ``E[k^2] = sum (2 d - 1) P(k >= d)``."""
    if not count:
        return 0.0
    square = sum((2 * depth + 1) * share for depth, share in enumerate(reach)) or mean + mean**2
    return max(square - mean**2, 0.0) / count


def _why_not_compared(seen: ServerReading, ours: Replay | None) -> str:
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


def _other_prompts(seen: ServerReading, plain: Sequence[RequestOutput]) -> Cause | None:
    """Prompts of other lengths: another template, or tokens before the first."""
    counts = [
        (reply.num_prompt_tokens, len(output.prompt_ids))
        for reply, output in zip(seen.replies, plain, strict=True)
    ]
    other = [pair for pair in counts if pair[0] and pair[0] != pair[1]]
    if not other:
        return None
    there, here = other[0]
    return Cause(
        "chat template",
        f"{seen.engine} makes {there} tokens of a prompt that the target's own template makes {here} of "
        f"({len(other)} of {len(counts)} prompts differ).",
        "Start the server with the chat template of the target's folder, and without a second first token.",
    )


def _other_texts(seen: ServerReading, pairs: Sequence[tuple[str, str]]) -> Cause | None:
    """Greedy replies that part early: the server's target is not the one here."""
    parted = sum(_common(*pair) < EARLY for pair in pairs)
    if parted * 2 <= len(pairs):
        return None
    return Cause(
        "another target",
        f"{parted} of {len(pairs)} greedy replies of {seen.engine} part from ours in their first quarter.",
        "Compare the server's target with the one here: its name, revision, quantisation and dtype.",
    )


def _other_engine(seen: ServerReading, ours: Replay, has_texts: bool, likeness: str) -> Cause:
    here = ours.stats.accept_length
    evidence = f"{seen.accept_length:.2f} tokens per verify there and {here:.2f} in our engine"
    has_prompts = any(reply.num_prompt_tokens for reply in seen.replies)
    if alike := [what for what, has in (("prompts", has_prompts), ("texts", has_texts)) if has]:
        evidence += f", though {' and '.join(alike)} agree"
    likeness = likeness and f" Ours accepts as much with {likeness}."
    return Cause(
        "the other engine",
        f"{evidence}.{likeness}",
        f"Look at {seen.engine}'s own side of the draft: its version, the layout it loads (`eagle-kit export "
        "--format`), the numbering of layer ids, and its speculative options.",
    )


def _letters(text: str) -> str:
    return MARKS.sub("", text)


def _common(one: str, other: str) -> float:
    """Share of the shorter text that both begin with."""
    length = min(len(one), len(other))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), length)
    return same / length
