"""Captures that fail: what needed them runs eagerly, and torch and the other graphs are as before."""

import gc
import logging

import pytest
import torch

from eagle_kit.engine.graphs.cuda_graph import GraphCall, GraphRunner
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.runner import Runner
from tests.cuda_device.device import bytes_of_node, phase
from tests.cuda_device.engines import made_up_results, small_llm
from tests.cuda_device.test_warm_up import USUAL, serve

pytestmark = [pytest.mark.illegal_calls, pytest.mark.usefixtures("memory_of_its_own")]
MIB = 1 << 20


def call(name: str, key: int, body) -> GraphCall:
    """A call of ``body`` with a tensor of 1 MiB."""
    inputs = (torch.zeros(MIB // 4, device="cuda"),)
    return GraphCall(name, key, lambda given: (body(given[0]),), inputs, lambda: inputs)


def reads(x: torch.Tensor) -> torch.Tensor:
    """A number of the device decides on the host, behind a tensor of 8 MiB."""
    wide = x.repeat(8)
    return x * 2 if wide.sum().item() else x * 3


def doubles(x: torch.Tensor) -> torch.Tensor:
    """Four tensors of 8 MiB, one after the other."""
    for _ in range(4):
        x = x.repeat(8).view(8, -1).mean(0)
    return x * 2


@pytest.mark.smoke
def test_each_operation_is_reported_once_and_its_calls_run_eagerly(caplog):
    runner = GraphRunner("cycle")
    with caplog.at_level(logging.WARNING), phase() as found:
        for key in (1, 2, 1, 2):
            (out,) = runner.run(call("cycle", key, reads))
            assert out.shape == (MIB // 4,)
        runner.run(call("cycle", 3, lambda x: x * x.max().item()))
        runner.run(call("cycle", 4, lambda x: x + torch.nonzero(x).numel()))
    assert found.counts["captures"] <= runner.num_warm_ups, "those that restore the generator"
    assert (runner.num_graphs, runner.num_warm_ups, runner.num_out_of_memory) == (0, 4, 0)
    assert (runner.num_captures, runner.num_eager_runs) == (0, 6)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2, texts
    assert "local_scalar" in texts[0] and "nonzero" in texts[1]
    for text in texts:
        assert "EAGLE_KIT_DISABLE=graphs" in text and "doctor --gpu" in text


def test_graphs_of_before_and_after_share_the_pool():
    runner = GraphRunner("cycle")
    runner.run(call("cycle", 0, doubles))
    reserved = torch.cuda.memory_reserved()
    for key in range(1, 4):
        runner.run(call("cycle", key, reads))
    for key in range(4, 8):
        runner.run(call("cycle", key, doubles))
    with phase() as found:
        for key in (0, 4, 5, 6, 7):
            runner.run(call("cycle", key, doubles))
    assert runner.num_graphs == runner.num_captures == found.counts["graph_launches"] == 5
    assert runner.num_eager_runs == 3
    outputs = 9 * MIB  # of each graph one tensor, and the block that the failed captures made
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 2 * outputs


def test_random_numbers_go_on_behind_a_failed_capture():
    generator = torch.cuda.default_generators[0]
    runner = GraphRunner("cycle")
    drawn = torch.rand(8, device="cuda")
    offset = generator.get_offset()
    runner.run(call("cycle", 0, reads))
    assert torch.rand_like(drawn).shape == drawn.shape
    assert generator.get_offset() > offset
    runner.run(call("cycle", 1, lambda x: x + torch.rand_like(x)))
    runner.run(call("cycle", 1, lambda x: x + torch.rand_like(x)))
    assert runner.num_graphs == 1


def test_the_pool_goes_with_its_runner():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    runner = GraphRunner("cycle")
    runner.run(call("cycle", 0, doubles))
    runner.run(call("cycle", 1, reads))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() > before
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_memory_that_the_driver_lacks_for_a_graph_is_no_fault_of_an_operation(caplog):
    runner = GraphRunner("cycle")
    with bytes_of_node(1 << 40), caplog.at_level(logging.WARNING):
        (out,) = runner.run(call("cycle", 0, doubles))
    assert out.shape == (MIB // 4,)
    assert (runner.num_graphs, runner.num_out_of_memory, runner.node_bytes) == (0, 1, 0)
    (record,) = caplog.records
    assert "memory" in record.getMessage() and "operation" not in record.getMessage()
    with bytes_of_node(1000):
        runner.run(call("cycle", 1, doubles))
        runner.run(call("cycle", 2, lambda x: x * 2))
    torch.rand(3, device="cuda")
    assert runner.num_graphs == 2 and runner.node_bytes > 9000 and runner.node_bytes % 1000 == 0


def test_a_server_whose_filters_cannot_be_captured_serves_all_kinds(monkeypatch, caplog):
    """An operation of some kinds of batches reads on the host; the others have their graphs."""
    run_cycle = Runner.run_cycle

    def faulty(self, inputs, settings):
        if inputs.sampling is not None and inputs.sampling.top_p is not None:
            inputs.sampling.top_p.max().item()
        return run_cycle(self, inputs, settings)

    monkeypatch.setattr(Runner, "run_cycle", faulty)
    llm = small_llm("3,1,4")
    engine = llm.engine()
    with made_up_results(), caplog.at_level(logging.WARNING):
        prepared = warm_up(engine, "usual")
        of_prompts = 2 * len(engine.runner.prompt_shapes)
        assert prepared.num_graphs == engine.num_graphs == 4 + of_prompts, "greedy and sampled, of two sizes"
        with phase() as found:
            assert serve(llm, USUAL) > 100
        assert found.counts["captures"] == 0 and found.counts["graph_launches"] > 0
        assert sum(engine.totals.shapes.values()) > found.counts["graph_launches"]
    assert len([text for text in caplog.messages if "aten.item" in text]) == 1
    assert torch.rand(3, device="cuda").shape == (3,)
