"""Serving targets with recurrent layers: states follow their requests, whatever happens to these.

More options, with every kind of draft, are in `test_conformance`.
"""

import itertools

import pytest
import torch
from sweep import sweep
from tiny import tiny_head, tiny_hybrid, tiny_target
from tiny_engine import PROMPTS, make_engine, resolved, serve

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory import engine_memory as memory
from eagle_kit.engine.memory.engine_memory import plan_memory
from eagle_kit.engine.request import Request

SHAPES = ["none", "4,1,5", "5,4,16"]
OPTIONS = {
    "fewer slots": {"batch": 2},
    "recorded": {"graph_mode": "cycle"},
    "no snapshots": {"state_snapshots": 0},
    "one snapshot, a small pool": {"state_snapshots": 1, "kv_tokens": 180, "max_context": 100},
    "parts, a small pool": {"kv_tokens": 180, "max_context": 100, "prefill_tokens": 7},
}


@pytest.fixture(scope="module")
def models():
    target = tiny_hybrid(vocab_size=11)
    return target, tiny_head(target, draft_vocab_size=9)


def greedy(target, prompt, count):
    """Continuation by whole forwards."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            out = target(torch.tensor(ids), torch.arange(len(ids)), target.causal())
            ids.append(int(target.logits(out.hidden[-1:])[0].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def wanted(models):
    return [greedy(models[0], prompt, 40) for prompt in PROMPTS]


def requests_of(prompts, first=0, max_tokens=40):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(first + i, list(prompt), params) for i, prompt in enumerate(prompts)]


def engine_of(models, shape, batch=5, **options):
    engine = make_engine(models, batch, **{"page_size": 4, **options})
    engine.use_shape(SpecShape.parse(shape))
    return engine


@pytest.mark.parametrize(
    ("name", "shape"),
    sweep(
        itertools.product(OPTIONS, SHAPES),
        fast=[
            ("fewer slots", "none"),
            ("recorded", "4,1,5"),
            ("no snapshots", "5,4,16"),
            ("one snapshot, a small pool", "4,1,5"),
            ("parts, a small pool", "5,4,16"),
        ],
    ),
)
def test_responses_are_those_of_whole_forwards(models, wanted, name, shape):
    options = OPTIONS[name]
    engine = engine_of(models, shape, **options)
    for first in (0, 10):  # the second time with whatever the first has left
        requests = requests_of(PROMPTS, first, max_tokens=25)
        serve(engine, requests)
        assert [request.token_ids for request in requests] == [response[:25] for response in wanted]
    if "kv_tokens" in options:
        assert engine.totals.num_preemptions
    if name == "recorded":
        assert engine.num_graphs > 0


@pytest.mark.parametrize("shape", sweep(SHAPES, fast=["none", "5,4,16"]))
def test_a_prompt_is_computed_from_its_snapshot(models, wanted, shape):
    engine = engine_of(models, shape, batch=1)
    longest = len(PROMPTS) - 1
    for number in range(3):
        (request,) = requests_of(PROMPTS[longest:], number)
        serve(engine, [request])
        assert request.token_ids == wanted[longest]
        cached = (len(PROMPTS[longest]) - 1) // 4 * 4 if number else 0
        assert request.stats.num_cached_tokens == cached


@pytest.mark.parametrize("shape", sweep(SHAPES, fast=["none", "5,4,16"]))
def test_a_beginning_that_prompts_share_is_cached_from_the_third_on(models, shape):
    """The second finds its pages, but no state, and leaves one where it goes its own way."""
    engine = engine_of(models, shape, batch=1)
    shared = [(3 * i + i * i) % 11 for i in range(37)]
    for number in range(5):
        prompt = shared + [number, number + 1, 5, 3, number]
        (request,) = requests_of([prompt], number, max_tokens=12)
        serve(engine, [request])
        assert request.token_ids == greedy(models[0], prompt, 12)
        assert request.stats.num_cached_tokens == (36 if number > 1 else 0)


def test_a_conversation_goes_on_from_its_last_prompt(models):
    engine = engine_of(models, "4,1,5", batch=1)
    (first,) = requests_of([PROMPTS[3]])
    serve(engine, [first])
    prompt = PROMPTS[3] + first.token_ids + [1, 2, 3]
    (second,) = requests_of([prompt], 1, max_tokens=10)
    serve(engine, [second])
    assert second.token_ids == greedy(models[0], prompt, 10)
    assert second.stats.num_cached_tokens == (len(PROMPTS[3]) - 1) // 4 * 4


def test_conversations_that_take_turns_keep_a_snapshot_each(models):
    """One to spare is enough: a turn's takes the place of that of the turn before."""
    engine = engine_of(models, "none", batch=1, max_context=512, state_snapshots=4)
    conversations = [[(number + 3 * i) % 11 for i in range(9 + number)] for number in range(3)]
    kept = [0] * 3
    for turn in range(4):
        for number, tokens in enumerate(conversations):
            (request,) = requests_of([tokens], 10 * turn + number, max_tokens=6)
            serve(engine, [request])
            assert request.token_ids == greedy(models[0], tokens, 6)
            assert request.stats.num_cached_tokens == kept[number]
            kept[number] = (len(tokens) - 1) // 4 * 4
            tokens += [*request.token_ids, 1, 2, 3]


