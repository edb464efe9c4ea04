"""Bytes of torch's caching allocator that have no value hold NaN, and those that have one keep it."""

import ctypes
import threading

import pytest
import torch
import triton
import triton.language as tl

from tests.cuda_device.device import phase
from tests.triton_on_cpu.kernel import KernelFault

SIZE = 1 << 20
"""Elements of a tensor in a segment of large blocks."""
SMALL = 256
"""Elements of a tensor in a segment with others."""
POISON = b"\xff"


def capture(body, pool=None, stream=None):
    """A graph of ``body`` -> the graph and what the body returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        out = body()
    return graph, out


def content(address: int, size: int) -> bytes:
    """Bytes of the device."""
    return ctypes.string_at(address, size)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes, which do not keep the tensor."""
    return tensor.data_ptr(), tensor.nbytes


def is_poisoned(place: tuple[int, int]) -> bool:
    """True if no byte has a value."""
    address, size = place
    return content(address, size) == size * POISON


# ---- Outside of captures ----


def test_a_block_is_poisoned_when_it_is_freed():
    x = torch.ones(SMALL, device="cuda")
    place = place_of(x)
    assert not is_poisoned(place)
    with phase() as found:
        del x
    assert is_poisoned(place) and found.counts["poisoned_blocks"] == 1


def test_a_block_is_poisoned_when_it_is_handed_out():
    x = torch.ones(SMALL, device="cuda")
    address, size = place_of(x)
    del x
    ctypes.memset(address, 0, size)  # as a kernel would that writes to what was freed
    again = torch.empty(SMALL, device="cuda")
    assert again.data_ptr() == address and again.isnan().all()


@pytest.mark.parametrize("size", [1, 511, 512, 513, 3000])
def test_the_neighbours_of_a_block_keep_their_bytes(size):
    blocks = [torch.full((size,), number, dtype=torch.uint8, device="cuda") for number in range(9)]
    del blocks[4]
    blocks.insert(4, torch.empty(size, dtype=torch.uint8, device="cuda"))
    for number, block in enumerate(blocks):
        wanted = 255 if number == 4 else number
        assert block.tolist() == [wanted] * size


def test_a_block_of_several_streams_is_poisoned_when_all_are_done():
    """The allocator defers the end of such a block until no capture goes on."""
    side = torch.cuda.Stream()
    x = torch.ones(SIZE, device="cuda")
    y = torch.ones(3, device="cuda")
    x.record_stream(side)
    block = [x]
    place = place_of(x)
    del x
    capture(lambda: (block.clear(), y.mul(2)))
    assert content(*place) == torch.ones(SIZE).numpy().tobytes(), "the side stream may still read it"
    torch.cuda.synchronize()
    other = torch.empty(SIZE, device="cuda")  # the allocator looks at its events when it is asked
    assert is_poisoned(place) and other.isnan().all()


def test_threads_that_free_in_one_stream_neither_wait_for_each_other_nor_lose_values():
    stream = torch.cuda.Stream()
    found = []

    def run(number: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(100):
                x = torch.full((SMALL,), float(number), device="cuda")
                y = x * 2
                del x
                found.append((y + torch.full((SMALL,), 1.0, device="cuda")).sum() == SMALL * (2 * number + 1))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) == 300 and all(map(bool, found))


# ---- Private pools ----


def test_what_a_graph_frees_is_poisoned_at_each_replay():
    x = torch.ones(SIZE, device="cuda")
    places = []

    def body():
        between = x + 1
        places.append(place_of(between))
        return between.sum()

    graph, out = capture(body)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        ctypes.memset(places[0][0], 0, places[0][1])
        graph.replay()
        assert out.item() == SIZE * (value + 1)
        assert is_poisoned(places[0])


