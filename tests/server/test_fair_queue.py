"""Calls of several clients in one thread."""

import asyncio
from collections import Counter

from eagle_kit.server.fair_queue import FairQueue, FairThread


def put(turns, name, size=0):
    """Add a call of the client that the first letter of a name says."""
    return turns.put(name[0], size, lambda: name)


def taken(turns, count=100):
    """Names of the next calls."""
    names = []
    while len(names) < count and (call := turns.take()) is not None:
        names.append(call.function())
    return names


def test_clients_take_turns_however_many_calls_they_have():
    turns = FairQueue()
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2"):
        put(turns, name)
    assert taken(turns) == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]


def test_a_client_that_comes_goes_before_the_one_that_is_served():
    turns = FairQueue()
    for number in range(9):
        put(turns, f"a{number}")
    assert taken(turns, 3) == ["a0", "a1", "a2"]
    put(turns, "b1")
    assert taken(turns, 2) == ["b1", "a3"]
    put(turns, "b2")
    assert taken(turns, 2) == ["b2", "a4"]


def test_the_client_that_is_served_does_not_come_again_before_another():
    turns = FairQueue()
    put(turns, "a0")
    taken(turns, 1)
    for name in ("a1", "a2", "b0"):
        put(turns, name)
    assert taken(turns) == ["b0", "a1", "a2"]


def test_clients_that_come_again_and_again_do_not_pass_one_that_waits():
    turns = FairQueue()
    for number in range(3):
        put(turns, f"a{number}")
    taken(turns, 1)
    put(turns, "b0")
    put(turns, "c0")
    found = []
    for number in range(1, 9):
        found += taken(turns, 1)
        for client in "bc":
            if found[-1].startswith(client):
                put(turns, f"{client}{number}")
    assert found[:6] == ["b0", "c0", "a1", "b1", "c2", "a2"]
    served = Counter(name[0] for name in found)
    assert served == {"a": 2, "b": 3, "c": 3}


def test_of_one_client_the_shortest_comes_first_then_the_oldest():
    turns = FairQueue()
    for name, size in (("a long", 9), ("a short", 2), ("b longer", 30), ("a also short", 2)):
        put(turns, name, size)
    assert taken(turns) == ["a short", "b longer", "a also short", "a long"]


def test_calls_that_were_cancelled_take_no_turn():
    turns = FairQueue()
    results = [put(turns, name) for name in ("a1", "a2", "a3", "b1", "b2")]
    for result in results[:2]:
        assert result.cancel()
    assert taken(turns) == ["a3", "b1", "b2"]
    assert not turns._last_turn and not turns._waiting


def test_a_thread_hands_over_results_and_errors_and_ends():
    async def check():
        thread = FairThread("test")
        thread.start()

        def fail():
            raise ValueError("of the call")

        calls = [thread.run("a", max, 1, 2), thread.run("b", fail), thread.run("a", min, 1, 2)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [results[0], str(results[1]), results[2]] == [2, "of the call", 1]
        thread.close()
        await asyncio.to_thread(thread._thread.join, 10)
        assert not thread._thread.is_alive()

    asyncio.run(check())
