"""Prometheus: vLLM's names under our prefix, in a registry of its own per server."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from eagle_kit.ops.cpu.memory import promised_memory
from eagle_kit.ops.device_memory import GpuMemory

if TYPE_CHECKING:
    from eagle_kit.engine.engine import Engine
    from eagle_kit.engine.request import Request

PREFIX = "eagle_kit:"
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ACCEPT_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PART_S = (0.01, 0.05, *WHOLE_S)
GPU_MEMORY = {
    "total": "Memory of the GPU.",
    "free": "Memory of the GPU that no process has.",
    "reserved": "Memory that torch's allocator has.",
    "allocated": "Memory that torch's allocator has given to tensors.",
    "planned": "Memory of the engine by the plan that is printed at the start.",
}
"""Fields of :class:`~eagle_kit.ops.device_memory.GpuMemory` with a gauge each, and the plan's."""


class Metrics:
    """Counters and gauges read from the engine when they are asked for, and histograms of latencies.

    It is the :class:`~eagle_kit.server.response_stream.Observer` of a server's engine.

    Args:
        engine: its counters are read from another thread than its own, each of them a plain number.
        model_name: label of every sample.
        read_memory: returns the memory of the engine's GPU; None for a CPU.
        planned_memory: bytes of the engine's memory plan.
    """

    def __init__(
        self,
        engine: "Engine",
        model_name: str,
        read_memory: Callable[[], GpuMemory | None] = lambda: None,
        planned_memory: int = 0,
    ) -> None:
        from prometheus_client import CollectorRegistry, Histogram, ProcessCollector

        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(engine, model_name, read_memory, planned_memory))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model_name)

        self._first = histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_S
        )
        self._between = histogram(
            "inter_token_latency_seconds",
            "Seconds between two emissions of a request, divided by the number of tokens of the later one.",
            BETWEEN_TOKENS_S,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its last token.", WHOLE_S
        )

        # Parts of that time.
        self._queue = histogram(
            "request_queue_time_seconds", "From the arrival of a request to its admission.", PART_S
        )
        self._inference = histogram(
            "request_inference_time_seconds", "From the admission of a request to its last token.", PART_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the admission of a request to its first token.", PART_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token of a request to its last.", PART_S
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "From the first token of a request to its last, divided by the number of later tokens.",
            BETWEEN_TOKENS_S,
        )

        # Sizes of requests.
        sizes = size_buckets(engine.config.max_context)
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", sizes)
        self._computed_tokens = histogram(
            "request_prefill_kv_computed_tokens",
            "Tokens of a prompt that the prefix cache did not hold.",
            sizes,
        )
        self._response_tokens = histogram("request_generation_tokens", "Tokens of a response.", sizes)
        self._max_tokens = histogram(
            "request_params_max_tokens", "Most tokens that a request asked for.", sizes
        )

        # Acceptance of requests.
        self._accept_length = histogram(
            "request_accept_length",
            "Tokens per verify of a request, the bonus token included; requests without verifies have none.",
            ACCEPT_LENGTHS,
        )

    def emitted(self, request: "Request", num_tokens: int, seconds: float, first: bool) -> None:
        """Observe the latency of tokens."""
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(num_tokens):  # one value per token, or tokens that come together would count less
                self._between.observe(seconds / num_tokens)

    def finished(self, request: "Request") -> None:
        """Observe the latency and the size of a request; one without tokens has none."""
        stats = request.stats
        if stats.last_token_at == 0:
            return

        # Its time, and the parts of it.
        decode_s = stats.last_token_at - stats.first_token_at
        self._whole.observe(stats.last_token_at - request.arrived_at)
        self._queue.observe(stats.admitted_at - request.arrived_at)
        self._inference.observe(stats.last_token_at - stats.admitted_at)
        self._prefill.observe(stats.first_token_at - stats.admitted_at)
        self._decode.observe(decode_s)
        num_later = len(request.token_ids) - 1
        if num_later > 0:
            self._per_token.observe(decode_s / num_later)

        # Its size.
        self._prompt_tokens.observe(len(request.prompt_ids))
        self._computed_tokens.observe(len(request.prompt_ids) - stats.num_cached_tokens)
        self._response_tokens.observe(len(request.token_ids))
        self._max_tokens.observe(request.params.max_tokens)

        # Its acceptance.
        if stats.spec.num_verifies:
            self._accept_length.observe(stats.spec.accept_length)

    def text(self) -> bytes:
        """Render the exposition format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


def size_buckets(most: int) -> tuple[float, ...]:
    """Return upper bounds of a histogram of tokens, as vLLM has them: 1, 2, 5, 10 and so on to ``most``."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(float(bound) for bound in bounds if bound <= most)