def test_an_aborted_request_leaves_nothing_to_the_next(models, wanted):
    engine = engine_of(models, "4,1,5", batch=1, lag=1)
    for number, prompt in enumerate(PROMPTS):
        (request,) = requests_of([prompt[::-1]], 100 + number)
        engine.add_request(request)
        for _ in range(number):
            engine.step()
        engine.abort(request)
        (after,) = requests_of([prompt], number)
        serve(engine, [after])
        assert after.token_ids == wanted[number]


def test_a_long_prompt_that_gives_way_keeps_what_it_has_computed(models):
    engine = engine_of(models, "none", batch=1, max_context=512, mixed_prefill_tokens=12, prefill_tokens=48)
    engine.scheduler.reading_cost = engine.scheduler.weights_cost = 0.0
    long = [(3 * i + i * i) % 11 for i in range(400)]
    (request,) = requests_of([long], max_tokens=4)
    engine.add_request(request)
    for number in range(12):
        for _ in range(3):
            engine.step()
        engine.check()
        (short,) = requests_of([[number % 11, 3]], 1 + number, max_tokens=1)
        engine.add_request(short)
    while engine.has_work:
        engine.step()
        engine.check()
    assert request.stats.num_preemptions > 1
    assert request.token_ids == greedy(models[0], long, 4)


@pytest.mark.parametrize("snapshots", [None, 0])
def test_many_that_wait_do_not_have_everything_computed_again_and_again(models, snapshots):
    """More conversations wait than there are snapshots."""
    engine = engine_of(models, "none", batch=2, max_context=512, state_snapshots=snapshots)
    engine.scheduler.reading_cost = engine.scheduler.weights_cost = 0.0
    computed, prefill = [], engine.runner.prefill

    def counting(chunks):
        computed.append(sum(chunk.stop - chunk.start for chunk in chunks))
        return prefill(chunks)

    engine.runner.prefill = counting
    prompts = [[(3 * i + i * i + number) % 11 for i in range(200)] for number in range(10)]
    requests = requests_of(prompts, max_tokens=100)
    serve(engine, requests)
    assert sum(computed) < 2 * sum(len(prompt) for prompt in prompts)


def test_the_memory_plan_counts_states(models):
    target, _ = models
    config = resolved(4, 128, kv_tokens=600)
    plan = plan_memory(target, None, config)
    one = 3 * (4 * 4 * 8 * 6 + 3 * (2 * 16 + 24) * 4)
    assert plan.states == one * (4 + 1 + 16) and "states with 16 snapshots" in str(plan)
    fewer = plan_memory(target, None, resolved(4, 128, kv_tokens=600, state_snapshots=3))
    assert fewer.states == one * 8
    assert plan_memory(target, None, resolved(4, 128, kv_tokens=600, prefix_cache=False)).states == one * 5


def test_snapshots_take_no_more_than_a_part_of_what_is_free(models, monkeypatch):
    target, _ = models
    one = 3 * (4 * 4 * 8 * 6 + 3 * (2 * 16 + 24) * 4)
    needed = plan_memory(target, None, resolved(4, 128, prefix_cache=False))
    fixed = needed.scratch + needed.logits + needed.activations + needed.states

    def free(count):
        monkeypatch.setattr(memory, "free_memory", lambda device: 2 * (fixed + count))

    free(4 * 6 * one)
    plan = plan_memory(target, None, resolved(4, 128))
    assert plan.state_snapshots == 6 and plan.states == one * (5 + 6)
    assert plan.pool <= 3 * 6 * one
    free(4 * 6 * one)
    per_token = plan.bytes_per_token
    given = (fixed + 2 * 4 * 6 * one) // per_token  # of 2 * (fixed + 4 * 6 * one) that are free
    assert plan_memory(target, None, resolved(4, 128, kv_tokens=given)).state_snapshots == 0
    assert plan_memory(
        target, None, resolved(4, 128, kv_tokens=given - 2 * one // per_token - 1)
    ).state_snapshots
    free(4)
    with pytest.raises(UserError, match="for states of recurrent layers"):
        plan_memory(target, None, resolved(4, 128))
    free(4 * one)
    with pytest.raises(UserError, match="or state_snapshots"):
        plan_memory(target, None, resolved(4, 128, state_snapshots=30))


def test_snapshots_of_a_target_without_states_are_refused():
    with pytest.raises(UserError, match="no recurrent layers"):
        LLM(tiny_target(), state_snapshots=3)


def test_a_negative_number_of_snapshots_is_refused():
    with pytest.raises((UserError, ValueError), match="state_snapshots"):
        resolved(4, 128, state_snapshots=-1)
