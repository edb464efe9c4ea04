"""Accept length as a server offers it: counters of its metrics, and the ``speculation`` of its responses.

``accept_length`` is tokens emitted per verify, the bonus token included (``eagle_kit/core/stats.py``).
Counters belong to the whole server: whoever else uses it during the run is in them. They allow
``1 + accepted / drafts`` only, which counts a bonus token even where a reply ended before it, and so lies a
little above the figure of the responses when replies are short.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_kit.bench.load.client import Client, import_httpx
from eagle_kit.bench.load.reply import RequestResult
from eagle_kit.core.stats import SpecStats

PREFIXES = ("eagle_kit:", "vllm:")
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)
"""Name and value of a sample in Prometheus' text format."""
SGLANG_GAUGE = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Snapshot:
    """Counters of one moment.

    Attributes:
        counters: sums over all labels, by ``COUNTERS``; empty where the server has none.
        gauge: SGLang's ``spec_accept_length``, the mean over its ranks; None where it has none.
    """

    counters: Mapping[str, float]
    gauge: float | None = None


def parse_metrics(text: str) -> Snapshot:
    """Read Prometheus text. ``_total`` may end a counter's name; ``_created`` and per-position series are
    other counters and do not count."""
    samples: dict[str, list[float]] = {}
    for name, value in SAMPLE.findall(text):
        try:
            samples.setdefault(name, []).append(float(value))
        except ValueError:
            continue
    counters = {}
    for prefix in PREFIXES:
        for counter in COUNTERS:
            name = f"{prefix}spec_decode_{counter}"
            found = samples.get(f"{name}_total", samples.get(name))
            if found is not None:
                counters[counter] = sum(found)
    gauges = samples.get(SGLANG_GAUGE)
    return Snapshot(counters, sum(gauges) / len(gauges) if gauges else None)


async def take_snapshot(client: Client) -> Snapshot | None:
    """The server's metrics now; None when it shows none."""
    httpx = import_httpx()
    try:
        response = await client.get("/metrics")
    except httpx.RequestError:
        return None
    return parse_metrics(response.text) if response.status_code == 200 else None


def from_metrics(pairs: Sequence[tuple[Snapshot | None, Snapshot | None]]) -> dict[str, Any] | None:
    """Acceptance between pairs of snapshots before and after; None when the server counted no draft.

    A counter that fell (the server was restarted) makes the whole figure unknown.
    """
    total = dict.fromkeys(COUNTERS, 0.0)
    for before, after in pairs:
        if before is None or after is None or not {COUNTERS[0], COUNTERS[2]} <= after.counters.keys():
            return None
        for name, value in after.counters.items():
            total[name] += value - before.counters.get(name, 0.0)
            if value < before.counters.get(name, 0.0):
                return None
    drafts, drafted, accepted = (total[name] for name in COUNTERS)
    if drafts == 0:
        return None
    return {
        "accept_length": 1 + accepted / drafts,
        "acceptance_rate": accepted / drafted if drafted else None,
        **{name: round(value) for name, value in total.items()},
    }


def from_responses(replies: Sequence[RequestResult]) -> dict[str, Any] | None:
    """Acceptance over all replies that told theirs; None when none did, or none verified anything."""
    total, told = SpecStats(), 0
    for reply in replies:
        found = reply.speculation or {}
        histogram = found.get("histogram")
        if isinstance(histogram, list) and all(isinstance(count, int) for count in histogram):
            emitted = sum(size * count for size, count in enumerate(histogram))
            total.add(SpecStats(sum(histogram), emitted, list(histogram)))
            told += 1
    if total.num_verifies == 0:
        return None
    return {
        "accept_length": total.accept_length,
        "num_verifies": total.num_verifies,
        "num_emitted_tokens": total.num_emitted_tokens,
        "histogram": total.histogram,
        "num_responses": told,
    }
