"""Pilots of `make-draft`: a tenth of the budget at most, and the least budget that makes sense."""

import pytest

from eagle_kit.train.plan.budget import LEAST_STEPS, ROW_TOKENS
from eagle_kit.train.plan.pilot import PILOTS, SHARE, ExpectedCosts, choose_pilot

COSTS = ExpectedCosts(loading=10.0, response_token=0.02, row_token=0.005, step_flops=1e12, flops_per_s=1e11)
TOKENS = 448


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0, 10.0, 100.0])
def test_a_pilot_takes_a_tenth_of_a_budget_at_most(factor: float, processes: int) -> None:
    budget = factor * COSTS.least_budget(TOKENS, processes)
    pilot = choose_pilot(budget, COSTS, TOKENS, processes)
    assert pilot is not None
    assert COSTS.seconds(pilot, TOKENS, processes) <= SHARE * budget * 1.000001


def test_more_time_is_measured_more_exactly() -> None:
    least = COSTS.least_budget(TOKENS, 1)
    chosen = [choose_pilot(factor * least, COSTS, TOKENS, 1) for factor in (1, 2, 4, 8, 16)]
    places = [PILOTS.index(pilot) for pilot in chosen if pilot is not None]
    assert len(places) == 5 and places == sorted(places, reverse=True)
    assert places[-1] == 0 and places[0] > 0


def test_a_budget_that_makes_no_sense_has_no_pilot() -> None:
    least = COSTS.least_budget(TOKENS, 1)
    assert choose_pilot(0.99 * least, COSTS, TOKENS, 1) is None

    # Of a target whose steps take minutes the training decides, not the pilot.
    slow = ExpectedCosts(10.0, 0.02, 150 / (2 * ROW_TOKENS), 1e12, 1e11)
    assert slow.least_budget(TOKENS, 1) > LEAST_STEPS * 150
    assert choose_pilot(600.0, slow, TOKENS, 1) is None
