"""The engine's thread and its readers: nothing is lost, nothing stays behind, nobody waits for ever."""

import asyncio
import random
import subprocess
import sys
import threading

import pytest

from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.server import async_engine
from eagle_kit.server.async_engine import AsyncEngine
from eagle_kit.server.response_stream import Delta, EngineFailed, Overloaded

GREEDY = SamplingParams(max_tokens=200)


def run(scripted, coroutine, *, response="abcdefghijklmnopqrstuvwxyz" * 2, capacity=400, **options):
    """Run ``coroutine(llm, engine, async_engine)``; afterwards nothing may be left."""
    llm, inner = scripted(response, **options)

    async def main():
        engine = AsyncEngine(inner, capacity=capacity)
        engine.start()
        try:
            async with asyncio.timeout(30):
                return await coroutine(llm, inner, engine)
        finally:
            await engine.shutdown()
            assert engine.num_live == 0 and not engine._progress and not engine._thread.is_alive()
            assert engine.failure is not None or not inner.has_work

    return asyncio.run(main())


def test_deltas_join_to_text_and_tokens(scripted):
    async def check(llm, inner, engine):
        request = llm.make_request([5], GREEDY)
        deltas = []
        async for delta in engine.stream(request):
            deltas.append(delta)
            inner.most_tokens += 10
        text = "".join(delta.text for delta in deltas)
        assert text == request.stream.text == "abcdefghijklmnopqrstuvwxyz" * 2
        assert [token for delta in deltas for token in delta.token_ids] == request.token_ids
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
        assert len(deltas) > 3

    run(scripted, check, hold_at=10)


def test_a_slow_reader_gets_what_it_missed_as_one_delta(scripted):
    async def check(llm, inner, engine):
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        while response.finish_reason is None:
            await asyncio.sleep(0.01)
        deltas = [delta async for delta in response]
        assert len(deltas) == 1 and len(deltas[0].token_ids) == 53 and deltas[0].finish_reason == "stop"

    run(scripted, check)


@pytest.mark.parametrize("num_prompt_tokens", [1, 17])
def test_a_response_ends_where_the_context_does(scripted, num_prompt_tokens):
    async def check(llm, inner, engine):
        (response,) = await engine.add([llm.make_request([5] * num_prompt_tokens, GREEDY)])
        delta = await response.collect()
        assert (delta.finish_reason, num_prompt_tokens + len(delta.token_ids)) == ("context", 32)

    run(scripted, check, max_context=32)


def test_requests_are_taken_all_or_none(scripted):
    async def check(llm, inner, engine):
        with pytest.raises(UserError, match="empty"):
            await engine.add([llm.make_request(prompt, GREEDY) for prompt in ([5], [], [6])])
        while engine.num_live:
            await asyncio.sleep(0.01)
        assert inner.totals.num_finished == {"abort": 2}
        inner.release()
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        assert (await response.collect()).finish_reason == "stop"

    run(scripted, check, hold_at=6)


def test_cancelling_at_any_moment_leaves_nothing_behind(scripted):
    rng = random.Random(3)

    async def reader(llm, engine, delay):
        try:
            async with asyncio.timeout(delay):
                async for _ in engine.stream(llm.make_request([5], GREEDY)):
                    await asyncio.sleep(rng.choice((0, 0, 0.01)))
        except TimeoutError:
            return "left"
        return "read"

    async def check(llm, inner, engine):
        jobs = []
        for _ in range(300):
            jobs.append(asyncio.create_task(reader(llm, engine, rng.choice((0, 0.001, 0.02, 0.2, 20)))))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.005)
        outcomes = await asyncio.gather(*jobs)
        assert outcomes.count("left") > 50 and outcomes.count("read") > 20
        while engine.num_live:
            await asyncio.sleep(0.01)
        finished = inner.totals.num_finished
        assert finished["abort"] + finished["stop"] == len(inner.seen)

    run(scripted, check, step_s=0.001, slots=16)


