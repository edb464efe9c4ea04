"""A diagnosis as text and as plain data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from eagle_kit.eval.diagnose.causes import Measured
from eagle_kit.eval.diagnose.compare import Comparison
from eagle_kit.eval.diagnose.context import ContextResult, PositionRange
from eagle_kit.eval.diagnose.estimates import Estimate
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.run import Diagnosis
from eagle_kit.eval.diagnose.server import ServerResult
from eagle_kit.eval.diagnose.trials import STEPS, Trial
from eagle_kit.report.tables import Table

HEALTHY = "No fault was found: the head fits this target."
MODEST = "No fault was found: the head fits this target and is modest; more training would raise acceptance."
MODEST_LENGTH = 1.5
"""Tokens per verify of a chain of four below which a fitting head is called modest."""


def as_text(diagnosis: Diagnosis, name: str) -> str:
    """Format a diagnosis for people.

    Args:
        name: the draft's, as it was given.
    """
    lines: list[str] = []
    measured = diagnosis.measured
    if diagnosis.replay is not None and measured is not None:
        lines += [*_replayed(diagnosis.replay, measured, diagnosis.dtype), ""]
        lines += _context(measured.context)
        if measured.skipped:
            lines += [measured.skipped, ""]
        lines += _formats(measured)
    if diagnosis.server is not None:
        lines += [*_server(diagnosis.server), ""]
    lines += _verdict(diagnosis, name)
    return "\n".join(lines)


def _replayed(replay: Replay, measured: Measured, dtype: str) -> Iterator[str]:
    """Lines of the responses decoded with the draft."""
    stats = replay.stats
    fit = measured.fit
    yield (
        f"replayed   {stats.num_verifies} verifies of a chain {replay.shape} in {dtype}: "
        f"{stats.accept_length:.2f} tokens per verify"
    )

    # Acceptance by depth. The engine counts no depth that it never reached.
    num_depths = len(fit.reach)
    by_engine = [*stats.acceptance_per_position, *[0.0] * num_depths][:num_depths]
    head = ["accepted at depth", *(str(depth + 1) for depth in range(num_depths))]
    rows = [
        ["by the engine, of its verifies", *(f"{share:.2f}" for share in by_engine)],
        ["at every token of the responses", *(_share(each) for each in fit.reach)],
    ]
    yield from Table(head, rows).text().splitlines()

    # Vocabulary and confidence.
    yield (
        f"vocabulary {fit.coverage.mean:.1%} of the responses' tokens can be proposed; "
        f"{fit.accepted_if_covered.mean:.2f} of first drafts are accepted there"
    )
    yield (
        f"certainty  first drafts have {_share(fit.confidence)} under the head, "
        f"{_share(fit.target_confidence)} under the target: {fit.excess.mean:+.3f}; "
        f"entropy {fit.entropy:.1f} of {fit.max_entropy:.1f} nats"
    )


def _share(estimate: Estimate) -> str:
    return f"{estimate.mean:.2f} ± {estimate.margin:.2f}"


def _context(context: ContextResult | None) -> Iterator[str]:
    """Lines of the acceptance by position."""
    if context is None:
        return
    yield f"first drafts accepted by position, in texts of up to {context.length} tokens"
    head = ["positions", *(f"{each.first}-{each.last}" for each in context.ranges)]
    rows = [
        ["as it is", *(_share(each.served) for each in context.ranges)],
        ["context cut to each chat", *(_share(each.near) for each in context.ranges)],
    ]
    yield from Table(head, rows).text().splitlines()
    yield ""


def _formats(measured: Measured) -> Iterator[str]:
    """Lines of the acceptance after prompts in other formats."""
    if not measured.formats:
        return
    yield "first drafts accepted behind prompts in other formats"
    rows = []
    for number, each in enumerate(measured.formats):
        # The first format is the target's own, which the others are compared with.
        gain = "" if number == 0 else f"{each.gain.mean:+.3f} ± {each.gain.margin:.3f}"
        rows.append([each.name, _share(each.accepted), gain])
    yield from Table(["format", "accepted", "more than behind its own"], rows).text().splitlines()
    yield ""


def _server(compared: Comparison) -> Iterator[str]:
    """Lines of a server beside our engine."""
    seen = compared.seen
    ours = compared.ours
    reach = [] if ours is None else ours.stats.acceptance_per_position
    num_depths = max(len(seen.reach), len(reach), 1)
    yield f"the same prompts at {seen.engine}"
    head = ["", "tokens per verify", *(f"depth {depth + 1}" for depth in range(num_depths))]
    rows = [[seen.engine, _length(seen), *_padded(seen.reach, num_depths)]]
    if ours is not None:
        length = f"{ours.stats.accept_length:.2f}"
        rows.append([f"our engine, {ours.shape}", length, *_padded(reach, num_depths)])
    yield from Table(head, rows).text().splitlines()
    yield compared.verdict


def _length(seen: ServerResult) -> str:
    """The server's tokens per verify."""
    if seen.accept_length is None:
        return "-"
    length = f"{seen.accept_length:.2f}"
    return f"{length} (its last interval)" if seen.is_gauge else length


