"""Counters of a running server, read from its ``/metrics``: ours, vLLM's and SGLang's.

Accept length is tokens emitted per verify, the bonus token included (:mod:`eagle_kit.core.stats`). Counters
belong to the whole server: whoever else uses it meanwhile is in them. Ours and vLLM's have the same names and
allow ``1 + accepted / drafts`` only, which counts a bonus token even where a reply ended before it, and so
lies a little above the figure of the replies (``return_speculation``) when they are short.

SGLang (0.5) counts no accepted tokens: there it is the tokens of replies but the first of each, which prefill
emits, per ``spec_verify_calls_total``; its gauge ``spec_accept_length`` is of the last interval of its log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from eagle_kit.core.errors import UserError

ENGINES = {"eagle_kit:": "eagle-kit", "vllm:": "vLLM", "sglang:": "SGLang"}
"""Prefix of an engine's metrics -> its name."""
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
"""Name, labels and value of a sample in Prometheus' text format."""
POSITION = re.compile(r'position="(\d+)"')
SHAPE = re.compile(r'shape="([^"]+)"')
DRAFTS, DRAFTED, ACCEPTED = (
    f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")
)
PER_POSITION, CYCLES = "spec_decode_num_accepted_tokens_per_pos", "spec_decode_num_cycles"
VERIFY_CALLS, REQUESTS, GAUGE = "spec_verify_calls", "num_requests", "spec_accept_length"
TOKENS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")


@dataclass(frozen=True)
class Snapshot:
    """Counters of one moment, summed over all other labels, without prefix and ``_total``.

    Attributes:
        counters: by name.
        accepted_at: accepted tokens by the depth of their draft, from 0.
        engine: name of the engine that wrote them; empty when none is known.
        gauge: SGLang's accept length of the last interval, the mean over what reports one; None without.
        cycles: ours by speculation shape.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    engine: str = ""
    gauge: float | None = None
    cycles: Mapping[str, float] = field(default_factory=dict)


def parse_metrics(text: str) -> Snapshot:
    """Read Prometheus' text format; samples that are not counted here are passed over."""
    counters: dict[str, float] = {}
    accepted_at: dict[int, float] = {}
    cycles: dict[str, float] = {}
    gauges, engine = [], ""
    for full, labels, value in SAMPLE.findall(text):
        prefix = next((each for each in ENGINES if full.startswith(each)), None)
        if prefix is None:
            continue
        engine, name = ENGINES[prefix], full.removeprefix(prefix).removesuffix("_total")
        if name == PER_POSITION and (found := POSITION.search(labels)):
            depth = int(found[1])
            accepted_at[depth] = accepted_at.get(depth, 0.0) + float(value)
        elif name == CYCLES and (found := SHAPE.search(labels)):
            cycles[found[1]] = cycles.get(found[1], 0.0) + float(value)
        elif name in (DRAFTS, DRAFTED, ACCEPTED, VERIFY_CALLS, REQUESTS, *TOKENS):
            counters[name] = counters.get(name, 0.0) + float(value)
        elif name == GAUGE and float(value) > 0:
            gauges.append(float(value))
    return Snapshot(counters, accepted_at, engine, sum(gauges) / len(gauges) if gauges else None, cycles)


def root_of(base_url: str) -> str:
    """The URL of a server without ``/v1``. Raises UserError for what is no URL."""
    try:
        parts = urlsplit(base_url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is no number, or too large
        is_url = False
    if not is_url:
        raise UserError(f"{base_url!r} is not a URL.", "Write it like http://127.0.0.1:8000.")
    return base_url.rstrip("/").removesuffix("/v1")


def take_snapshot(base_url: str) -> Snapshot:
    """The counters of a server now.

    Args:
        base_url: of the server, ``/v1`` at its end or not.

    Raises:
        UserError: nobody answers, or there are no metrics.
    """
    root = root_of(base_url)
    try:
        with build_opener(ProxyHandler({})).open(f"{root}/metrics", timeout=10) as response:
            return parse_metrics(response.read().decode("utf-8", "replace"))
    except (OSError, HTTPException) as error:
        remedy = "Start the server, or check --base-url."
        if isinstance(error, HTTPError):
            remedy = "Start SGLang with --enable-metrics; of another server check --base-url."
        raise UserError(f"There are no metrics at {root}/metrics ({error}).", remedy) from None


def difference(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Figures of the time between two snapshots.

    Raises:
        UserError: a counter fell, so that the server was restarted.
    """

    def between(name: str) -> float:
        value = after.counters.get(name, 0.0) - before.counters.get(name, 0.0)
        if value < 0:
            raise UserError(f"The server's counter {name} fell.", "Do not restart the server meanwhile.")
        return value

    figures: dict[str, Any] = {name: round(between(name)) for name in TOKENS if name in after.counters}
    drafts, drafted, accepted = (round(between(name)) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafts:
        figures |= {"verifies": drafts, "draft tokens": drafted, "accepted tokens": accepted}
        figures["accept length"] = 1 + accepted / drafts
        for depth in sorted(after.accepted_at):
            count = after.accepted_at[depth] - before.accepted_at.get(depth, 0.0)
            figures[f"accepted at depth {depth + 1}"] = count / drafts
    elif verifies := round(between(VERIFY_CALLS)):
        emitted = figures.get("generation_tokens", 0) - round(between(REQUESTS))
        figures |= {"verifies": verifies, "accept length": emitted / verifies}
    elif after.gauge is not None:
        figures["accept length of the last interval"] = after.gauge
    return figures
