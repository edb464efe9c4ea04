"""The queue finds the request that a search would find, at the same cost for thousands."""

import random

import pytest
from random_runner import RandomRunner, use_random_runner
from tiny import tiny_target
from tiny_engine import resolved

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.engine import waiting_queue
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.engine.waiting_queue import WaitingQueue, progress


def request_of(rng, number) -> Request:
    """A request of one of three clients, each of whose groups is its own; some gave way before."""
    group = rng.randrange(9)
    request = Request(number, [1] * rng.randint(1, 9), SamplingParams(), rng.randint(0, 1))
    request.group = group
    request.client = "abc"[group % 3]
    request.response.token_ids = [1] * rng.choice([0, 0, 3, 40])
    return request


def heads(waiting) -> dict[int, Request]:
    """The first waiting request of each group."""
    found = {}
    for request in sorted(waiting, key=lambda each: (-each.priority, each.number), reverse=True):
        found[request.group] = request
    return found


@pytest.mark.parametrize("seed", range(4))
def test_requests_come_in_their_order(seed):
    rng = random.Random(seed)
    queue = WaitingQueue()
    waiting, running = [], []
    for number in range(400):
        event = rng.random()
        if event < 0.5 or not (waiting or running):
            waiting.append(request_of(rng, number))
            queue.add(waiting[-1])
        elif event < 0.75 and waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(request)
            if rng.random() < 0.7:
                queue.take_slot(request)
                running.append(request)
            else:
                queue.forget_client(request.client)
        elif running:
            request = running.pop(rng.randrange(len(running)))
            queue.leave_slot(request)
            queue.forget_client(request.client)
        assert queue.num_requests == len(waiting)
        assert queue.num_tokens == sum(request.num_tokens for request in waiting)

        expected = sorted(heads(waiting).values(), key=queue.order)
        assert list(queue.in_order()) == expected


def test_candidates_are_those_without_a_token_and_those_with_the_least_progress():
    queue = WaitingQueue()
    requests = []
    for number in range(40):
        request = Request(number, [1], SamplingParams())
        request.client = "a" if number < 38 else "b"
        request.response.token_ids = [1] * (0 if number % 2 else 100 - number)
        requests.append(request)
        queue.add(request)
    found = queue.candidates(8)
    assert found == sorted(found, key=queue.order)
    fresh = [request.number for request in found if not progress(request)]
    assert fresh == [1, 3, 5, 7, 39], "each client has its share"
    begun = [request.number for request in found if progress(request)]
    assert sorted(begun) == [30, 32, 34, 36, 38]
    assert {request.number for request in queue.candidates(1)} == {1, 36}


def crowded(num_waiting: int, slots: int = 64) -> Engine:
    """An engine whose batch is full of responses beyond their turn, with requests that wait."""
    config = resolved(slots, 512, page_size=4, kv_tokens=64 * 600)
    engine = Engine(tiny_target(vocab_size=11, num_layers=1), None, config)
    use_random_runner(
        engine,
        RandomRunner(0, page_size=4, shape=NO_SPECULATION, ngram=False, failure_share=0.0),
        NO_SPECULATION,
    )
    for number in range(slots):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        engine.add_request(Request(number, [1, 2, 3], params))
    for _ in range(40):
        engine.step()
    for number in range(slots, slots + num_waiting):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        engine.add_request(Request(number, [number % 11] * (1 + number % 200), params))
    return engine


def test_a_step_looks_at_as_many_requests_with_ten_times_as_many_waiting(monkeypatch):
    counts = []
    for num_waiting in (300, 3000):
        engine = crowded(num_waiting)
        looks = []
        order = WaitingQueue.order

        def counted(self, request, looks=looks, order=order):
            looks.append(request)
            return order(self, request)

        monkeypatch.setattr(WaitingQueue, "order", counted)
        for _ in range(20):
            engine.step()
        monkeypatch.setattr(WaitingQueue, "order", order)
        engine.check()
        counts.append(len(looks))
    assert counts[1] <= 1.2 * counts[0] + 50, counts


def test_long_prompts_that_leave_the_last_slot_to_others_are_looked_at_once(monkeypatch):
    # A batch with two free slots, soon after a preemption.
    config = resolved(8, 512, page_size=4, kv_tokens=64 * 600, prefill_tokens=16, mixed_prefill_tokens=4)
    engine = Engine(tiny_target(vocab_size=11, num_layers=1), None, config)
    use_random_runner(
        engine,
        RandomRunner(0, page_size=4, shape=NO_SPECULATION, ngram=False, failure_share=0.0),
        NO_SPECULATION,
    )
    for number in range(6):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        engine.add_request(Request(number, [1, 2, 3], params))
    for _ in range(10):
        engine.step()
    engine.scheduler._num_guarded_steps = 32

    # One of the long prompts begins; the others are behind it.
    for number in range(10, 410):
        engine.add_request(Request(number, [number % 11] * 300, SamplingParams(max_tokens=5)))
    looks = []
    in_order = waiting_queue._Client.in_order

    def counted(self):
        for request in in_order(self):
            looks.append(request)
            yield request

    monkeypatch.setattr(waiting_queue._Client, "in_order", counted)
    engine.step()
    assert engine.num_waiting == 399
    assert len(looks) < 3 * 400
    engine.check()
