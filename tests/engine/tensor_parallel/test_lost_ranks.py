"""Groups of ranks of which one is lost: what is raised, and that it is left in bounded time."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import RankLost
from eagle_kit.distributed import collectives
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.tensor_parallel.ranks import RankGroup, WorkerArgs, WorkerProcesses


@pytest.fixture
def ranks():
    """A rank without others."""
    ranks = Ranks.__new__(Ranks)
    ranks.lost = None
    return ranks


def test_a_lost_group_is_left_in_bounded_time(monkeypatch):
    """One that is whole is left as it takes."""
    left = []
    monkeypatch.setattr(collectives, "CLOSE_S", 0.1)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: time.sleep(0.5) or left.append(True))
    for is_lost in (False, True):
        ranks = Ranks.__new__(Ranks)
        ranks.lost = "Rank 1 has ended." if is_lost else None
        ranks.close()
        assert bool(left) != is_lost and ranks.lost
        left.clear()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), torch.AcceleratorError("lost"), ValueError()])
def test_an_error_of_the_own_device_is_the_cause_where_another_rank_is_lost(ranks, error):
    """As of a graph that reads the memory of a rank that is gone."""
    ranks.lost = "Rank 1 has ended."
    with pytest.raises(RankLost, match=ranks.lost) as raised, RankGroup(ranks).keep_in_step():
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("ended", ["Rank 1 was ended by SIGKILL.", None])
def test_an_error_of_the_own_device_may_be_known_before_the_end_of_a_rank(ranks, ended):
    """Where none ends within a time, the error is this rank's own, and the others are ended."""
    killed, error = [], torch.AcceleratorError("lost")
    workers = SimpleNamespace(exit_message=lambda timeout_s: ended, kill=lambda: killed.append(True))
    with pytest.raises(RuntimeError) as raised, RankGroup(ranks, workers).keep_in_step():
        raise error
    if ended is None:
        assert raised.value is error and killed and "interrupted (AcceleratorError)" in ranks.lost
    else:
        assert isinstance(raised.value, RankLost) and raised.value.__cause__ is error and not killed
        assert str(raised.value) == ranks.lost == ended


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_process_that_ends_as_it_is_told_is_not_lost(ranks, monkeypatch, tmp_path, is_closed):
    """It may have ended before the first rank has left the group."""
    program = tmp_path / "rank"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    workers = WorkerProcesses(WorkerArgs(0, tmp_path, tmp_path, None, EngineConfig(tensor_parallel=2)))

    def broadcast(message):
        os.kill(workers.pids[0], signal.SIGTERM)
        workers.exit_message(0.5)  # which its watcher has seen then

    ranks.rank = 0
    ranks.broadcast = broadcast
    if is_closed:
        RankGroup(ranks, workers).close("leave")
        assert workers.exit_message() is None
    else:
        broadcast("leave")
        assert workers.exit_message().endswith("was ended by SIGTERM.")
