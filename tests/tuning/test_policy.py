"""The policy in a simulated engine: texts of known ease, cycles of known cost."""

import random

import pytest

from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.tuning.acceptance import Acceptance
from eagle_kit.tuning.policy import ShapePolicy

SHAPES = [NO_SPECULATION, *map(SpecShape.parse, ("1,1,2", "2,1,3", "4,1,5", "6,1,7"))]
AVERAGE = 0.55
"""Chance that a token of average text is accepted, at every depth."""


def seconds(batch_size, shape, context):
    """A machine that is bound by memory up to 8 rows and by arithmetic beyond."""
    rows = batch_size * shape.tokens
    return 30e-3 * max(1.0, rows / 8) + 4e-3 * shape.steps


def acceptances():
    found = {}
    for shape in SHAPES[1:]:
        reach = tuple(AVERAGE**depth for depth in range(1, shape.steps + 1))
        found[shape] = Acceptance(1 + sum(reach), reach)
    return found


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
    policy = ShapePolicy(seconds, acceptances())
    eases = [policy.new_request() for _ in chances(0)]
    return speed(
        lambda: policy.choose(eases, 300),
        chances,
        lambda i, shape, accepted: policy.observe(eases[i], shape, accepted),
    )


def fixed(chances):
    return {shape: speed(lambda shape=shape: shape, chances) for shape in SHAPES}


@pytest.mark.parametrize("batch_size", [1, 4, 8, 32])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 0.97])
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
    policy = ShapePolicy(seconds, {})
    assert {policy.choose([policy.new_request()], 10) for _ in range(100)} == {NO_SPECULATION}
