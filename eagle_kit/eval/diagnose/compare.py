"""A server beside our engine: same prompts, same shape; where they differ, and what that points to."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from eagle_kit.core.output import RequestOutput
from eagle_kit.eval.diagnose.causes import Cause
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.server import ServerReading
from eagle_kit.eval.diagnose.trials import SURE

OTHER_ENGINE = "the other engine"
EARLY = 0.25
"""Share of a reply's text by which two engines with the same weights have not parted."""
LEAST_SHARE = 0.05
"""Share of accepted drafts that two engines may differ by without a cause."""


@dataclass(frozen=True)
class Comparison:
    """A server and our engine on the same prompts.

    Attributes:
        ours: our engine in the server's shape, as far as it is known.
        cause: why the server accepts fewer; None where it does not.
        verdict: one sentence.
    """

    seen: ServerReading
    ours: Replay
    cause: Cause | None
    verdict: str


def compare_server(
    seen: ServerReading, ours: Replay, plain: Sequence[RequestOutput], likeness: str = ""
) -> Comparison:
    """Compare acceptance, prompts and texts.

    Args:
        plain: our replies, decoded plainly.
        likeness: the fault under which our own engine accepts about what the server does; empty when unknown.
    """
    cause = _other_prompts(seen, plain) or _other_texts(seen, plain)
    lower, higher = _differs(seen, ours)
    name = seen.engine
    if seen.accept_length is None:
        verdict = (
            f"{name} counts no verifies: it runs without speculation, or without metrics "
            "(SGLang needs --enable-metrics)."
        )
        return Comparison(seen, ours, cause, verdict)
    if not lower:
        verdict = (
            f"{name} accepts more than our engine." if higher else f"{name} accepts what our engine does."
        )
        return Comparison(seen, ours, cause, verdict)
    if cause is None:
        evidence = f"{_lengths(seen, ours)}, though prompts and texts agree."
        if likeness:
            evidence += f" Ours accepts about as much with {likeness}."
        remedy = (
            f"Look at {name}'s own side of the draft: its version, the layout it loads (`eagle-kit export "
            "--format`), the numbering of layer ids, and its speculative options."
        )
        cause = Cause(OTHER_ENGINE, evidence, remedy, cost=1.0)
    verdict = f"{name} accepts fewer than our engine with the same draft: the cause lies there."
    return Comparison(seen, ours, cause, verdict)


def _lengths(seen: ServerReading, ours: Replay) -> str:
    return (
        f"{seen.accept_length:.2f} tokens per verify there and {ours.stats.accept_length:.2f} in our engine"
    )


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
        cost=1.0,
    )


def _other_texts(seen: ServerReading, plain: Sequence[RequestOutput]) -> Cause | None:
    """Greedy replies that part early: the server's target is not the one here."""
    shares = [_common(reply.text, output.text) for reply, output in zip(seen.replies, plain, strict=True)]
    parted = sum(share < EARLY for share in shares)
    if parted * 2 <= len(shares):
        return None
    return Cause(
        "another target",
        f"{parted} of {len(shares)} greedy replies of {seen.engine} part from ours in their first quarter.",
        "Compare the server's target with the one here: its name, revision, quantisation and dtype.",
        cost=1.0,
    )


def _common(one: str, other: str) -> float:
    """Share of the shorter text that both begin with; 1 where one is empty."""
    length = min(len(one), len(other))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), length)
    return same / length if length else 1.0


def _differs(seen: ServerReading, ours: Replay) -> tuple[bool, bool]:
    """Whether the server accepts fewer drafts per verify than our engine, or more, and not by chance."""
    if seen.accept_length is None:
        return False, False
    there, here = seen.accept_length - 1, ours.stats.accept_length - 1
    error = sqrt(_variance(seen.num_verifies, seen.reach, there) + _variance_of(ours))
    worth = max(SURE * error, LEAST_SHARE * max(there, here))
    return here - there > worth, there - here > worth


def _variance(count: int, reach: Sequence[float], mean: float) -> float:
    """Variance of a mean number of accepted drafts, from the share of verifies that reach each depth:
    ``E[k^2] = sum (2 d - 1) P(k >= d)``."""
    if not count:
        return 0.0
    square = sum((2 * depth + 1) * share for depth, share in enumerate(reach)) or mean + mean**2
    return max(square - mean**2, 0.0) / count


def _variance_of(ours: Replay) -> float:
    stats = ours.stats
    return _variance(stats.num_verifies, stats.acceptance_per_position, stats.accept_length - 1)
