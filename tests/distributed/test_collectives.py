"""Collectives that fail: what is said of it, and what is kept of the error."""

import pickle
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed import distributed_c10d

from eagle_kit.core.errors import RankLost
from eagle_kit.distributed import collectives
from eagle_kit.distributed.collectives import Ranks


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


def test_a_wait_for_the_device_ends_where_a_rank_is_lost_or_silent(ranks):
    ranks.timeout_s = 0.01
    answers = iter([False] * 100_000)
    with pytest.raises(RankLost, match=r"has not answered for 0\.01 seconds"):
        ranks.wait_for(SimpleNamespace(query=lambda: next(answers)))
    ranks.timeout_s = 60.0
    ranks.lost = None
    answers = iter([False, False])

    def query():
        ranks.lose("Rank 1 has ended.")
        ranks.lose("A rank has not answered for 60 seconds.")  # which follows from it
        return next(answers)

    with pytest.raises(RankLost, match="Rank 1 has ended"):
        ranks.wait_for(SimpleNamespace(query=query))


class Unportable(Exception):
    """An error that cannot be pickled, as those of some libraries."""

    def __reduce__(self):
        raise TypeError("holds a file")


def fail(error):
    raise error


def exchange(ranks):
    """Messages around the size of their buffer, tensors of different strides, work that fails on a rank."""
    # Messages.
    sizes = range(collectives.INLINE_BYTES - 60, collectives.INLINE_BYTES + 10)
    sent = [bytes([size % 251]) * size for size in (0, *sizes, 3000)]
    heard = [ranks.agree(message if ranks.is_first else None) for message in sent]
    assert heard == sent
    assert len(pickle.dumps(sent[1])) < collectives.INLINE_BYTES - 8 < len(pickle.dumps(sent[-2]))

    # Tensors.
    table = torch.arange(12.0).view(3, 4) + 100 * ranks.rank
    part = table.t() if ranks.is_first else table.t().contiguous()
    found = {"sum": ranks.sum(part), "stack": ranks.stack(part), "first": ranks.first(part)}
    found["join"] = ranks.join(table[:, : 1 + ranks.rank], 3)

    # Errors, each heard by all ranks.
    errors = []
    for failing_ranks, error in (
        ([1], ValueError("of one")),
        ([1], Unportable("of a library")),
        ([0], KeyError(3)),
    ):
        work = partial(fail, error) if ranks.rank in failing_ranks else int
        try:
            ranks.together(work)
        except Exception as raised:
            errors.append((type(raised).__name__, str(raised)))
    assert ranks.together(lambda: ranks.rank) == ranks.rank
    return found, errors, dict(ranks.volume)


def test_messages_tensors_and_errors_reach_the_others():
    (first, first_errors, volume), (second, second_errors, _) = run_ranks(2, exchange)
    table = torch.arange(12.0).view(3, 4)
    part = table.t()
    wanted = {"sum": 2 * part + 100, "stack": torch.stack((part, part + 100)), "first": part}
    wanted["join"] = torch.cat((table[:, :1], table[:, :2] + 100), 1)
    for found in (first, second):
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            assert torch.equal(found[name], each), name
    own = [("ValueError", "of one"), ("Unportable", "of a library"), ("KeyError", "3")]
    assert second_errors == own
    assert first_errors == [own[0], ("RuntimeError", "Unportable: of a library"), own[2]]
    assert volume == {"sum": 48, "stack": 48 + 24, "first": 48}


def load_slowly(ranks, raised):
    """The first rank waits one second, the other one until it has."""
    if not ranks.is_first:
        last = time.monotonic() + 30
        while not raised.exists():
            assert time.monotonic() < last
            time.sleep(0.02)
        return None
    ranks.start_timeout = timedelta(seconds=1)
    distributed_c10d._set_pg_timeout(ranks.start_timeout, ranks._slow)
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
