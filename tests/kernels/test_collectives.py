"""Collectives that fail: what is said of it, and what is kept of the error."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed import distributed_c10d

from eagle_kit.core.errors import RankLost
from eagle_kit.kernels import collectives
from eagle_kit.kernels.collectives import Ranks


@pytest.fixture
def ranks():
    """A rank whose collectives are given by tests."""
    ranks = Ranks.__new__(Ranks)
    ranks.volume, ranks.lost, ranks.timeout_s = collectives.Counter(), None, 7.0
    return ranks


def failing(error):
    def collective():
        raise error

    return collective


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), torch.AcceleratorError("lost")])
def test_an_error_of_the_own_device_is_no_other_ranks_end(ranks, error):
    with pytest.raises(type(error)) as raised:
        ranks._run("sum", torch.zeros(1), failing(error))
    assert raised.value is error and ranks.lost is None
    ranks._run("sum", torch.zeros(1), lambda: None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Connection closed by peer", "A rank has ended."),
        ("Timed out waiting 7000ms for recv", "A rank has not answered for 7 seconds."),
    ],
)
def test_an_error_of_the_connection_is_kept_as_the_cause(ranks, text, sentence):
    error = RuntimeError(text)
    with pytest.raises(RankLost) as raised:
        ranks._run("sum", torch.zeros(1), failing(error))
    assert raised.value.__cause__ is error and str(raised.value) == ranks.lost == sentence
    with pytest.raises(RankLost, match=sentence):
        ranks._run("sum", torch.zeros(1), lambda: None)


@pytest.mark.parametrize(("spin_s", "num_sleeps"), [(60, 0), (0, 3)])
def test_short_work_of_the_device_is_waited_for_without_sleep(ranks, monkeypatch, spin_s, num_sleeps):
    sleeps, answers = [], iter([False, False, False, True])
    monkeypatch.setattr(collectives, "SPIN_S", spin_s)
    monkeypatch.setattr(collectives, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleeps.append))
    ranks.wait_for(SimpleNamespace(query=lambda: next(answers)))
    assert sleeps == [collectives.POLL_S] * num_sleeps and next(answers, None) is None


def load_slowly(ranks, raised):
    """The first rank waits one second, the other one until it has."""
    if not ranks.is_first:
        last = time.monotonic() + 30
        while not raised.exists():
            assert time.monotonic() < last
            time.sleep(0.02)
        return None
    collectives.START_TIMEOUT = timedelta(seconds=1)
    distributed_c10d._set_pg_timeout(collectives.START_TIMEOUT, ranks._slow)
    try:
        with pytest.raises(RankLost) as error:
            ranks.all(None)
    finally:
        raised.touch()
    return str(error.value)


def test_the_time_that_is_named_is_that_of_the_collective(tmp_path):
    """Loading may take longer than a step, 20 seconds here."""
    first, _ = run_ranks(2, load_slowly, tmp_path / "raised")
    assert first == "A rank has not answered for 1 second."
