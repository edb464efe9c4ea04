"""Captures of the engine and of measurements, beside other threads and with little memory."""

import threading

import pytest
import torch

from eagle_kit.engine.graphs.cuda_graph import CaptureError, Graph, GraphCall, GraphRunner
from eagle_kit.ops.timing import Timer
from eagle_kit.ops.transfer import to_device
from tests.cuda_device.device import phase

pytestmark = pytest.mark.smoke
MIB = 1 << 20


def pin_in_another_thread(errors: list[str]) -> None:
    """Pin memory of a size that is not cached, as the prefetch of a store does, and wait for it."""

    def pin() -> None:
        try:
            torch.empty(next(sizes), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()


sizes = iter(range(256 * MIB, 10_000 * MIB, 256 * MIB))


def test_another_thread_may_pin_memory_while_the_engine_captures():
    errors: list[str] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            pin_in_another_thread(errors)
        return x * 2

    with phase() as found:
        graph = Graph(body, torch.ones(3, device="cuda"))
        graph.replay()
    assert not errors and found.counts["pinned_allocations"] == 1


def test_another_thread_may_pin_memory_while_a_measurement_is_captured():
    errors: list[str] = []
    x = torch.ones(3, device="cuda")

    def run() -> None:
        if torch.cuda.is_current_stream_capturing():
            pin_in_another_thread(errors)
        x.mul_(2)

    assert Timer(x.device, budget_s=0.0, least=1).time(run).how == "graph"
    assert not errors


def test_measurements_share_one_stream_and_so_one_workspace_of_cublas():
    """32 MiB on this capability, for every stream of a handle, for good."""
    x = torch.ones(64, 64, device="cuda")
    Timer(x.device, budget_s=0.0, least=1).time(lambda: x @ x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        Timer(x.device, budget_s=0.0, least=1).time(lambda: x @ x)
    assert torch.cuda.memory_allocated() == before


def too_large(x: torch.Tensor) -> torch.Tensor:
    """Fits while it is run, but not into the memory of a graph."""
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    return x * 2


def test_too_little_memory_for_a_graph_is_reported_as_that():
    """The operation that asks for memory can be in a graph, so it is not blamed."""
    stream = torch.cuda.current_stream()
    with pytest.raises(torch.OutOfMemoryError, match="4096.00 GiB") as caught:
        Graph(too_large, torch.ones(3, device="cuda"))
    assert not isinstance(caught.value, CaptureError)
    assert torch.cuda.current_stream() == stream


def test_a_call_without_memory_for_its_graph_runs_eagerly_and_others_are_captured():
    runner = GraphRunner("cycle")
    inputs = (torch.ones(3, device="cuda"),)
    large = GraphCall("large", 0, lambda given: (too_large(given[0]),), inputs, lambda: inputs)
    for _ in range(2):
        (out,) = runner.run(large)
        assert out.shape == (3,)
    assert (runner.num_graphs, runner.num_out_of_memory, runner.num_warm_ups) == (0, 1, 1)
    runner.run(GraphCall("small", 0, lambda given: (given[0] * 2,), inputs, lambda: inputs))
    assert runner.num_graphs == 1


@pytest.mark.illegal_calls
def test_an_operation_that_reads_on_the_host_is_named():
    with pytest.raises(CaptureError, match="local_scalar"):
        Graph(lambda x: x * x.sum().item(), torch.ones(3, device="cuda"))


def test_numbers_of_the_host_are_sent_where_the_device_is_the_default():
    with torch.device("cuda"):
        assert to_device([1, 2, 3], torch.device("cuda")).tolist() == [1, 2, 3]
