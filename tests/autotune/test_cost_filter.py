"""Costs learnt from the times of cycles."""

import math

import numpy as np
import pytest

from eagle_kit.autotune.cost_filter import (
    OF_KIND,
    OF_PACKING,
    PLAIN,
    QUICK_ERROR,
    TABLE_ERROR,
    CostFilter,
    Kind,
)

ONE, TWO, THREE = Kind(1), Kind(2), Kind(3)


def run(cost_filter, errors, cycles, count=8, seed=0, noise=0.02):
    """Let kinds of cycles take turns, each of which takes ``exp(errors[kind])`` of its time."""
    rng, cycle = np.random.default_rng(seed), 0
    while cycle < cycles:
        for kind, error in errors.items():
            for _ in range(count):
                cost_filter.observe(kind, cycle, error + noise * rng.standard_normal())
                cycle += 1
    return cycle


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_kind_that_costs_more_than_the_table_says_is_found(seed, count):
    cost_filter, errors = CostFilter(), {PLAIN: 0.0, ONE: 0.2, TWO: -0.1, Kind(1, is_packed=True): 0.1}
    cycle = run(cost_filter, errors, 400, count, seed=seed)
    for kind, error in errors.items():
        assert cost_filter.drift(kind) == pytest.approx(error, abs=0.04)
        assert cost_filter.variance(kind, cycle) < (TABLE_ERROR / 3) ** 2
    assert cost_filter.drift(PLAIN) == cost_filter.variance(PLAIN, cycle) == 0.0


def test_a_machine_that_is_slower_for_all_shapes_changes_no_cost():
    cost_filter = CostFilter()
    run(cost_filter, {PLAIN: 0.5, ONE: 0.5}, 200)
    assert cost_filter.drift(ONE) == pytest.approx(0.0, abs=0.03)


def take_turns(cost_filter, errors, cycle=0, times=1, count=6):
    """Cycles of the kinds in turn: ``(kind, error)``."""
    for _ in range(times):
        for kind, error in errors:
            for _ in range(count):
                cost_filter.observe(kind, cycle, error)
                cycle += 1
    return cycle


def test_the_same_estimates_as_of_all_times_at_once():
    """Least squares over level, drafting, packing and kinds, with a level that does not wander."""
    cost_filter, noise, rng = CostFilter(), 0.05**2, np.random.default_rng(3)
    kinds = [PLAIN, ONE, TWO, Kind(2, is_packed=True)]
    rows = np.array([[1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1]])
    prior = np.array([4.0, TABLE_ERROR**2 - OF_KIND**2, OF_PACKING**2, *[OF_KIND**2] * 3])
    order = [0, 1, 2, 3, 1, 0, 3, 2, 1]
    times = [0.1 * rng.standard_normal() for _ in order]
    for kind in kinds[1:]:
        cost_filter._seen[kind] = (0, *cost_filter._parts(kind), cost_filter._add(OF_KIND**2))
    for place, error in zip(order, times, strict=True):
        seen = cost_filter._seen[kinds[place]]
        cost_filter._learn(seen, error - sum(cost_filter._state[i] for i in seen), noise, {0})
    used = rows[order]
    covariance = np.linalg.inv(used.T @ used / noise + np.diag(1 / prior))
    assert cost_filter._state == pytest.approx(covariance @ used.T @ times / noise, abs=1e-9)
    assert np.array(cost_filter._covariance) == pytest.approx(covariance, abs=1e-9)


def test_an_error_of_plain_decodings_own_time_is_one_of_all_shapes():
    cost_filter = CostFilter(QUICK_ERROR)
    take_turns(cost_filter, [(ONE, 0.0), (PLAIN, -0.8)])
    assert cost_filter.has_compared
    assert cost_filter.drift(ONE) == pytest.approx(0.8, abs=0.1)
    assert 0.5 < cost_filter.drift(TWO) < 0.8


def test_packed_windows_that_are_dear_say_little_of_whole_ones():
    cost_filter = CostFilter()
    take_turns(cost_filter, [(PLAIN, 0.0), (Kind(1, is_packed=True), 0.35)], times=3)
    assert cost_filter.drift(Kind(1, is_packed=True)) == pytest.approx(0.35, abs=0.05)
    assert cost_filter.drift(Kind(2, is_packed=True)) > 0.2
    assert cost_filter.drift(ONE) < 0.1