def _padded(shares: Sequence[float], num_depths: int) -> list[str]:
    missing = ["-"] * (num_depths - len(shares))
    return [f"{share:.2f}" for share in shares] + missing


def _verdict(diagnosis: Diagnosis, name: str) -> Iterator[str]:
    """Lines of the causes."""
    if diagnosis.is_healthy:
        replay = diagnosis.replay
        is_modest = replay is not None and replay.stats.accept_length < MODEST_LENGTH
        yield f"{name}: {MODEST if is_modest else HEALTHY}"
    else:
        yield f"{name}: likely causes of low acceptance, the likeliest first"
    for number, cause in enumerate(diagnosis.causes, 1):
        doubt = "" if cause.is_found else " (possible)"
        yield f"  {number}. {cause.subject}{doubt}: {cause.evidence}"
        yield f"     -> {cause.remedy}"


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Convert a diagnosis to plain data for JSON.

    Returns:
        ``healthy``; ``causes``; ``findings`` of the files; and where it was measured ``engine`` (the replay),
        ``acceptance`` (share of roots accepted to each depth, with standard errors), ``fit``, ``trials``,
        ``context``, ``formats`` and ``server``.
    """
    record: dict[str, Any] = {
        "healthy": diagnosis.is_healthy,
        "dtype": diagnosis.dtype,
        "causes": [asdict(cause) for cause in diagnosis.causes],
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }
    if diagnosis.replay is not None:
        replay = diagnosis.replay
        record["engine"] = {
            "shape": str(replay.shape),
            "accept_length": replay.stats.accept_length,
            "acceptance_per_position": replay.stats.acceptance_per_position,
            "num_verifies": replay.stats.num_verifies,
            "num_different": replay.num_different,
        }
    if diagnosis.measured is not None:
        record |= _measured_record(diagnosis.measured)
    if diagnosis.server is not None:
        record["server"] = _server_record(diagnosis.server)
    return record


def _measured_record(measured: Measured) -> dict[str, Any]:
    fit = measured.fit
    context = measured.context
    return {
        "acceptance": [each._asdict() for each in fit.reach],
        "steps": STEPS,
        "fit": {
            "coverage": fit.coverage._asdict(),
            "within": fit.accepted_if_covered._asdict(),
            "confidence": fit.confidence._asdict(),
            "trust": fit.target_confidence._asdict(),
            "excess": fit.excess._asdict(),
            "entropy": fit.entropy,
            "most_entropy": fit.max_entropy,
            "is_finite": fit.is_finite,
        },
        "trials": [_trial_record(trial) for trial in measured.trials],
        "context": None if context is None else [_range_record(each) for each in context.ranges],
        "skipped": measured.skipped,
        "formats": [
            {"name": each.name, "accepted": each.accepted._asdict(), "gain": each.gain._asdict()}
            for each in measured.formats
        ],
    }


def _trial_record(trial: Trial) -> dict[str, Any]:
    return {
        "subject": trial.hypothesis.subject,
        "reading": trial.hypothesis.words,
        "confirmed": trial.is_confirmed,
        "served": trial.served._asdict(),
        "undone": trial.undone._asdict(),
        "gain": trial.gain._asdict(),
    }


def _range_record(positions: PositionRange) -> dict[str, Any]:
    return {
        "first": positions.first,
        "last": positions.last,
        "served": positions.served._asdict(),
        "near": positions.near._asdict(),
    }


def _server_record(compared: Comparison) -> dict[str, Any]:
    seen = compared.seen
    ours = None
    if compared.ours is not None:
        ours = {
            "shape": str(compared.ours.shape),
            "accept_length": compared.ours.stats.accept_length,
            "acceptance_per_position": compared.ours.stats.acceptance_per_position,
        }
    return {
        "engine": seen.engine,
        "accept_length": seen.accept_length,
        "is_gauge": seen.is_gauge,
        "acceptance_per_position": list(seen.reach),
        "num_verifies": seen.num_verifies,
        "other_traffic": seen.other_traffic,
        "ours": ours,
        "verdict": compared.verdict,
    }
