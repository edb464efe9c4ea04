"""Pace, rounds, warm-up and interruption, against a real server."""

import asyncio
import time

import pytest

from eagle_kit.bench.load.client import Client, ClientSettings
from eagle_kit.bench.load.endpoint import explore
from eagle_kit.bench.load.runner import LoadPlan, measure, send_all
from eagle_kit.bench.load.workload import arrival_times, make_requests
from eagle_kit.core.errors import UserError
from tests.bench.load.scripted_server import Script, scripted_server, text, three_token_chunks


def requests(count, due=None):
    prompts = [(f"prompt {number}", 6) for number in range(count)]
    return make_requests(prompts, "chat", due=due or [0.0] * count, temperature=0.0, seed=0)


def run(servers, plan):
    async def both():
        endpoints = [await explore(ClientSettings(server.url)) for server in servers]
        for server in servers:
            server.bodies.clear()
        return await measure(endpoints, plan, progress=False)

    return asyncio.run(both())


def asked(server):
    return [int(body["messages"][0]["content"].split()[1]) for body in server.bodies]


def slow(body):
    return three_token_chunks(body, delay=0.01)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_number_under_way(server, concurrency):
    server.respond = slow
    server.most_at_once = 0
    (measured,), interrupted = run([server], LoadPlan(requests(7), concurrency=concurrency))
    assert server.most_at_once == concurrency and not interrupted
    assert [reply.number for reply in measured.replies] == list(range(7))
    assert {reply.outcome for reply in measured.replies} == {"ok"}
    assert sorted(asked(server)) == list(range(7))


def test_an_open_loop_sends_all_at_once(server):
    server.respond = lambda body: three_token_chunks(body, delay=0.0 if body["max_tokens"] == 1 else 0.2)
    run([server], LoadPlan(requests(5)))
    assert server.most_at_once == 5


def test_an_open_loop_sends_when_requests_are_due_and_not_before(server):
    due = arrival_times(6, rate=30.0, seed=1)
    (measured,), _ = run([server], LoadPlan(requests(6, due)))
    planned = [reply.planned_at for reply in measured.replies]
    assert [at - planned[0] for at in planned] == pytest.approx(due, abs=1e-6)
    assert planned[0] >= measured.phases[0].started_at
    assert all(reply.sent_at - reply.planned_at > -1e-3 for reply in measured.replies)
    assert sorted(asked(server)) == list(range(6))


def test_failures_are_counted_among_good_replies_and_none_is_sent_again(server):
    failing = Script(status=500, body={"error": {"message": "bad luck"}})
    server.respond = lambda body: failing if body["messages"][0]["content"] == "prompt 2" else slow(body)
    (measured,), _ = run([server], LoadPlan(requests(5), concurrency=2))
    assert [reply.outcome for reply in measured.replies] == ["ok", "ok", "failed", "ok", "ok"]
    assert sorted(asked(server)) == list(range(5))


def test_warm_up_comes_first_and_is_kept_apart(server):
    everything = requests(5)
    (measured,), _ = run([server], LoadPlan(everything[:3], everything[3:]))
    assert set(asked(server)[:2]) == {3, 4} and len(measured.warmup) == 2
    assert [reply.number for reply in measured.replies] == [0, 1, 2]


def test_two_endpoints_take_turns_over_the_same_requests(server):
    order = []
    with scripted_server() as other:
        for name, each in (("a", server), ("b", other)):
            each.respond = lambda body, name=name: (
                order.append((name, int(body["messages"][0]["content"].split()[1]))) or slow(body)
                if body["max_tokens"] > 1
                else slow(body)
            )
        (first, second), _ = run([server, other], LoadPlan(requests(5), concurrency=1, rounds=2))
    assert order == [
        *(("a", n) for n in (0, 1, 2)), *(("b", n) for n in (0, 1, 2)),
        *(("b", n) for n in (3, 4)), *(("a", n) for n in (3, 4)),
    ]  # fmt: skip
    assert len(first.phases) == 2 and [r.number for r in second.replies] == [0, 1, 2, 3, 4]


def test_rounds_begin_their_own_time():
    plan = LoadPlan(requests(4, [0.0, 1.0, 5.0, 6.5]), rounds=2)
    assert [[request.due_s for request in plan.part(n)] for n in range(2)] == [[0.0, 1.0], [0.0, 1.5]]


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": 4}, {"concurrency": 0}])
def test_impossible_plans_are_refused(wrong):
    with pytest.raises(UserError):
        LoadPlan(requests(3), **wrong)


@pytest.mark.parametrize("concurrency", [2, None])
def test_a_stop_gives_up_what_runs_sends_no_more_and_reports_all_that_was_sent(server, concurrency):
    quick = Script([(0.0, text("a", "stop"))])
    endless = Script([(0.0, text("first")), (60.0, text("second", "stop"))])
    server.respond = lambda body: quick if body["messages"][0]["content"] == "prompt 0" else endless
    due = [0.0, 0.0, 0.0, 60.0, 60.0]

    async def stopped():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.4, stop.set)
        async with Client(ClientSettings(server.url, "tiny")) as client:
            return await send_all(client, requests(5, due), concurrency, stop)

    started = time.monotonic()
    replies = asyncio.run(stopped())
    assert time.monotonic() - started < 10
    assert [(r.number, r.outcome, r.text) for r in replies] == [
        (0, "ok", "a"), (1, "interrupted", "first"), (2, "interrupted", "first")
    ]  # fmt: skip


def test_a_defect_of_ours_is_not_hidden(server):
    def broken(reply):
        raise ZeroDivisionError

    async def send():
        async with Client(ClientSettings(server.url, "tiny")) as client:
            await send_all(client, requests(3), None, asyncio.Event(), broken)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(send())
