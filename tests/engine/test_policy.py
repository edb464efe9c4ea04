"""Shapes that change from cycle to cycle change no text; what is learnt from cycles goes to the policy."""

import itertools

import pytest
from restless import Restless
from sweep import sweep
from tiny_engine import PROMPTS, decode, make_engine, serve

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.autoregressive import AutoregressiveDrafter
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.memory.engine_memory import plan_memory
from eagle_kit.engine.request import Request

SAMPLING = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 3}}
SHAPES = tuple(map(SpecShape.parse, ("1,1,2", "4,1,5", "3,2,6", "5,4,16")))


@pytest.fixture(scope="module")
def plain(models):
    """Responses of plain decoding by the name of their sampling."""
    return {
        name: [request.token_ids for request in decode(models, max_tokens=40, **params)]
        for name, params in SAMPLING.items()
    }


@pytest.mark.parametrize(
    ("batch", "sampling", "lag"),
    sweep(
        itertools.product((1, 3), SAMPLING, (0, 1)),
        fast=[(1, "seeded", 0), (3, "greedy", 1), (3, "seeded", 1)],
    ),
)
def test_shapes_that_change_every_cycle_change_no_text(models, plain, batch, sampling, lag):
    params = SamplingParams(max_tokens=40, **SAMPLING[sampling])
    engine = make_engine(models, batch, lag=lag)
    policy = Restless(0, SHAPES)
    engine.use_shape(policy)
    requests = [Request(i, list(prompt), params) for i, prompt in enumerate(PROMPTS)]
    serve(engine, requests)
    assert [request.token_ids for request in requests] == plain[sampling]
    assert len(policy.used) == 1 + len(SHAPES)
    assert engine.totals.spec.num_accepted_at[0] > 0
    assert set(engine.totals.shapes) == {NO_SPECULATION, *SHAPES}
    drafting = [count for request in requests for shape, count in request.stats.shapes.items() if shape.steps]
    assert sum(drafting) == engine.totals.spec.num_verifies == engine.totals.num_drafts


class Late(Restless):
    """Plain decoding for some cycles, then a chain."""

    def __init__(self, num_plain):
        super().__init__(0, SHAPES)
        self.num_plain, self.chain = num_plain, next(shape for shape in SHAPES if shape.topk == 1)

    def choose(self, requests, context):
        self.num_plain -= 1
        return NO_SPECULATION if self.num_plain >= 0 else self.chain


@pytest.mark.parametrize(
    ("num_plain", "batch"),
    sweep(
        itertools.product((1, 63, 64, 65, 100, 150), (1, 3)),
        fast=[(1, 1), (64, 1), (65, 1), (150, 1), (63, 3), (65, 3), (100, 3)],
    ),
)
def test_a_draft_that_has_waited_accepts_what_it_would_behind_a_prompt(models, batch, num_plain):
    """What it pending fills a window of the scratch, and is read in several where it is more. The batch is
    full, so that a row too many would be another request's, or nobody's."""
    prompts = [list(prompt) for prompt in PROMPTS[:batch]]

    def serve_with(policy, prompts, max_tokens):
        engine = make_engine(models, batch, max_context=512)
        engine.use_shape(policy)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
        serve(engine, requests)
        return requests

    late = serve_with(Late(num_plain), prompts, num_plain + 41)
    known = [prompt + request.token_ids[:num_plain] for prompt, request in zip(prompts, late, strict=True)]
    soon = serve_with(Late(0), known, 41)
    assert [request.token_ids[num_plain:] for request in late] == [request.token_ids for request in soon]
    if batch == 1:  # others join some cycles later, and wait for fewer
        assert [request.stats.spec for request in late] == [request.stats.spec for request in soon]
    accepted = [
        sum(sum(request.stats.spec.num_accepted_at) for request in requests)
        / sum(request.stats.spec.num_verifies for request in requests)
        for requests in (late, soon)
    ]
    assert accepted[0] == pytest.approx(accepted[1], abs=0.05)
    assert num_plain > 65 or accepted[1] > 0.05, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("most", sweep([16, 40, 100, 512], fast=[16, 100]))