def test_a_graph_that_reads_what_it_did_not_write_gets_nan_at_each_replay():
    """Other graphs of its pool leave values in the same memory."""
    x = torch.ones(SIZE, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    writer, total = capture(lambda: (x * 3).sum(), pool)

    def body():
        unwritten = torch.empty(SIZE, device="cuda")
        return unwritten * 1

    reader, out = capture(body, pool)
    for _ in range(2):
        writer.replay()
        reader.replay()
        assert total.item() == 3 * SIZE
        assert out.isnan().all()


def test_an_output_that_was_dropped_is_poisoned_before_its_graph_writes_it_again():
    x = torch.ones(SIZE, device="cuda")
    places = []

    def body():
        out = torch.empty(SIZE, device="cuda")
        out[: SIZE // 2] = x[: SIZE // 2]
        places.append(place_of(out))
        return [out]

    graph, kept = capture(body)
    graph.replay()
    address, size = places[0]
    kept.clear()
    assert is_poisoned(places[0])
    ctypes.memset(address, 0, size)
    graph.replay()
    written = torch.ones(SIZE // 2).numpy().tobytes()
    assert content(address, size) == written + (size // 2) * POISON


def test_a_tensor_that_was_made_in_a_capture_may_be_written_from_outside():
    def body():
        held = torch.empty(3, device="cuda")
        return held, held + 1

    graph, (held, out) = capture(body)
    assert held.isnan().all()
    for value in (5.0, 6.0):
        held.fill_(value)
        graph.replay()
        assert out.tolist() == [value + 1] * 3
        assert held.tolist() == [value] * 3


def test_what_is_freed_in_a_capture_and_is_not_of_it_is_left_alone_by_replays():
    stream = torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(stream):
        outside = [torch.ones(SIZE, device="cuda")]
    place = place_of(outside[0])
    graph, _ = capture(lambda: (outside.clear(), x.mul(2)), stream=stream)
    assert is_poisoned(place)
    with torch.cuda.stream(stream):
        other = torch.full((SIZE,), 7.0, device="cuda")
    assert place_of(other) == place
    graph.replay()
    assert (other == 7.0).all()


def test_an_output_of_another_graph_is_left_alone_by_replays_of_the_one_that_dropped_it():
    x = torch.ones(SIZE, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    first, dropped = capture(lambda: [x * 2], pool, stream)
    place = place_of(dropped[0])
    second, total = capture(lambda: (dropped.clear(), x.sum())[1], pool, stream)
    third, held = capture(lambda: x * 5, pool, stream)
    assert place_of(held) == place
    third.replay()
    second.replay()
    assert (held == 5.0).all() and total.item() == SIZE
    first.replay()
    assert (held == 2.0).all(), "the first graph writes there at each replay"


def test_graphs_that_are_gone_leave_no_poison_behind():
    graph, held = capture(lambda: torch.ones(SIZE, device="cuda"))
    graph.replay()
    graph.reset()
    assert (held == 1.0).all()
    place = place_of(held)
    del held
    assert is_poisoned(place)


# ---- Faults ----


def test_a_graph_that_reads_a_block_which_was_freed_gets_nan():
    inputs = [torch.ones(SIZE, device="cuda")]
    graph, out = capture(lambda: inputs[0] * 2)
    graph.replay()
    assert (out == 2.0).all()
    inputs.clear()
    graph.replay()
    assert out.isnan().all()


def test_a_graph_that_reads_the_pool_of_a_graph_that_was_dropped_gets_nan():
    x = torch.ones(SIZE, device="cuda")
    source, made = capture(lambda: [x + 1])
    reader, out = capture(lambda: made[0] * 1)
    source.replay()
    reader.replay()
    assert (out == 2.0).all()
    source.reset()
    made.clear()
    reader.replay()
    assert out.isnan().all()


@triton.jit
def count_up(x, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at.to(tl.float32), at < count)


def test_an_access_of_a_kernel_outside_of_its_tensors_is_named():
    x = torch.zeros(SMALL, device="cuda")
    count_up[(1,)](x, SMALL, 2 * SMALL)
    assert x.tolist() == list(range(SMALL))
    with pytest.raises(KernelFault, match=rf"store of count_up.*test_poison.py.*byte {4 * SMALL} "):
        count_up[(1,)](x, SMALL + 1, 2 * SMALL)
