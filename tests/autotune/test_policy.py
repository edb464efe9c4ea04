"""The policy in a simulated engine: texts of known ease, cycles of known cost."""

import itertools
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
from crossed import crossed

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.calibration import Calibration
from eagle_kit.autotune.chances import EASE_SPACING, EASES, place_of
from eagle_kit.autotune.cycle_costs import Packings
from eagle_kit.autotune.policy import HOLD, WHOLE_LOOK, ShapePolicy
from eagle_kit.autotune.probes import MOST_DEBT, PROBE, PROBE_LOSS, Probes
from eagle_kit.autotune.texts import Ease, Texts
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

SHAPES = [NO_SPECULATION, *map(SpecShape.parse, ("1,1,2", "2,1,3", "4,1,5", "6,1,7"))]
AVERAGE = 0.55
"""Chance that a token of average text is accepted, at every depth."""


def seconds(batch_size, shape, context):
    """A machine that is bound by memory up to 8 rows and by arithmetic beyond."""
    rows = batch_size * shape.tokens
    return 30e-3 * max(1.0, rows / 8) + 4e-3 * shape.steps


def make_policy(table=None, seconds=seconds, **kwargs):
    return ShapePolicy(seconds, table or AcceptanceTable.even(SHAPES, AVERAGE), {1: SHAPES}, **kwargs)


def speed(choose, chances, observe=lambda *_: None, num_tokens=4000, seed=0):
    """Tokens per second of a batch whose requests' tokens are accepted with ``chances(number of tokens)``."""
    rng, time, counts = random.Random(seed), 0.0, [0] * len(chances(0))
    while sum(counts) < num_tokens * len(counts):
        shape = choose()
        time += seconds(len(counts), shape, 300)
        for i, chance in enumerate(chances(min(counts))):
            accepted = 0
            while accepted < shape.steps and rng.random() < chance:
                accepted += 1
            counts[i] += accepted + 1
            observe(i, shape, accepted)
    return sum(counts) / time


def adaptive(chances):
    policy = make_policy()
    eases = [policy.new_request() for _ in chances(0)]
    return speed(
        lambda: policy.choose(eases, 300),
        chances,
        lambda i, shape, accepted: policy.observe(eases[i], shape, accepted),
    )


def fixed(chances):
    return {shape: speed(lambda shape=shape: shape, chances) for shape in SHAPES}


@crossed(("batch_size", [1, 4, 8, 32]), ("chance", [0.0, 0.2, 0.5, 0.8, 0.97]))
def test_text_of_one_kind_is_decoded_nearly_as_fast_as_in_its_best_shape(chance, batch_size):
    def chances(at):
        return [chance] * batch_size

    speeds, ours = fixed(chances), adaptive(chances)
    assert ours > 0.98 * speeds[NO_SPECULATION]
    assert ours > 0.96 * max(speeds.values())


