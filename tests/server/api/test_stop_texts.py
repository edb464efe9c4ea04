"""Stop texts that are found beside the engine end a response at the same token, with the same counts, as
those that are looked for in every step."""

import asyncio
import random
import time
from collections import Counter

import pytest
from tiny import tiny_head

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.server.async_engine import AsyncEngine
from eagle_kit.server.response_stream import Delta, EngineFailed

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def models(target_folder):
    plain = LLM(str(target_folder), max_context=128)
    return plain.target, tiny_head(plain.target, draft_vocab_size=67), plain.tokenizer


def make(models, lag, **options):
    target, head, tokenizer = models
    sizes = {"max_batch_size": 6, "max_context": 128, "page_size": 4, "kv_tokens": 1200, **options}
    return LLM(target, head, tokenizer=tokenizer, shape="3,1,4", lag=lag, prefix_cache=False, **sizes)


@pytest.fixture(scope="module")
def expected(models):
    """Prompts and parameters, and what lag 0 responses: half of them end at a stop text, at the last token,
    the first, or in between, some at one that only the end of the response completes."""
    rng, llm = random.Random(5), make(models, 0)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randrange(2, 12))] for _ in range(NUM_REQUESTS)]
    kinds = [
        {"max_tokens": 40, "ignore_eos": i % 2 == 0, "temperature": 0.9, "seed": i}
        for i in range(NUM_REQUESTS)
    ]
    plain, params = llm.generate(prompts, [SamplingParams(**kind) for kind in kinds]), []
    for i, output in enumerate(plain):
        at = [0, rng.randrange(len(output.text) + 1), max(len(output.text) - 3, 0)][i % 3]
        stop = ((i % 4 and output.text[at : at + 3]) or "never to be found",)
        logprobs = 2 if i % 5 == 0 else None
        params.append(SamplingParams(**kinds[i], stop=stop, logprobs=logprobs))
    outputs = llm.generate(prompts, params)
    assert Counter(output.finish_reason for output in outputs)["stop"] >= NUM_REQUESTS // 2
    assert len({len(output.token_ids) for output in outputs}) > 8
    for i, output in enumerate(outputs):
        assert len(output.logprobs) == (0 if i % 5 else len(output.token_ids))
    counted = make(models, 0)
    counted.generate(prompts, params)
    return prompts, params, outputs, counted.engine().totals


def facts(output):
    """What a user sees; alternatives by their tokens, as their values may differ in the last bit."""
    logprobs = [[token for token, _ in each.top] for each in output.logprobs]
    return output.token_ids, output.text, output.finish_reason, output.stats, output.shapes, logprobs


def counters(totals):
    """Those of a run that do not depend on its steps."""
    return totals.num_generated_tokens, totals.num_draft_tokens, totals.spec, totals.num_finished


def test_a_call_a_step_behind_responses_the_same(models, expected):
    prompts, params, outputs, totals = expected
    llm = make(models, 1)
    assert [facts(each) for each in llm.generate(prompts, params)] == [facts(each) for each in outputs]
    assert counters(llm.engine().totals) == counters(totals)
    llm.engine().check()
    assert llm.engine().kv_usage == 0.0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_server_responses_the_same(models, expected, lag):
    prompts, params, outputs, totals = expected
    llm = make(models, lag)
    engine = llm.engine()
    observed = Counter()
    waited = Counter()
    begun = time.perf_counter()

    class Observer:
        def emitted(self, request, num_tokens, seconds, first):
            observed[request.number] += num_tokens
            waited[request.number] += seconds
            assert seconds >= 0.0 and first == (observed[request.number] == num_tokens)

        def finished(self, request):
            observed["finished"] += 1

    async def read(served, request):
        deltas = [delta async for delta in served.stream(request)]
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        whole = Delta()
        for delta in deltas:
            whole.add(delta)
        assert (whole.text, whole.token_ids) == (request.stream.text, request.token_ids)
        assert whole.logprobs == request.response.logprobs and whole.finish_reason == request.finish_reason
        assert observed[request.number] == len(request.token_ids)

    async def main():
        served = AsyncEngine(engine, capacity=100, observer=Observer())
        served.start()
        requests = [llm.make_request(*pair) for pair in zip(prompts, params, strict=True)]
        for request in requests:
            request.arrived_at = begun - 1000.0  # as if its body had taken that long
        async with asyncio.timeout(120):
            await asyncio.gather(*(read(served, request) for request in requests))
            await served.shutdown()
        return [request.output() for request in requests]

    found = asyncio.run(main())
    assert [facts(each) for each in found] == [facts(each) for each in outputs]
    assert observed["finished"] == NUM_REQUESTS
    elapsed = time.perf_counter() - begun
    assert all(1000.0 <= seconds <= 1000.0 + elapsed for seconds in waited.values()), (
        "each moment counts once"
    )
    assert counters(engine.totals) == counters(totals)
    engine.check()


