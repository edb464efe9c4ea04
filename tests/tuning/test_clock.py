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


def test_an_error_of_plain_decodings_own_time_is_one_of_all_shapes():
    clock = Clock(3, QUICK_ERROR)
    assert not clock.is_compared
    for cycle, number in enumerate([1] * 8 + [0] * 4):
        clock.observe(number, cycle, 0.0 if number else -0.9)
    assert clock.is_compared
    assert clock.drift == pytest.approx([0.0, 0.9, 0.65], abs=0.1)
    before = clock.drift[2]
    for cycle, number in enumerate([1] * 6 + [0] * 6, start=12):
        clock.observe(number, cycle, -0.3 if number else -0.9)
    assert clock.drift[2] == pytest.approx(before, abs=0.15)  # by then it is known


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
