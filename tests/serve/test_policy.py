"""Shapes that change from cycle to cycle change no text; what is learnt from cycles goes to the policy."""

import random

import pytest
from tiny_engine import PROMPTS, decode, make_engine, serve

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.serve.request import Request
from eagle_kit.tuning.acceptance import Acceptance
from eagle_kit.tuning.policy import ShapePolicy

SHAPES = tuple(map(SpecShape.parse, ("1,1,2", "4,1,5", "3,2,6", "5,4,16")))


class Restless(ShapePolicy):
    """Chooses by chance, plain decoding for a while now and then."""

    def __init__(self, seed):
        reach = {shape: Acceptance(1.0, (0.5,) * shape.steps) for shape in SHAPES}
        super().__init__(lambda batch_size, shape, context: 1.0, reach)
        self.rng, self.plain, self.used = random.Random(seed), 0, set()

    def choose(self, eases, context):
        if self.plain:
            self.plain -= 1
            return NO_SPECULATION
        if self.rng.random() < 0.1:
            self.plain = self.rng.randrange(50)
        shape = self.rng.choice(self.shapes)
        self.used.add(shape)
        return shape


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 3])
def test_shapes_that_change_every_cycle_change_no_text(models, batch, params, lag):
    plain = [request.token_ids for request in decode(models, max_tokens=80, **params)]
    engine = make_engine(models, batch, lag=lag)
    policy = Restless(0)
    engine.use_shape(policy)
    requests = [
        Request(i, list(prompt), SamplingParams(max_tokens=80, **params)) for i, prompt in enumerate(PROMPTS)
    ]
    serve(engine, requests)
    assert [request.token_ids for request in requests] == plain
    assert len(policy.used) == 1 + len(SHAPES)
    assert engine.totals.spec.num_accepted_at[0] > 0