def test_one_time_that_is_far_off_is_not_believed_and_several_are():
    cost_filter = CostFilter()
    cycle = take_turns(cost_filter, [(PLAIN, 0.0), (ONE, 0.0)], times=3)
    for kind, error in ((PLAIN, 0.0), (ONE, 1.0)):
        cost_filter.observe(kind, cycle, error)
        cycle += 1
    assert cost_filter.drift(ONE) == pytest.approx(0.0, abs=0.02)
    take_turns(cost_filter, [(PLAIN, 0.0), (ONE, 1.0)], cycle, times=4)
    assert cost_filter.drift(ONE) == pytest.approx(1.0, abs=0.1)


def test_a_machine_that_becomes_faster_leaves_doubt():
    cost_filter = CostFilter()
    cycle = take_turns(cost_filter, [(PLAIN, 0.0), (ONE, 0.0)], times=3)
    before = cost_filter.variance(ONE, cycle)
    take_turns(cost_filter, [(ONE, -0.3)], cycle, times=3)
    assert cost_filter.drift(ONE) == pytest.approx(0.0, abs=0.1)
    assert cost_filter.variance(ONE, cycle) > max(4 * before, 0.1**2)


def test_what_was_not_compared_for_long_is_doubted_again_and_goes_back_to_the_table():
    cost_filter = CostFilter()
    cycle = run(cost_filter, {PLAIN: 0.0, ONE: 0.1}, 300)
    doubts = [cost_filter.variance(ONE, cycle + wait) for wait in (0, 1000, 10**6)]
    assert 0 < doubts[0] < doubts[1] < doubts[2] <= TABLE_ERROR**2 * 1.001
    take_turns(cost_filter, [(PLAIN, 0.0)], cycle + 10**5)
    assert abs(cost_filter.drift(ONE)) < 0.01


def test_the_noise_of_cycles_is_measured():
    cost_filter = CostFilter()
    run(cost_filter, {PLAIN: 0.0, ONE: 0.0}, 2000, noise=0.04)
    assert math.sqrt(cost_filter.noise) == pytest.approx(0.04, rel=0.3)


def test_a_kind_is_doubted_beside_the_one_that_is_used():
    cost_filter = CostFilter()
    take_turns(cost_filter, [(PLAIN, 0.0), (TWO, 0.0), (ONE, 0.0)], times=4)
    cost_filter.observe(THREE, 72, 0.0)
    cost_filter.observe(ONE, 73, 0.0)
    new, packed = Kind(4), Kind(4, is_packed=True)
    found = [cost_filter.standard_error(kind, ONE) for kind in (ONE, TWO, THREE, new, packed)]
    assert found[0] == 0.0 and found == sorted(found) and len(set(found)) == 5
    assert found[2] == pytest.approx(cost_filter.standard_error(ONE, THREE))
    take_turns(cost_filter, [(ONE, 0.0), (ONE, 5.0), (ONE, -5.0)], 74, times=20)  # limits hold
    assert (
        cost_filter.standard_error(THREE, ONE) < 0.2
        and cost_filter.variance(THREE, 500) <= TABLE_ERROR**2 * 1.001
    )


def test_a_comparison_is_remembered_by_what_it_was_made_of():
    """After hours in one shape plain decoding is tried: a drift that was known is forgotten by then, but what
    is measured now is believed."""
    cost_filter = CostFilter()
    cycle = take_turns(cost_filter, [(PLAIN, 0.0), (ONE, 0.3)], times=4)
    cycle = take_turns(cost_filter, [(ONE, 0.3)], cycle, count=20_000)
    take_turns(cost_filter, [(PLAIN, 0.0)], cycle, count=4)
    assert cost_filter.drift(ONE) == pytest.approx(0.3, abs=0.1)


def test_what_was_learnt_of_kinds_is_no_change_of_the_machine():
    cost_filter = CostFilter(QUICK_ERROR)
    cycle = take_turns(cost_filter, [(ONE, 0.0), (PLAIN, -0.8)])
    assert cost_filter.variance(ONE, cycle) < 0.1**2
