"""Random events, in the nightly tier hundreds of thousands: whatever arrives, stops, is aborted or sent back,
no page or token is lost. The models are replaced by random results; scheduler, prefix cache, n-gram log and
engine are the real ones."""

import random

import pytest
from random_runner import STOP, RandomRunner, use_random_runner
from tiny import tiny_target
from tiny_engine import resolved, serve

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.models.cache_specs import RecurrenceSpec, StateSpec
from eagle_kit.models.config import TargetConfig


class HybridConfig(TargetConfig):
    """Of a target with a recurrent layer."""

    states = StateSpec((), (RecurrenceSpec(1, 1, 2, 2),))


class RandomMatch:
    """A grammar that ends, leads nowhere, or goes on, at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.is_complete, self.is_stuck = rng, False, False

    def advance(self, tokens):
        assert not (self.is_complete or self.is_stuck)
        for count in range(1, len(tokens) + 1):
            event = self.rng.random()
            if event < 0.05:
                self.is_complete = True
                return count
            if event < 0.06:
                self.is_stuck = True
                return count - 1
        return len(tokens)


def _prompt(rng: random.Random) -> list[int]:
    """Often one of a few beginnings, so that pages are shared."""
    beginning = rng.choice(([], [1] * 9, [1, 2] * 8, [3] * 21))
    return beginning + [rng.randrange(5) for _ in range(rng.choice((1, 2, 5, 20)))]


@pytest.mark.parametrize("num_events", [3_000, pytest.param(33_400, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("page_size", "lag", "shape", "with_ngram", "share_of_grammars", "lookback"),
    [
        (1, 0, "5,4,16", False, 0.0, None),
        pytest.param(4, 1, "4,1,5", False, 0.0, None, marks=pytest.mark.nightly),
        (16, 1, None, False, 0.0, None),
        (4, 1, "5,4,16", True, 0.0, None),
        pytest.param(4, 1, "4,1,5", False, 0.2, None, marks=pytest.mark.nightly),
        (1, 1, "4,1,5", True, 0.2, None),
        pytest.param(4, 1, "4,1,5", False, 0.0, 0, marks=pytest.mark.nightly),
        (1, 0, "5,4,16", False, 0.0, 2),
        (4, 1, "2,1,3", False, 0.1, 2),
        pytest.param(4, 1, None, False, 0.0, 0, marks=pytest.mark.nightly),
        (1, 1, "4,1,5", True, 0.0, 0),
    ],
)
def test_a_storm_of_events_loses_nothing(
    page_size, lag, shape, with_ngram, share_of_grammars, lookback, num_events
):
    """With a ``lookback``, the target has recurrent layers."""
    rng = random.Random(page_size)
    options = {"algorithm": "NGRAM", "ngram": {"capacity": 500}} if with_ngram else {}
    sizes = {"kv_tokens": 128, "page_size": page_size, "prefill_tokens": 24, "lag": lag}
    config = resolved(8, 60, **sizes, **options)
    target = tiny_target(vocab_size=6, num_layers=1, eos_token_ids=(STOP,))
    if lookback is not None:
        target.config = HybridConfig(**vars(target.config))
    engine = Engine(target, None, config)
    shape = SpecShape.parse(shape)
    runner = RandomRunner(
        seed=page_size, page_size=page_size, shape=shape, ngram=with_ngram, lookback=lookback or 0
    )
    use_random_runner(engine, runner, shape)
    assert engine.scheduler.has_draft is (shape.steps > 0 and not with_ngram)
    alive: list[Request] = []
    finished: list[Request] = []
    number, events = 0, 0
    while events < num_events:
        events += 1
        event = rng.random()
        if event < 0.25 and engine.num_waiting < 20:
            params = SamplingParams(
                max_tokens=rng.choice((1, 2, 3, 10, 200)),
                ignore_eos=rng.random() < 0.3,
                cache_salt=(None, None, "a", "b")[number % 4],
            )
            request = Request(number, _prompt(rng), params, priority=rng.choice((0, 0, 0, 1)))
            request.group = max(0, number - rng.choice((0, 0, number % 8)))
            if rng.random() < share_of_grammars:
                request.response.match = RandomMatch(rng)
            engine.add_request(request)
            alive.append(request)
            number += 1
        elif event < 0.3 and alive:
            engine.abort(rng.choice(alive))
        else:
            engine.step()
        engine.check()
        for request in [request for request in alive if request.finish_reason is not None]:
            alive.remove(request)
            finished.append(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.page_pool.num_available == engine.page_pool.num_pages and engine.num_running == 0
    for request in finished + alive:
        tokens, params = request.token_ids, request.params
        assert not request.sequence.allocation.nodes and not request.sequence.allocation.pages
        assert len(tokens) <= params.max_tokens and request.num_tokens <= 60
        if request.finish_reason == "length":
            assert len(tokens) == params.max_tokens
        elif request.finish_reason == "context":
            assert request.num_tokens == 60
        elif request.finish_reason == "stop":
            assert request.response.match or (tokens[-1] == STOP and not params.ignore_eos)
        if not params.ignore_eos:
            assert STOP not in tokens[:-1]
        if request.response.match is None:
            assert request.response.num_text_tokens == len(tokens) - (request.finish_reason == "stop")
    totals = engine.totals
    served = finished + alive
    admitted = [request for request in served if request.stats.admitted_at > 0.0]
    assert totals.num_preemptions == sum(request.stats.num_preemptions for request in served)
    assert totals.num_generated_tokens == sum(len(request.token_ids) for request in served)
    assert totals.num_prompt_tokens == sum(len(request.prompt_ids) for request in admitted)
    assert totals.num_cached_prompt_tokens == sum(request.stats.num_cached_tokens for request in admitted)
    assert totals.num_finished.total() == len(served) == number
    reasons = totals.num_finished
    often = num_events // 700
    assert all(reasons[reason] > often for reason in ("stop", "length", "context", "abort", "error")), reasons
    assert engine.totals.num_preemptions > often and engine.page_pool.num_evicted > 2 * often
    assert engine.totals.num_cached_prompt_tokens > 20 * often or lookback is not None
    assert engine.totals.num_cached_prompt_tokens > 5 * often
    if with_ngram:
        assert not engine._num_indexed and engine.totals.num_draft_tokens > 20 * often


@pytest.mark.parametrize("shape", [None, "4,1,5"])
def test_the_end_token_ends_a_response_and_is_no_part_of_its_text(shape):
    target = tiny_target(vocab_size=6, num_layers=1, eos_token_ids=(STOP,))
    engine = Engine(target, None, resolved(4, 300, kv_tokens=1600, page_size=4))
    shape = SpecShape.parse(shape)
    runner = RandomRunner(0, page_size=4, shape=shape, ngram=False, failure_share=0.0)
    use_random_runner(engine, runner, shape)
    params = SamplingParams(max_tokens=250)
    *ended, unended = [Request(i, [1, 2, 3], params) for i in range(4)]
    unended.params = SamplingParams(max_tokens=250, ignore_eos=True)
    serve(engine, [*ended, unended])
    for request in ended:
        assert request.token_ids.index(STOP) == len(request.token_ids) - 1
        assert request.finish_reason == "stop"
        assert request.response.num_text_tokens == len(request.token_ids) - 1
    assert STOP in unended.token_ids[:-1]
    assert unended.response.num_text_tokens == len(unended.token_ids) == 250
