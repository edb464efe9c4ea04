"""Counters of a running server, read from its ``/metrics``: ours, vLLM's and SGLang's.

Accept length is tokens emitted per verify, the bonus token included (:mod:`eagle_kit.core.stats`). Counters
are of the whole server, other clients included.

* Ours and vLLM's have the same names, and give the accept length as ``1 + accepted / drafts``. This
  counts a bonus token even where a response ended before it, so it is a little above the figure of the
  responses (``return_speculation``) when they are short.
* SGLang (0.5) counts no accepted tokens. Its accept length is the tokens of responses but the first
  of each, which prefill emits, per ``spec_verify_calls_total``. Its gauge ``spec_accept_length`` is
  of the last interval of its log.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from eagle_kit.core.errors import UserError, first_line

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

ENGINES = {"eagle_kit:": "eagle-kit", "vllm:": "vLLM", "sglang:": "SGLang"}
"""Prefix of an engine's metrics -> its name."""
DRAFTS = "spec_decode_num_drafts"
DRAFTED = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
CYCLES = "spec_decode_num_cycles"
VERIFY_CALLS = "spec_verify_calls"
REQUESTS = "num_requests"
GAUGE = "spec_accept_length"
PROMPT_TOKENS = "prompt_tokens"
GENERATION_TOKENS = "generation_tokens"
TOKENS = (PROMPT_TOKENS, "prompt_tokens_cached", GENERATION_TOKENS)
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Snapshot:
    """Counters of one moment, summed over all other labels, without prefix and ``_total``.

    Attributes:
        counters: by name.
        accepted_at: accepted tokens by the depth of their draft, from 0.
        engine: name of the engine that wrote them; empty when none is known.
        gauge: SGLang's accept length of the last interval, the mean over all labels; None without
            one.
        cycles: cycles of our engine, by speculation shape.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    engine: str = ""
    gauge: float | None = None
    cycles: Mapping[str, float] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """A counter; 0 where the engine does not have it."""
        return round(self.counters.get(name, 0.0))

    @property
    def num_verifies(self) -> int:
        """Target forwards over drafts; 0 where they are not counted."""
        return self.count(DRAFTS) or self.count(VERIFY_CALLS)

    def since(self, before: "Snapshot") -> "Snapshot":
        """What was counted after ``before``; the gauge is this snapshot's.

        Raises:
            UserError: a counter fell, so that the server was restarted.
        """
        return Snapshot(
            _subtract(self.counters, before.counters),
            _subtract(self.accepted_at, before.accepted_at),
            self.engine,
            self.gauge,
            _subtract(self.cycles, before.cycles),
        )

    def plus(self, other: "Snapshot") -> "Snapshot":
        """The sum of two differences; the gauge is that of ``other``, the later one."""
        return Snapshot(
            _add(self.counters, other.counters),
            _add(self.accepted_at, other.accepted_at),
            other.engine or self.engine,
            other.gauge,
            _add(self.cycles, other.cycles),
        )


def _subtract(after: Mapping[KeyT, float], before: Mapping[KeyT, float]) -> dict[KeyT, float]:
    differences = {}
    for key, value in after.items():
        differences[key] = value - before.get(key, 0.0)
        if differences[key] < 0:
            raise UserError(f"The server's counter {key} fell.", "Do not restart the server meanwhile.")
    return differences


def _add(counts: Mapping[KeyT, float], others: Mapping[KeyT, float]) -> dict[KeyT, float]:
    total = dict(counts)
    for key, value in others.items():
        total[key] = total.get(key, 0.0) + value
    return total


def read_samples(text: str) -> "list[Sample]":
    """Samples of Prometheus' text format.

    Raises:
        UserError: the text has another format, or the package that reads it is missing.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UserError(
            "The counters of a server need the package prometheus-client.",
            "Install it: pip install 'eagle_kit[eval]'.",
        ) from None
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise UserError(
            f"The metrics of the server cannot be read ({first_line(error)}).", "Check --base-url."
        ) from None


def parse_metrics(text: str) -> Snapshot:
    """Counters in Prometheus' text format; other samples are passed over. Raises UserError as
    :func:`read_samples`."""
    counters: dict[str, float] = defaultdict(float)
    accepted_at: dict[int, float] = defaultdict(float)
    cycles: dict[str, float] = defaultdict(float)
    gauges = []
    engine = ""
    for sample in read_samples(text):
        prefix = next((each for each in ENGINES if sample.name.startswith(each)), None)
        if prefix is None:
            continue
        engine = ENGINES[prefix]
        name = sample.name.removeprefix(prefix).removesuffix("_total")
        if name == PER_POSITION and sample.labels.get("position", "").isdigit():
            accepted_at[int(sample.labels["position"])] += sample.value
        elif name == CYCLES and "shape" in sample.labels:
            cycles[sample.labels["shape"]] += sample.value
        elif name in (DRAFTS, DRAFTED, ACCEPTED, VERIFY_CALLS, REQUESTS, *TOKENS):
            counters[name] += sample.value
        elif name == GAUGE and sample.value > 0:
            gauges.append(sample.value)
    gauge = sum(gauges) / len(gauges) if gauges else None
    return Snapshot(dict(counters), dict(accepted_at), engine, gauge, dict(cycles))


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
    import httpx

    root = root_of(base_url)
    remedy = "Start the server, or check --base-url."
    try:
        response = httpx.get(f"{root}/metrics", timeout=10, trust_env=False)
        response.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if isinstance(error, httpx.HTTPStatusError):
            remedy = "Start SGLang with --enable-metrics; of another server check --base-url."
        reason = first_line(error)
        raise UserError(f"There are no metrics at {root}/metrics ({reason}).", remedy) from None
    return parse_metrics(response.text)


def difference(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Figures of the time between two snapshots.

    Raises:
        UserError: a counter fell, so that the server was restarted.
    """

    return figures_of(after.since(before))


def figures_of(counted: Snapshot) -> dict[str, Any]:
    """Figures of the counts between two snapshots, by names for people."""
    figures: dict[str, Any] = {name: counted.count(name) for name in TOKENS if name in counted.counters}
    drafts = counted.count(DRAFTS)
    verify_calls = counted.count(VERIFY_CALLS)
    if drafts:
        # Ours and vLLM's.
        accepted = counted.count(ACCEPTED)
        figures["verifies"] = drafts
        figures["draft tokens"] = counted.count(DRAFTED)
        figures["accepted tokens"] = accepted
        figures["accept length"] = 1 + accepted / drafts
        for depth in sorted(counted.accepted_at):
            figures[f"accepted at depth {depth + 1}"] = counted.accepted_at[depth] / drafts
    elif verify_calls:
        # SGLang's. The first token of each response comes from prefill.
        emitted = counted.count(GENERATION_TOKENS) - counted.count(REQUESTS)
        figures["verifies"] = verify_calls
        figures["accept length"] = emitted / verify_calls
    elif counted.gauge is not None:
        figures["accept length of the last interval"] = counted.gauge
    return figures
