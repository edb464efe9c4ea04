"""Reading ahead: the order asked for, a bound on what waits, errors in the thread that trains."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.prefetch import Prefetcher
from eagle_kit.data.hidden_states.store import StateStore

HERE = torch.device("cpu")


class Gated(StateStore):
    """Reads when ``may_read`` lets it, and says after each read by ``has_read``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_read = threading.Event()
        self.may_read.set()
        self.has_read = threading.Semaphore(0)

    def read(self, rows):
        assert self.may_read.wait(20)
        found = super().read(rows)
        self.has_read.release()
        return found

    def wait_for_reads(self, count: int) -> None:
        """Wait until ``count`` more rows were read."""
        for _ in range(count):
            assert self.has_read.acquire(timeout=20)


@pytest.fixture
def store(tmp_path: Path) -> Gated:
    about = {
        "version": 1,
        "target": {"name": "t", "revision": None, "weights": "w0"},
        "layer_ids": [],
        "layer_ids_are": "inputs of layers",
        "last_hidden_state": "after the final norm",
        "precision": "float32",
        "format": "computed",
        "hidden_size": 2,
        "data": {"source": "t", "max_length": 1, "supervised_tokens": 8, "rows": 8, "files": {}},
    }
    store = Gated(tmp_path / "states", about, shard_bytes=1)
    for row in range(8):
        store.add([row], [1], {"hidden": torch.full((1, 2), float(row)), "argmax": torch.tensor([row])})
    return store


def test_rows_come_in_the_order_and_rows_that_are_not_there_as_none(store: Gated) -> None:
    order = [[3, 1], [7], [9], [0, 5]]
    with closing(Prefetcher(store, order)) as ahead:
        found = [ahead.take(rows) for rows in order]
    assert found[2] is None
    assert [part["hidden"][:, 0].tolist() for part in found if part is not None] == [[3, 1], [7], [0, 5]]


def counted(order, taken):
    """``order``, noting in ``taken`` what was asked of it."""
    for rows in order:
        taken.append(rows)
        yield rows


def test_no_more_waits_than_the_bound(store: Gated) -> None:
    taken: list[list[int]] = []
    with closing(Prefetcher(store, counted(([i % 8] for i in range(10**9)), taken), ahead=3)) as ahead:
        store.wait_for_reads(4)
        assert len(taken) == 4, "three wait and one is in the thread's hands"
        ahead.take([0])
        store.wait_for_reads(1)
        assert len(taken) == 5
        assert not store.has_read.acquire(blocking=False)


def test_reading_goes_on_while_the_step_is_computed(store: Gated) -> None:
    with closing(Prefetcher(store, [[i] for i in range(4)], ahead=2)) as ahead:
        store.wait_for_reads(3)
        store.may_read.clear()
        ahead.take([0])  # does not wait for the read of row 3, which begins now
        store.may_read.set()
        store.wait_for_reads(1)


def test_an_error_of_the_thread_is_raised_where_rows_are_asked_for(store: Gated) -> None:
    for path in store.folder.glob("states-0000005-*"):
        path.write_bytes(b"")
    with closing(Prefetcher(store, [[4], [5], [6]])) as ahead:
        ahead.take([4])
        with pytest.raises(UserError, match="states-0000005"):
            ahead.take([5])


def test_closing_ends_the_thread_at_any_time(store: Gated) -> None:
    for taken in (0, 1, 3):
        ahead = Prefetcher(store, ([i % 8] for i in range(10**9)))
        for row in range(taken):
            ahead.take([row])
        ahead.close()
        ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("states")]
