"""What a server's metrics and traces say of a GPU: ranges, memory, captures and compilations in traffic."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from starlette.testclient import TestClient
from tiny_tokenizers import byte_level

from eagle_kit.config.server import ServerConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.ops.device_memory import gpu_memory
from eagle_kit.server.api.app import create_app
from eagle_kit.server.api.metrics import PREFIX
from tests.cuda_device import device
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results, small_llm

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@contextmanager
def noted_ranges() -> Iterator[Counter[str]]:
    """Count the ranges that are opened in the real library, by name, and those that are closed."""
    noted: Counter[str] = Counter()
    push = torch.cuda.nvtx.range_push
    pop = torch.cuda.nvtx.range_pop

    def noted_push(text: str) -> int:
        noted[text] += 1
        return push(text)

    def noted_pop() -> int:
        noted["closed"] += 1
        return pop()

    with (
        mock.patch.object(torch.cuda.nvtx, "range_push", noted_push),
        mock.patch.object(torch.cuda.nvtx, "range_pop", noted_pop),
    ):
        yield noted


@pytest.mark.smoke
def test_ranges_of_nvtx_lie_around_captures_and_replays():
    llm = small_llm(nvtx=True)
    engine = llm.engine()
    with noted_ranges() as noted, phase() as found, made_up_results():
        llm.generate([[1, 2, 3], [4, 5, 6, 7]], GREEDY)
    assert found.counts["captures"] > 0
    num_steps = engine.totals.num_steps
    assert noted["eagle_kit.step"] == noted["eagle_kit.schedule"] == num_steps > 5
    num_cycles = sum(count for name, count in noted.items() if name.startswith("eagle_kit.cycle 3,2,6 batch"))
    assert num_cycles == noted["eagle_kit.decode"] > engine.num_graphs > 0
    closed = noted.pop("closed")
    assert closed == noted.total()


def test_without_nvtx_no_range_is_opened():
    llm = small_llm()
    with noted_ranges() as noted, made_up_results():
        llm.generate([[1, 2, 3]], GREEDY)
    assert not noted


def test_the_memory_of_the_gpu_is_what_the_driver_and_the_allocator_say():
    small_llm().engine()
    here = torch.device("cuda", 0)
    memory = gpu_memory(here)
    assert memory is not None
    assert memory.total - memory.free == device.bytes_used()
    assert memory.reserved == torch.cuda.memory_reserved() >= memory.allocated > 0
    held = torch.empty(64 << 20, dtype=torch.uint8, device=here)
    later = gpu_memory(here)
    assert later is not None and later.allocated == memory.allocated + held.nbytes


def metrics_of(http: TestClient) -> dict[str, float]:
    """Metrics of a server without further labels, by name."""
    found = {}
    for line in http.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith(PREFIX):
            found[name.removeprefix(PREFIX).replace('{model_name="m"}', "")] = float(value)
    return found


def served(llm: LLM) -> TestClient:
    """A server of an engine."""
    config = ServerConfig(model_name="m", allowed_host="testserver", log_stats_interval_s=0)
    return TestClient(create_app(llm, llm.engine(), config))


def test_a_server_reports_memory_and_captures_in_traffic():
    llm = small_llm(tokenizer=byte_level())
    with made_up_results():
        llm.warm_up("usual")
        with served(llm) as http:
            body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200
            prepared = metrics_of(http)
            assert prepared["graphs_captured_in_traffic_total"] == 0
            assert prepared["kernels_compiled_in_traffic_total"] == 0

            # The warm-up has left out batches with log-probabilities.
            assert http.post("/v1/completions", json={**body, "logprobs": 2}).status_code == 200
            found = metrics_of(http)
    assert found["graphs_captured_in_traffic_total"] == found["num_graphs"] - prepared["num_graphs"] > 0
    assert found["gpu_memory_planned_bytes"] == llm.memory_plan.total > 0
    assert 0 < found["gpu_memory_allocated_bytes"] <= found["gpu_memory_reserved_bytes"]
    assert found["gpu_memory_free_bytes"] < found["gpu_memory_total_bytes"]


def test_kernels_that_are_compiled_in_traffic_are_counted():
    """No other test has a target of these sizes, and there was no warm-up."""
    sizes = {"hidden_size": 320, "num_heads": 5, "intermediate_size": 448}
    llm = small_llm(changes=sizes, tokenizer=byte_level())
    with made_up_results(), served(llm) as http:
        assert metrics_of(http)["kernels_compiled_in_traffic_total"] == 0
        body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        found = metrics_of(http)
    assert found["kernels_compiled_in_traffic_total"] > 0
    assert found["graphs_captured_in_traffic_total"] == found["num_graphs"] > 0
