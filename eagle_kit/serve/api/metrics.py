"""Prometheus: vLLM's names under our prefix, in a registry of its own per server."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_kit.serve.engine import Engine
    from eagle_kit.serve.request import Request

PREFIX = "eagle_kit:"
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and gauges read from the engine when they are asked for, and histograms of latencies.

    It is the :class:`~eagle_kit.serve.reply.Observer` of a server's engine.

    Args:
        engine: its counters are read from another thread than its own, each of them a plain number.
        model_name: label of every sample.
    """

    def __init__(self, engine: "Engine", model_name: str) -> None:
        from prometheus_client import CollectorRegistry, Histogram

        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(engine, model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model_name)

        self._first = histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_S
        )
        self._between = histogram(
            "inter_token_latency_seconds",
            "Per token: seconds between two emissions of a request, divided by the tokens of the later.",
            BETWEEN_TOKENS_S,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its last token.", WHOLE_S
        )

    def emitted(self, request: "Request", num_tokens: int, seconds: float, first: bool) -> None:
        """A request emitted tokens."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(num_tokens):  # one value per token, or tokens that come together would count less
                self._between.observe(seconds / num_tokens)

    def finished(self, request: "Request") -> None:
        """A request has ended; one that never emitted anything has no latency."""
        if request.last_token_at > 0:
            self._whole.observe(request.last_token_at - request.arrived_at)

    def text(self) -> bytes:
        """The exposition format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class _EngineCollector:
    """Makes samples of an engine's own counters at every scrape, so that nothing is counted twice."""

    def __init__(self, engine: "Engine", model_name: str) -> None:
        self._engine, self._model = engine, model_name

    def collect(self) -> Iterable[Any]:
        """All families; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engine, totals = self._engine, self._engine.totals

        def counter(name: str, text: str, value: float) -> Any:
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            return family

        def gauge(name: str, text: str, value: float) -> Any:
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            return family

        yield gauge("num_requests_running", "Requests in the batch.", engine.num_running)
        yield gauge("num_requests_waiting", "Requests in the queue.", engine.num_waiting)
        yield gauge("kv_cache_usage_perc", "Share of the key-value pool in use, 0 to 1.", engine.kv_usage)
        yield counter(
            "num_preemptions", "Requests sent back to the queue for want of pages.", totals.num_preemptions
        )
        yield counter("prompt_tokens", "Prompt tokens of admitted requests.", totals.num_prompt_tokens)
        yield counter(
            "prompt_tokens_cached",
            "Prompt tokens that the prefix cache held.",
            totals.num_cached_prompt_tokens,
        )
        yield counter("generation_tokens", "Tokens of replies.", totals.num_generated_tokens)
        yield counter("engine_steps", "Scheduling steps.", totals.num_steps)
        success = CounterMetricFamily(
            PREFIX + "request_success", "Requests by finish reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(dict(totals.num_finished).items()):
            success.add_metric([self._model, reason], count)
        yield success
        spec = totals.spec
        num_drafts = spec.num_verifies if totals.num_draft_tokens else 0  # windows of one draft nothing
        accepted = list(spec.num_accepted_at)
        yield counter("spec_decode_num_drafts", "Verifies of a draft.", num_drafts)
        yield counter("spec_decode_num_draft_tokens", "Tokens drafted and verified.", totals.num_draft_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", sum(accepted))
        per_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts of which the token at this depth was accepted.",
            labels=["model_name", "position"],
        )
        for depth, count in enumerate(accepted):
            per_position.add_metric([self._model, str(depth)], count)
        yield per_position
