"""Processes of training: what the others hear of one that ends."""

import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from eagle_kit.kernels.heartbeat import LEFT, launched_store
from eagle_kit.train.parallel.processes import watching


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
