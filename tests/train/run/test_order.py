"""Rows of a mixture: shares, phases, repetitions; and its account."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_kit.config.train import DataConfig, SourceConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.run.order import DataOrder, DataPart, parts_of

STEPS, SIZE = 250, 4


def order_of(*parts: DataPart, seed: int = 1) -> DataOrder:
    return DataOrder(parts, SIZE, seed, STEPS)


def taken(order: DataOrder, steps: range = range(STEPS)) -> np.ndarray:
    """Part of every row that is taken, ``[steps * SIZE]``."""
    borders = [part.first + part.num_rows for part in order.parts]
    rows = [row for step in steps for row in order.rows_of_step(step)]
    return np.searchsorted(borders, rows, side="right")


def test_any_stretch_has_the_shares_of_the_weights() -> None:
    order = order_of(DataPart(0, 30, weight=1.0), DataPart(30, 7, weight=3.0), DataPart(37, 400, weight=6.0))
    for first in (0, 100, 200):
        counts = np.bincount(taken(order, range(first, first + 25)), minlength=3)
        assert np.abs(counts - [10, 30, 60]).max() <= 3
    assert order.num_drawn() == np.bincount(taken(order)).tolist()


def test_every_part_goes_through_all_its_rows_before_it_repeats_one() -> None:
    order = order_of(DataPart(0, 30), DataPart(30, 13, weight=2.0))
    rows = np.array([row for step in range(STEPS) for row in order.rows_of_step(step)])
    for first, count in ((0, 30), (30, 13)):
        mine = rows[(rows >= first) & (rows < first + count)]
        passes = [mine[i : i + count].tolist() for i in range(0, len(mine) - count, count)]
        assert len(passes) > 5 and all(sorted(one) == list(range(first, first + count)) for one in passes)
        assert passes[0] != passes[1]


def test_a_phase_bounds_when_a_part_is_drawn() -> None:
    order = order_of(
        DataPart(0, 50, phase=(0.0, 0.6)),
        DataPart(50, 50, phase=(0.4, 1.0)),
        DataPart(100, 9, phase=(0.5, 0.7)),
    )
    found = taken(order)
    at = [np.flatnonzero(found == part) / len(found) for part in range(3)]
    for (start, end), places in zip(((0.0, 0.6), (0.4, 1.0), (0.5, 0.7)), at, strict=True):
        assert start <= places.min() < start + 0.01 and end - 0.01 < places.max() < end
    assert set(found[:400]) == {0} and set(found[700:]) == {1}


def test_rows_are_drawn_no_more_often_than_they_may_and_others_take_their_share() -> None:
    order = order_of(
        DataPart(0, 10, weight=9.0, max_rows=25), DataPart(10, 20), DataPart(30, 20, max_rows=40)
    )
    counts = np.bincount(taken(order))
    assert counts.tolist() == [25, 1000 - 65, 40]
    assert order.num_drawn() == counts.tolist()
    firsts = np.flatnonzero(taken(order) == 0)
    assert firsts.max() < 40, "its share stays large until it is used up"


def test_a_schedule_that_asks_for_more_than_there_is_is_refused() -> None:
    parts = [
        DataPart(0, 10, max_rows=20, name="a"),
        DataPart(10, 30, phase=(0.0, 0.5), max_rows=30, name="b"),
    ]
    with pytest.raises(UserError, match=r"After step 12 of 250 .*: a, b gave all") as error:
        order_of(*parts)
    assert "max_repeats" in error.value.remedy


def test_an_order_is_a_function_of_seed_and_step_and_processes_share_it() -> None:
    parts = (DataPart(0, 30, weight=2.0, phase=(0.0, 0.8)), DataPart(30, 13, max_rows=700))
    order, again = order_of(*parts), order_of(*parts)
    last = again.rows_of_step(200)
    assert [order.rows_of_step(step) for step in range(201)][-1] == last
    assert order_of(*parts, seed=2).rows_of_step(200) != last
    shares = [order.share_of(200, process, 2) for process in range(2)]
    assert [row for share in shares for row in share] == last


def test_parts_of_a_mixture_are_drawn_by_tokens_and_as_often_as_their_rows_may_be() -> None:
    """A source of short rows is drawn more often, so that its share of the tokens is its weight."""
    # Sources, and the rows that were packed of them.
    sources = (
        SourceConfig(source="a", weight=3.0, phase=(0.0, 0.5), max_repeats=1.5),
        SourceConfig(source="b", phase=(0.25, 1.0)),
    )
    held = [
        SimpleNamespace(first=0, num_rows=7, num_tokens=70, name="short"),
        SimpleNamespace(first=7, num_rows=20, num_tokens=2000, name="long"),
    ]
    data: Any = SimpleNamespace(parts=held)
    assert parts_of(DataConfig(mix=sources), data) == [
        DataPart(0, 7, 0.3, (0.0, 0.5), 10, "short"),
        DataPart(7, 20, 0.01, (0.25, 1.0), None, "long"),
    ]
    data = SimpleNamespace(parts=held[:1])
    with pytest.raises(UserError, match="data.mix has 2 sources, and the rows were packed of 1"):
        parts_of(DataConfig(mix=sources), data)


def test_a_step_that_takes_the_last_row_of_any_part_ends_a_pass() -> None:
    order = order_of(DataPart(0, 30), DataPart(30, 13, weight=2.0))
    found = taken(order)
    counts = [0, 0]
    ends = []
    for place, part in enumerate(found):
        counts[part] += 1
        if counts[part] % order.parts[part].num_rows == 0:
            ends.append(place // SIZE)
    assert [step for step in range(STEPS) if order.ends_pass(step)] == sorted(set(ends)) and len(ends) > 50


def test_one_part_alone_is_one_permutation_a_pass() -> None:
    order = DataOrder([DataPart(0, 11)], 1, 5, 44)
    seeds = np.random.SeedSequence([5, 2])
    expected = np.random.Generator(np.random.PCG64(seeds)).permutation(11).tolist()
    assert [order.rows_of_step(step)[0] for step in range(22, 33)] == expected
    assert [step for step in range(44) if order.ends_pass(step)] == [10, 21, 32, 43]
