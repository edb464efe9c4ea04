"""A target whose weights hold NaN for one token: the requests that hold it end with an error, alone."""

import math

import pytest
import torch
from conformance import untrained_head
from crossed import crossed
from restless import Restless
from tiny import tiny_head, tiny_target
from tiny_engine import make_engine

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.graphs.cpu_graph import CpuGraphs
from eagle_kit.engine.request import Request
from eagle_kit.ops.accept import is_finite
from eagle_kit.ops.backend import use

BAD = 100
GOOD = [[3, 4, 5, 6], [9, 8, 7], [1] * 9]


def models(value: float = math.nan):
    """A target that never emits ``BAD`` of itself, whose embedding is ``value`` there, and its head."""
    target = tiny_target(tie_word_embeddings=False)
    with torch.no_grad():
        target.embed_tokens.weight[BAD] = value
    return target, tiny_head(target)


def serve(engine, prompts, params):
    requests = [Request(i, list(p), params) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return requests


def responses(engine, prompts, params):
    return [request.token_ids for request in serve(engine, prompts, params)]


def engine_of(pair, shape, **options):
    engine = make_engine(pair, batch=4, page_size=4, **options)
    engine.use_shape(SpecShape.parse(shape))
    return engine


@pytest.mark.parametrize("lag", [0, 1])
@crossed(("shape", [None, "3,1,4", "3,2,6"]), ("temperature", [0.0, 0.8]))
def test_the_request_ends_alone(shape, temperature, lag):
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)
    pair = models()
    expected = responses(engine_of(pair, shape, lag=lag), GOOD, params)
    engine = engine_of(pair, shape, lag=lag)
    bad = [5, BAD, *range(20, 30)]
    requests = serve(engine, [GOOD[0], bad, *GOOD[1:]], params)
    ended = requests.pop(1)
    assert ended.finish_reason == "error" and ended.token_ids == []
    assert [request.token_ids for request in requests] == expected
    assert {request.finish_reason for request in requests} == {"length"}
    assert engine.totals.num_finished == {"error": 1, "length": 3}
    assert engine.page_pool.match(bad) == [], "no page that led to NaN is cached"
    assert engine.page_pool.match(GOOD[2]), "those of the others are"
    assert responses(engine, GOOD, params) == expected, "pages and slots that held NaN are used again"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [None, "3,1,4", "3,2,6"])
def test_a_response_ends_before_the_token_whose_logits_are_not_finite(shape, value):
    """``logit_bias`` makes the target emit the token; its own logits come a cycle later."""
    params = SamplingParams(max_tokens=12, logit_bias={BAD: 1e9}, ignore_eos=True)
    engine = engine_of(models(value), shape)
    (request,) = serve(engine, [[3, 4, 5, 6]], params)
    assert request.finish_reason == "error" and request.token_ids == [BAD]
    assert engine.page_pool.match([3, 4, 5, 6, BAD]), "the page before it is cached"


def test_recordings_carry_the_flag():
    """A request that turns bad after the cycle was recorded."""
    pair = models()
    engine = make_engine(pair, batch=4, page_size=4)
    engine.runner.graphs = CpuGraphs(2)
    engine.use_shape(SpecShape.parse("3,1,4"))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
    expected = responses(engine_of(pair, "3,1,4"), GOOD[:2], params)
    assert responses(engine, GOOD[:2], params) == expected and engine.runner.graphs.num_graphs
    with torch.no_grad():
        poison = int(expected[0][5])
        pair[0].embed_tokens.weight[poison] = math.nan
    first, second = serve(engine, [GOOD[0], GOOD[1]], params)
    assert first.finish_reason == "error"
    assert first.token_ids == expected[0][: len(first.token_ids)] and len(first.token_ids) <= 6
    assert poison in expected[1] or second.token_ids == expected[1]


