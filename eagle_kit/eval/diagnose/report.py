"""A diagnosis as text and as plain data."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from eagle_kit.eval.diagnose.causes import Measured
from eagle_kit.eval.diagnose.compare import Comparison
from eagle_kit.eval.diagnose.context import ContextReading
from eagle_kit.eval.diagnose.estimates import Estimate
from eagle_kit.eval.diagnose.formats import FormatReading
from eagle_kit.eval.diagnose.replay import Replay
from eagle_kit.eval.diagnose.run import Diagnosis
from eagle_kit.eval.diagnose.trials import STEPS
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
    if diagnosis.replay is not None and diagnosis.measured is not None:
        lines += [*_replayed(diagnosis.replay, diagnosis.measured, diagnosis.dtype), ""]
        lines += _context(diagnosis.measured.context)
        lines += [diagnosis.measured.skipped, ""] if diagnosis.measured.skipped else []
        lines += _formats(diagnosis.measured)
    if diagnosis.server is not None:
        lines += [*_server(diagnosis.server), ""]
    lines += _verdict(diagnosis, name)
    return "\n".join(lines)


def _replayed(replay: Replay, measured: Measured, dtype: str) -> Iterator[str]:
    stats, fit = replay.stats, measured.fit
    yield (
        f"replayed   {stats.num_verifies} verifies of a chain {replay.shape} in {dtype}: "
        f"{stats.accept_length:.2f} tokens per verify"
    )
    head = ["accepted at depth", *map(str, range(1, len(fit.reach) + 1))]
    engine = [*stats.acceptance_per_position, *[0.0] * len(fit.reach)][: len(fit.reach)]
    rows = [
        ["by the engine, of its verifies", *(f"{share:.2f}" for share in engine)],
        ["at every token of the replies", *map(_share, fit.reach)],
    ]
    yield from Table(head, rows).text().splitlines()
    yield (
        f"vocabulary {fit.coverage.mean:.1%} of the replies' tokens can be proposed; "
        f"{fit.within.mean:.2f} of first drafts are accepted there"
    )
    yield (
        f"certainty  first drafts have {_share(fit.confidence)} under the head, {_share(fit.trust)} under "
        f"the target: {fit.excess.mean:+.3f}; entropy {fit.entropy:.1f} of {fit.most_entropy:.1f} nats"
    )


def _share(estimate: Estimate) -> str:
    return f"{estimate.mean:.2f} ± {estimate.margin:.2f}"


def _context(context: ContextReading | None) -> Iterator[str]:
    if context is None:
        return
    yield f"first drafts accepted by position, in texts of up to {context.length} tokens"
    head = ["positions", *(f"{part.first}-{part.last}" for part in context.parts)]
    rows = [
        ["as it is", *(_share(part.served) for part in context.parts)],
        ["context cut to each chat", *(_share(part.near) for part in context.parts)],
    ]
    yield from [*Table(head, rows).text().splitlines(), ""]


def _formats(measured: Measured) -> Iterator[str]:
    if not measured.formats:
        return
    yield "first drafts accepted behind prompts in other formats"
    rows = [_format_row(each, number == 0) for number, each in enumerate(measured.formats)]
    table = Table(["format", "accepted", "more than behind its own"], rows)
    yield from [*table.text().splitlines(), ""]


def _format_row(reading: FormatReading, is_own: bool) -> list[str]:
    more = "" if is_own else f"{reading.gain.mean:+.3f} ± {reading.gain.margin:.3f}"
    return [reading.name, _share(reading.accepted), more]


def _server(compared: Comparison) -> Iterator[str]:
    seen, ours = compared.seen, compared.ours
    reach = [] if ours is None else ours.stats.acceptance_per_position
    depth = max(len(seen.reach), len(reach), 1)
    yield f"the same prompts at {seen.engine}"
    head = ["", "tokens per verify", *(f"depth {i + 1}" for i in range(depth))]
    rows = [[seen.engine, _length(compared), *_padded(seen.reach, depth)]]
    if ours is not None:
        length = f"{ours.stats.accept_length:.2f}"
        rows.append([f"our engine, {ours.shape}", length, *_padded(reach, depth)])
    yield from Table(head, rows).text().splitlines()
    yield compared.verdict


def _length(compared: Comparison) -> str:
    seen = compared.seen
    if seen.accept_length is None:
        return "-"
    return f"{seen.accept_length:.2f}" + (" (its last interval)" if seen.is_gauge else "")


def _padded(shares: Any, depth: int) -> list[str]:
    return [f"{share:.2f}" for share in shares] + ["-"] * (depth - len(shares))


def _verdict(diagnosis: Diagnosis, name: str) -> Iterator[str]:
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
    fit, context = measured.fit, measured.context
    figures = {
        key: value._asdict() if isinstance(value, Estimate) else value
        for key, value in vars(fit).items()
        if key != "reach"
    }
    return {
        "acceptance": [each._asdict() for each in fit.reach],
        "steps": STEPS,
        "fit": figures,
        "trials": [
            {
                "subject": trial.hypothesis.subject,
                "reading": trial.hypothesis.words,
                "confirmed": trial.is_confirmed,
                "served": trial.served._asdict(),
                "undone": trial.undone._asdict(),
                "gain": trial.gain._asdict(),
            }
            for trial in measured.trials
        ],
        "context": None if context is None else [_part_record(part) for part in context.parts],
        "skipped": measured.skipped,
        "formats": [
            {"name": each.name, "accepted": each.accepted._asdict(), "gain": each.gain._asdict()}
            for each in measured.formats
        ],
    }


def _part_record(part: Any) -> dict[str, Any]:
    return {
        "first": part.first,
        "last": part.last,
        "served": part.served._asdict(),
        "near": part.near._asdict(),
    }


def _server_record(compared: Comparison) -> dict[str, Any]:
    seen, ours = compared.seen, compared.ours
    return {
        "engine": seen.engine,
        "accept_length": seen.accept_length,
        "is_gauge": seen.is_gauge,
        "acceptance_per_position": list(seen.reach),
        "num_verifies": seen.num_verifies,
        "other_traffic": seen.other_traffic,
        "ours": None
        if ours is None
        else {
            "shape": str(ours.shape),
            "accept_length": ours.stats.accept_length,
            "acceptance_per_position": ours.stats.acceptance_per_position,
        },
        "verdict": compared.verdict,
    }
