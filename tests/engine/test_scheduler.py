"""Fair turns: no request holds the others, whatever it asks for, and giving way changes no response.

Waiting times are counted in steps of the engine, so they are the same on every machine."""

import itertools

import pytest
from random_runner import RandomRunner, use_random_runner
from sweep import sweep
from tiny import tiny_target
from tiny_engine import make_engine, resolved

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.engine.scheduler import Scheduler, progress
from eagle_kit.kv.page_pool import PagePool

SLOTS, TURN = 4, 32
LONG = [(3 * i + i * i) % 11 for i in range(400)]


def requests_of(prompts, first=0, together=False, **params) -> list[Request]:
    """Requests, ``together`` those of one call."""
    params = SamplingParams(**{"ignore_eos": True, **params})
    requests = [Request(first + i, list(prompt), params) for i, prompt in enumerate(prompts)]
    for request in requests:
        request.group = first if together else request.number
    return requests


def engine_of(slots=SLOTS, kv_tokens=None, **options) -> Engine:
    """Make an engine of plain decoding whose tokens are random. Its scheduler counts no time of reading."""
    sizes = {"page_size": 4, "kv_tokens": kv_tokens or slots * 712}
    config = resolved(slots, 512, **sizes, **options)
    engine = Engine(tiny_target(vocab_size=11, num_layers=1), None, config)
    runner = RandomRunner(0, page_size=4, shape=NO_SPECULATION, ngram=False, failure_share=0.0)
    use_random_runner(engine, runner, NO_SPECULATION)
    engine.scheduler.reading_cost = 0.0
    engine.scheduler.weights_cost = 0.0
    return engine


def steps_to_first_token(engine, request) -> int:
    """Add ``request`` and step until it has a token -> the number of steps."""
    engine.add_request(request)
    for count in range(1, 1000):
        engine.step()
        engine.check()
        if request.token_ids:
            return count
    raise AssertionError("no token in 1000 steps")


def begin(engine, requests, steps) -> None:
    for request in requests:
        engine.add_request(request)
    for _ in range(steps):
        engine.step()


def test_many_choices_of_one_request_hold_nobody_up():
    engine = engine_of()
    many = requests_of([[1, 2, 3]] * 32, together=True, max_tokens=300, temperature=1.0, seed=1)
    begin(engine, many, steps=10)
    assert engine.num_running == SLOTS
    assert steps_to_first_token(engine, *requests_of([[5, 6]], first=100, max_tokens=30)) <= 2


def test_choices_that_began_late_share_the_slots_with_those_before():
    engine = engine_of()
    first = requests_of([[1, 2, 3]] * 16, together=True, max_tokens=20)
    second = requests_of([[5, 6]] * 16, first=100, together=True, max_tokens=20)
    begin(engine, [*first, *second], steps=90)
    ended = [sum(request.finish_reason is not None for request in each) for each in (first, second)]
    assert sum(ended) >= 12 and abs(ended[0] - ended[1]) <= SLOTS


def of(client, requests) -> list[Request]:
    for request in requests:
        request.client = client
    return requests


def num_running(engine, client) -> int:
    return sum(request.client == client for request in engine.scheduler.running)


def test_a_client_with_many_requests_does_not_hold_another_up():
    engine = engine_of()
    begin(engine, of("a", requests_of([[i % 11, 2] for i in range(60)], max_tokens=300)), steps=10)
    newcomer = requests_of([[5, 6]], first=100, max_tokens=300)
    assert steps_to_first_token(engine, *of("b", newcomer)) <= TURN

    # With as many requests as there are slots it gets half of them.
    begin(engine, of("b", requests_of([[7, i] for i in range(SLOTS)], first=101, max_tokens=300)), steps=40)
    shares = []
    for _ in range(3 * TURN):
        engine.step()
        shares.append(num_running(engine, "b"))
    assert 0.4 * SLOTS < sum(shares) / len(shares) < 0.6 * SLOTS


