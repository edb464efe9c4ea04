"""The plan of a budget: time adds up, phases see what rates allow, the curve goes through its points."""

import math

import pytest

from eagle_kit.train.plan import budget
from eagle_kit.train.plan.budget import Phase, TokenRates, expected_accept_lengths, learning_rate, plan_budget

RATES = TokenRates(responses=300.0, training=500.0, kept=1100.0)


def seconds_of(plan, rates):
    """Time that a plan's training takes, counted phase by phase."""
    tokens, own = plan.training.phase.tokens, 1.3 * plan.response_tokens
    distinct = plan.training.raw_tokens + min(own, tokens - budget.RAW_SHARE * tokens)
    return distinct / rates.training + (tokens - distinct) / rates.kept


@pytest.mark.parametrize("budget_s", [1800.0, 12 * 3600.0])
def test_a_plan_spends_the_whole_budget(budget_s):
    plan = plan_budget(budget_s, 120.0, RATES, math.inf)
    assert plan.responses_s + plan.training_s + plan.reserved_s + 120.0 == pytest.approx(budget_s)
    assert plan.response_tokens / RATES.responses == pytest.approx(plan.responses_s, rel=0.01)
    assert plan.training.keeps and seconds_of(plan, RATES) == pytest.approx(plan.training_s, rel=0.02)
    assert budget.PASSES * plan.training.raw_tokens == pytest.approx(budget.RAW_SHARE * plan.tokens, rel=0.02)
    assert (1 - budget.RAW_SHARE) * plan.tokens > 1.3 * plan.response_tokens, (
        "responses are seen more than once"
    )


def test_without_room_for_states_rows_are_seen_once():
    plan = plan_budget(12 * 3600.0, 120.0, RATES, 1e5)
    assert not plan.training.keeps
    assert plan.tokens / RATES.training == pytest.approx(plan.training_s, rel=0.02)
    assert plan.training.raw_tokens == pytest.approx(budget.RAW_SHARE * plan.tokens, rel=0.02)
    roomy = plan_budget(12 * 3600.0, 120.0, RATES, math.inf)
    assert roomy.tokens > 1.3 * plan.tokens


def test_more_responses_than_can_be_gone_through_are_seen_in_part():
    rates = TokenRates(1e6, RATES.training, RATES.kept)
    plan = plan_budget(12 * 3600.0, 120.0, rates, math.inf)
    assert seconds_of(plan, rates) == pytest.approx(plan.training_s, rel=0.02)
    assert plan_budget(12 * 3600.0, 120.0, rates, 2 * plan.tokens) == plan, (
        "what is not reached needs no room"
    )


def test_the_share_of_raw_chats_is_that_of_their_phase():
    places = [(i + 0.5) / 1000 for i in range(1000)]
    raw = own = 0.0
    for place in places:
        drawn = [budget.RAW_PHASE[0] <= place < budget.RAW_PHASE[1], budget.OWN_PHASE[0] <= place]
        raw, own = raw + drawn[0] / sum(drawn), own + drawn[1] / sum(drawn)
    assert raw / (raw + own) == pytest.approx(budget.RAW_SHARE, abs=0.002)


def test_processes_share_the_rows_of_a_step():
    assert Phase.of(1e6, 8).rows_per_step == 8 and Phase.of(1e9, 3).rows_per_step % 3 == 0


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


def test_a_head_proposes_more_tokens_of_a_large_vocabulary_and_never_more_than_there_are():
    sizes = {5000: 5000, 49_152: 8192, 65_536: 8192, 65_537: 32_000, 151_936: 32_000}
    assert {vocab: budget.draft_vocab_size(vocab) for vocab in sizes} == sizes


def test_rates_have_two_digits():
    assert learning_rate(577) == 1.2e-3 and learning_rate(2048) == 3.4e-4


def test_wider_targets_learn_at_a_lower_rate():
    assert learning_rate(576) == learning_rate(64) == 1.2e-3
    assert learning_rate(4096) == pytest.approx(1.7e-4)


def test_slow_responses_shorten_the_training_to_a_quarter_at_most():
    plan = plan_budget(12 * 3600.0, 120.0, RATES, math.inf)
    in_time = 120.0 + plan.responses_s
    assert plan.training_left_s(12 * 3600.0, in_time) == pytest.approx(plan.training_s)
    assert plan.training_left_s(12 * 3600.0, in_time + 600.0) == pytest.approx(plan.training_s - 600.0)
    assert plan.training_left_s(12 * 3600.0, 20 * 3600.0) == budget.LEAST_TRAINING * plan.training_s


def test_prompts_that_a_draft_is_measured_on_fit_a_third_of_the_reserved_time():
    plan = plan_budget(3600.0, 120.0, RATES, math.inf)
    prompts = plan.prompts_of_a_task(RATES.responses, 64, num_tasks=2, num_shapes=3)
    tokens = 2 * prompts * (1 + 3) * 64
    assert 0.5 * plan.reserved_s / 3 < tokens / (budget.SINGLE_RATE * RATES.responses) <= plan.reserved_s / 3
    assert plan.prompts_of_a_task(1e-3, 64, 2, 3) == budget.PROMPTS_OF_A_TASK[0]
    assert plan.prompts_of_a_task(1e6, 64, 2, 3) == budget.PROMPTS_OF_A_TASK[1]