def test_a_batch_that_catches_up_computes_no_more_rows_than_memory_is_planned_for(models, most, monkeypatch):
    engines = [make_engine(models, 4, max_context=512, prefill_tokens=tokens) for tokens in (512, most)]
    params, responses, rows = SamplingParams(max_tokens=60, ignore_eos=True), [], []
    extend = AutoregressiveDrafter.extend

    def watched(self, state, pending, *args):
        rows.append(pending.tokens.numel())
        return extend(self, state, pending, *args)

    monkeypatch.setattr(AutoregressiveDrafter, "extend", watched)
    for engine in engines:
        rows.clear()
        engine.use_shape(Late(36))
        requests = [Request(i, [*PROMPTS[i]][:9], params) for i in range(4)]
        serve(engine, requests)
        responses.append([(request.token_ids, request.stats.spec) for request in requests])
    assert responses[0][0] == responses[1][0]
    assert 32 <= max(rows) <= max(most, 36), "at most one request's where it alone is more"


def test_only_shapes_that_wait_keep_what_the_draft_misses(models):
    engine = make_engine(models, 2)
    engine.use_shape(SHAPES[1])
    assert engine.runner.slots.pending is None
    engine.use_shape(Restless(0, SHAPES[1:2]))
    assert engine.runner.slots.pending is not None
    without = make_engine((models[0], None), 2)
    assert without.runner.slots.pending is None


def test_slots_of_other_shapes_keep_what_is_missed_in_one_place(models):
    engine, plain = make_engine(models, 1), decode(models, prompts=PROMPTS[:1], max_tokens=30)[0].token_ids
    kept = set()
    for shapes in (SHAPES[:1], SHAPES, SHAPES[:2]):
        engine.use_shape(Late(5))
        engine.use_shape(Restless(0, shapes))
        request = Request(0, list(PROMPTS[0]), SamplingParams(max_tokens=30))
        serve(engine, [request])
        assert request.token_ids == plain
        kept.add(id(engine.runner.slots.pending.hidden_states))
    assert len(engine.runner._slots) > 2 and len(kept) == 1


def test_memory_is_planned_for_what_a_draft_misses_where_it_may_miss_something(models):
    target, head = models
    draft = load_draft_model(head, target)

    def scratch(shape, chooses_shapes=False):
        config = EngineConfig(max_batch_size=3, max_context=64, shape=shape)
        config = config.resolve(on_gpu=False, max_positions=4096)
        return plan_memory(target, draft, config, chooses_shapes=chooses_shapes).scratch

    alone = scratch("4,1,5")
    assert scratch("none") == alone
    assert (
        scratch("4,1,5", chooses_shapes=True)
        == scratch("4,1,5 2:none")
        == alone + 4 * 64 * 3 * 4 * (target.config.hidden_size)
    )


@pytest.mark.parametrize("drafts", [{}, {"sampled_drafts": True}], ids=["deterministic", "sampled"])
def test_the_draft_says_how_sure_it_is_of_its_next_token(models, drafts):
    engine = make_engine(models, 2, **drafts)
    chain = SpecShape(2, 1, 3)
    seen = []
    policy = ShapePolicy({1: [chain]}, chain)
    policy.observe_confidence = lambda request, probability: seen.append(probability)
    engine.use_shape(policy)
    requests = [Request(i, list(p), SamplingParams(max_tokens=20)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    assert seen
    assert all(0 < probability <= 1 for probability in seen)
    assert len(set(seen)) > 5


class Once(ShapePolicy):
    """A chain in the first cycle of a request, then plain decoding."""

    def __init__(self):
        self.chain = SpecShape(1, 1, 2)
        super().__init__({1: [NO_SPECULATION, self.chain]})
        self.seen = []
        self.given = []
        self.observed = []

    def choose(self, requests, context):
        (request,) = requests
        is_first = request not in self.given
        self.given.append(request)
        return self.chain if is_first else NO_SPECULATION

    def observe_confidence(self, request, confidence):
        self.seen.append((request, confidence))
        request.confidence_class = None if confidence is None else 0

    def observe(self, request, shape, num_accepted, num_depths=None):
        self.observed.append((request, shape))


@pytest.mark.parametrize("lag", [0, 1])
def test_policies_learn_from_drafting_cycles_and_hear_where_the_confidence_is_unknown(models, lag):
    policy, engine = Once(), make_engine(models, 1, lag=lag)
    engine.use_shape(policy)
    requests = [
        Request(i, list(p), SamplingParams(max_tokens=12, ignore_eos=True)) for i, p in enumerate(PROMPTS)
    ]
    serve(engine, requests)
    everyone = list(dict.fromkeys(policy.given))
    assert len(everyone) == len(PROMPTS)
    assert policy.observed == [(request, policy.chain) for request in everyone]
    for request in everyone:
        confidences = [confidence for who, confidence in policy.seen if who is request]
        assert len(confidences) == (0 if lag else 2) and confidences[1:] == ([] if lag else [None])
