"""Metrics of a server, by vLLM's names."""

import pytest
from tiny import tiny_head

from eagle_kit.engine.llm import LLM
from eagle_kit.server.api.metrics import GPU_MEMORY, PREFIX, size_buckets
from tests.server.api.serving import serving, wait_until

VLLM = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "cache_config_info",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_time_per_output_token_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_max_tokens_bucket",
    "request_prefill_kv_computed_tokens_bucket",
}
"""Names, after ``vllm:``, that vLLM's dashboards for Grafana and the like read."""


def samples_of(server):
    """Samples of a server's engine: (name, labels without the model's) -> value."""
    found = {}
    for family in server.service.metrics.registry.collect():
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
                found[sample.name.removeprefix(PREFIX), tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.fixture
def llm(target_folder):
    """A random target with a random head."""
    plain = LLM(str(target_folder), max_context=128)
    head = tiny_head(plain.target, draft_vocab_size=67)
    sizes = {"max_batch_size": 4, "max_context": 128, "page_size": 4, "kv_tokens": 512}
    return LLM(str(target_folder), head, shape="3,1,4", **sizes)


def test_a_dashboard_for_vllm_finds_what_it_reads(scripted):
    with serving(*scripted("a response whose drafts are accepted")) as server:
        assert server.http.post("/v1/completions", json={"prompt": "a b c"}).status_code == 200
        text = server.http.get("/metrics").text
        assert {name for name in VLLM if f"{PREFIX}{name}{{" not in text} == set()


def test_the_parts_of_a_requests_time_and_its_size_add_up(llm):
    engine = llm.engine()
    with serving(llm, engine) as server:
        body = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 12, "ignore_eos": True}
        for _ in range(2):  # the second finds two pages in the cache
            assert server.http.post("/v1/completions", json=body).status_code == 200
        found = samples_of(server)

    def total(name):
        assert found[f"{name}_count", ()] == 2
        return found[f"{name}_sum", ()]

    whole = total("e2e_request_latency_seconds")
    inference = total("request_inference_time_seconds")
    assert total("request_queue_time_seconds") + inference == pytest.approx(whole)
    parts = total("request_prefill_time_seconds") + total("request_decode_time_seconds")
    assert parts == pytest.approx(inference) and 0 < inference < whole
    per_token = total("request_time_per_output_token_seconds")
    assert 11 * per_token == pytest.approx(total("request_decode_time_seconds"))
    assert (total("request_prompt_tokens"), total("request_generation_tokens")) == (18, 24)
    assert total("request_params_max_tokens") == 24
    assert total("request_prefill_kv_computed_tokens") == 18 - 8
    assert found["prefix_cache_queries_total", ()] == 18 and found["prefix_cache_hits_total", ()] == 8
    pool = {
        "block_size": "4",
        "num_gpu_blocks": "128",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
    }
    assert found["cache_config_info", tuple(sorted(pool.items()))] == 1


def test_recordings_that_requests_wait_for_are_counted(llm):
    """A CPU records a cycle when its kind has run often."""
    engine = llm.engine()
    with serving(llm, engine) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
        assert samples_of(server)["graphs_captured_in_traffic_total", ()] == 0
        assert server.http.post("/v1/completions", json=body).status_code == 200
        wait_until(lambda: not engine.has_work)
        found = samples_of(server)
    assert found["graphs_captured_in_traffic_total", ()] == found["num_graphs", ()] > 0
    assert found["kernels_compiled_in_traffic_total", ()] == found["steps_out_of_memory_total", ()] == 0


def test_cycles_that_cannot_be_recorded_are_counted(llm):
    """A cycle that reads a number on the host has no recording."""
    engine = llm.engine()
    run_cycle = engine.runner.run_cycle

    def reading(inputs, settings):
        emitted = run_cycle(inputs, settings)
        emitted.tokens.sum().item()
        return emitted

    engine.runner.run_cycle = reading
    with serving(llm, engine) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        wait_until(lambda: not engine.has_work)
        found = samples_of(server)
    assert found["graphs_captured_in_traffic_total", ()] == found["num_graphs", ()] == 0
    assert 10 < found["runs_without_graph_total", ()] < engine.totals.num_steps


def test_a_cpu_has_no_samples_of_a_gpus_memory(scripted):
    with serving(*scripted("abc")) as server:
        text = server.http.get("/metrics").text
    for name in GPU_MEMORY:
        assert f"# TYPE {PREFIX}gpu_memory_{name}_bytes gauge" in text
        assert f"{PREFIX}gpu_memory_{name}_bytes{{" not in text


@pytest.mark.parametrize(
    ("most", "bounds"),
    [
        (1, [1]),
        (5, [1, 2, 5]),
        (128, [1, 2, 5, 10, 20, 50, 100]),
        (2000, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]),
    ],
)
def test_buckets_of_sizes_go_up_to_the_context(most, bounds):
    assert list(size_buckets(most)) == bounds
