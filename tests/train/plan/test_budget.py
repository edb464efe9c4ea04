"""The plan of a budget: time adds up, phases see what rates allow, the curve goes through its points."""

import math

import pytest

from eagle_kit.train.plan import budget
from eagle_kit.train.plan.budget import Phase, Rates, expected_accept_lengths, learning_rate, plan_budget

RATES = Rates(replies=300.0, training=500.0, kept=1100.0)


@pytest.mark.parametrize("budget_s", [1800.0, 12 * 3600.0])
def test_a_plan_spends_the_whole_budget(budget_s):
    plan = plan_budget(budget_s, 120.0, RATES, math.inf)
    assert sum(plan.seconds) + 120.0 == pytest.approx(budget_s)
    once = plan.raw.tokens / plan.passes
    seconds = once / RATES.training + (plan.passes - 1) * once / RATES.kept
    assert plan.passes == 3 and seconds == pytest.approx(plan.seconds[0], rel=0.02)
    assert plan.reply_tokens / RATES.replies == pytest.approx(plan.seconds[1], rel=0.01)
    distinct = 1.3 * plan.reply_tokens
    seconds = distinct / RATES.training + (plan.own.tokens - distinct) / RATES.kept
    assert plan.own.tokens > distinct and seconds == pytest.approx(plan.seconds[2], rel=0.02)


def test_without_room_for_states_rows_are_seen_once():
    plan = plan_budget(12 * 3600.0, 120.0, RATES, 1e5)
    assert plan.passes == 1 and plan.raw.tokens / RATES.training == pytest.approx(plan.seconds[0], rel=0.02)
    assert plan.own.tokens / RATES.training == pytest.approx(plan.seconds[2], rel=0.02)
    roomy = plan_budget(12 * 3600.0, 120.0, RATES, math.inf)
    assert roomy.tokens > 1.3 * plan.tokens


def test_more_replies_than_can_be_gone_through_are_seen_in_part():
    assert RATES.seen(100.0, 1e9) == 100.0 * RATES.training


def test_more_time_is_more_steps_and_then_more_rows_in_a_step():
    sizes = [Phase.of(tokens) for tokens in (1e4, 1e6, 1e7, 1e9)]
    assert [phase.rows_per_step for phase in sizes] == [2, 2, 3, budget.MOST_ROWS_PER_STEP]
    assert sizes[0].steps == budget.LEAST_STEPS
    assert sorted(phase.tokens for phase in sizes) == [phase.tokens for phase in sizes]


def test_the_expectation_goes_through_what_was_measured_and_grows():
    for tokens, chain, tree in budget.CURVE:
        assert expected_accept_lengths(tokens) == pytest.approx((chain, tree))
    found = [
        expected_accept_lengths(tokens)[1] for tokens in (0, 1000, 10**5, 10**6, 4 * 10**6, 10**7, 10**8)
    ]
    assert found == sorted(found) and found[0] == 1.0 and found[-1] < 3.5


def test_wider_targets_learn_at_a_lower_rate():
    assert learning_rate(576) == learning_rate(64) == 1.5e-3
    assert learning_rate(4096) == pytest.approx(2.1e-4)