def test_free_slots_are_shared_by_clients_and_not_by_requests():
    engine = engine_of()
    many = of("a", requests_of([[i % 11, 2] for i in range(20)], max_tokens=300))
    choices = of("a", requests_of([[1, 2]] * 8, first=20, together=True, max_tokens=300))
    few = of("b", requests_of([[5, 6], [7, 8]], first=100, max_tokens=300))
    begin(engine, [*many, *choices, *few], steps=1)
    assert num_running(engine, "a") == num_running(engine, "b") == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_clients_with_long_queues_of_short_responses_do_not_hold_another_up(slots):
    engine = engine_of(slots)
    for i in range(slots):
        queue = requests_of([[each % 11, 2] for each in range(20)], first=20 * i, max_tokens=5)
        begin(engine, of(f"a{i}", queue), steps=0)
    begin(engine, [], steps=4)
    assert steps_to_first_token(engine, *of("b", requests_of([[5, 6]], first=100, max_tokens=5))) <= 2 * 5


def test_a_client_that_comes_back_goes_behind_one_that_waits():
    engine = engine_of(slots=1)
    waits = of("a", requests_of([[1, 2], [3, 4], [5, 6]], max_tokens=5))
    begin(engine, waits, steps=1)

    # Another client sends its next request as soon as its last one has ended.
    for number in range(3, 6):
        (request,) = of("b", requests_of([[number, 9]], first=number, max_tokens=5))
        engine.add_request(request)
        while request.finish_reason is None:
            engine.step()
    assert all(each.finish_reason is not None for each in waits)


def test_a_higher_priority_goes_before_a_client_with_fewer_slots():
    engine = engine_of()
    urgent = of("a", requests_of([[i, 2] for i in range(SLOTS + 1)], max_tokens=300))
    for request in urgent:
        request.priority = 1
    begin(engine, [*of("b", requests_of([[5, 6]], first=100, max_tokens=300)), *urgent], steps=1)
    assert num_running(engine, "a") == SLOTS


def test_long_prompts_hold_nobody_up():
    engine = engine_of(prefill_tokens=8)
    begin(engine, requests_of([[i, *LONG] for i in range(2 * SLOTS)], max_tokens=5), steps=10)
    assert engine.num_running == SLOTS
    waited = [
        steps_to_first_token(engine, *requests_of([[5, 6, i]], first=100 + i, max_tokens=3)) for i in range(3)
    ]
    assert max(waited) <= 6


