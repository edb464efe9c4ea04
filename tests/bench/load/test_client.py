"""Real HTTP, scripted replies: exact latencies by a scripted clock, and every failure with its reason."""

import asyncio
import itertools

import pytest

from eagle_kit.bench.load.client import Client, ClientSettings
from eagle_kit.bench.load.endpoint import CONTINUOUS_USAGE, SPECULATION, USAGE, explore
from eagle_kit.bench.load.reply import Recorder
from eagle_kit.bench.load.workload import LoadRequest
from eagle_kit.core.errors import UserError
from tests.bench.load.scripted_server import Script, text

REQUEST = LoadRequest(0, {"messages": [{"role": "user", "content": "hi"}]}, 6)


def send(server, request=REQUEST, *, clock=None, **settings):
    async def run():
        async with Client(
            ClientSettings(server.url, "tiny", **settings), clock or itertools.count().__next__
        ) as client:
            return await client.send(request, Recorder(0, 0.0, client.clock()))

    return asyncio.run(run())


def test_latencies_are_those_of_the_clock_when_each_event_was_read(server):
    # Sent; then one reading of every event: role, one token, three, two, finish, usage.
    times = iter([100.0, 100.1, 100.5, 101.1, 101.3, 101.5, 109.0])
    extensions = {**CONTINUOUS_USAGE, **SPECULATION}
    reply = send(server, clock=times.__next__, extensions=extensions)
    assert (reply.outcome, reply.text, reply.finish_reason) == ("ok", "abbbcc", "length")
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (7, 2, 6)
    assert (reply.ttft, reply.e2e, reply.tpot) == pytest.approx((0.5, 1.5, 0.2))
    assert [tokens for _, tokens in reply.itl] == [3, 2]
    assert [value for value, _ in reply.itl] == pytest.approx([0.2, 0.1])
    assert reply.speculation["accept_length"] == 2.5
    assert next(times, None) is None


def test_the_body_is_what_was_asked_for_and_no_more(server):
    request = LoadRequest(3, {"prompt": [5, 6]}, 9, seed=4)
    send(server, request, api="completions", temperature=0.5, ignore_eos=True, extra_body={"top_p": 0.9})
    send(server, extra_body={"max_tokens": None, "max_completion_tokens": 6})
    assert server.paths == ["/v1/completions", "/v1/chat/completions"]
    common = {"model": "tiny", "stream": True}
    assert server.bodies[0] == {
        **common, "prompt": [5, 6], "max_tokens": 9, "seed": 4,
        "temperature": 0.5, "ignore_eos": True, "top_p": 0.9,
    }  # fmt: skip
    assert server.bodies[1] == {**common, **REQUEST.content, "temperature": 0.0, "max_completion_tokens": 6}


@pytest.mark.parametrize(
    ("script", "reason", "num_tokens"),
    [
        (Script(status=500, body={"error": {"message": "out\nof memory"}}), "HTTP 500: out of memory", 0),
        (Script(status=503, body={"detail": "full"}), "HTTP 503: full", 0),
        (Script([(0, text("a")), (0, text("b"))], cut_off=True), "the connection broke off", 2),
        (Script([(0, text("a"))], done=False), "the stream broke off before its end", 1),
        (Script([(0, text("a")), (0, {"error": {"message": "engine"}})]), "error in the stream: engine", 1),
        (Script([(0, text("a")), (0, b"data: {oops\n\n")]), "an event that is not JSON", 1),
        (Script([(0, text("a")), (9, text("b", "stop"))]), "timeout: not finished after 0.5 s", 1),
        (Script([]), "the stream held no text", 0),
    ],
)
def test_a_failure_has_its_reason_and_keeps_what_came(server, script, reason, num_tokens):
    server.respond = lambda body: script
    reply = send(server, timeout_s=0.5)
    assert reply.outcome == "failed" and reply.reason.startswith(reason)
    assert reply.output_tokens == num_tokens