def test_an_abort_finds_a_stop_text_that_nobody_had_read(models, expected):
    prompts, params, outputs, _ = expected
    stopped = [i for i, each in enumerate(outputs) if each.finish_reason == "stop" and params[i].ignore_eos]
    i = next(i for i in stopped if params[i].logprobs is not None)
    llm = make(models, 1)
    engine, request = llm.engine(), llm.make_request(prompts[i], params[i])
    engine.add_request(request)
    while len(request.token_ids) < len(outputs[i].token_ids) + 4:
        engine.step()
    assert request.finish_reason is None, "nobody reads"
    engine.abort(request)
    assert facts(request.output()) == facts(outputs[i])
    engine.drain()


class Panic(BaseException):
    """As Rust's panics arrive in Python."""


class Broken:
    """A tokenizer that fails on a response of some length."""

    def decode(self, ids, skip_special_tokens=True):
        if len(ids) > 1:
            raise Panic("a defect of a tokenizer")
        return "a"


def broken_and_good(llm, **kind):
    """A request whose text cannot be made, and another."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **kind)
    good, bad = llm.make_request([5, 6], params), llm.make_request([7, 8], params)
    bad.stream._detokenizer._tokenizer = Broken()
    return good, bad


KINDS = [{}, {"stop": ("never to be found",)}]


@pytest.mark.parametrize("kind", KINDS, ids=["no stop text", "stop text"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_text_that_cannot_be_made_ends_its_response_alone(models, lag, kind):
    llm = make(models, lag)
    engine, finished = llm.engine(), []

    class Observer:
        def emitted(self, request, num_tokens, seconds, first):
            pass

        def finished(self, request):
            finished.append(request)

    async def main():
        served = AsyncEngine(engine, capacity=10, observer=Observer())
        served.start()
        good, bad = broken_and_good(llm, **kind)
        responses = await served.add([good]) + await served.add([bad])
        async with asyncio.timeout(60):
            with pytest.raises(EngineFailed, match="could not be made .Panic"):
                await responses[1].collect()
            assert len((await responses[0].collect()).token_ids) == 40
            assert served.health == "ok"
            await served.shutdown()
        assert served.num_live == 0 and bad.finish_reason in ("abort", "error", "length")
        assert Counter(finished) == Counter([good, bad]), "latencies are observed once"

    asyncio.run(main())
    assert not engine.has_work


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=["no stop text", "stop text"])
def test_a_call_gets_the_other_responses(models, lag, kind, monkeypatch):
    llm = make(models, lag)
    good, bad = broken_and_good(llm, **kind)
    made = iter([good, bad])
    monkeypatch.setattr(llm, "make_request", lambda *given, **named: next(made))
    first, second = llm.generate([[5, 6], [7, 8]], SamplingParams())
    assert first.finish_reason == "length" and len(first.token_ids) == 40
    assert second.finish_reason == "error" and llm.engine().kv_usage == 0.0
    llm.engine().check()


def test_an_abort_of_a_text_that_cannot_be_made_ends_the_request(models):
    llm = make(models, 1)
    engine, (_, bad) = llm.engine(), broken_and_good(llm, stop=("never to be found",))
    engine.add_request(bad)
    while len(bad.token_ids) < 3:
        engine.step()
    assert bad.stream.num_decoded == 0, "nobody reads"
    engine.abort(bad)
    assert bad.finish_reason == "error" and engine.num_running == 0 and len(bad.token_ids) >= 3
    engine.drain()