class _EngineCollector:
    """Collector of an engine's own counters and of its GPU's memory, read at every scrape."""

    def __init__(
        self,
        engine: "Engine",
        model_name: str,
        read_memory: Callable[[], GpuMemory | None],
        planned_memory: int,
    ) -> None:
        self._engine = engine
        self._model = model_name
        self._read_memory = read_memory
        self._planned_memory = planned_memory

    def collect(self) -> Iterable[Any]:
        """Iterate over all families; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def family(kind: Any, name: str, text: str, samples: Iterable[tuple[Any, float]], *label: str) -> Any:
            made = kind(PREFIX + name, text, labels=["model_name", *label])
            for value, count in samples:
                made.add_metric([self._model, str(value)] if label else [self._model], count)
            return made

        engine = self._engine
        totals = self._engine.totals
        accepted = list(totals.spec.num_accepted_at)
        gauges = (
            ("num_requests_running", "Requests in the batch.", engine.num_running),
            ("num_requests_waiting", "Requests in the queue.", engine.num_waiting),
            ("kv_cache_usage_perc", "Share of the key-value pool in use, 0 to 1.", engine.kv_usage),
            (
                "promised_memory_bytes",
                "Memory of the key-value pool on a CPU that was allocated and has not been used yet.",
                promised_memory(),
            ),
            ("num_graphs", "Captured or recorded cycles.", engine.num_graphs),
            (
                "graph_memory_bytes",
                "GPU memory that the driver took for graphs.",
                engine.runner.graphs.node_bytes,
            ),
            ("num_grammars", "Compiled grammars in the cache.", engine.num_grammars),
        )
        counters = (
            (
                "num_preemptions",
                "Running requests that were preempted, for want of pages or at the end of a turn.",
                totals.num_preemptions,
            ),
            ("prompt_tokens", "Prompt tokens of admitted requests.", totals.num_prompt_tokens),
            (
                "prompt_tokens_cached",
                "Prompt tokens found in the prefix cache.",
                totals.num_cached_prompt_tokens,
            ),
            ("generation_tokens", "Tokens of responses.", totals.num_generated_tokens),
            (
                "requests_failed",
                "Requests that ended by an error of the logits or of the text, or for lack of memory.",
                totals.num_finished.get("error", 0),
            ),
            (
                "prefix_cache_queries",
                "The same as prompt_tokens, under vLLM's name.",
                totals.num_prompt_tokens,
            ),
            (
                "prefix_cache_hits",
                "The same as prompt_tokens_cached, under vLLM's name.",
                totals.num_cached_prompt_tokens,
            ),
            ("engine_steps", "Scheduling steps.", totals.num_steps),
            (
                "graphs_captured_in_traffic",
                "Graphs that were captured, or on a CPU recorded, since the warm-up; requests waited.",
                totals.num_captures,
            ),
            (
                "runs_without_graph",
                "Cycles, parts of them and prompts that ran eagerly, because they have no graph for good.",
                totals.num_eager_runs,
            ),
            (
                "kernels_compiled_in_traffic",
                "Kernels that Triton compiled, or read from its cache, since the warm-up; requests waited.",
                totals.num_compilations,
            ),
            (
                "steps_in_parts",
                "Steps for which the GPU had too little memory, so that they were run in parts.",
                totals.num_steps_in_parts,
            ),
            (
                "steps_out_of_memory",
                "Steps that ended all requests, because the GPU had too little memory for parts too.",
                totals.num_steps_out_of_memory,
            ),
            ("spec_decode_num_drafts", "Verifications of at least one draft token.", totals.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", totals.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", sum(accepted)),
        )
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in table:
                yield family(kind, name, text, [("", value)])

        # Memory of the GPU; a CPU has no samples.
        memory = self._read_memory()
        for name, text in GPU_MEMORY.items():
            samples = []
            if memory is not None:
                size = self._planned_memory if name == "planned" else getattr(memory, name)
                samples = [("", float(size))]
            yield family(GaugeMetricFamily, f"gpu_memory_{name}_bytes", text, samples)

        # The pool, as labels of a constant.
        config = engine.config
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "1, with the sizes and options of the key-value pool as labels.",
            labels=["model_name", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"],
        )
        labels = (config.page_size, config.num_pages, config.kv_dtype, config.prefix_cache)
        info.add_metric([self._model, *map(str, labels)], 1.0)
        yield info

        # Counts by reason, shape, batch size and depth.
        finished = sorted(dict(totals.num_finished).items())
        text = "Requests by finish reason."
        yield family(CounterMetricFamily, "request_success", text, finished, "finished_reason")
        shapes = [(str(shape), count) for shape, count in sorted(dict(totals.shapes).items())]
        name = "spec_decode_num_cycles"
        text = "Cycles by shape: steps,topk,tokens, or none."
        yield family(CounterMetricFamily, name, text, shapes, "shape")
        gains = [(choice.batch_size, choice.gain) for choice in engine.choices()]
        name = "spec_decode_expected_speedup"
        text = "Expected speed-up of the chosen shape over plain decoding, by batch size."
        yield family(GaugeMetricFamily, name, text, gains, "batch_size")
        name = "spec_decode_num_accepted_tokens_per_pos"
        text = "Accepted draft tokens by depth."
        yield family(CounterMetricFamily, name, text, enumerate(accepted), "position")
