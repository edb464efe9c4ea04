"""Rows of states that are written while the device computes the next ones.

Streams run as late as may be: what is read, reused or freed before its copy was waited for has other bytes.
"""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.prefetch import Prefetcher
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.data.hidden_states.writer import NUM_BUFFERS, writing
from tests.cuda_device.device import LogKind, late_streams, phase

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
H = 64
LENGTHS = [5, 90, 3, 41, 90, 17, 1]


def store_of(folder: Path, form: str) -> StateStore:
    """A store for the rows of :data:`LENGTHS`, with several shards."""
    about = {
        "version": 1,
        "target": {"name": "t", "revision": None, "weights": "w0"},
        "layer_ids": [1, 2],
        "layer_ids_are": "inputs of layers",
        "last_hidden_state": "after the final norm",
        "precision": "bfloat16",
        "format": form,
        "hidden_size": H,
        "data": {"source": "t", "max_length": 90, "supervised_tokens": 8, "rows": len(LENGTHS), "files": {}},
    }
    return StateStore(folder, about, shard_bytes=16_000)


def states_of(row: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(row)
    length = LENGTHS[row]
    return {
        "aux": torch.randn(length, 2 * H, generator=generator).to(device, torch.bfloat16),
        "hidden": torch.randn(length, H, generator=generator).to(device, torch.bfloat16),
        "argmax": torch.randint(99, (length,), generator=generator).to(device),
    }


def write(store: StateStore, device: torch.device, rows: Any = None) -> None:
    rows = range(len(LENGTHS)) if rows is None else rows
    with writing(store, device) as add:
        for row in rows:
            add([row], [LENGTHS[row]], states_of(row, device))


def shards(folder: Path) -> set[str]:
    """Names of the shards, which have a SHA-256 of the bytes of all tensors."""
    return {path.name for path in folder.glob("states-*.safetensors")}


@pytest.mark.smoke
@pytest.mark.parametrize("form", ["computed", "fp8"])
def test_shards_have_the_bytes_that_a_cpu_writes(form: str, tmp_path: Path) -> None:
    write(store_of(tmp_path / "cpu", form), CPU)
    with late_streams(), phase(LogKind.SYNCHRONISATION) as found:
        write(store_of(tmp_path / "cuda", form), CUDA)
    expected = shards(tmp_path / "cpu")
    assert len(expected) > 2 and shards(tmp_path / "cuda") == expected
    StateStore(tmp_path / "cuda").verify()
    waits = [call.name for call in found.of(LogKind.SYNCHRONISATION) if "writer" in str(call)]
    assert waits == ["cudaEventSynchronize"] * len(LENGTHS), "once a row, in the thread that writes"


def test_a_row_waits_for_a_buffer_whose_row_is_being_written(tmp_path: Path) -> None:
    """While the first row is being written, as many others as there are buffers may be computed."""
    store = store_of(tmp_path, "computed")
    may_write = threading.Event()
    add_encoded = store.add_encoded

    def wait_and_add(*args: Any) -> None:
        assert may_write.wait(20)
        add_encoded(*args)

    store.add_encoded = wait_and_add  # type: ignore[method-assign]
    given: list[int] = []

    def give() -> None:
        with writing(store, CUDA) as add:
            for row, length in enumerate(LENGTHS):
                add([row], [length], states_of(row, CUDA))
                given.append(row)

    with late_streams():
        thread = threading.Thread(target=give)
        thread.start()
        thread.join(1)
        assert len(given) == 1 + NUM_BUFFERS
        may_write.set()
        thread.join(20)
    assert given == list(range(len(LENGTHS)))
    written = StateStore(tmp_path)
    for row in given:
        expected = states_of(row, CPU)
        found = written.load([row], CPU)
        assert found is not None and all(found[name].equal(expected[name]) for name in expected)


def test_states_that_are_not_finite_are_an_error_of_the_thread_that_computes(tmp_path: Path) -> None:
    store = store_of(tmp_path, "fp8")

    def bad(row: int) -> dict[str, torch.Tensor]:
        states = states_of(row, CUDA)
        if row == 3:
            states["hidden"][-1, -1] = torch.inf
        return states

    given = []
    with (
        late_streams(),
        pytest.raises(UserError, match=r"states \(hidden\) are not finite: it overflowed in bfloat16"),
        writing(store, CUDA) as add,
    ):
        for row, length in enumerate(LENGTHS):
            add([row], [length], bad(row))
            given.append(row)
    assert given[-1] <= 3 + NUM_BUFFERS
    assert 3 not in StateStore(tmp_path, store.manifest).rows()


def test_an_error_of_the_last_row_is_raised_at_the_end(tmp_path: Path) -> None:
    store = store_of(tmp_path / "file", "computed")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        write(store, CUDA, range(2))


def test_what_is_written_before_an_interruption_stays(tmp_path: Path) -> None:
    """The rows of whole shards are there, and the others are captured by the next run."""
    store = store_of(tmp_path / "cuda", "computed")
    with pytest.raises(KeyboardInterrupt), writing(store, CUDA) as add:
        for row in range(5):
            add([row], [LENGTHS[row]], states_of(row, CUDA))
        raise KeyboardInterrupt
    assert threading.active_count() == 1 or all(t.name != "states" for t in threading.enumerate())
    again = store_of(tmp_path / "cuda", "computed")
    missing = again.missing()
    assert 0 < len(missing) < len(LENGTHS)
    write(again, CUDA, missing)
    write(store_of(tmp_path / "cpu", "computed"), CPU)
    ours, theirs = StateStore(tmp_path / "cuda"), StateStore(tmp_path / "cpu")
    for row in range(len(LENGTHS)):
        a, b = ours.read([row]), theirs.read([row])
        assert a is not None and b is not None and all(a[name].equal(b[name]) for name in a)


def test_rows_are_read_into_pinned_memory_by_two_threads(tmp_path: Path) -> None:
    write(store_of(tmp_path, "fp8"), CPU)
    store = StateStore(tmp_path)
    order = [[3], [1, 6], [0], [5, 2, 4]]
    with closing(Prefetcher(store, order, pin=True)) as ahead:
        for rows in order:
            pinned = ahead.take(rows)
            expected = store.read(rows)
            assert pinned is not None and expected is not None and pinned.keys() == expected.keys()
            for name, tensor in pinned.items():
                assert tensor.is_pinned() and tensor.dtype == expected[name].dtype
                assert tensor.view(torch.uint8).equal(expected[name].view(torch.uint8))
            on_device = store.decode(pinned, CUDA)
            on_host = store.decode(expected, CPU)
            assert all(on_device[name].cpu().equal(on_host[name]) for name in on_host)