def test_capacity_counts_everything_on_its_way(scripted):
    async def check(llm, inner, engine):
        first = await engine.add([llm.make_request([5], GREEDY) for _ in range(3)])
        with pytest.raises(Overloaded):
            await engine.add([llm.make_request([5], GREEDY) for _ in range(2)])
        with pytest.raises(UserError, match="at most 4"):
            await engine.add([llm.make_request([5], GREEDY) for _ in range(5)])
        (last,) = await engine.add([llm.make_request([5], GREEDY)])
        (probe,) = await engine.add([llm.make_request([5], GREEDY)], is_probe=True)
        inner.release()
        await asyncio.gather(*(response.collect() for response in (*first, last, probe)))
        await engine.add([llm.make_request([5], GREEDY) for _ in range(4)])

    run(scripted, check, capacity=4, hold_at=6)


def of(client, llm, count, params=GREEDY):
    requests = [llm.make_request([5], params) for _ in range(count)]
    for request in requests:
        request.client = client
    return requests


def test_a_full_queue_has_room_for_clients_with_few_requests(scripted):
    async def check(llm, inner, engine):
        many = await engine.add(of("a", llm, 32))
        for client, count in (("a", 1), ("b", 3), ("", 3)):
            with pytest.raises(Overloaded, match="holds 32 of at most 32"):
                await engine.add(of(client, llm, count))

        # Two are few, and eight are spare.
        few = [*await engine.add(of("b", llm, 1)), *await engine.add(of("b", llm, 1))]
        with pytest.raises(Overloaded, match="holds 34 of at most 32"):
            await engine.add(of("b", llm, 1))
        for client in "cde":
            few += await engine.add(of(client, llm, 2))
        with pytest.raises(Overloaded, match="holds 40 of at most 32"):
            await engine.add(of("f", llm, 1))

        inner.release()
        ended = await asyncio.gather(*(response.collect() for response in (*many, *few)))
        assert {delta.finish_reason for delta in ended} == {"stop"}

    run(scripted, check, capacity=32, hold_at=6, slots=2)


def test_requests_whose_grammars_are_being_compiled_count_for_their_client(scripted):
    async def check(llm, inner, engine):
        gate = threading.Event()
        inner.grammars.compile = lambda grammar: gate.wait(20)
        grammar = SamplingParams(max_tokens=200, grammar=Grammar("regex", "a"))
        bound = [asyncio.create_task(engine.add(of("a", llm, 1, grammar))) for _ in range(16)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="holds 16 of at most 16"):
            await engine.add(of("a", llm, 1))
        (free,) = await engine.add(of("b", llm, 1))
        assert (await free.collect()).finish_reason == "stop"
        gate.set()
        for (response,) in await asyncio.gather(*bound):
            assert (await response.collect()).finish_reason == "stop"
        assert not engine._num_reserved

    run(scripted, check, capacity=16)


def test_a_failure_reaches_readers_waiting_ones_and_late_ones(scripted):
    async def check(llm, inner, engine):
        responses = await engine.add([llm.make_request([5], GREEDY) for _ in range(3)])
        for result in await asyncio.gather(
            *(response.collect() for response in responses), return_exceptions=True
        ):
            assert isinstance(result, EngineFailed)
        assert engine.health == "unhealthy"
        with pytest.raises(EngineFailed):
            await engine.add([llm.make_request([5], GREEDY)])
        for response in responses:
            response.close()

    run(scripted, check, slots=2, fail_at=4)


def test_a_shutdown_with_and_without_grace(scripted):
    async def check(llm, inner, engine):
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        await anext(response)
        shutdown = asyncio.create_task(engine.shutdown(grace_s=20))
        await asyncio.sleep(0)  # it has begun
        inner.release()
        await shutdown
        assert (await response.collect()).finish_reason == "stop"
        with pytest.raises(Overloaded, match="shutting down"):
            await engine.add([llm.make_request([5], GREEDY)])

    run(scripted, check, hold_at=6)

    async def check_abort(llm, inner, engine):
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        first = await anext(response)
        await engine.shutdown()
        whole = Delta()
        whole.add(first)
        whole.add(await response.collect())
        assert whole.finish_reason == "abort" and whole.text == response.request.stream.text != ""

    run(scripted, check_abort, hold_at=6)

    async def check_waiting(llm, inner, engine):
        """The second choice of a request that is served is served as well, another request is not."""
        both = await engine.add([llm.make_request([5], GREEDY) for _ in range(2)])
        await anext(both[0])
        (other,) = await engine.add([llm.make_request([5], GREEDY)])
        shutdown = asyncio.create_task(engine.shutdown(grace_s=20))
        with pytest.raises(Overloaded):
            await other.collect()
        inner.release()
        await shutdown
        assert [(await response.collect()).finish_reason for response in both] == ["stop", "stop"]

    run(scripted, check_waiting, hold_at=6, slots=1)


