"""Latencies are exactly what their definitions say."""

import pytest

from eagle_kit.bench.load.reply import BadEvent, Recorder
from tests.bench.load.scripted_server import text, usage


def record(*events, done=True, sent_at=10.0):
    recorder = Recorder(0, sent_at, sent_at)
    for at, event in events:
        recorder.take(event, at)
    return recorder.finish(done)


def test_a_chunk_of_three_tokens_is_three_latencies_of_a_third_of_its_gap():
    reply = record(
        (10.2, text("")),
        (10.5, text("a", usage=usage(7, 1))),
        (11.1, text("bbb", usage=usage(7, 4))),
        (11.3, text("cc", usage=usage(7, 6))),
        (11.5, text("", "length", usage=usage(7, 6))),
        (19.0, {"choices": [], "usage": usage(7, 6)}),
    )
    assert (reply.outcome, reply.output_tokens, reply.prompt_tokens, reply.cached_tokens) == ("ok", 6, 7, 2)
    assert reply.counted_by == "usage" and reply.event_tokens == [1, 3, 2]
    assert reply.ttft == pytest.approx(0.5)
    assert reply.e2e == pytest.approx(1.5)
    assert reply.tpot == pytest.approx(1.0 / 5)
    assert reply.gaps == pytest.approx([0.6, 0.2])
    assert [value for value, _ in reply.itl] == pytest.approx([0.2, 0.1])
    assert [tokens for _, tokens in reply.itl] == [3, 2]


def test_without_usage_per_chunk_tokens_are_shared_out_by_characters():
    last = (12.0, {"choices": [], "usage": usage(7, 8)})
    reply = record((10.5, text("aa")), (11.1, text("bbbb")), (11.3, text("cc", "stop")), last)
    assert reply.counted_by == "characters" and reply.event_tokens == [2, 4, 2]
    assert [value for value, _ in reply.itl] == pytest.approx([0.15, 0.1])


@pytest.mark.parametrize("num_tokens", [3, 4])
def test_as_many_chunks_as_tokens_or_one_less_are_a_token_each(num_tokens):
    last = (12.0, {"choices": [], "usage": usage(7, num_tokens)})
    reply = record((10.5, text("a")), (11.1, text("long word")), (11.3, text("c", "stop")), last)
    assert reply.counted_by == "events"
    assert [tokens for _, tokens in reply.itl] == [1, 1]
    assert reply.tpot == pytest.approx(0.8 / (num_tokens - 1))


def test_without_any_usage_every_chunk_with_text_counts_as_a_token():
    reply = record((10.5, text("aaa")), (11.0, text("b")), (11.2, text("", "stop")))
    assert reply.usage_tokens is None and reply.prompt_tokens is None
    assert (reply.output_tokens, reply.counted_by) == (2, "events")


def test_text_that_was_held_back_lends_its_gap_to_the_next_token():
    counted = [text("x", usage=usage(1, n)) for n in (1, 1, 3)]
    reply = record((10.0, counted[0]), (10.1, counted[1]), (10.4, counted[2]), (10.4, text("", "stop")))
    assert reply.itl == [(pytest.approx(0.2), 2)]


def test_an_end_token_alone_has_its_first_token_at_the_end_and_no_pace():
    reply = record((10.3, text("", "stop")), (10.4, {"choices": [], "usage": usage(3, 1)}))
    assert (reply.ttft, reply.e2e) == (pytest.approx(0.3), pytest.approx(0.3))
    assert (reply.tpot, reply.itl, reply.gaps) == (None, [], [])


def test_reasoning_tool_calls_and_plain_completions_are_text_too():
    def delta(**fields):
        return {"choices": [{"delta": fields}]}

    call = [{"function": {"name": "f", "arguments": "{}"}}]
    reply = record(
        (11, delta(reasoning_content="r")),
        (12, delta(tool_calls=call)),
        (13, {"choices": [{"text": "t", "finish_reason": "stop"}]}),
    )
    assert reply.text == "rf{}t" and len(reply.events) == 3


def test_a_stream_without_end_mark_or_finish_reason_is_broken():
    assert record((11, text("a", "stop")), done=False).outcome == "ok"
    with pytest.raises(BadEvent, match="broke off"):
        record((11, text("a")), done=False)
    with pytest.raises(BadEvent, match="no text and no finish reason"):
        record((11, text("")))


def test_an_aborted_reply_has_failed():
    reply = record((11, text("a")), (12, text("", "abort")))
    assert (reply.outcome, reply.reason) == ("failed", "the server aborted the reply")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({"error": "plain"}, "plain"),
        ([1], "not an object"),
        ({"choices": [3]}, "not a list of objects"),
    ],
)
def test_a_bad_event_is_a_failure_with_its_reason(event, reason):
    with pytest.raises(BadEvent, match=reason):
        Recorder(0, 0.0, 0.0).take(event, 1.0)