def test_a_request_aborted_before_its_logits_are_seen_is_not_cached():
    engine = engine_of(models(), None, lag=1)
    prompt = [5, 6, 7, BAD, *range(20, 30)]
    request = Request(0, prompt, SamplingParams(max_tokens=5))
    engine.add_request(request)
    engine.step()
    engine.abort(request)
    while engine.has_work:
        engine.step()
    assert engine.page_pool.match(prompt) == []


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_that_is_preempted_in_the_middle_is_cached_where_it_is_finite(lag, bad):
    """Of 40 tokens, computed 8 at a time, the 10th may be bad."""
    engine = engine_of(models(), None, lag=lag, prefill_tokens=8)
    engine.scheduler.attention_cost = 0.0  # so that every step computes 8
    prompt = list(range(40))
    prompt[9] = BAD if bad else 9
    request = Request(0, prompt, SamplingParams(max_tokens=2))
    engine.add_request(request)
    for _ in range(3):
        engine.step()
    cached = 8 if bad else 24 - 8 * lag
    assert request.finish_reason == ("error" if bad else None)
    if not bad:
        engine.scheduler.send_back(request)
    assert len(engine.page_pool.match(prompt)) * 4 == cached
    while engine.has_work:
        engine.step()
        engine.check()
    assert request.finish_reason == ("error" if bad else "length")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [256, pytest.param(250, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", [None, "2,1,3"])
def test_the_request_ends_alone_by_the_kernels_of_a_gpu(triton_device, vocab, shape):
    """A row of NaN gives a token of the vocabulary, also where its last chunk of 256 is full: the next kernel
    reads the token's embedding."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    target = tiny_target(vocab, num_layers=1, tie_word_embeddings=False).to(triton_device)
    pair = target, None if shape is None else tiny_head(target).to(triton_device)
    prompts = [[3, 4], [5, 20]]
    with use("triton"):
        expected = responses(engine_of(pair, shape), prompts, params)
        poison = expected[1][1]
        assert poison not in expected[0]
        with torch.no_grad():
            target.embed_tokens.weight[poison] = math.nan
        good, bad = serve(engine_of(pair, shape), prompts, params)
    assert bad.finish_reason == "error" and bad.token_ids == expected[1][:2]
    assert good.finish_reason == "length" and good.token_ids == expected[0]


def test_finite_rows():
    nan, inf = math.nan, math.inf
    rows = [[0.0, 1.0], [0.0, -inf], [-inf, -inf], [inf, 0.0], [nan, 0.0], [-inf, nan]]
    assert is_finite(torch.tensor(rows)).tolist() == [True, True, False, False, False, False]


def test_the_request_ends_alone_where_windows_are_packed():
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    pair, shapes = models(), tuple(map(SpecShape.parse, ("3,1,4", "3,2,6")))
    expected = responses(engine_of(pair, None), GOOD, params)
    for seed in range(4):
        engine = make_engine(pair, batch=4, page_size=4)
        engine.use_shape(Restless(seed, shapes, most_plain=2))
        requests = serve(engine, [GOOD[0], [5, BAD, 20, 21], *GOOD[1:]], params)
        ended = requests.pop(1)
        assert ended.finish_reason == "error" and ended.token_ids == []
        assert [request.token_ids for request in requests] == expected


HEADS = ("eagle3", "eagle1", "p-eagle", "dflash", "dspark", "one module", "three modules")


@pytest.mark.parametrize("kind", HEADS)
def test_a_draft_that_is_not_finite_changes_no_greedy_token(kind):
    """Chains, trees and sampled chains of a head all of whose weights are NaN, beside plain decoding."""
    target = tiny_target(vocab_size=11)
    head = untrained_head(kind, target)
    with torch.no_grad():
        for weight in head.parameters():
            weight.fill_(math.nan)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = responses(engine_of((target, None), None), GOOD[:2], params)
    modes = [("2,1,3", {}), ("2,3,6", {})]
    if "module" not in kind or kind == "one module":
        modes.append(("2,1,3", {"sampled_drafts": True}))
    for shape, options in modes:
        found = serve(engine_of((target, head), shape, **options), GOOD[:2], params)
        assert [request.token_ids for request in found] == expected
        assert {request.finish_reason for request in found} == {"length"}