def test_a_slot_of_a_request_s_second_choice_goes_to_another_request(scripted):
    async def check(llm, inner, engine):
        await engine.add([llm.make_request([5], GREEDY) for _ in range(3)])
        (other,) = await engine.add([llm.make_request([5], GREEDY)])
        assert (await anext(other)).token_ids
        inner.release()

    run(scripted, check, hold_at=6, slots=2)


def test_requests_with_a_grammar_count_while_it_is_compiled_and_hold_nothing_up(scripted):
    async def check(llm, inner, engine):
        gate = threading.Event()
        inner.grammars.compile = lambda grammar: gate.wait(20)
        grammar = SamplingParams(max_tokens=200, grammar=Grammar("regex", "a"))
        bound = [asyncio.create_task(engine.add([llm.make_request([5], grammar)])) for _ in range(2)]
        await asyncio.sleep(0.05)
        (free,) = await engine.add([llm.make_request([5], GREEDY)])
        assert (await free.collect()).finish_reason == "stop"
        inner.most_tokens = 6
        await engine.add([llm.make_request([5], GREEDY)])
        with pytest.raises(Overloaded, match="holds 3 of at most 3"):
            await engine.add([llm.make_request([5], GREEDY)])
        assert threading.active_count() < 100
        gate.set()
        inner.release()
        for (response,) in await asyncio.gather(*bound):
            assert (await response.collect()).finish_reason == "stop"
        assert not engine._num_reserved

    run(scripted, check, capacity=3)


def test_a_shutdown_does_not_wait_for_a_grammar(scripted):
    gate = threading.Event()

    async def check(llm, inner, engine):
        inner.grammars.compile = lambda grammar: gate.wait(20)
        grammar = SamplingParams(max_tokens=200, grammar=Grammar("regex", "a"))
        requests = [llm.make_request([5], grammar) for _ in range(2)]
        adding = asyncio.ensure_future(engine.add(requests))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await engine.shutdown()
        gate.set()
        with pytest.raises(Overloaded):
            await adding

    run(scripted, check)


