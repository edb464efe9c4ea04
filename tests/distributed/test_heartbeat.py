"""Heartbeat of processes: one that is stopped, as a machine without network, is missed by the others."""

import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from queue import Queue

import pytest
import torch.distributed as dist

from eagle_kit.distributed.heartbeat import Heartbeat

TIMEOUT_S = 4.0
"""Much more than a machine that is busy with other tests keeps a process waiting."""
_processes = multiprocessing.get_context("fork")


def connect(port: int, timeout: timedelta) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False)


def live(rank: int, size: int, port: int, ends_after: float, pipe, *, fails: bool = False) -> None:
    """Send what is missed, and end, or leave before."""
    heartbeat = Heartbeat(partial(connect, port), rank, size, TIMEOUT_S, pipe.send)
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
            task = partial(live, rank, len(ends), store.port, seconds, sender, fails=rank == failing)
            children.append(_processes.Process(target=task))
            children[-1].start()
            pipes.append(receiver)
        return [child.pid for child in children], pipes

    yield start
    for child in children:
        child.kill()
        child.join()


def assert_missed(pipe, rank: int, size: int) -> None:
    assert pipe.poll(10 * TIMEOUT_S)
    assert f"Process {rank} of {size} " in pipe.recv()


def test_a_stopped_process_is_missed_and_neither_one_that_leaves_nor_one_that_lives(start):
    pids, pipes = start(60.0, 0.5, 60.0, 60.0)
    assert pipes[1].poll(10 * TIMEOUT_S)
    assert pipes[1].recv() == "ended"
    time.sleep(1.5 * TIMEOUT_S)
    assert not any(pipes[rank].poll() for rank in (0, 2, 3))
    os.kill(pids[3], signal.SIGSTOP)
    assert_missed(pipes[0], 3, 4)
    assert_missed(pipes[2], 3, 4)


def test_a_process_that_ends_with_an_error_is_missed(start):
    _, (first, failed, third) = start(60.0, 0.5, 60.0, failing=1)
    assert failed.poll(10 * TIMEOUT_S)
    assert failed.recv() == "ended"
    assert_missed(first, 1, 3)
    assert_missed(third, 1, 3)


def test_a_store_that_does_not_answer_is_missed():
    """As that of a machine which is gone; connections are refused here."""
    missed = Queue()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen, so that the port is nobody else's either
        port = nobody.getsockname()[1]
        with pytest.raises(RuntimeError):
            connect(port, timedelta(seconds=0.2))
        heartbeat = Heartbeat(partial(connect, port), 0, 3, TIMEOUT_S, missed.put)
        assert "store of the first machine" in missed.get(timeout=10 * TIMEOUT_S)
        heartbeat.close()
    assert missed.empty()
    assert not any(thread.is_alive() for thread in heartbeat._threads)
