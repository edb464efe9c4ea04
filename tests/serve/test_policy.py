"""Shapes that change from cycle to cycle change no text; what is learnt from cycles goes to the policy."""

import pytest
from restless import Restless
from tiny_engine import PROMPTS, decode, make_engine, serve

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.serve.request import Request
from eagle_kit.tuning.acceptance import AcceptanceTable
from eagle_kit.tuning.policy import ShapePolicy

SHAPES = tuple(map(SpecShape.parse, ("1,1,2", "4,1,5", "3,2,6", "5,4,16")))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 3])
def test_shapes_that_change_every_cycle_change_no_text(models, batch, params, lag):
    plain = [request.token_ids for request in decode(models, max_tokens=80, **params)]
    engine = make_engine(models, batch, lag=lag)
    policy = Restless(0, SHAPES)
    engine.use_shape(policy)
    requests = [
        Request(i, list(prompt), SamplingParams(max_tokens=80, **params)) for i, prompt in enumerate(PROMPTS)
    ]
    serve(engine, requests)
    assert [request.token_ids for request in requests] == plain
    assert len(policy.used) == 1 + len(SHAPES)
    assert engine.totals.spec.num_accepted_at[0] > 0
    assert set(engine.totals.shapes) == {NO_SPECULATION, *SHAPES}
    drafting = [count for request in requests for shape, count in request.shapes.items() if shape.steps]
    assert sum(drafting) == engine.totals.spec.num_verifies == engine.totals.num_drafts


@pytest.mark.parametrize("drafts", [{}, {"sampled_drafts": True}], ids=["deterministic", "sampled"])
def test_the_draft_says_how_sure_it_is_of_its_next_token(models, drafts):
    engine, chain, seen = make_engine(models, 2, **drafts), SpecShape(2, 1, 3), []
    policy = ShapePolicy(lambda *_: 1.0, AcceptanceTable.even([chain]), {1: [chain]})
    policy.choose = lambda eases, context: chain
    policy.see = lambda ease, probability: seen.append(probability)
    engine.use_shape(policy)
    serve(engine, [Request(i, list(p), SamplingParams(max_tokens=20)) for i, p in enumerate(PROMPTS)])
    assert seen
    assert all(0 < probability <= 1 for probability in seen)
    assert len(set(seen)) > 5
