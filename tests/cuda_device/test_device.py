"""The device keeps CUDA's rules of memory, copies and captures; errors name the call and the Python line."""

import ctypes
import threading

import pytest
import torch

from tests.cuda_device import device
from tests.cuda_device.device import LogKind, counts, phase

GB = 1_000_000_000


def capture(body, mode: str = "global", stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of what ``body`` launches; the stream of before is the current one afterwards."""
    before = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream or torch.cuda.Stream(), capture_error_mode=mode):
            body()
    finally:
        torch.cuda.set_stream(before)
    return graph


def errors(found: device.Phase) -> list[tuple[str, int]]:
    """Names and errors of the illegal calls."""
    return [(call.name, call.error) for call in found.of(LogKind.ILLEGAL_CALL)]


# ---- Memory ----


def test_memory_is_taken_in_segments_and_given_back():
    torch.cuda.empty_cache()
    before = device.bytes_used()
    large = torch.empty(3 * GB, dtype=torch.uint8, device="cuda")
    assert 3 * GB <= device.bytes_used() - before < 3 * GB + (4 << 20)
    del large
    torch.cuda.empty_cache()
    assert device.bytes_used() == before


def test_out_of_memory_is_torchs_error_and_names_the_line():
    with phase() as found, pytest.raises(torch.cuda.OutOfMemoryError, match="100.00 GiB"):
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    first = found.of(LogKind.OUT_OF_MEMORY)[0]
    assert first.name == "cudaMalloc" and first.error == 2 and str(100 << 30) in first.detail
    assert first.place is not None and first.place.file == __file__
    assert not found.of(LogKind.ILLEGAL_CALL), "torch asks and lives with the answer"


def test_memory_can_be_made_short():
    torch.cuda.empty_cache()
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    with device.memory_of(device.bytes_used() + (100 << 20)):
        assert torch.cuda.mem_get_info()[0] == 100 << 20
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    assert torch.empty(128 << 20, dtype=torch.uint8, device="cuda").numel() > kept.numel()


def test_numbers_of_the_host_come_back_from_the_device():
    sent = torch.arange(5).pin_memory()
    there = sent.to("cuda", non_blocking=True)
    assert sent.is_pinned() and there.tolist() == [0, 1, 2, 3, 4]


# ---- Launches ----


def test_launches_are_counted_by_who_makes_them():
    x = torch.empty(16, 16, device="cuda")
    x @ x
    with phase() as found:
        (x + 1) @ x
    assert found.counts["runtime_launches"] == 1 and found.counts["library_launches"] == 1
    assert found.launches == 2


def test_a_replay_counts_the_nodes_of_its_graph():
    x = torch.empty(16, 16, device="cuda")
    x @ x
    before = counts()["live_graphs"]
    graph = capture(lambda: x.mul(2).add(1).relu())
    with phase() as found:
        graph.replay()
        graph.replay()
    assert found.counts["graph_launches"] == 2 and found.counts["replayed_nodes"] == 6
    assert found.launches == 0, "a replay is no launch of the host's"
    assert counts()["live_graphs"] == before + 1
    graph.reset()
    assert counts()["live_graphs"] == before


def test_waits_of_the_host_are_found_with_their_lines():
    x = torch.ones(3, device="cuda")
    with phase(LogKind.SYNCHRONISATION) as found:
        x.add_(1)
        x.sum().item()
    (wait,) = found.of(LogKind.SYNCHRONISATION)
    assert wait.name == "cudaStreamSynchronize" and wait.place is not None
    assert wait.place.function == "test_waits_of_the_host_are_found_with_their_lines"


# ---- Captures ----


@pytest.mark.illegal_calls
def test_a_read_in_a_capture_ends_it():
    x = torch.ones(3, device="cuda")
    with phase() as found, pytest.raises(RuntimeError, match="previous error during capture"):
        capture(lambda: x.sum().item())
    assert errors(found)[0] == ("cudaStreamSynchronize", 900)
    assert errors(found)[-1] == ("cudaStreamEndCapture", 901)
    place = found.calls[0].place
    assert place is not None and place.function == "<lambda>"
    graph = capture(lambda: x.mul(2))
    graph.replay()


@pytest.mark.illegal_calls
def test_a_copy_from_pageable_memory_ends_a_capture():
    """torch refuses such a copy itself, so CUDA is called by its name."""
    x = torch.ones(3, device="cuda")
    host = torch.ones(3)
    with pytest.raises(RuntimeError, match="pinned"):
        capture(lambda: x.copy_(host, non_blocking=True))

    def copy() -> None:
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, host)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert ctypes.CDLL(None).cudaMemcpyAsync(*addresses, ctypes.c_size_t(12), 1, stream) == 900

    with phase() as found, pytest.raises(RuntimeError):
        capture(copy)
    assert errors(found)[0] == ("cudaMemcpyAsync", 900)


@pytest.mark.illegal_calls
@pytest.mark.parametrize(
    ("mode", "is_refused"), [("global", True), ("thread_local", False), ("relaxed", False)]
)
def test_another_thread_pins_memory_during_a_capture(mode, is_refused):
    """Only a capture in mode "global" refuses it, and ends; sizes are new, so that nothing cached is used."""
    x = torch.ones(3, device="cuda")
    failed = []

    def pin() -> None:
        try:
            torch.empty(device.num_calls() + 12_345_678, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            failed.append(str(error))

    def body() -> None:
        thread = threading.Thread(target=pin)
        thread.start()
        thread.join()
        x.mul(2)

    if not is_refused:
        capture(body, mode)
        assert not failed
        return
    with pytest.raises(RuntimeError):
        capture(body, mode)
    assert "not permitted when stream is capturing" in failed[0]


@pytest.mark.illegal_calls
def test_work_of_another_stream_has_to_come_back_to_the_capture():
    x = torch.ones(3, device="cuda")
    main = torch.cuda.Stream()
    side = torch.cuda.Stream()

    def forked(is_joined: bool) -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.mul(2)
        if is_joined:
            main.wait_stream(side)

    capture(lambda: forked(True), stream=main)
    with phase() as found, pytest.raises(RuntimeError, match="unjoined work"):
        capture(lambda: forked(False), stream=main)
    assert errors(found) == [("cudaStreamEndCapture", 904)]
    with torch.cuda.stream(side):
        x.mul(2)


@pytest.mark.illegal_calls
def test_a_capture_does_not_wait_for_work_outside_of_it():
    x = torch.ones(3, device="cuda")
    outside = torch.cuda.Event()
    outside.record()
    with phase() as found, pytest.raises(RuntimeError):
        capture(lambda: (torch.cuda.current_stream().wait_event(outside), x.mul(2)))
    assert errors(found)[0] == ("cudaStreamWaitEvent", 905)


@pytest.mark.illegal_calls
def test_nobody_waits_for_an_event_of_a_capture():
    x = torch.ones(3, device="cuda")
    event = torch.cuda.Event()
    capture(lambda: (x.mul(2), event.record()))
    with phase() as found, pytest.raises(RuntimeError):
        event.synchronize()
    assert errors(found) == [("cudaEventSynchronize", 907)]


@pytest.mark.illegal_calls
def test_the_default_stream_cannot_be_captured():
    assert ctypes.CDLL(None).cudaStreamBeginCapture(None, 0) == 900
    with pytest.raises(RuntimeError, match="default stream"):
        torch.cuda.CUDAGraph().capture_begin()


# ---- What is not there ----


@pytest.mark.illegal_calls
def test_a_function_without_a_body_fails_by_its_name():
    with phase() as found, pytest.raises(RuntimeError, match="not supported"):
        torch.empty(1 << 20, device="cuda").untyped_storage()._share_cuda_()
    assert errors(found)[0] == ("cudaIpcGetMemHandle", 801)


def test_a_function_that_nobody_imports_is_not_found_by_name():
    with pytest.raises(AttributeError, match="cuNoSuchFunction"):
        ctypes.CDLL("libcuda.so.1").cuNoSuchFunction  # noqa: B018