def test_nobody_there_is_a_failure_of_the_request(server):
    server.url = "http://127.0.0.1:9"
    assert send(server).reason.startswith("no connection")


def test_half_a_character_reaches_the_server(server):
    request = LoadRequest(0, {"messages": [{"role": "user", "content": "\ud800"}]}, 6)
    assert send(server, request).outcome == "ok"
    assert server.bodies[0]["messages"][0]["content"] == "\ud800"


def test_text_with_unicode_line_ends_is_one_event(server):
    raw = 'data: {"choices": [{"text": "a\u2028b\x85c", "finish_reason": "stop"}]}\n\n'
    server.respond = lambda body: Script([(0, raw.encode())])
    assert send(server).text == "a\u2028b\x85c"


def test_connections_are_used_again(server):
    async def run():
        async with Client(ClientSettings(server.url, "tiny")) as client:
            for _ in range(3):
                assert (await client.send(REQUEST, Recorder(0, 0.0, 0.0))).outcome == "ok"
            return len(client._http._transport._pool.connections)

    assert asyncio.run(run()) == 1


def found(server, model="", **settings):
    return asyncio.run(explore(ClientSettings(server.url, model, **settings)))


def test_an_endpoint_is_found_with_its_model_and_every_extension(server):
    endpoint = found(server)
    assert (endpoint.settings.model, endpoint.server) == ("tiny", "script")
    assert endpoint.settings.extensions == {**CONTINUOUS_USAGE, **SPECULATION}
    assert {body["max_tokens"] for body in server.bodies} == {1}


@pytest.mark.parametrize(
    ("refused", "extensions"),
    [
        (("stream_options.continuous_usage_stats",), {**USAGE, **SPECULATION}),
        (("return_speculation",), CONTINUOUS_USAGE),
        (("stream_options",), SPECULATION),
        (("stream_options", "return_speculation"), {}),
    ],
)
def test_extensions_that_are_refused_are_left_out(server, refused, extensions):
    server.refused = refused
    assert found(server).settings.extensions == extensions


def test_a_server_without_a_list_of_models_is_asked_for_the_one_named(server):
    server.models = None
    assert found(server, "any").server == "unknown"
    with pytest.raises(UserError, match=r"serves 0 models.*--model"):
        found(server)


def test_several_models_are_the_users_choice(server):
    server.models = ["a", "b"]
    with pytest.raises(UserError, match="2 models: 'a', 'b'"):
        found(server)
    assert found(server, "b").settings.model == "b"


def test_a_model_that_is_not_there_is_told_with_those_that_are(server):
    with pytest.raises(UserError, match=r"no model 'big'.*'tiny'"):
        found(server, "big")


def test_the_key_is_sent_and_its_refusal_told(server):
    server.key = "secret"
    assert found(server, api_key="secret").settings.model == "tiny"
    with pytest.raises(UserError, match="API key"):
        found(server)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1"])
def test_an_endpoint_where_nobody_answers_is_a_users_mistake(url):
    with pytest.raises(UserError, match=r"Nobody answers at .*Start the server"):
        asyncio.run(explore(ClientSettings(url)))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UserError, match="is not a URL"):
        ClientSettings(url)


@pytest.mark.parametrize("status", [500, 404, 400])
def test_a_first_request_that_is_refused_ends_before_any_load(server, status):
    server.respond = lambda body: Script(status=status, body={"error": {"message": "because"}})
    with pytest.raises(UserError, match=f"HTTP {status}: because"):
        found(server)
    assert len(server.bodies) == 1


def test_v1_may_end_the_url(server):
    server.url += "/v1/"
    assert found(server).settings.model == "tiny"


def test_usage_needs_not_be_complete(server):
    event = {"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": True}}
    server.respond = lambda body: Script([(0, text("a", "stop")), (0, event)])
    reply = send(server)
    assert (reply.prompt_tokens, reply.usage_tokens, reply.output_tokens) == (None, None, 1)
