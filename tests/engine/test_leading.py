"""What the first rank tells the others of a request."""

from types import SimpleNamespace

from random_runner import RandomRunner, use_random_runner
from tiny import tiny_target
from tiny_engine import resolved

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.engine.tensor_parallel.leading import Arrival


def engine_of_one_slot() -> Engine:
    """Make an engine of plain decoding whose tokens are random, the same for every such engine."""
    config = resolved(1, 64, page_size=4, kv_tokens=512)
    engine = Engine(tiny_target(vocab_size=11, num_layers=1), None, config)
    runner = RandomRunner(0, page_size=4, shape=NO_SPECULATION, ngram=False, failure_share=0.0)
    use_random_runner(engine, runner, NO_SPECULATION)
    return engine


def order_of_replies(engine: Engine) -> list[int]:
    """Serve all requests -> their numbers, in the order in which they end."""
    numbers = []
    while engine.has_work:
        for request in engine.step():
            if request.finish_reason is not None:
                numbers.append(request.number)
    return numbers


def test_another_rank_serves_requests_in_the_order_of_the_first() -> None:
    """By their priorities, and choices of one prompt as those of one group."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0, seed=5, cache_salt="a")
    first = engine_of_one_slot()
    other = engine_of_one_slot()
    follower = SimpleNamespace(engine=other, requests={})
    for number, (priority, group) in enumerate([(0, 0), (0, 1), (0, 1), (-1, 3), (2, 4), (1, 5)]):
        request = Request(number, [number + 1, 3], params, priority, group=group)
        first.add_request(request)
        Arrival.of(request).do(follower)
        told = follower.requests[number]
        assert (told.priority, told.group, told.seed) == (priority, group, request.seed)
        assert told.params.cache_salt == "a"
    order = order_of_replies(first)
    assert sorted(order) == list(range(6)) and order != sorted(order)
    assert order_of_replies(other) == order
