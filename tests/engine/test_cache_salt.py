"""Requests with different cache salts: the same responses, and no page and no n-gram of one another."""

import pytest
from tiny import tiny_target
from tiny_engine import decode, make_engine, serve

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request

PROMPT = [(3 * i * i) % 11 for i in range(33)]
SALTS = [None, "a", "b", "a", None, "b", "c"]
IS_REPEATED = [False, False, False, True, True, True, False]


@pytest.mark.parametrize(("page_size", "shape", "lag"), [(1, "5,4,16", 0), (4, None, 1)])
def test_pages_are_shared_with_the_same_salt_only(models, page_size, shape, lag):
    (alone,) = decode(models, shape, prompts=[PROMPT], max_tokens=12)
    engine = make_engine(models, batch=2, page_size=page_size, max_context=128, lag=lag)
    engine.use_shape(SpecShape.parse(shape))
    cached = []
    for number, salt in enumerate(SALTS):
        request = Request(number, list(PROMPT), SamplingParams(max_tokens=12, cache_salt=salt))
        serve(engine, [request])
        assert request.token_ids == alone.token_ids
        cached.append(request.stats.num_cached_tokens)
    assert cached == [32 * is_repeated for is_repeated in IS_REPEATED]


def test_a_preempted_request_finds_its_own_pages_again_and_nobody_else_s(models):
    """Eight requests of one prompt and two salts, in a pool that does not hold their responses."""
    (alone,) = decode(models, prompts=[PROMPT], max_tokens=60)
    engine = make_engine(models, batch=8, page_size=4, max_context=128, kv_tokens=400)
    requests = []
    for number in range(8):
        params = SamplingParams(max_tokens=60, cache_salt="ab"[number % 2])
        requests.append(Request(number, list(PROMPT), params))
    serve(engine, requests)
    assert engine.totals.num_preemptions > 0
    assert [request.token_ids for request in requests] == [alone.token_ids] * 8
    late = Request(9, list(PROMPT), SamplingParams(max_tokens=1, cache_salt="c"))
    serve(engine, [late])
    assert late.stats.num_cached_tokens == 0


def test_n_grams_are_shared_with_the_same_salt_only():
    llm = LLM(tiny_target(), algorithm="NGRAM", max_context=128, page_size=4, shape="8,4,12")
    prompt = list(range(1, 9))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    accepted = []
    responses = []
    for salt in SALTS:
        given = SamplingParams(max_tokens=24, ignore_eos=True, cache_salt=salt)
        (output,) = llm.generate([prompt], given)
        accepted.append(output.stats.accept_length)
        responses.append(output.token_ids)
    (plain,) = LLM(tiny_target(), max_context=128).generate([prompt], params)
    assert responses == [plain.token_ids] * len(SALTS)
    first = accepted[0]
    for value, is_repeated in zip(accepted, IS_REPEATED, strict=True):
        assert value > first + 1 if is_repeated else value == first