def test_a_long_prompt_does_not_starve_behind_short_ones():
    engine = engine_of(prefill_tokens=8)
    (long,) = requests_of([LONG], max_tokens=5)
    begin(engine, [long], steps=1)
    for i in range(6 * len(LONG) // 8):
        begin(engine, requests_of([[i % 11] * 8], first=100 + i, max_tokens=4), steps=1)
    assert long.token_ids


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_prompt_gives_way_to_a_first_token_after_its_turn(prefix_cache):
    """Without a prefix cache it would be computed again from its beginning, so that it keeps its slot."""
    engine = engine_of(slots=1, prefill_tokens=8, prefix_cache=prefix_cache)
    (long,) = requests_of([LONG], max_tokens=1)
    begin(engine, [long], steps=10)
    waited = steps_to_first_token(engine, *requests_of([[5, 6]], first=100, max_tokens=1))
    assert long.stats.num_preemptions == int(prefix_cache)
    assert waited <= 4 if prefix_cache else waited > 30
    begin(engine, [], steps=150)
    assert long.finish_reason == "length"


def test_long_responses_give_way_after_their_turn():
    engine = engine_of()
    begin(engine, requests_of([[i, 1] for i in range(SLOTS)], max_tokens=400), steps=10)
    newcomers = requests_of([[5, 6], [7, 8]], first=100, max_tokens=300)
    engine.add_request(newcomers[0])
    assert steps_to_first_token(engine, newcomers[1]) <= TURN
    assert newcomers[0].token_ids


def test_a_first_token_does_not_wait_for_the_whole_turn_of_a_long_response():
    engine = engine_of()
    begin(engine, requests_of([[i, 1] for i in range(SLOTS + 1)], max_tokens=400), steps=3 * TURN)
    waited = []
    for i in range(12):  # whenever it comes, also just after another took a slot
        newcomer = requests_of([[5, 6, i % 11]], first=100 + i, max_tokens=3)[0]
        waited.append(steps_to_first_token(engine, newcomer))
    assert max(waited) <= 8 + 2


def test_short_prompts_that_come_with_a_long_one_do_not_wait_for_its_first_part(monkeypatch):
    engine = engine_of(prefill_tokens=256, mixed_prefill_tokens=16)
    parts = []
    prefill = engine.runner.prefill

    def watched(chunks):
        parts.append(sum(chunk.stop - chunk.start for chunk in chunks))
        return prefill(chunks)

    monkeypatch.setattr(engine.runner, "prefill", watched)
    begin(engine, requests_of([LONG, [5, 6], [7, 8]], max_tokens=20), steps=2)
    assert parts[0] <= 2 * 16 + 4


def test_long_prompts_beside_one_another_hold_no_slots_of_short_ones():
    engine = engine_of(prefill_tokens=64, mixed_prefill_tokens=8)
    responses = requests_of([[1, 2]], max_tokens=400)
    begin(engine, [*responses, *requests_of([[i, *LONG] for i in range(2 * SLOTS)], first=10)], steps=3)
    assert engine.num_running == SLOTS
    newcomers = requests_of([[5, 6, i] for i in range(SLOTS - 2)], first=100, max_tokens=30)
    for newcomer in newcomers:
        engine.add_request(newcomer)
    for _ in range(3):
        engine.step()
    assert all(newcomer.token_ids for newcomer in newcomers), "one long prompt at a time is enough"
    assert sum(each.is_prefilling for each in engine.scheduler.running) == 1


def test_choices_are_not_begun_again_and_again_for_newcomers():
    engine = engine_of()
    many = requests_of([[1, 2, 3]] * 32, together=True, max_tokens=300)
    begin(
        engine, [*many, *requests_of([[i, 1] for i in range(SLOTS - 2)], first=50, max_tokens=300)], steps=9
    )
    before = engine.totals.num_preemptions
    for i in range(6):
        newcomer = requests_of([[5, 6, i]], first=100 + i, max_tokens=2)[0]
        assert steps_to_first_token(engine, newcomer) <= 2
        begin(engine, [], steps=4)
    assert engine.totals.num_preemptions - before <= 2


def loop(engine, clients, steps, max_tokens) -> int:
    """Serve ``clients`` that ask for a short response again and again -> the number of responses."""
    live, count = [], 0
    for _ in range(steps):
        live = [request for request in live if request.finish_reason is None]
        while len(live) < clients:
            live += requests_of([[count % 11] * 8], first=1000 + count, max_tokens=max_tokens)
            engine.add_request(live[-1])
            count += 1
        engine.step()
    return count


@pytest.mark.parametrize(("slots", "clients"), [(1, 2), (4, 4)])
def test_a_long_response_does_not_starve_behind_short_ones(slots, clients):
    engine = engine_of(slots)
    (long,) = requests_of([[1, 2]], max_tokens=400)
    begin(engine, [long], steps=70)
    assert loop(engine, clients, steps=700, max_tokens=16) > 15
    assert len(long.token_ids) > 70 + 2 * TURN


def test_a_long_prompt_does_not_start_again_and_again_without_a_prefix_cache():
    engine = engine_of(1, prefix_cache=False, prefill_tokens=16)
    (long,) = requests_of([LONG], max_tokens=5)
    begin(engine, [long], steps=1)
    loop(engine, clients=2, steps=100, max_tokens=8)
    assert long.token_ids


def test_nobody_gives_way_for_what_would_not_fit_even_so():
    engine = engine_of(kv_tokens=600)
    holder, small = requests_of([LONG[:300], [1, 2]], max_tokens=150)
    holder.priority = 1
    begin(engine, [holder, small], steps=100)
    (large,) = requests_of([LONG[::-1][:350]], first=100, max_tokens=20)
    begin(engine, [large], steps=20)
    assert engine.totals.num_preemptions == 0 and large.sequence.slot < 0 < len(small.token_ids)


def test_responses_shorter_than_a_turn_are_never_interrupted():
    engine = engine_of()
    begin(engine, requests_of([[i % 11, 1] for i in range(5 * SLOTS)], max_tokens=TURN), steps=1000)
    assert engine.totals.num_preemptions == 0 and not engine.has_work


def test_prompts_of_one_call_run_to_their_ends():
    engine = engine_of()
    begin(
        engine,
        requests_of([[i % 11, 1] for i in range(3 * SLOTS)], together=True, max_tokens=200),
        steps=3000,
    )
    assert engine.totals.num_preemptions == 0 and not engine.has_work


def test_long_prompts_take_a_bounded_part_of_a_step_that_decodes(monkeypatch):
    engine = engine_of(mixed_prefill_tokens=32)
    computed = []
    prefill = engine.runner.prefill

    def counting(chunks):
        computed.append(sum(stop - start for _, start, stop, _ in chunks))
        return prefill(chunks)

    monkeypatch.setattr(engine.runner, "prefill", counting)
    begin(engine, requests_of([[1, 2]], max_tokens=200), steps=3)
    begin(engine, requests_of([[i, *LONG] for i in range(2)], first=10, max_tokens=3), steps=60)
    assert max(computed) <= 32 and sum(computed) == 2 + 2 * 401
    assert min(computed[1:-1]) < 16, "tokens with many before them count for more"


def test_parts_deep_in_a_prompt_are_worth_what_must_be_read_for_them(monkeypatch):
    engine = engine_of(mixed_prefill_tokens=16)
    parts = []
    engine.scheduler.attention_cost, engine.scheduler.reading_cost = 0.0, 0.1
    engine.scheduler.weights_cost = 12.0
    prefill = engine.runner.prefill

    def counting(chunks):
        parts.extend((start, stop - start) for _, start, stop, _ in chunks)
        return prefill(chunks)

    begin(engine, requests_of([[1, 2]], max_tokens=400), steps=3)
    monkeypatch.setattr(engine.runner, "prefill", counting)
    (long,) = requests_of([LONG], first=10, max_tokens=3)
    begin(engine, [long], steps=20)
    assert steps_to_first_token(engine, *requests_of([[5, 6, 7]], first=20, max_tokens=3)) <= 3
    steps = 20
    while not long.token_ids:
        engine.step()
        steps += 1
    others = [part for part in parts if part != (0, 3)]
    assert all(count >= 12 + 0.1 * start for start, count in others[:-1])
    work = sum(count + 12 + 0.1 * start for start, count in others)
    assert 0.4 * 16 * steps <= work <= 16 * (steps + 3), "it saves, and loses little of its share"


def decoded_in(engine, request, steps) -> list[int]:
    """Step -> tokens of ``request`` after each step."""
    counts = []
    for _ in range(steps):
        engine.step()
        counts.append(len(request.token_ids))
    return counts


@pytest.mark.parametrize("num_choices", [1, 2])
def test_responses_behind_long_prompts_sit_out_cycles_of_others(num_choices):
    engine = engine_of()
    engine.scheduler.reading_cost, engine.scheduler.weights_cost = 0.1, 11.0
    long = requests_of([LONG] * num_choices, together=True, max_tokens=100, ignore_eos=True)
    short = requests_of([[1, 2, 3]], first=10, max_tokens=100, ignore_eos=True)[0]
    begin(engine, long, steps=4)
    assert all(len(each.token_ids) >= 2 for each in long), "alone they decode in every step"
    engine.add_request(short)
    while len(short.token_ids) < 4:
        engine.step()
    before = [len(each.token_ids) for each in long]
    counts = decoded_in(engine, short, 40)
    assert counts[-1] - counts[0] == 39, "the short one decodes in every step"
    cycles = sum(len(each.token_ids) for each in long) - sum(before)
    cost = 1 + 0.1 * (len(LONG) + 20)
    assert 0.8 * 40 * 12 / cost <= cycles <= 1.2 * 40 * 12 / cost, "they get their share, and no more"
    if num_choices > 1:
        assert abs(len(long[0].token_ids) - len(long[1].token_ids)) <= 2
    engine.abort(short)
    before = len(long[0].token_ids)
    engine.step()
    assert decoded_in(engine, long[0], 3)[-1] >= before + 3


def test_responses_that_sit_out_cycles_give_way_after_their_turn_too():
    engine = engine_of()
    engine.scheduler.reading_cost, engine.scheduler.weights_cost = 0.1, 3.0
    long = requests_of([LONG[200 + i :] for i in range(SLOTS - 1)], max_tokens=290, ignore_eos=True)
    short = requests_of([[1], [4, 5]], first=10, max_tokens=400, ignore_eos=True)
    short[0].priority = 1
    begin(engine, long, steps=2)
    begin(engine, short[:1], steps=2 * TURN + 10)
    assert all(each.sequence.slot >= 0 for each in long), "there is a slot for everyone"
    assert all(len(each.token_ids) < TURN <= progress(each) for each in long)
    assert all(each.turn.num_skipped for each in long)
    assert steps_to_first_token(engine, short[1]) <= 3
    assert sum(each.sequence.slot < 0 for each in long) == 1


def test_the_last_token_of_a_long_prompt_that_is_cached_waits_for_its_share(monkeypatch):
    engine = engine_of(mixed_prefill_tokens=16)
    parts = []
    engine.scheduler.attention_cost, engine.scheduler.reading_cost = 0.0, 0.1
    engine.scheduler.weights_cost = 12.0
    prefill = engine.runner.prefill

    def counting(chunks):
        parts.append(len(chunks))
        return prefill(chunks)

    long = requests_of([LONG] * 8, together=True, max_tokens=1)
    begin(engine, long[:1], steps=3)
    assert long[0].finish_reason == "length"
    begin(engine, requests_of([[1, 2]], first=10, max_tokens=400), steps=3)
    monkeypatch.setattr(engine.runner, "prefill", counting)
    begin(engine, long[1:], steps=0)
    steps = 0
    while any(each.finish_reason is None for each in long):
        engine.step()
        engine.check()
        steps += 1
    cost = 1 + 12 + 0.1 * (len(LONG) - 4)
    assert sum(parts) == 7
    assert steps >= 0.8 * 7 * cost / 16, "each reads the whole prompt"
    assert steps <= 3 * 7 * cost / 16


def test_a_prompt_with_many_choices_is_computed_once(monkeypatch):
    engine = engine_of()
    computed = []
    prefill = engine.runner.prefill

    def counting(chunks):
        computed.append(sum(stop - start for _, start, stop, _ in chunks))
        return prefill(chunks)

    monkeypatch.setattr(engine.runner, "prefill", counting)
    begin(engine, requests_of([LONG] * SLOTS, together=True, max_tokens=3), steps=30)
    assert not engine.has_work
    assert sum(computed) <= len(LONG) + 4 * SLOTS


def test_many_choices_of_a_higher_priority_leave_others_a_slot():
    engine = engine_of()
    many = requests_of([[1, 2, 3]] * 8, together=True, max_tokens=300)
    for request in many:
        request.priority = 1
    begin(engine, many, steps=10)
    assert steps_to_first_token(engine, *requests_of([[5, 6]], first=100, max_tokens=3)) <= 2


def test_a_higher_priority_does_not_give_way_to_a_lower():
    engine = engine_of()
    urgent = requests_of([[i, 1] for i in range(SLOTS)], max_tokens=300)
    for request in urgent:
        request.priority = 1
    begin(engine, urgent, steps=200)
    steps_to_first_token(engine, *requests_of([[5, 6]], first=100, max_tokens=3))
    assert all(request.finish_reason is not None for request in urgent[:1])
    assert engine.totals.num_preemptions == 0


@pytest.mark.parametrize(("num_short", "length"), [(3, 8), (1, 16), (2, 30)])
def test_a_long_prompt_has_its_half_of_each_step_beside_many_short_ones(num_short, length):
    """Also where each of the short ones takes more than all of a step's tokens, and is ended even so."""
    engine = engine_of(slots=8, prefill_tokens=64, mixed_prefill_tokens=16)
    engine.scheduler.attention_cost = 0.0
    long, response = requests_of([LONG, [1, 2]], max_tokens=400)
    begin(engine, [response, long], steps=1)
    steps = 0
    numbers = itertools.count()
    while not long.token_ids and steps < 200:
        digits = [(n % 11, n // 11 % 11, n // 121) for n in itertools.islice(numbers, num_short)]
        short = [[*each, *[2] * (length - 3)] for each in digits]  # of which none is in the prefix cache
        begin(engine, requests_of(short, first=100 + 3 * steps, max_tokens=1), steps=1)
        steps += 1
    assert steps <= len(LONG) / 8 + 3


def test_a_request_that_was_sent_back_returns_though_another_is_no_turn_ahead_of_it():
    """Of those that run one is a turn ahead of the request that waits, and gives way."""
    config = resolved(2, 512, page_size=4)
    scheduler = Scheduler(
        PagePool(400, 4), config.replace(kv_tokens=1600), num_lookahead_tokens=4, has_draft=False
    )
    near, far = requests_of([[1], [2]], max_tokens=400)
    assert admitted(scheduler, [near, far]) == [0, 0]
    near.response.token_ids = [0] * (TURN + 10)
    far.response.token_ids = [0] * (5 * TURN)
    for request in (near, far):
        scheduler.mark_finite(request, request.num_to_compute)
    (waiting,) = requests_of([[3]], first=10, max_tokens=400)
    waiting.response.token_ids = [0] * TURN
    scheduler.add(waiting)
    assert scheduler.plan().preempted == [far]
    assert waiting.sequence.slot >= 0


@pytest.mark.parametrize(("length", "fits"), [(16, True), (17, False)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_nobody_gives_way_where_pages_would_still_be_missing(is_shared, length, fits):
    """Others have a page each to grow into, and pages that they share with the victim stay theirs."""
    config = resolved(4, 512, page_size=4)
    num_pages = 10 if is_shared else 8
    pool = PagePool(num_pages, 4)
    scheduler = Scheduler(pool, config.replace(kv_tokens=40), num_lookahead_tokens=4, has_draft=False)
    prompts = [[1] * 9, [1] * 9] if is_shared else [[1], [2]]
    far, near = requests_of(prompts, max_tokens=400)
    for request in (far, near):
        admitted(scheduler, [request])
        scheduler.mark_finite(request, request.num_to_compute)
        pool.cache_pages(request.sequence.allocation, request.prompt_ids)
    assert pool.num_available == 4
    assert near.sequence.num_shared_tokens == 8 * is_shared

    # A request that does or does not fit into what the victim would free.
    far.turn.num_skipped = 3 * TURN
    (waiting,) = requests_of([[3] * length], first=10, max_tokens=400)
    scheduler.add(waiting)
    assert scheduler.plan().preempted == ([far] if fits else [])
    assert (waiting.sequence.slot >= 0) == fits


def test_a_second_choice_that_gave_way_returns_after_some_steps():
    engine = engine_of(slots=3)
    many = requests_of([[1, 2, 3]] * 2, together=True, max_tokens=300)
    begin(engine, [*many, *requests_of([[4]], first=50, max_tokens=300)], steps=4)
    steps_to_first_token(engine, *requests_of([[5, 6]], first=100, max_tokens=1))
    assert many[1].stats.num_preemptions == 1
    begin(engine, [], steps=TURN // 2)
    assert many[1].sequence.slot < 0, "the last slot is left to others for a while"
    begin(engine, [], steps=TURN)
    assert many[1].sequence.slot >= 0


@pytest.mark.parametrize("decode_prefill_tokens", [16, 11])
def test_no_step_computes_more_prompt_tokens_than_memory_is_planned_for(monkeypatch, decode_prefill_tokens):
    engine = engine_of(
        prefill_tokens=16, decode_prefill_tokens=decode_prefill_tokens, mixed_prefill_tokens=16
    )
    computed = []
    prefill = engine.runner.prefill

    def counting(chunks):
        computed.append(sum(stop - start for _, start, stop, _ in chunks))
        return prefill(chunks)

    begin(engine, requests_of([[1, 2]], max_tokens=400), steps=2)
    monkeypatch.setattr(engine.runner, "prefill", counting)
    (long,) = requests_of([LONG], first=10, max_tokens=3)
    begin(engine, [long], steps=2)
    for i in range(8):
        begin(engine, requests_of([[i] * (9 + i)], first=20 + i, max_tokens=2), steps=3)
    assert max(computed) == decode_prefill_tokens


def test_a_request_that_would_take_the_pages_that_others_grow_into_waits():
    engine = engine_of(kv_tokens=48)
    running = requests_of([[i, 1, 2] for i in range(3)], max_tokens=8)
    begin(engine, running, steps=4)
    (late,) = requests_of([[7, 1, 2]], first=10, max_tokens=8)
    begin(engine, [late], steps=1)
    assert late.sequence.slot < 0
    begin(engine, [], steps=10)
    assert engine.totals.num_preemptions == 0
    assert late.token_ids


@pytest.mark.parametrize(
    ("shape", "temperature", "lag"),
    sweep(
        [(None, 1.0, 0), (None, 0.0, 1), ("4,1,5", 1.0, 1), ("3,2,6", 0.0, 1)],
        fast=[(None, 1.0, 0), ("3,2,6", 0.0, 1)],
    ),
)
def test_giving_way_changes_no_response(models, shape, temperature, lag):
    def serve(batch, arrivals):
        options = {"kv_tokens": 2000, "prefill_tokens": 16, "lag": lag}
        engine = make_engine(models, batch, page_size=4, max_context=256, **options)
        engine.use_shape(SpecShape.parse(shape))
        for group in arrivals:
            for request in group:
                engine.add_request(request)
            for _ in range(15):
                engine.step()
        while engine.has_work:
            engine.step()
            engine.check()
        return engine.totals.num_preemptions, [list(each.token_ids) for group in arrivals for each in group]

    def arrivals():
        params = {"temperature": temperature, "seed": 3}
        return [
            requests_of([[1, 2, 3]] * 3, together=True, max_tokens=60, **params),
            requests_of([LONG[:50], LONG[30:70]], first=20, max_tokens=45, **params),
            requests_of([[4, 5]] * 2, first=30, max_tokens=45, **params),
        ]

    preempted, crowded = serve(2, arrivals())
    assert preempted > 3
    assert crowded == serve(10, arrivals())[1]


def scheduler_of_ranks(batch, num_pages):
    """Scheduler of two ranks of data-parallel attention; a request needs a page more than its tokens."""
    config = resolved(batch, 64, page_size=4, tensor_parallel=2, data_parallel_attention=True)
    pool = PagePool(num_pages, 4, num_shards=2)
    return Scheduler(pool, config.replace(kv_tokens=4 * num_pages), num_lookahead_tokens=4, has_draft=False)


def admitted(scheduler, requests):
    """Parts of the pool that requests are given to; None of those that wait."""
    for request in requests:
        scheduler.add(request)
    scheduler.plan()
    scheduler.page_pool.check(request.sequence.allocation for request in scheduler.running)
    return [request.sequence.allocation.shard if request.sequence.slot >= 0 else None for request in requests]


def test_requests_are_given_to_the_rank_with_most_free_latents():
    scheduler = scheduler_of_ranks(6, 40)
    long, *short = requests_of([[1] * 32, *([i] * 5 for i in range(2, 5))])
    assert admitted(scheduler, [long, *short]) == [0, 1, 1, 1]  # 9 pages beside 3, 6 and 9
    assert admitted(scheduler, requests_of([[6] * 5], first=10)) == [0]
    scheduler.remove(long)
    assert admitted(scheduler, requests_of([[7] * 5], first=11)) == [0]


def test_a_rank_takes_no_more_than_its_part_of_the_batch():
    scheduler = scheduler_of_ranks(4, 200)
    many = requests_of([[i] * 3 for i in range(5)])
    assert admitted(scheduler, many) == [0, 1, 0, 1, None]
    scheduler.remove(many[2])
    scheduler.plan()
    assert many[4].sequence.allocation.shard == 0 and many[4].sequence.slot >= 0


def test_a_request_goes_where_most_of_its_tokens_are_cached():
    scheduler = scheduler_of_ranks(4, 40)
    first, second = requests_of([[1] * 16, [2] * 16])
    assert admitted(scheduler, [first, second]) == [0, 1]
    for request in (first, second):
        scheduler.page_pool.cache_pages(request.sequence.allocation, request.prompt_ids)
    scheduler.remove(first)  # the second goes on, so that the first shard has more room
    again = requests_of([[*second.prompt_ids, 5], [*second.prompt_ids[:4], *[6] * 13]], first=10)
    assert admitted(scheduler, again[:1]) == [1] and again[0].sequence.num_shared_tokens == 16
    assert admitted(scheduler, again[1:]) == [0] and again[1].sequence.num_shared_tokens == 0


def test_requests_give_way_on_the_rank_that_lacks_pages():
    scheduler = scheduler_of_ranks(4, 16)
    mine = requests_of([[i] * 7 for i in range(4)])
    assert admitted(scheduler, mine) == [0, 1, 0, 1]
    mine[0].response.token_ids = [0] * 13  # with the next cycle 6 of 8 pages, of which the third has 3
    for request in mine:
        scheduler.mark_computed(request, request.num_to_compute)
    preempted = scheduler.plan().preempted
    assert preempted == [mine[2]] and mine[1].sequence.slot >= 0 and mine[3].sequence.slot >= 0


def test_requests_give_way_on_a_full_rank_where_the_slots_are_taken():
    """Three slots are no multiple of two ranks: one always has room for a second request."""
    scheduler = scheduler_of_ranks(3, 200)
    running = requests_of([[i] * 3 for i in range(3)], max_tokens=300)
    assert admitted(scheduler, running) == [0, 1, 0]
    scheduler.remove(running[0])
    (late,) = requests_of([[7] * 3], first=10, max_tokens=300)
    # Take pages, so that the second rank has most free pages.
    scheduler.page_pool.extend(running[2].sequence.allocation, 60)
    assert admitted(scheduler, [late]) == [1]
    for request in scheduler.running:
        scheduler.mark_finite(request, request.num_to_compute)
    late.response.token_ids = [0] * (2 * TURN)
    (waiting,) = requests_of([[8] * 3], first=20)
    scheduler.add(waiting)
    assert scheduler.plan().preempted == [late] and waiting.sequence.slot >= 0


def test_the_cache_is_not_followed_to_a_rank_with_far_more_requests():
    scheduler = scheduler_of_ranks(16, 400)
    (first,) = requests_of([[1] * 16])
    assert admitted(scheduler, [first]) == [0]
    scheduler.page_pool.cache_pages(first.sequence.allocation, first.prompt_ids)
    chats = requests_of([[*first.prompt_ids, i] for i in range(10)], first=10)
    given = admitted(scheduler, chats)
    assert given[0] == 0 and chats[0].sequence.num_shared_tokens == 16
    assert abs(given.count(0) + 1 - given.count(1)) <= 2


def on_a_gpu(slots: int, num_running: int) -> Engine:
    """An engine with a GPU's shares of prompts, in which some requests decode."""
    limits = EngineConfig(max_batch_size=slots).resolve(on_gpu=True)
    names = ("prefill_tokens", "decode_prefill_tokens", "mixed_prefill_tokens")
    engine = engine_of(slots, **{name: getattr(limits, name) for name in names})
    begin(engine, requests_of([[i % 11, 2] for i in range(num_running)], max_tokens=300), steps=2)
    return engine


def count_prompts(engine) -> list[int]:
    """Let an engine note the number of prompts of every forward over prompts."""
    counts = []
    prefill = engine.runner.prefill

    def counting(chunks):
        counts.append(len(chunks))
        return prefill(chunks)

    engine.runner.prefill = counting
    return counts


@pytest.mark.parametrize("num_running", [0, 8])
@pytest.mark.parametrize(("length", "num_forwards"), [(10, 1), (25, 1), (30, 2)])
def test_forty_short_prompts_that_wait_are_one_forward_on_a_gpu(num_running, length, num_forwards):
    """Of 40 prompts of 30 tokens, more than a step's share, all but a few are in the first forward."""
    engine = on_a_gpu(48, num_running)
    prompts = [[(i + j * j) % 11 for j in range(length)] for i in range(40)]
    waiting = requests_of(prompts, first=100, max_tokens=30)
    for i, request in enumerate(waiting):
        request.client = f"client {i}"
        engine.add_request(request)
    counts = count_prompts(engine)
    while any(not request.token_ids for request in waiting):
        engine.step()
        engine.check()
    assert len(counts) == num_forwards and counts[0] >= 34


def test_short_prompts_run_together_beside_a_long_one_on_a_gpu():
    """The long prompt has half of the step."""
    engine = on_a_gpu(48, 8)
    long = requests_of([LONG], first=100, max_tokens=5)
    short = requests_of([[i % 11] * 12 for i in range(30)], first=101, max_tokens=5)
    begin(engine, [*long, *short], steps=1)
    assert all(request.token_ids for request in short)
