"""From measurements to figures: percentiles, throughputs, ratios; ready for JSON.

Throughputs count the tokens of good replies over the time from a round's start to the end of its last reply,
failed ones included. Latencies are those of good replies (definitions: ``reply.py``), in milliseconds.
Percentiles of figures per reply are interpolated as NumPy does by default; those of ITL, where every token
weighs the same, are the smallest value that at least q % of the tokens do not exceed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from eagle_kit.bench.load.acceptance import from_metrics, from_responses
from eagle_kit.bench.load.runner import Measurement, Phase

PERCENTILES = (50, 90, 95, 99)
LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "inter-token latency"),
    ("tpot_ms", "time per output token"),
    ("chunk_gap_ms", "gap between chunks"),
    ("e2e_ms", "end to end"),
)
RATES = (
    ("request_throughput", "requests/s"),
    ("output_throughput", "output tokens/s"),
    ("input_throughput", "input tokens/s"),
    ("total_throughput", "tokens/s in all"),
)
CACHE_DIFFERENCE = 0.05
"""Shares of input from the prefix cache that differ by more than this make a comparison unfair."""
LATE_S = 0.1
"""Requests sent later than this after they were due mean that the client, not the server, was measured."""


def statistics(values: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, float] | None:
    """``mean, p50, p90, p95, p99`` of ``values``, and ``num``, how many there are (with weights: their sum).

    Returns None without values.
    """
    import numpy as np

    if not values:
        return None
    if weights is None:
        percentiles = np.percentile(values, PERCENTILES)
    else:
        percentiles = np.percentile(values, PERCENTILES, weights=weights, method="inverted_cdf")
    return {
        "num": len(values) if weights is None else float(sum(weights)),
        "mean": float(np.average(values, weights=weights)),
        **{f"p{q}": float(value) for q, value in zip(PERCENTILES, percentiles, strict=True)},
    }


def summarize(measurement: Measurement) -> dict[str, Any]:
    """All figures of one endpoint, ready for JSON. What is unknown is None."""
    replies = measurement.replies
    good = [reply for reply in replies if reply.outcome == "ok"]
    seconds = sum(phase.ended_at - phase.started_at for phase in measurement.phases)
    num_output = sum(reply.output_tokens for reply in good)
    known = [reply.prompt_tokens for reply in good if reply.prompt_tokens is not None]
    num_input = sum(known) if good and len(known) == len(good) else None
    cached = [reply.cached_tokens for reply in good if reply.cached_tokens is not None]
    itl = [pair for reply in good for pair in reply.itl]
    endpoint = measurement.endpoint
    return {
        "base_url": endpoint.settings.base_url,
        "model": endpoint.settings.model,
        "server": endpoint.server,
        "extensions": dict(endpoint.settings.extensions),
        "duration_s": seconds,
        "requests": {
            "planned": measurement.num_planned,
            "sent": len(replies),
            **{name: sum(r.outcome == name for r in replies) for name in ("ok", "failed", "interrupted")},
            "failures": dict(Counter(r.reason for r in replies if r.outcome == "failed").most_common()),
            "finish_reasons": dict(Counter(str(r.finish_reason) for r in good).most_common()),
            "peak_concurrency": max(map(peak_concurrency, measurement.phases), default=0),
            "mean_concurrency": _per(sum(reply.e2e for reply in replies), seconds),
            "max_lateness_s": max((reply.sent_at - reply.planned_at for reply in replies), default=0.0),
            "warmup": len(measurement.warmup),
            "warmup_failed": sum(reply.outcome != "ok" for reply in measurement.warmup),
        },
        "tokens": {
            "input": num_input,
            "cached_input": sum(cached) if cached else None,
            "output": num_output,
            "output_of_failed": sum(reply.output_tokens for reply in replies if reply.outcome != "ok"),
            "replies_without_usage": sum(reply.usage_tokens is None for reply in good),
            "replies_by_event_count": dict(Counter(reply.counted_by for reply in good).most_common()),
            "per_chunk": _per(num_output, sum(len(reply.events) for reply in good)),
        },
        "request_throughput": _per(len(good), seconds),
        "output_throughput": _per(num_output, seconds),
        "input_throughput": _per(num_input, seconds),
        "total_throughput": _per(None if num_input is None else num_input + num_output, seconds),
        "ttft_ms": statistics([1e3 * reply.ttft for reply in good if reply.ttft is not None]),
        "itl_ms": statistics([1e3 * value for value, _ in itl], [tokens for _, tokens in itl]),
        "tpot_ms": statistics([1e3 * reply.tpot for reply in good if reply.tpot is not None]),
        "chunk_gap_ms": statistics([1e3 * gap for reply in good for gap in reply.gaps]),
        "e2e_ms": statistics([1e3 * reply.e2e for reply in good]),
        "accept_length": {
            "responses": from_responses(good),
            "metrics": from_metrics([(phase.before, phase.after) for phase in measurement.phases]),
            "sglang_gauge": _gauge(measurement.phases),
        },
        "warnings": warnings_of(measurement),
    }


def warnings_of(measurement: Measurement) -> list[str]:
    """What makes the figures of an endpoint mean something else than they say."""
    replies, out = measurement.replies, []
    good = [reply for reply in replies if reply.outcome == "ok"]
    silent = sum(reply.usage_tokens is None for reply in good)
    if silent:
        out.append(
            f"{silent} of {len(good)} replies came without usage: every chunk was counted as one token, "
            "which is too few where chunks hold several"
        )
    guessed = sum(reply.counted_by == "characters" for reply in good)
    if guessed:
        out.append(
            f"the server does not say how many tokens its chunks hold: in {guessed} of {len(good)} replies "
            "ITL shares them out by characters (TPOT and throughput are exact)"
        )
    late = max((reply.sent_at - reply.planned_at for reply in replies), default=0.0)
    if late > LATE_S:
        out.append(f"requests were sent up to {late:.2f} s late: the client could not keep up")
    failed = Counter(str(r.reason or r.outcome) for r in measurement.warmup if r.outcome != "ok")
    out += [f"{count} warm-up requests failed: {reason}" for reason, count in failed.items()]
    return out


def peak_concurrency(phase: Phase) -> int:
    """Most requests that were under way at one moment; one that ends when another begins does not meet it."""
    changes = [(reply.sent_at, 1) for reply in phase.replies]
    changes += [(reply.ended_at, -1) for reply in phase.replies]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def output_over_time(measurement: Measurement, num_bins: int = 30) -> dict[str, Any]:
    """Output tokens per second over the run, pauses between rounds left out.

    Returns:
        ``bin_s``, the width of a bin in seconds, and ``tokens_per_s`` of every bin. Tokens belong to the
        moment of their chunk; those without text to the reply's end.
    """
    moments: list[tuple[float, float]] = []
    elapsed = 0.0
    for phase in measurement.phases:
        shift = elapsed - phase.started_at
        for reply in phase.replies:
            moments += [
                (event.at + shift, tokens)
                for event, tokens in zip(reply.events, reply.event_tokens, strict=True)
            ]
            moments.append((reply.ended_at + shift, max(0.0, reply.output_tokens - sum(reply.event_tokens))))
        elapsed += phase.ended_at - phase.started_at
    if elapsed <= 0:
        return {"bin_s": 0.0, "tokens_per_s": []}
    width = elapsed / num_bins
    bins = [0.0] * num_bins
    for at, tokens in moments:
        bins[min(num_bins - 1, max(0, math.floor(at / width)))] += tokens / width
    return {"bin_s": width, "tokens_per_s": bins}


def reply_rows(measurement: Measurement) -> list[dict[str, Any]]:
    """One row per request that was sent, times in seconds from its round's start."""
    return [
        {
            "number": reply.number,
            "round": number,
            "outcome": reply.outcome,
            "reason": reply.reason,
            "sent_s": round(reply.sent_at - phase.started_at, 6),
            "ttft_s": reply.ttft,
            "e2e_s": reply.e2e,
            "tpot_s": reply.tpot,
            "prompt_tokens": reply.prompt_tokens,
            "cached_tokens": reply.cached_tokens,
            "output_tokens": reply.output_tokens,
            "chunks": len(reply.events),
            "finish_reason": reply.finish_reason,
            "accept_length": (reply.speculation or {}).get("accept_length"),
        }
        for number, phase in enumerate(measurement.phases)
        for reply in phase.replies
    ]