def test_text_that_changes_is_decoded_faster_than_in_any_fixed_shape():
    def chances(at):
        return [(0.95, 0.05, 0.6)[at // 500 % 3]]

    assert adaptive(chances) > 1.02 * max(fixed(chances).values())


def test_a_batch_is_chosen_for_as_a_whole():
    def chances(at):
        return [0.9, 0.9, 0.1, 0.1]

    assert adaptive(chances) > 0.96 * max(fixed(chances).values())


def test_without_a_draft_decoding_is_plain():
    policy = ShapePolicy(seconds, AcceptanceTable.even([]), {})
    assert {policy.choose([policy.new_request()], 10) for _ in range(100)} == {NO_SPECULATION}


def test_a_batch_has_the_menu_of_the_next_size_and_the_largest_that_of_the_last():
    menus = {1: SHAPES[:2], 4: SHAPES[2:3], 16: SHAPES[3:]}
    policy = ShapePolicy(seconds, AcceptanceTable.even(SHAPES, AVERAGE), menus)
    found = {size: policy.menu(size)[1:] for size in (1, 2, 4, 5, 16, 17, 64)}
    wanted = {1: SHAPES[1:2]}
    wanted |= dict.fromkeys((2, 4), SHAPES[2:3])
    wanted |= dict.fromkeys((5, 16, 17, 64), SHAPES[3:])
    assert found == wanted
    for size, menu in menus.items():
        assert policy.menus[size] == [NO_SPECULATION, *(shape for shape in menu if shape.steps)]
    assert policy.menus.keys() == menus.keys()


CLASSES = (0.3, 0.7)


def confident_table():
    """Unsure drafts are accepted in one of ten cases, sure ones in nine, others in five."""
    chances = np.array([0.1, 0.5, 0.9])
    shapes = SHAPES[1:]
    reach = {shape: np.stack([chances**depth for depth in range(1, shape.steps + 1)], 1) for shape in shapes}
    return AcceptanceTable(CLASSES, dict.fromkeys(shapes, np.full(3, 1 / 3)), reach)


def confident_speed(
    choose, see=lambda _: None, num_tokens=20000, chances=(0.1, 0.5, 0.9), observe=lambda *_: None
):
    """Tokens per second of a request whose drafts are as sure as they are good."""
    rng, time, count = random.Random(1), 0.0, 0
    while count < num_tokens:
        chance = rng.choice(chances)
        see(chance)
        shape = choose()
        time += seconds(1, shape, 300)
        accepted = 0
        while accepted < shape.steps and rng.random() < chance:
            accepted += 1
        observe(shape, accepted)
        count += accepted + 1
    return count / time


def test_drafting_stops_early_where_the_draft_is_unsure():
    policy = make_policy(confident_table())
    ease = policy.new_request()
    used = {0.1: Counter(), 0.9: Counter()}
    now = [0.0]

    def see(chance):
        now[0] = chance
        policy.see(ease, chance)

    def choose():
        shape = policy.choose([ease], 300)
        if now[0] in used:
            used[now[0]][shape] += 1
        return shape

    ours = confident_speed(choose, see)
    fixed = [confident_speed(lambda shape=shape: shape) for shape in SHAPES]
    assert ours > 1.04 * max(fixed)
    assert used[0.1].most_common(1)[0][0].steps <= 1 < used[0.9].most_common(1)[0][0].steps


def told_speed(see, choose, observe=lambda *_: None, bias=0.0, num_tokens=8000):
    """Tokens per second of a request whose chains hold up to a depth that the draft knows: it tells each
    depth's confidence, whose log-odds are off by ``bias``. Its first token is as sure everywhere."""
    rng, time, count = random.Random(1), 0.0, 0
    while count < num_tokens:
        depth = rng.choice((1, 3, 6))
        chances = [0.9 if d < depth else 0.1 for d in range(6)]
        odds = [math.log(chance / (1 - chance)) + bias for chance in chances]
        see(np.cumprod([1 / (1 + math.exp(-each)) for each in odds]).tolist())
        shape = choose()
        time += seconds(1, shape, 300)
        accepted = 0
        while accepted < shape.steps and rng.random() < chances[accepted]:
            accepted += 1
        observe(shape, accepted)
        count += accepted + 1
    return count / time


@pytest.mark.parametrize("bias", [0.0, 1.5, -1.5])
def test_windows_end_where_the_draft_tells_that_its_chain_does(bias):
    """Faster than any fixed shape, and than what the first token tells; a bias is learnt."""

    def run(told):
        policy = make_policy()
        ease = policy.new_request()
        return told_speed(
            lambda survival: policy.see(ease, survival if told else survival[0]),
            lambda: policy.choose([ease], 300),
            lambda shape, accepted: policy.observe(ease, shape, accepted),
            bias=bias,
        )

    fixed = [told_speed(lambda _: None, lambda shape=shape: shape) for shape in SHAPES]
    ours, first_only = run(told=True), run(told=False)
    assert ours > 1.05 * max(fixed) and ours > 1.05 * first_only, (ours, first_only, fixed)


def test_what_requests_have_taught_about_confidences_serves_those_that_come():
    """Each request is 12 cycles long, too short to learn by how much its own confidences are wrong."""

    def run(shares):
        policy, cycles, eases = make_policy(), itertools.count(), []

        def see(survival):
            if next(cycles) % 12 == 0:
                eases[:] = [policy.new_request()]
                if not shares:
                    policy.texts.calibration = Calibration()
            policy.see(eases[0], survival)

        return told_speed(
            see,
            lambda: policy.choose(eases, 300),
            lambda shape, accepted: policy.observe(eases[0], shape, accepted),
            bias=2.5,
        )

    assert run(shares=True) > 1.03 * run(shares=False)


def test_confidences_that_are_no_numbers_are_not_believed():
    policy = make_policy()
    ease = policy.new_request()
    policy.see(ease, [float("nan")] * 6)
    assert not ease.told and ease.confidence is None
    assert policy.choose([ease], 300) in SHAPES


def test_text_of_which_the_draft_is_never_sure_is_decoded_plainly():
    """Its drafts are as good as the draft thinks, so its ease says nothing."""
    policy = make_policy(confident_table())
    ease, used = policy.new_request(), Counter()

    def choose():
        shape = policy.choose([ease], 300)
        used[shape] += 1
        return shape

    plain = confident_speed(lambda: NO_SPECULATION, chances=(0.1,))
    ours = confident_speed(
        choose,
        lambda chance: policy.see(ease, chance),
        chances=(0.1,),
        observe=lambda shape, accepted: policy.observe(ease, shape, accepted),
    )
    assert confident_speed(lambda: SHAPES[1], chances=(0.1,)) < 0.98 * plain < ours
    assert used[NO_SPECULATION] > 0.85 * sum(used.values())


def test_text_of_which_the_draft_is_seldom_sure_is_drafted_where_it_is():
    """No single shape is worth much there, and shapes that follow the confidence are."""
    chances = (0.1, 0.1, 0.1, 0.9)
    policy = make_policy(confident_table())
    ease = policy.new_request()
    ours = confident_speed(
        lambda: policy.choose([ease], 300), lambda chance: policy.see(ease, chance), chances=chances
    )
    fixed = [confident_speed(lambda shape=shape: shape, chances=chances) for shape in SHAPES]
    assert ours > 1.03 * max(fixed)


@pytest.mark.parametrize("told", [False, True])
def test_packings_that_cannot_be_worth_it_are_passed_over_and_no_others(monkeypatch, told):
    """The bound leaves out none that would be chosen; new requests among them."""

    def run():
        policy = make_policy(confident_table(), packed_share=lambda size, shape, context, rows: 0.7)
        rng, eases, chosen = random.Random(5), [policy.new_request() for _ in range(6)], []
        for number in range(400):
            if number % 20 == 19:
                eases[rng.randrange(6)] = policy.new_request()
            for ease in eases:
                first = rng.choice((0.1, 0.5, 0.9))
                policy.see(ease, [first ** (depth + 1) for depth in range(6)] if told else first)
            shape = policy.choose(eases, 300)
            chosen.append((shape, policy.num_drafts))
            verified = policy.num_drafts or [shape.tokens - 1] * 6
            for ease, most in zip(eases, verified, strict=True):
                policy.observe(ease, shape, rng.randint(0, min(shape.steps, most)), most)
        return chosen

    passed, bound = Counter(), Packings.may_be_worth

    def counted(*args):
        passed[bound(*args)] += 1
        return bound(*args)

    monkeypatch.setattr(Packings, "may_be_worth", counted)
    chosen = run()
    assert passed[True] and passed[False] and any(drafts is not None for _, drafts in chosen)
    monkeypatch.setattr(Packings, "may_be_worth", lambda *_: True)
    assert run() == chosen


def test_what_drafting_is_worth_depends_on_no_order_of_requests():
    """Those behind one that ends move up."""

    def run(turn):
        policy, rng = make_policy(confident_table()), random.Random(7)
        eases, chosen = [policy.new_request() for _ in range(4)], []
        chances = dict(zip(map(id, eases), (0.1, 0.3, 0.6, 0.9), strict=True))
        for number in range(200):
            given = eases[turn(number) :] + eases[: turn(number)]
            for ease in eases:
                policy.see(ease, 0.5)
            shape = policy.choose(given, 300)
            chosen.append(shape)
            for ease in eases:
                accepted = 0
                while accepted < shape.steps and rng.random() < chances[id(ease)]:
                    accepted += 1
                policy.observe(ease, shape, accepted)
        return chosen

    assert run(lambda number: 0) == run(lambda number: number % 4)


def test_costs_are_computed_again_where_times_have_changed_them():
    policy, eases = make_policy(confident_table(), packed_share=lambda *_: 0.7), []
    eases = [policy.new_request() for _ in range(4)]
    before = policy.costs.of(4, 300), policy.costs.packings(4, 300, 1)
    for _ in range(8):
        policy.choose(eases, 300)
        assert policy.costs.of(4, 310) is before[0] and policy.costs.packings(4, 310, 1) is before[1]
    for shape in (SHAPES[1], NO_SPECULATION) * 4:
        policy.choose(eases, 300)
        policy.observe_time(4, shape, 300, 0.2)
    after = policy.costs.of(4, 300), policy.costs.packings(4, 300, 1)
    assert after[0].seconds[1] != before[0].seconds[1] and after[1].seconds != before[1].seconds
    assert policy.costs.of(4, 300) is after[0]


def test_a_plain_probe_does_not_change_what_a_head_that_tells_is_worth():
    """In a plain cycle it tells nothing, so that nothing is known of the request's depths."""
    policy = make_policy(confident_table())
    ease = policy.new_request()
    for _ in range(20):
        policy.see(ease, [0.8, 0.6, 0.5, 0.4, 0.3, 0.2])
        policy.observe(ease, policy.choose([ease], 300), 0)
    assert policy._spent and ease.value < -1.0
    before, is_drafting = policy._gained / policy._spent, policy.shape.steps > 0
    policy.see(ease, None)
    policy.choose([ease], 300)
    assert policy.texts.tells and is_drafting and policy._gained / policy._spent == before


def test_a_choice_between_looks_computes_no_outlook(monkeypatch):
    """It is made of numbers at hand, plain or not; a look comes every eight cycles, or sixteen where it is
    clear whether to draft, and one that compares all shapes, while cycles are chosen one by one, at every
    fourth of them."""
    policy, looks, rng = make_policy(confident_table()), Counter(), random.Random(0)
    outlook = ShapePolicy._outlook

    def counted(self, eases, context):
        looks[bool(self.shape.steps)] += 1
        return outlook(self, eases, context)

    monkeypatch.setattr(ShapePolicy, "_outlook", counted)
    ease = policy.new_request()
    for number in range(400):
        policy.see(ease, rng.choice((0.1, 0.9)) if number < 200 else 0.1)
        shape = policy.choose([ease], 300)
        policy.observe(ease, shape, shape.steps if number < 200 and ease.confidence else 0)
    assert not policy.shape.steps
    assert 200 / (2 * HOLD * WHOLE_LOOK) <= looks[True] < 200 / (HOLD * WHOLE_LOOK) + 4
    assert looks[False] < 200 / HOLD


def test_doubt_is_that_of_the_mean_length_by_the_delta_method():
    """Of own eases, which are independent, and of what new requests have in common."""
    policy = make_policy(confident_table())
    eases = [
        Ease(1.0, (0.2, 0.5, 0.3), variance=0.3, information=2.0),
        Ease(-0.6, (0.6, 0.3, 0.1), variance=0.7),
        Ease(float(EASES[-1]), (0.1, 0.1, 0.8), variance=0.9),
    ]
    lengths = policy._lengths
    for number in range(1, len(policy.shapes)):
        rows = [place_of(ease.value) for ease in eases]
        mixes = lengths._tilts[number] * np.array([ease.mix for ease in eases])
        mixes /= mixes.sum(1, keepdims=True)
        here = (lengths._lengths[rows, number] * mixes).sum(1)
        above = [min(row + 1, len(EASES) - 1) for row in rows]
        slopes = ((lengths._lengths[above, number] * mixes).sum(1) - here) / EASE_SPACING
        variance = (slopes**2 * [0.3, 0.7, 0.9]).sum() + slopes[1:].sum() ** 2 * policy.texts.shared_variance
        expected = math.sqrt(variance / here.sum() ** 2 + policy.costs.variance(3, number, 0))
        assert policy._doubt(eases, number) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("batch_size", "least"), [(1, 0.84), (2, 0.9), (4, 0.96)])
def test_a_draft_far_weaker_than_the_average_one_is_soon_left_alone(batch_size, least):
    """One of ten tokens is accepted, whatever the draft says, and nothing was known of it; each of the cycles
    that draft costs a third. Over three replies of 60 cycles."""
    rates = []
    for seed in range(12):
        rng, tokens, spent = random.Random(seed), 0, 0.0

        def dear(batch_size, shape, context):
            return seconds(batch_size, shape, context) * (1.3 if shape.steps else 1.0)

        policy = make_policy(confident_table(), dear, is_average=True)
        for _ in range(3):
            eases = [policy.new_request() for _ in range(batch_size)]
            for _ in range(60):
                for ease in eases:
                    policy.see(ease, rng.choice((0.1, 0.5, 0.9)))
                shape = policy.choose(eases, 300)
                verified = policy.num_drafts or [shape.tokens - 1] * batch_size
                for ease, most in zip(eases, verified, strict=True):
                    accepted = int(most > 0 and rng.random() < 0.1)
                    policy.observe(ease, shape, accepted, most)
                    tokens += 1 + accepted
                took = dear(batch_size, shape, 300)
                policy.observe_time(batch_size, shape, 300, took * math.exp(rng.gauss(0.0, 0.05)))
                spent += took
        rates.append(tokens / spent * dear(batch_size, NO_SPECULATION, 300) / batch_size)
    assert np.mean(rates) > least


def test_how_sure_an_unknown_draft_is_of_texts_is_soon_known():
    """New requests begin with what those before them had, which for a measured draft is seen more slowly."""
    unsure = []
    for is_average in (True, False):
        policy = make_policy(confident_table(), is_average=is_average)
        for _ in range(4):
            ease = policy.new_request()
            for _ in range(16):
                policy.see(ease, 0.1)
        unsure.append(policy.new_request().mix[0])
    assert unsure[0] > 0.85 > 0.82 > unsure[1] > 0.6


def test_costs_that_the_table_has_wrong_are_learnt():
    def wrong(batch_size, shape, context):
        return seconds(batch_size, shape, context) * (0.5 if shape.steps == 6 else 1.0)

    policy = make_policy(seconds=wrong)
    ease, rng, used = policy.new_request(), random.Random(2), Counter()
    for _ in range(3000):
        shape = policy.choose([ease], 300)
        used[shape] += 1
        accepted = 0
        while accepted < shape.steps and rng.random() < AVERAGE:
            accepted += 1
        policy.observe(ease, shape, accepted)
        policy.observe_time(1, shape, 300, seconds(1, shape, 300) * rng.uniform(0.95, 1.05))
    last = policy.plan([1])[0]
    assert last.shape.steps < 6
    assert used.most_common(1)[0][0].steps < 6


def plain_too_dear(batch_size, shape, context):
    return seconds(batch_size, shape, context) * (1.0 if shape.steps else 2.5)


def chain_too_cheap(batch_size, shape, context):
    return seconds(batch_size, shape, context) * (0.4 if shape.steps == 4 else 1.0)


@pytest.mark.parametrize("measured", [plain_too_dear, chain_too_cheap])
def test_a_short_measurement_is_compared_with_plain_decoding_soon(measured):
    """Other programs ran while it was made, and the draft is good for nothing."""

    def speed(tuned_to, seed):
        policy, rng = make_policy(seconds=measured, tuned_to=tuned_to), random.Random(seed)
        ease, spent, tokens = policy.new_request(), 0.0, 0
        for _ in range(300):
            shape = policy.choose([ease], 300)
            accepted = int(shape.steps > 0 and rng.random() < 0.05)
            policy.observe(ease, shape, accepted)
            took = seconds(1, shape, 300)
            policy.observe_time(1, shape, 300, took * math.exp(rng.gauss(0.0, 0.08)))
            spent, tokens = spent + took, tokens + 1 + accepted
        return tokens / spent * seconds(1, NO_SPECULATION, 300)

    short, long = ([speed(tuned_to, seed) for seed in range(8)] for tuned_to in (0, 1))
    assert np.mean(short) > 0.96
    assert np.mean(short) > np.mean(long) + 0.03  # which is trusted for longer


@pytest.mark.parametrize("times_plain", [False, True])
def test_a_comparison_that_does_not_come_about_is_not_sought_for_ever(times_plain):
    """Batch sizes that change every few cycles, and plain cycles that have no recording and are not timed."""
    policy, rng = make_policy(tuned_to=0), random.Random(0)
    eases, num_plain = [policy.new_request() for _ in range(4)], Counter()
    for number in range(1200):
        size = 1 + number // 3 % 4
        shape = policy.choose(eases[:size], 300)
        for ease in eases[:size]:
            accepted = 0
            while accepted < shape.steps and rng.random() < 0.9:
                accepted += 1
            policy.observe(ease, shape, accepted)
        if shape.steps or times_plain:
            policy.observe_time(size, shape, 300, seconds(size, shape, 300))
        num_plain[number // 400] += not shape.steps
    assert 4 <= num_plain[0] < 120 and num_plain[2] < 30


@pytest.mark.parametrize("seed", range(5))
def test_times_that_vary_by_chance_keep_no_draft_from_drafting(seed):
    """Drafting is worth 1.2, and cycles take 0.8 to 1.25 times what they should: when that has let the policy
    decode plainly, it comes back soon, also where there was nothing to draft for long before."""
    policy, rng = make_policy(), random.Random(seed)
    ease, chain = policy.new_request(), SHAPES[1]
    spent = Counter()
    for number in range(8000):
        chance = 0.0 if number < 2000 else 0.4
        shape = policy.choose([ease], 300)
        accepted = 0
        while accepted < shape.steps and rng.random() < chance:
            accepted += 1
        policy.observe(ease, shape, accepted)
        policy.observe_time(1, shape, 300, seconds(1, shape, 300) * math.exp(rng.gauss(0.0, 0.12)))
        if number >= 2000:
            spent[bool(shape.steps)] += 1
    gain = 1.4 * seconds(1, NO_SPECULATION, 300) / seconds(1, chain, 300)
    assert 1.2 < gain < 1.25
    assert spent[True] > 0.85 * (spent[True] + spent[False])


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_becomes_faster_has_its_costs_compared_anew(seed):
    """Beside a neighbour that used the memory, drafting was worth 1.09 at 1.35 times the cost of a plain
    cycle. Alone, where plain cycles take two thirds of the time, it takes 1.56 times theirs and costs 6 %:
    that is seen within some 30 cycles, and so is the way back."""
    one = SHAPES[1]
    times, is_alone = {NO_SPECULATION: 0.2, one: 0.27}, {NO_SPECULATION: 0.133, one: 0.208}
    policy = ShapePolicy(
        lambda batch_size, shape, context: times.get(shape, 1.0),
        AcceptanceTable.even(SHAPES[:2], 0.47),
        {32: SHAPES[:2]},
    )
    rng, drafted = random.Random(seed), []
    eases = [policy.new_request() for _ in range(32)]
    for number in range(900):
        takes = is_alone if 300 <= number < 600 else times
        shape = policy.choose(eases, 300)
        for ease in eases:
            policy.observe(ease, shape, int(shape.steps > 0 and rng.random() < 0.47))
        policy.observe_time(32, shape, 300, takes[shape] * math.exp(rng.gauss(0.0, 0.05)))
        drafted.append(bool(shape.steps))
    assert sum(drafted[100:300]) > 0.8 * 200
    assert sum(drafted[330:600]) < 0.3 * 270
    assert sum(drafted[640:]) > 0.7 * 260


@pytest.mark.parametrize("seed", range(5))
def test_new_requests_are_tried_though_those_before_them_could_not_be_drafted(seed):
    """Eight replies of 64 tokens at a time, hard for long and then easy: that is seen within some replies,
    though plain decoding tells nothing of them, and trying it costs the hard ones next to nothing."""
    policy, rng = make_policy(), random.Random(seed)
    seconds_of = {NO_SPECULATION: 0.05, SHAPES[1]: 0.064}
    spent, tokens, drafted = [], [], []
    for number in range(60):
        chance = 0.05 if number < 30 else 0.5
        eases, lengths = [policy.new_request() for _ in range(8)], [0] * 8
        spent.append(0.0)
        drafted.append(0)
        while max(lengths) < 64:
            shape = policy.choose(eases, 300)
            shape = shape if shape in seconds_of else SHAPES[1]
            for i, ease in enumerate(eases):
                accepted = int(shape.steps > 0 and rng.random() < chance)
                policy.observe(ease, shape, accepted)
                lengths[i] += 1 + accepted
            took = seconds_of[shape] * math.exp(rng.gauss(0.0, 0.06))
            policy.observe_time(8, shape, 300, took)
            spent[-1] += seconds_of[shape]
            drafted[-1] += bool(shape.steps)
        tokens.append(sum(lengths))
    plain = 8 / seconds_of[NO_SPECULATION]
    assert sum(tokens[5:30]) / sum(spent[5:30]) > 0.98 * plain
    assert sum(drafted[36:]) > 0.8 * sum(tokens[36:]) / 8 / 1.5


def test_looking_at_the_plan_changes_nothing():
    """``/metrics`` asks for it as often as it likes."""
    policy, other = make_policy(), make_policy()
    for _ in range(50):
        policy.plan([1, 8])
    assert policy.texts.shared_variance == other.texts.shared_variance


def test_one_request_tells_little_of_the_others():
    """However long it is drafted, it is one text."""
    policy, rng = make_policy(), random.Random(0)
    ease, before = policy.new_request(), policy.texts.shared_variance
    for _ in range(5000):
        policy.observe(ease, SHAPES[1], int(rng.random() < 0.9))
        policy.learn()
    assert policy.texts.shared_variance > before / (1.0 + before) - 1e-6
    assert 0.0 < policy.texts.shared_ease < 0.5 * ease.value


def test_first_cycles_say_nothing_of_the_texts():
    """Replies begin alike, whatever comes then."""

    def learnt(first_accepted, seed=0):
        policy, rng = make_policy(confident_table()), random.Random(seed)
        for _ in range(100):
            ease = policy.new_request()
            policy.observe(ease, SHAPES[1], first_accepted)
            for _ in range(24):
                chance = rng.choice((0.1, 0.5, 0.9))
                policy.see(ease, chance)
                policy.observe(ease, SHAPES[1], int(rng.random() < chance))
        policy.learn()
        return policy.texts.shared_ease, ease.value

    assert learnt(1) == learnt(0)
    found = [learnt(1, seed)[0] for seed in range(8)]
    assert abs(np.mean(found)) < 0.1 and max(map(abs, found)) < 1.0


@pytest.mark.parametrize("num_cycles", [1, 2])
def test_replies_of_one_cycle_teach_that_a_draft_is_worth_nothing(num_cycles):
    policy, used = make_policy(), Counter()
    for _ in range(1500 // num_cycles):
        ease = policy.new_request()
        for _ in range(num_cycles):
            shape = policy.choose([ease], 300)
            used[shape] += 1
            policy.observe(ease, shape, 0)
            policy.see(ease, 0.5)
        policy.leave(ease)
    assert used[NO_SPECULATION] > used.total() * 2 / 3


def test_one_slow_cycle_says_little_of_a_shape():
    """Plain decoding is tried, and meets a machine that is slow for one of its cycles."""
    errors = [(1, 0.0)] * 6 + [(0, 0.0), (0, 0.5), (0, 0.02), (0, -0.01)] + [(1, 0.0)] * 6
    policy = make_policy()
    for number, error in errors:
        shape = policy.shapes[number]
        policy.choose([policy.new_request()] * 2, 300)
        policy.observe_time(2, shape, 300, seconds(2, shape, 300) * math.exp(error))
    plain, chain = policy.shapes[:2]
    costs = policy.costs.of(2, 300).seconds
    assert costs[1] / costs[0] == pytest.approx(seconds(2, chain, 300) / seconds(2, plain, 300), rel=0.03)


def test_a_machine_that_slows_down_changes_no_choice():
    policy = make_policy()
    before = policy.plan([1, 8])
    for number in range(100):
        for shape in SHAPES:
            policy.observe_time(8, shape, 300, (1 if number < 10 else 3) * seconds(8, shape, 300))
    after = policy.plan([1, 8])
    assert [choice.shape for choice in after] == [choice.shape for choice in before]


def test_coming_back_must_pay_for_what_the_draft_has_missed():
    def cycles_until_drafting(seconds_a_token):
        def reading(batch_size, num_tokens, context):
            return batch_size * num_tokens * seconds_a_token

        policy = ShapePolicy(seconds, AcceptanceTable.even(SHAPES, AVERAGE), {1: SHAPES}, "", reading)
        ease = policy.new_request()
        ease.value, ease.variance = -6.0, 0.0
        for _ in range(HOLD):
            assert not policy.choose([ease], 300).steps
        ease.value, ease.num_missed = 0.0, HOLD
        return next((n for n in range(HOLD + 1) if policy.choose([ease], 300).steps), None)

    assert cycles_until_drafting(0.0) is not None
    assert cycles_until_drafting(1.0) is None  # but for a probe, later


def test_a_probe_ends_though_the_batch_changes():
    policy = make_policy()
    eases = [policy.new_request() for _ in range(3)]
    for ease in eases:
        ease.value = -6.0
    used = [policy.choose(eases[: 1 + i % 3], 100) for i in range(1500)]
    first = next(i for i, shape in enumerate(used) if shape.steps)
    assert all(shape.steps for shape in used[first : first + PROBE])
    assert not any(shape.steps for shape in used[first + PROBE : first + PROBE + 40])


def row_seconds(num_rows, shape):
    """A machine whose time grows with every row, in plain decoding of 15 requests as much as at rest."""
    return 60e-3 + 4e-3 * num_rows + 3e-3 * shape.steps


def batch_speed(batch_size, packs, see_depths=False, num_cycles=1500):
    """Tokens per second of a batch whose drafts are as sure as they are good, each of its own text, and the
    verified drafts by chance."""

    def whole(batch_size, shape, context):
        return row_seconds(batch_size * shape.tokens, shape)

    def share(batch_size, shape, context, num_rows):
        return row_seconds(num_rows, shape) / whole(batch_size, shape, context)

    policy = ShapePolicy(whole, confident_table(), {1: SHAPES}, packed_share=share if packs else None)
    eases, rng, verified = [policy.new_request() for _ in range(batch_size)], random.Random(4), Counter()
    time, count = 0.0, 0
    for _ in range(num_cycles):
        chances = [rng.choice((0.1, 0.5, 0.9)) for _ in eases]
        for ease, chance in zip(eases, chances, strict=True):
            policy.see(ease, [chance**d for d in range(1, 7)] if see_depths else chance)
        shape = policy.choose(eases, 300)
        drafts = policy.num_drafts or [shape.tokens - 1] * batch_size
        rows = batch_size + sum(drafts)
        took = row_seconds(rows, shape)
        for ease, chance, most in zip(eases, chances, drafts, strict=True):
            accepted = 0
            while accepted < min(shape.steps, most) and rng.random() < chance:
                accepted += 1
            policy.observe(ease, shape, accepted, most)
            count += accepted + 1
            verified[chance] += most
        noisy = took * math.exp(rng.gauss(0.0, 0.05))
        policy.observe_time(batch_size, shape, 300, noisy, rows if policy.num_drafts else None)
        time += took
    return count / time, verified


@pytest.mark.parametrize(("packs", "most"), [(False, 450), (True, 550)])
def test_a_cycle_costs_the_policy_few_calls(packs, most):
    """Calls of functions and operations are counted, which on the host take about a microsecond each."""
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        if event in ("call", "c_call") and frame.f_globals["__name__"].startswith("eagle_kit.autotune"):
            num_calls += 1

    sys.setprofile(count)
    try:
        batch_speed(8, packs, num_cycles=500)
    finally:
        sys.setprofile(None)
    assert num_calls / 500 < most


@crossed(
    ("see_depths", [pytest.param(False, id="first token"), pytest.param(True, id="all depths")]),
    ("batch_size, gain", [(4, 1.1), (8, 1.1), (32, 1.01)]),
)
def test_a_batch_verifies_the_drafts_that_are_likeliest(batch_size, gain, see_depths):
    whole, _ = batch_speed(batch_size, packs=False, see_depths=see_depths)
    packed, verified = batch_speed(batch_size, packs=True, see_depths=see_depths)
    assert packed > gain * whole, (packed, whole)
    assert verified[0.9] > 2 * verified[0.1]


def test_a_text_that_becomes_easy_is_verified_again():
    """Drafts of prose are not worth their rows beside those of code; then it goes on with code, and the draft
    is as sure as before."""

    def whole(batch_size, shape, context):
        return row_seconds(batch_size * shape.tokens, shape)

    def share(batch_size, shape, context, num_rows):
        return row_seconds(num_rows, shape) / whole(batch_size, shape, context)

    policy = ShapePolicy(whole, confident_table(), {1: SHAPES}, packed_share=share)
    eases, rng, verified = [policy.new_request() for _ in range(8)], random.Random(4), []
    for number in range(900):
        chances = [0.02 if number < 300 else 0.9, *[0.9 if rng.random() < 0.7 else 0.1 for _ in range(7)]]
        for ease, chance in zip(eases, [0.5, *chances[1:]], strict=True):
            policy.see(ease, chance)
        shape = policy.choose(eases, 300)
        drafts = policy.num_drafts or [shape.tokens - 1] * 8
        for ease, chance, most in zip(eases, chances, drafts, strict=True):
            accepted = 0
            while accepted < min(shape.steps, most) and rng.random() < chance:
                accepted += 1
            policy.observe(ease, shape, accepted, most)
        verified.append(drafts[0] > 0)
    hard, easy = verified[150:300], verified[700:]
    assert 0 < sum(hard) / len(hard) < 0.15 and sum(easy) / len(easy) > 0.8


def test_a_request_that_has_just_come_does_not_stop_the_choice_for_others():
    policy = make_policy(confident_table())
    eases = [policy.new_request() for _ in range(2)]
    policy.see(eases[0], 0.9)
    policy.choose(eases, 300)
    policy.shape, policy._left, policy._batch_size = SHAPES[1], 100, 2
    used = set()
    for chance in (0.1, 0.9) * 20:
        policy.see(eases[0], chance)
        used.add(policy.choose(eases, 300))
    assert len(used) > 1


def test_times_of_packed_cycles_say_little_of_whole_ones():
    """Here fewer rows save nothing."""
    policy = ShapePolicy(
        seconds, confident_table(), {1: SHAPES}, packed_share=lambda size, shape, context, rows: 0.7
    )
    eases, rng = [policy.new_request() for _ in range(4)], random.Random(3)
    packed = []
    for _ in range(1500):
        for ease in eases:
            policy.see(ease, rng.choice((0.1, 0.5, 0.9)))
        shape = policy.choose(eases, 300)
        rows = None if policy.num_drafts is None else 4 + sum(policy.num_drafts)
        took = seconds(4, shape, 300) * math.exp(rng.gauss(0.0, 0.03))
        policy.observe_time(4, shape, 300, took, rows)
        packed.append(rows is not None)
        plain, whole = policy.costs.of(4, 300).seconds[:2]
        found = whole / plain / (seconds(4, SHAPES[1], 300) / seconds(4, SHAPES[0], 300))
        assert abs(math.log(found)) < 0.7 * math.log(1 / 0.7)
    assert sum(packed[:100]) > 90 and sum(packed[-300:]) < 75


def test_what_is_planned_says_how_many_drafts_are_verified():
    def share(batch_size, shape, context, num_rows):
        return row_seconds(num_rows, shape) / row_seconds(batch_size * shape.tokens, shape)

    policy = ShapePolicy(
        lambda size, shape, context: row_seconds(size * shape.tokens, shape),
        confident_table(),
        {1: SHAPES},
        packed_share=share,
    )
    (choice,) = policy.plan([8])
    assert choice.shape.steps and choice.verified < 1 and "% of its drafts verified" in str(choice)
    assert choice.length <= choice.shape.steps + 1
    plain = row_seconds(8, NO_SPECULATION)
    assert choice.gain == pytest.approx(choice.length * 1e3 * plain / choice.milliseconds)


def test_one_request_has_nothing_to_share():
    (whole, _), (packed, _) = batch_speed(1, packs=False), batch_speed(1, packs=True)
    assert whole == packed


def test_a_request_without_verified_drafts_tells_nothing_of_its_text():
    policy = make_policy(confident_table())
    ease = policy.new_request()
    policy.see(ease, 0.5)
    before = ease.value
    policy.observe(ease, SHAPES[3], 0, 0)
    policy.learn()
    assert ease.value == before and ease.information == 0.0
    policy.observe(ease, SHAPES[3], 1, 1)
    policy.learn()
    once, ease.value, ease.variance = ease.value, before, 1.0
    policy.observe(ease, SHAPES[1], 1)
    policy.learn()
    assert once == pytest.approx(ease.value, rel=0.05), "one draft of a longer chain is one of a short one"


def test_a_new_batch_is_learnt_from_sooner(monkeypatch):
    policy = make_policy(confident_table())
    cycles, learn = [], Texts.learn
    monkeypatch.setattr(Texts, "learn", lambda texts: cycles.append(policy._num_cycles) or learn(texts))
    eases = [policy.new_request() for _ in range(4)]
    cycles.clear()
    for number in range(1, 41):
        if number == 31:
            eases[2] = policy.new_request()
            cycles.clear()
        for ease in eases:
            policy.see(ease, 0.9)
        shape = policy.choose(eases, 300)
        assert shape.steps
        for ease in eases:
            policy.observe(ease, shape, shape.steps)
        if number == 30:
            found, policy._left = [*cycles], 100
    assert found[:3] == [1, 3, 5]  # the last by a look
    assert cycles == [31, 33, 37]


@pytest.mark.parametrize(("tuned_to", "most"), [(4, 16), (2, 8)])
def test_looks_are_rare_where_costs_are_known_and_the_choice_is_clear(tuned_to, most, monkeypatch):
    policy, looks, look = make_policy(tuned_to=tuned_to), [], ShapePolicy._look

    def noted(self, eases, context):
        looks.append(self._num_cycles)
        look(self, eases, context)

    monkeypatch.setattr(ShapePolicy, "_look", noted)
    eases = [policy.new_request() for _ in range(4)]
    for _ in range(300):
        shape = policy.choose(eases, 300)
        for ease in eases:
            policy.observe(ease, shape, shape.steps)
        policy.observe_time(4, shape, 300, seconds(4, shape, 300))
    between = [b - a for a, b in itertools.pairwise(looks[-8:])]
    assert max(between) == most


@pytest.mark.parametrize("at_once", [False, True])
def test_the_first_cycle_of_a_reply_tells_nothing_where_plain_ones_follow(at_once):
    policy = make_policy()
    for _ in range(20):
        ease = policy.new_request()
        policy.observe(ease, SHAPES[1], 1)
        if at_once:
            policy.learn()
        assert ease.is_young
        policy.observe(ease, NO_SPECULATION, 0)
        policy.learn()
        assert not ease.is_young
        policy.leave(ease)
    policy.learn()
    assert policy.texts.shared_ease == 0.0
    only = policy.new_request()
    policy.observe(only, SHAPES[1], 1)
    policy.leave(only)
    policy.learn()
    assert policy.texts.shared_ease > 0.0


@pytest.mark.parametrize("has_lost", [0.3, 50.0])
def test_what_drafting_lost_is_owed(has_lost):
    """A probe was expected to lose a tenth of a plain cycle, and it and what followed have lost more: so much
    has to be saved before the next, or half a cycle if it was very much."""
    probes = Probes()

    def pays(seconds):
        probes.save(seconds)
        return probes.pay(0.99, 0.5, lost=0.1, plain=1.0, since=0.0)

    assert pays(0.0)
    probes._may_lose = 0.0
    probes.begin_other()
    probes.lost += has_lost
    probes.begin_other()
    assert not pays(0.0)
    owed = min(has_lost - 0.1, MOST_DEBT) + 0.1
    assert not pays(0.9 * owed / PROBE_LOSS) and pays(0.2 * owed / PROBE_LOSS)


def test_what_a_probe_paid_is_credited_once():
    """Drafting loses nothing in the probe, and something after a second change: all of that is owed."""
    probes = Probes()
    assert probes.pay(0.99, 0.5, lost=0.1, plain=1.0, since=0.0)
    probes._may_lose = 0.0
    probes.begin_other()
    probes.begin_other()
    probes.lost += 0.3
    probes.begin_other()
    needed = 0.3 + 0.1  # what is owed, and what the next probe is expected to lose
    probes.save(0.9 * needed / PROBE_LOSS)
    assert not probes.pay(0.99, 0.5, lost=0.1, plain=1.0, since=0.0)
    probes.save(0.2 * needed / PROBE_LOSS)
    assert probes.pay(0.99, 0.5, lost=0.1, plain=1.0, since=0.0)


@pytest.mark.parametrize("lag", [0, 1])
def test_what_drafting_loses_is_reckoned_by_cycles_and_requests(lag):
    """Nothing is accepted, at two batch sizes; with a lag a cycle's tokens come behind the next choice, and
    are reckoned with it."""
    policy, pending = make_policy(), []
    eases, expected = [policy.new_request() for _ in range(8)], 0.0
    policy.shape, policy._probes.is_on = SHAPES[1], True
    for number in range(10):
        batch = eases[: 8 if number < 6 else 1]
        policy._left = 100
        shape = policy.choose(batch, 300)
        assert shape == SHAPES[1]
        expected += seconds(len(batch), shape, 300) - seconds(len(batch), NO_SPECULATION, 300)
        pending.append((batch, shape))
        while len(pending) > lag * (number < 5):
            done, used = pending.pop(0)
            for ease in done:
                policy.observe(ease, used, 0)
    assert policy._probes.lost == pytest.approx(expected)
    policy._use(0, reading=1.0)
    policy._use(1, reading=1.0)
    assert policy._probes.lost == 1.0


def test_a_probe_verifies_what_any_cycle_would():
    """Where packed windows alone are worth it, whole ones would tell that drafting is worth nothing."""

    def whole(batch_size, shape, context):
        return 1.9 if shape.steps else 1.0

    packs = ShapePolicy(
        whole, confident_table(), {8: SHAPES[:2]}, packed_share=lambda size, shape, context, rows: rows / 16
    )
    eases, rng, probed = [packs.new_request() for _ in range(8)], random.Random(0), Counter()
    for ease in eases:
        ease.value = -0.5
    for _ in range(3000):
        for ease in eases:
            packs.see(ease, rng.choice((0.1, 0.9)))
        shape = packs.choose(eases, 300)
        for ease, most in zip(eases, packs.num_drafts or [shape.steps] * 8, strict=True):
            chance = (0.05, 0.5, 0.6)[ease.confidence]
            packs.observe(ease, shape, int(most > 0 and rng.random() < chance), most)
        probed[packs._probes.is_on and shape.steps > 0 and packs.num_drafts is not None] += 1
    assert probed[True]