def test_short_grammars_go_before_long_ones_and_those_of_clients_that_left_are_not_compiled(scripted):
    gate, begun = threading.Event(), []

    async def check(llm, inner, engine):
        def compile_slowly(grammar):
            begun.append(grammar.text)
            gate.wait(20)

        inner.grammars.compile = compile_slowly

        def add(text):
            params = SamplingParams(max_tokens=200, grammar=Grammar("regex", text))
            return asyncio.create_task(engine.add([llm.make_request([5], params)]))

        adding = [add("first")]
        while not begun:
            await asyncio.sleep(0.005)
        for text in ("the longest of all", "a client that left", "longer", "", "b", "a"):
            adding.append(add(text))
            await asyncio.sleep(0)  # it is in the queue now
        adding[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding[2]
        await asyncio.sleep(0)  # the queue hears of it
        gate.set()
        for (response,) in await asyncio.gather(*adding[:2], *adding[3:]):
            assert (await response.collect()).finish_reason == "stop"
        assert begun == ["first", "", "b", "a", "longer", "the longest of all"] and not engine._num_reserved

    run(scripted, check, capacity=8)


def test_a_client_with_many_grammars_does_not_hold_those_of_others(scripted):
    gate = threading.Event()
    begun = []

    async def check(llm, inner, engine):
        def compile_slowly(grammar):
            begun.append(grammar.text)
            gate.wait(20)

        inner.grammars.compile = compile_slowly

        def add(client, text):
            params = SamplingParams(max_tokens=200, grammar=Grammar("regex", text))
            return asyncio.create_task(engine.add(of(client, llm, 1, params)))

        adding = [add("a", "a" * size) for size in range(1, 5)]
        while not begun:
            await asyncio.sleep(0.005)
        adding.append(add("b", "longer than all others"))
        await asyncio.sleep(0)
        gate.set()
        for (response,) in await asyncio.gather(*adding):
            await response.collect()
        assert begun == ["a", "longer than all others", "aa", "aaa", "aaaa"]

    run(scripted, check, capacity=32)


def test_the_process_ends_while_a_grammar_is_compiled():
    """The thread is a daemon."""
    code = """
import asyncio, time
from types import SimpleNamespace as Any
from eagle_kit.server.async_engine import AsyncEngine
async def main():
    device = Any(device=Any(type="cpu"))
    inner = Any(has_work=False, runner=device, ranges=None, profile=None)
    inner.prepare = lambda request: time.sleep(60)
    engine = AsyncEngine(inner, capacity=4)
    engine.start()
    request = Any(params=Any(constraint=Any(text='a')), response=Any(match=None), client='')
    adding = asyncio.ensure_future(engine.add([request]))
    await asyncio.sleep(0.1)
    await engine.shutdown(1)
    print(type((await asyncio.gather(adding, return_exceptions=True))[0]).__name__)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "Overloaded\n"), done.stderr


@pytest.mark.parametrize("is_stuck", [True, False])
def test_readers_hear_of_a_lost_rank_while_a_step_waits_for_it(scripted, monkeypatch, is_stuck):
    monkeypatch.setattr(async_engine, "STUCK_S", 0.1 if is_stuck else 20.0)
    monkeypatch.setattr(async_engine, "NOTIFY_S", 0.1)
    error, told = RankLost("Rank 1 has ended."), []
    in_a_step = threading.Event()
    may_end = threading.Event()
    others = set(threading.enumerate())

    async def check(llm, inner, engine):
        plain = inner.step

        def step():
            in_a_step.set()
            assert not is_stuck or may_end.wait(20)
            return plain()

        inner.step = step
        engine.on_stuck = told.append
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        assert await asyncio.to_thread(in_a_step.wait, 20)
        engine.fail(error)
        with pytest.raises(EngineFailed, match="RankLost"):
            await response.collect()
        while is_stuck and not told:
            await asyncio.sleep(0.01)
        assert engine.failure is error
        may_end.set()
        for request in list(inner.running):
            inner.abort(request)  # nobody goes on with them

    run(scripted, check, hold_at=6)
    for thread in set(threading.enumerate()) - others:
        thread.join(20)
    assert told == [error] * is_stuck


def test_a_rank_that_is_lost_behind_an_error_of_the_device_is_told(scripted):
    error, told = RankLost("Rank 1 has ended."), []

    async def check(llm, inner, engine):
        engine.on_failure = told.append
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        with pytest.raises(EngineFailed, match="RuntimeError"):
            await response.collect()
        engine.fail(error)
        while len(told) < 2:
            await asyncio.sleep(0.01)
        assert type(told[0]) is RuntimeError and told[1] is error

    run(scripted, check, fail_at=1)


@pytest.mark.parametrize("is_told", [True, False])
def test_the_first_error_by_which_a_lost_rank_is_known_is_logged(scripted, caplog, is_told):
    """Where the watcher of the ranks has told of it, nothing is left to say."""

    async def check(llm, inner, engine):
        step = inner.step

        def collective():
            try:
                return step()
            except RuntimeError as error:
                raise RankLost("A rank has ended.") from (None if is_told else error)

        def lose():
            try:
                return collective()
            except RankLost as error:
                raise RankLost("Rank 1 has ended.") from error

        inner.step = lose
        (response,) = await engine.add([llm.make_request([5], GREEDY)])
        with pytest.raises(EngineFailed, match="RankLost"):
            await response.collect()

    run(scripted, check, fail_at=1)
    if is_told:
        assert not caplog.records
    else:
        (record,) = caplog.records
        assert record.exc_info is None and "RuntimeError: the engine breaks on purpose" in record.getMessage()
