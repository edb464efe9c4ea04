"""The choice between plain decoding and n-grams, with times that are made up."""

import pytest
from tiny import tiny_target

from eagle_kit import LLM, SamplingParams
from eagle_kit.autotune.ngram import NgramPolicy
from eagle_kit.core.shape import NGRAM_SHAPE, NO_SPECULATION, SpecShape

PLAIN_MS = 10.0
DRAFTED_MS = 15.0


def run(policy, cycles, accepted, size=2):
    """Shapes of ``cycles`` cycles, in each of which every request accepts ``accepted`` drafts."""
    requests = [policy.new_request() for _ in range(size)]
    shapes = []
    for _ in range(cycles):
        shape = policy.choose(requests, 100)
        shapes.append(shape)
        for request in requests:
            policy.observe(request, shape, accepted if shape.steps else 0, 4 if shape.steps else 0)
        policy.observe_time(size, shape, 100, (DRAFTED_MS if shape.steps else PLAIN_MS) / 1e3)
    return shapes


def share(shapes):
    return sum(shape == NGRAM_SHAPE for shape in shapes) / len(shapes)


def test_both_kinds_of_cycles_are_timed_first():
    policy = NgramPolicy(NGRAM_SHAPE, [1, 2])
    assert policy.shapes_at(2) == [NO_SPECULATION, NGRAM_SHAPE] and policy.plan([1, 2]) == []
    assert set(run(policy, 8, 0)) == {NO_SPECULATION, NGRAM_SHAPE}
    assert [choice.batch_size for choice in policy.plan([1, 2])] == [2]


@pytest.mark.parametrize(("accepted", "least", "most"), [(0, 0.0, 0.08), (2, 0.95, 1.0)])
def test_what_pays_is_used_and_the_other_tried_now_and_then(accepted, least, most):
    policy = NgramPolicy(NGRAM_SHAPE, [2])
    run(policy, 100, accepted)
    shapes = run(policy, 600, accepted)
    assert least <= share(shapes) <= most and 0 < share(shapes) < 1
    (choice,) = policy.plan([2])
    assert (choice.shape == NGRAM_SHAPE) == (accepted > 0)
    assert choice.gain == pytest.approx((1 + accepted) * PLAIN_MS / DRAFTED_MS if accepted else 1.0, rel=0.05)


def test_text_that_begins_to_repeat_is_noticed():
    policy = NgramPolicy(NGRAM_SHAPE, [2])
    run(policy, 300, 0)
    assert share(run(policy, 300, 3)[150:]) > 0.9
    assert share(run(policy, 300, 0)[150:]) < 0.1


def test_a_text_that_repeats_is_noticed_in_one_trial():
    policy = NgramPolicy(NGRAM_SHAPE, [1])
    run(policy, 300, 0, size=1)
    shapes = run(policy, 300, 4, size=1)
    first = shapes.index(NGRAM_SHAPE)
    assert share(shapes[first : first + 100]) == 1.0


def test_drafting_begins_where_it_clearly_pays_and_goes_on_while_it_pays(monkeypatch):
    policy = NgramPolicy(NGRAM_SHAPE, [1])
    run(policy, 100, 0, size=1)
    monkeypatch.setattr(policy, "gain", lambda size: 1.01)
    assert share(run(policy, 400, 0, size=1)) < 0.1
    monkeypatch.setattr(policy, "gain", lambda size: 1.1)
    run(policy, 200, 0, size=1)
    monkeypatch.setattr(policy, "gain", lambda size: 1.01)
    assert share(run(policy, 400, 0, size=1)) > 0.9


def test_an_engine_mixes_both_and_its_figures_are_of_verifies_alone():
    """Plain cycles are no verifies: every count is of cycles that had drafts."""
    llm = LLM(tiny_target(vocab_size=11), algorithm="NGRAM", max_context=256)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3, 1, 2]], params)
    assert output.token_ids == llm.generate([[1, 2, 3, 1, 2]], params, shape="none")[0].token_ids
    assert output.shapes[NO_SPECULATION] > 0 and output.shapes[NGRAM_SHAPE] > 0
    assert output.stats.num_verifies == output.shapes[NGRAM_SHAPE]
    assert sum(output.stats.histogram) == output.stats.num_verifies


def test_a_shape_that_is_given_is_kept():
    llm = LLM(tiny_target(vocab_size=11), algorithm="NGRAM", max_context=256, shape="4,2,6")
    (output,) = llm.generate([[1, 2, 3, 1, 2]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert SpecShape.parse("4,2,6") in output.shapes and NGRAM_SHAPE not in output.shapes