def compare_measurements(first: Measurement, second: Measurement) -> dict[str, Any]:
    """Ratios first / second of every figure that both have, how many replies have the same text, and what
    makes the ratios unfair."""
    a, b = summarize(first), summarize(second)
    ratios: dict[str, float] = {}
    for name, _ in RATES:
        ratios[name] = _per(a[name], b[name])
    for name, _ in LATENCIES:
        for statistic in ("mean", *(f"p{q}" for q in PERCENTILES)):
            if a[name] and b[name]:
                ratios[f"{name}.{statistic}"] = _per(a[name][statistic], b[name][statistic])
    texts = {reply.number: reply.text for reply in second.replies if reply.outcome == "ok"}
    both = [r for r in first.replies if r.outcome == "ok" and r.number in texts]
    return {
        "first_over_second": {name: ratio for name, ratio in ratios.items() if ratio is not None},
        "replies_of_both": len(both),
        "replies_identical": sum(reply.text == texts[reply.number] for reply in both),
        "warnings": _unequal_caches(a["tokens"], b["tokens"]),
    }


def _unequal_caches(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """A server that has seen the prompts before wins for that reason alone."""
    shares = [_per(tokens["cached_input"], tokens["input"]) for tokens in (first, second)]
    if None in shares or abs(shares[0] - shares[1]) <= CACHE_DIFFERENCE:
        return []
    return [
        f"the prefix cache held {100 * shares[0]:.0f} % of the first server's input and "
        f"{100 * shares[1]:.0f} % of the second's: start both afresh, or use prompts that neither has seen "
        "(another --seed)"
    ]


def _per(amount: float | None, of: float | None) -> Any:
    return amount / of if amount is not None and of else None


def _gauge(phases: Sequence[Phase]) -> float | None:
    """SGLang's gauge after the last round: its own recent mean, not the run's."""
    return phases[-1].after.gauge if phases and phases[-1].after is not None else None
