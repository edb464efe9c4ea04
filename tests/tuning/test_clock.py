"""Costs learnt from the times of cycles."""

import math

import numpy as np
import pytest

from eagle_kit.tuning.clock import QUICK_ERROR, TABLE_ERROR, WANDER, Clock


def run(clock, errors, cycles, num_plain=8, num_drafting=8, seed=0, noise=0.02):
    """Let plain decoding and the shapes take turns; shape ``i`` takes ``exp(errors[i])`` of its time."""
    rng, cycle = np.random.default_rng(seed), 0
    while cycle < cycles:
        for number, count in ((0, num_plain), *((i, num_drafting) for i in range(1, len(errors)))):
            for _ in range(count):
                clock.observe(number, cycle, errors[number] + noise * rng.standard_normal())
                cycle += 1
    return cycle


@pytest.mark.parametrize("seed", range(3))
def test_a_shape_that_costs_more_than_the_table_says_is_found(seed):
    clock = Clock(3)
    cycle = run(clock, [0.0, 0.2, -0.1], 400, seed=seed)
    assert clock.drift == pytest.approx([0.0, 0.2, -0.1], abs=0.03)
    assert all(clock.doubt(number, cycle) < (TABLE_ERROR / 3) ** 2 for number in (1, 2))


def test_a_machine_that_is_slower_for_all_shapes_changes_no_cost():
    clock = Clock(2)
    run(clock, [0.5, 0.5], 200)
    assert clock.drift == pytest.approx([0.0, 0.0], abs=0.03)


def take_turns(clock, errors, cycle=0, times=1, count=6):
    """Cycles of the named shapes in turn: ``(number, error)``."""
    for _ in range(times):
        for number, error in errors:
            for _ in range(count):
                clock.observe(number, cycle, error)
                cycle += 1
    return cycle


def test_an_error_of_plain_decodings_own_time_is_one_of_all_shapes():
    clock = Clock(3, QUICK_ERROR)
    take_turns(clock, [(1, 0.0), (0, -0.9)])
    assert clock.is_known.tolist() == [False, True, False]
    assert clock.drift == pytest.approx([0.0, 0.9, 0.65], abs=0.1)


def test_a_shape_that_is_known_tells_nothing_of_others():
    clock = Clock(4, QUICK_ERROR)
    cycle = take_turns(clock, [(1, 0.0), (0, 0.0)])
    known, unknown = clock.doubt(1, cycle), clock.doubt(2, cycle)
    assert known < 0.06**2 and 0.18**2 < unknown < 0.25**2
    cycle = take_turns(clock, [(1, 0.3), (0, 0.0)], cycle, times=3)
    assert clock.drift[2] == pytest.approx(0.0, abs=0.01)
    assert clock.doubt(2, cycle) == pytest.approx(unknown, rel=0.1)
    before = clock.drift[1]
    take_turns(clock, [(2, 0.5), (0, 0.0)], cycle)
    assert clock.drift[1] == before and clock.drift[2] == pytest.approx(0.5, abs=0.1)
    assert 0.1 < clock.drift[3] < 0.35  # two shapes disagree about the third


def test_a_shape_begins_with_what_is_known_of_another():
    clock = Clock(3, QUICK_ERROR)
    cycle = take_turns(clock, [(1, 0.4), (0, 0.0)])
    clock.inherit(2, 1)
    assert clock.drift[2] == clock.drift[1] and clock.is_known[2]
    assert clock.doubt(2, cycle) == clock.doubt(1, cycle)


def test_what_was_not_compared_for_long_is_doubted_again():
    clock = Clock(2)
    cycle = run(clock, [0.0, 0.1], 300)
    soon, late = (clock.doubt(1, cycle + wait) for wait in (0, 1000))
    assert 0 < soon < late <= TABLE_ERROR**2
    assert late - soon == pytest.approx(min(1000 * WANDER**2, TABLE_ERROR**2 - soon))


def test_the_noise_of_cycles_is_measured():
    clock = Clock(2)
    run(clock, [0.0, 0.0], 2000, noise=0.04)
    assert math.sqrt(clock.noise) == pytest.approx(0.04, rel=0.3)
