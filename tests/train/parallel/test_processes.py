"""Processes of training: what the others hear of one that ends."""

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from eagle_kit.config.train import DataConfig, TrainConfig
from eagle_kit.core.process import num_cores
from eagle_kit.distributed.heartbeat import LEFT, launched_store
from eagle_kit.train.parallel.processes import make_process_state, watching


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_process_that_has_done_its_work_says_that_it_leaves(monkeypatch, fails):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    config = SimpleNamespace(training=SimpleNamespace(peer_timeout_s=60.0))
    heard = launched_store(timedelta(seconds=20))
    with suppress(ZeroDivisionError), watching(config, SimpleNamespace(num_processes=2, process_index=1)):
        while not heard.check(["1"]):
            time.sleep(0.01)
        if fails:
            raise ZeroDivisionError
    assert (heard.get("1").decode() == LEFT) != fails


def test_processes_that_are_started_anew_do_not_hear_those_before(monkeypatch):
    """What a worker said before torchrun started all of them again is in the same store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    heard = []
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        mine = launched_store(timedelta(seconds=20))
        heard.append(mine.check(["1"]))
        mine.set("1", LEFT)
        assert mine.check(["1"])
    assert heard == [False, False]


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Put the number of threads, and accelerate's state, back."""
    before = torch.get_num_threads()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cpu_threads", "local_processes", "expected"),
    [
        (3, None, 3),
        (3, "2", 3),
        (None, "1", num_cores()),
        (None, "2", max(1, num_cores() // 2)),
        (None, "999", 1),
    ],
)
def test_threads_are_those_that_are_asked_for_or_a_share_of_the_cores(
    own_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    cpu_threads: int | None,
    local_processes: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if local_processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_processes)
    training = {"cpu_threads": cpu_threads, "precision": "float32"}
    torch.set_num_threads(7)  # what a launcher, or nobody, has set before
    make_process_state(
        TrainConfig(target="t", output_dir="o", data=DataConfig(source="a"), training=training)
    )
    assert torch.get_num_threads() == expected
