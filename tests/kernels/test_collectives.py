"""Collectives that fail: what is said of it, and what is kept of the error."""

import time

import pytest
import torch
from rank_processes import run_ranks

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


def load_slowly(ranks):
    if not ranks.is_first:
        time.sleep(2)
        return None
    with pytest.raises(RankLost) as raised:
        ranks.all(None)
    return str(raised.value)


def test_the_time_that_is_named_is_that_of_the_collective(monkeypatch):
    """Loading may take longer than a step, 20 seconds here."""
    monkeypatch.setattr(collectives, "START_TIMEOUT", collectives.timedelta(seconds=1))
    first, _ = run_ranks(2, load_slowly)
    assert first == "A rank has not answered for 1 seconds."
