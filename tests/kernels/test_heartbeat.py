"""Heartbeat of processes: one that is stopped, as a machine without network, is missed by the others."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from eagle_kit.kernels.heartbeat import Heartbeat

TIMEOUT_S, SIZE = 2.0, 3
_processes = multiprocessing.get_context("fork")


def connect(port: int, timeout: timedelta) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False)


def live(rank: int, port: int, ends_after: float, pipe, *, fails: bool = False) -> None:
    """Send what is missed, and end, or leave before."""
    heartbeat = Heartbeat(partial(connect, port), rank, SIZE, TIMEOUT_S, pipe.send)
    time.sleep(ends_after)
    (heartbeat.close if fails else heartbeat.leave)()
    pipe.send("ended")
    os._exit(0)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def start(store):
    children = []

    def start(*ends: float, failing: int | None = None):
        pipes = []
        for rank, seconds in enumerate(ends):
            receiver, sender = _processes.Pipe(duplex=False)
            task = partial(live, rank, store.port, seconds, sender, fails=rank == failing)
            children.append(_processes.Process(target=task))
            children[-1].start()
            pipes.append(receiver)
        return [child.pid for child in children], pipes

    yield start
    for child in children:
        child.kill()
        child.join()


def test_a_stopped_process_is_missed_by_the_others_and_not_before(start):
    pids, pipes = start(*[60.0] * SIZE)
    time.sleep(2 * TIMEOUT_S)
    assert not any(pipe.poll() for pipe in pipes)
    os.kill(pids[1], signal.SIGSTOP)
    for rank in (0, 2):
        assert pipes[rank].poll(10 * TIMEOUT_S)
        assert pipes[rank].recv() == f"Process 1 of {SIZE} has not been heard from for 2 seconds."


def test_a_process_that_leaves_is_not_missed(start):
    _, pipes = start(3 * TIMEOUT_S, 0.5, 3 * TIMEOUT_S)
    for pipe in pipes:
        assert pipe.poll(10 * TIMEOUT_S) and pipe.recv() == "ended"


def test_a_process_that_ends_with_an_error_is_missed(start):
    _, (first, failed, third) = start(60.0, 0.5, 60.0, failing=1)
    assert failed.poll(10 * TIMEOUT_S) and failed.recv() == "ended"
    for pipe in (first, third):
        assert pipe.poll(10 * TIMEOUT_S)
        assert pipe.recv() == f"Process 1 of {SIZE} has not been heard from for 2 seconds."


def test_a_store_that_does_not_answer_is_missed(start, store):
    """As that of a machine which is gone; connections are refused here."""
    port = store.port
    with pytest.raises(RuntimeError):
        connect(port + 1, timedelta(seconds=0.2))
    heard = []
    heartbeat = Heartbeat(partial(connect, port + 1), 0, SIZE, TIMEOUT_S, heard.append)
    time.sleep(2 * TIMEOUT_S)
    heartbeat.close()
    assert heard == ["The store of the first machine has not answered for 2 seconds."]
    assert not any(thread.is_alive() for thread in heartbeat._threads)
