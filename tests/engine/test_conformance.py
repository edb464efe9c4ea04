"""Speculation, batches, caches and graphs change no text: one table of targets, drafts and options.

A few cases hold every value of every axis, the pairwise table every two values of two axes, and the slow
sweep every target with every draft, text, policy and kind of graphs.
"""

import itertools
import random

import pytest
from conformance import AXES, DEFAULTS, DIAGONAL, PAIRWISE, Conformance, name_of
from pairwise import pairs_of

OTHERS = ("shape", "page_size", "batch", "lag", "prefill_tokens", "prefix_cache", "pool")
"""Axes whose values are drawn in the sweep."""
NOTHING_ACCEPTED = "nothing was accepted, so nothing was tested"


@pytest.fixture(scope="module")
def conformance(tmp_path_factory):
    return Conformance(tmp_path_factory.mktemp)


def test_the_table_holds_every_pair_and_its_diagonal_every_value():
    found = set().union(*map(pairs_of, PAIRWISE))
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            assert (one, first, other, second) in found
    for name, values in AXES.items():
        assert {case[name] for case in DIAGONAL} == set(values)


@pytest.mark.essential
@pytest.mark.parametrize("case", DIAGONAL, ids=name_of)
def test_every_value_leaves_the_text_as_it_is(conformance, case):
    assert conformance.check(case) > 0 or case["draft"] == "none", NOTHING_ACCEPTED


@pytest.mark.parametrize("case", [each for each in PAIRWISE if each not in DIAGONAL], ids=name_of)
def test_every_two_values_leave_the_text_as_it_is(conformance, case):
    assert conformance.check(case) > 0 or case["draft"] == "none", NOTHING_ACCEPTED


@pytest.mark.nightly
@pytest.mark.parametrize("text", AXES["text"])
@pytest.mark.parametrize("draft", AXES["draft"])
@pytest.mark.parametrize("target", AXES["target"])
def test_every_combination_leaves_the_text_as_it_is(conformance, target, draft, text):
    """Every policy with every kind of graphs; other options are drawn."""
    rng = random.Random(f"{target}, {draft}, {text}")
    num_accepted = 0
    for policy, graphs in itertools.product(AXES["policy"], AXES["graphs"]):
        case = DEFAULTS | {"target": target, "draft": draft, "text": text, "policy": policy, "graphs": graphs}
        for name in OTHERS:
            case[name] = rng.choice(AXES[name])
        num_accepted += conformance.check(case)
    assert num_accepted > 0 or draft == "none", NOTHING_ACCEPTED
