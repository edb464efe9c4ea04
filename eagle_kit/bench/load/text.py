"""Summaries as text for people."""

from typing import Any

from eagle_kit.bench.load.report import LATENCIES, PERCENTILES, RATES

COLUMNS = ("mean", *(f"p{q}" for q in PERCENTILES))


def format_summary(summary: dict[str, Any]) -> str:
    """One endpoint's figures."""
    requests, tokens = summary["requests"], summary["tokens"]
    lines = [
        f"{summary['base_url']}  {summary['model']}  ({summary['server']})",
        f"  requests    {requests['sent']} of {requests['planned']} sent: {requests['ok']} ok, "
        f"{requests['failed']} failed, {requests['interrupted']} interrupted; "
        f"peak concurrency {requests['peak_concurrency']}, mean {_number(requests['mean_concurrency'])}",
    ]
    lines += [f"    {count} x {reason}" for reason, count in requests["failures"].items()]
    lines.append(
        f"  tokens      {_count(tokens['input'])} in "
        f"({_count(tokens['cached_input'])} from the prefix cache), "
        f"{tokens['output']} out, {_number(tokens['per_chunk'])} per chunk"
    )
    rates = ", ".join(f"{_number(summary[name])} {unit}" for name, unit in RATES)
    lines.append(f"  throughput  {rates}; {summary['duration_s']:.2f} s")
    lines.append(f"  {'ms':<22}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, label in LATENCIES:
        values = summary[name] or {}
        lines.append(f"  {label:<22}" + "".join(f"{_number(values.get(column)):>10}" for column in COLUMNS))
    lines.append(f"  accept length  {_acceptance(summary['accept_length'])}")
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in summary["warnings"])])


def format_comparison(summaries: list[dict[str, Any]], comparison: dict[str, Any]) -> str:
    """The ratios of two endpoints, first / second."""
    first, second = (summary["base_url"] for summary in summaries)
    ratios = comparison["first_over_second"]
    lines = [f"ratios, {first} / {second}"]
    lines += [f"  {unit:<22}{_ratio(ratios.get(name)):>10}" for name, unit in RATES]
    lines.append("  (above 1: the first one is faster)")
    lines.append(f"  {'':<22}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, label in LATENCIES:
        cells = (f"{_ratio(ratios.get(f'{name}.{column}')):>10}" for column in COLUMNS)
        lines.append(f"  {label:<22}" + "".join(cells))
    lines.append("  (below 1: the first one is faster)")
    lines.append(
        f"  same text: {comparison['replies_identical']} of {comparison['replies_of_both']} replies of both"
    )
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in comparison["warnings"])])


def _acceptance(offered: dict[str, Any]) -> str:
    parts = []
    if (told := offered["responses"]) is not None:
        parts.append(
            f"{told['accept_length']:.3f} by the responses ({told['num_verifies']} verifies, "
            f"histogram {told['histogram']})"
        )
    if (counted := offered["metrics"]) is not None:
        parts.append(f"{counted['accept_length']:.3f} by /metrics ({counted['num_drafts']} drafts)")
    if offered["sglang_gauge"] is not None:
        parts.append(f"{offered['sglang_gauge']:.3f} by SGLang's gauge (its own recent mean, not this run's)")
    return "; ".join(parts) or "not offered"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
