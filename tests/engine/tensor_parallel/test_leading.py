"""Calls that rank 0 sends to the other ranks."""

import pytest
from random_runner import RandomRunner, use_random_runner
from rank_processes import run_ranks
from tiny import tiny_target
from tiny_engine import resolved

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request
from eagle_kit.engine.tensor_parallel.leading import (
    CALLS,
    Follower,
    Leader,
    RankCall,
    RequestData,
    rank_call,
)
from eagle_kit.engine.tensor_parallel.ranks import RankGroup


def engine_of_one_slot() -> Engine:
    """Make an engine of plain decoding whose tokens are random, the same for every such engine."""
    config = resolved(1, 64, page_size=4, kv_tokens=512)
    engine = Engine(tiny_target(vocab_size=11, num_layers=1), None, config)
    runner = RandomRunner(0, page_size=4, shape=NO_SPECULATION, ngram=False, failure_share=0.0)
    use_random_runner(engine, runner, NO_SPECULATION)
    return engine


def follower_of(engine: Engine) -> Follower:
    """Make a follower with an engine that it cannot replace."""

    def fail(*args: object) -> None:
        raise AssertionError("the engine is not replaced here")

    return Follower(engine.target, lambda: engine, make_engine=fail, set_draft=fail)


def order_of_responses(engine: Engine) -> list[int]:
    """Serve all requests; returns their numbers in the order in which they end."""
    numbers = []
    while engine.has_work:
        for request in engine.step():
            if request.finish_reason is not None:
                numbers.append(request.number)
    return numbers


def test_a_follower_serves_requests_in_the_order_of_rank_0() -> None:
    """By their priorities, and choices of one prompt as those of one group."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0, seed=5, cache_salt="a")
    first = engine_of_one_slot()
    other = engine_of_one_slot()
    follower = follower_of(other)
    for number, (priority, group) in enumerate([(0, 0), (0, 1), (0, 1), (-1, 3), (2, 4), (1, 5)]):
        request = Request(number, [number + 1, 3], params, priority, group=group)
        first.add_request(request)
        follower.execute(rank_call("add_request", RequestData.of(request)))
        copy = follower.requests[number]
        assert (copy.priority, copy.group, copy.response.seed) == (priority, group, request.response.seed)
        assert copy.params.cache_salt == "a"
    order = order_of_responses(first)
    assert sorted(order) == list(range(6)) and order != sorted(order)
    assert order_of_responses(other) == order


def test_a_follower_knows_the_requests_that_have_not_ended() -> None:
    engine = engine_of_one_slot()
    follower = follower_of(engine)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for number in range(3):
        request = Request(number, [1, 2, 3], params)
        follower.execute(rank_call("add_request", RequestData.of(request)))
    follower.execute(rank_call("end", 1, "abort"))
    follower.execute(rank_call("end", 7, "abort"))  # rank 0 has refused it
    assert follower.requests.keys() == {0, 2}
    while engine.has_work:
        follower.execute(rank_call("step"))
    assert not follower.requests
    assert engine.totals.num_finished == {"abort": 1, "length": 2}


@pytest.mark.parametrize(
    "name", ["run", "execute", "engine", "requests", "_set_draft", "__init__", "unknown"]
)
def test_a_name_that_is_not_listed_is_neither_sent_nor_called(name: str) -> None:
    with pytest.raises(ValueError, match=f"no call '{name}'"):
        rank_call(name)
    follower = follower_of(engine_of_one_slot())
    with pytest.raises(ValueError, match=f"no call '{name}'"):
        follower.execute(RankCall(name, ()))


def test_the_listed_calls_are_all_that_a_follower_can_do() -> None:
    public = {name for name, value in vars(Follower).items() if callable(value) and name[0] != "_"}
    assert public - {"run", "execute"} == CALLS


def send_or_receive(ranks):
    """Make calls on rank 0; on the other one return the messages that arrive."""
    if not ranks.is_first:
        messages = []
        while not messages or messages[-1][-1].name != "leave":
            messages.append(ranks.receive())
        return messages

    leader = Leader(RankGroup(ranks))
    leader.defer("end", 3, "abort")
    with pytest.raises(ValueError, match="no call 'unknown'"), leader.call("unknown"):
        pass
    with leader.call("use_graphs", "off"):
        leader.defer("end", 4, "stop")
        with leader.call("drain"):
            pass
    with leader.call("leave"):
        pass
    return None


def test_deferred_calls_are_sent_before_the_next_one_and_parts_of_a_call_are_not_sent() -> None:
    _, messages = run_ranks(2, send_or_receive)
    assert messages == [[("end", (3, "abort")), ("use_graphs", ("off",))], [("leave", ())]]
