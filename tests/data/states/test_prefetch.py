"""Reading ahead: the order asked for, a bound on what waits, errors in the thread that trains."""

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.data.states.prefetch import Prefetcher
from eagle_kit.data.states.store import StateStore

HERE = torch.device("cpu")


class Slow(StateStore):
    """Takes ``delay`` seconds to read, and counts."""

    delay = 0.0
    num_read = 0

    def read(self, rows):
        time.sleep(self.delay)
        self.num_read += 1
        return super().read(rows)


@pytest.fixture
def store(tmp_path: Path) -> Slow:
    about = {
        "version": 1,
        "precision": "float32",
        "format": "computed",
        "hidden_size": 2,
        "data": {"rows": 8},
    }
    store = Slow(tmp_path / "states", about, shard_bytes=1)
    for row in range(8):
        store.add([row], [1], {"hidden": torch.full((1, 2), float(row)), "argmax": torch.tensor([row])})
    return store


def test_rows_come_in_the_order_and_rows_that_are_not_there_as_none(store: Slow) -> None:
    order = [[3, 1], [7], [9], [0, 5]]
    with closing(Prefetcher(store, order)) as ahead:
        found = [ahead.take(rows) for rows in order]
    assert found[2] is None
    assert [part["hidden"][:, 0].tolist() for part in found if part is not None] == [[3, 1], [7], [0, 5]]


def test_no_more_waits_than_the_bound(store: Slow) -> None:
    with closing(Prefetcher(store, ([i % 8] for i in range(10**9)), ahead=3)) as ahead:
        time.sleep(0.5)
        assert store.num_read == 4, "three wait and one is in the thread's hands"
        ahead.take([0])
        time.sleep(0.3)
        assert store.num_read == 5


def test_reading_goes_on_while_the_step_is_computed(store: Slow) -> None:
    store.delay = 0.1
    waited = []
    for step in (0.0, 0.3):
        with closing(Prefetcher(store, [[i] for i in range(4)])) as ahead:
            waited.append(0.0)
            for row in range(4):
                time.sleep(step)
                started = time.perf_counter()
                ahead.take([row])
                waited[-1] += time.perf_counter() - started
    assert 0.3 < waited[0] < 2.0 and waited[1] < waited[0] / 2


def test_an_error_of_the_thread_is_raised_where_rows_are_asked_for(store: Slow) -> None:
    for path in store.folder.glob("states-0000005-*"):
        path.write_bytes(b"")
    with closing(Prefetcher(store, [[4], [5], [6]])) as ahead:
        ahead.take([4])
        with pytest.raises(UserError, match="states-0000005"):
            ahead.take([5])


def test_closing_ends_the_thread_at_any_time(store: Slow) -> None:
    for taken in (0, 1, 3):
        ahead = Prefetcher(store, ([i % 8] for i in range(10**9)))
        for row in range(taken):
            ahead.take([row])
        ahead.close()
        ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("states")]
