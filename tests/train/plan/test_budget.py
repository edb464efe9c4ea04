"""The plan of a budget: time adds up, phases see what rates allow, the curve goes through its points."""

import pytest

from eagle_kit.train.plan import budget
from eagle_kit.train.plan.budget import Phase, Rates, expected_accept_lengths, learning_rate, plan_budget


@pytest.mark.parametrize("budget_s", [1800.0, 12 * 3600.0])
def test_a_plan_spends_the_whole_budget(budget_s):
    rates = Rates(replies=300.0, training=500.0)
    plan = plan_budget(budget_s, 120.0, rates)
    assert sum(plan.seconds) + 120.0 == pytest.approx(budget_s)
    assert plan.raw.tokens / rates.training == pytest.approx(plan.seconds[0], rel=0.02)
    assert plan.reply_tokens / rates.replies == pytest.approx(plan.seconds[1], rel=0.01)
    assert plan.own.tokens / rates.training == pytest.approx(plan.seconds[2], rel=0.02)


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
