"""What is cheap to send and was dear to answer: each is refused quickly, and holds nobody else up."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle_kit.server.api.body import parse
from eagle_kit.server.api.errors import ApiError
from eagle_kit.server.api.protocol import ChatRequest, CompletionRequest
from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving

N = 700_000
FEWER = 100_000


def one_key(name: str, value: object) -> bytes:
    """A completion request with a prompt, and an object of many keys with this value."""
    return json.dumps({"prompt": "a", name: {str(i): value for i in range(FEWER)}}).encode()


BOMBS: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: b'{"prompt":[' + b"[]," * N + b"[]]}",
    "fewer empty lists": lambda: b'{"prompt":[' + b"[]," * FEWER + b"[]]}",
    "numbers and a text": lambda: b'{"prompt":[' + b"1," * N + b'"a"]}',
    "texts and a number": lambda: b'{"prompt":[' + b'"",' * N + b"1]}",
    "many numbers": lambda: b'{"prompt":[' + b"1," * (2 * N) + b"1]}",
    "unknown keys": lambda: json.dumps({f"k{i}": 1 for i in range(N)}).encode(),
    "fewer unknown keys": lambda: json.dumps({f"k{i}": 1 for i in range(FEWER)}).encode(),
    "biases": lambda: one_key("logit_bias", 1),
    "wrong biases": lambda: one_key("logit_bias", "1"),
    "messages": lambda: b'{"messages":[' + b"{}," * FEWER + b"{}]}",
}
"""Bodies of up to ten megabytes. Functions, so that collecting this file does not make them."""


@pytest.fixture(scope="module")
def reading_s():
    """Time of this thread that it takes to read a million numbers."""
    body = BOMBS["many numbers"]()
    started = time.thread_time()
    json.loads(body)
    return time.thread_time() - started


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_of_a_million_mistakes_is_refused_at_once(name, reading_s):
    body = BOMBS[name]()
    started = time.thread_time()
    with pytest.raises(ApiError) as refusal:
        parse(ChatRequest if name == "messages" else CompletionRequest, body)
    assert refusal.value.status == 400 and len(refusal.value.message) < 300
    assert time.thread_time() - started < 25 * reading_s, "it was a hundred times as much"


def test_large_bodies_that_are_right_pass():
    tokens = list(range(200_000))
    assert parse(CompletionRequest, json.dumps({"prompt": tokens}).encode()).prompts == [tokens]
    text = "[{:" * 40_000
    assert parse(CompletionRequest, json.dumps({"prompt": [text] * 3}).encode()).prompts == [text] * 3


@pytest.fixture
def server(tokenizer):
    llm = scripted_llm(tokenizer)
    with serving(llm, ScriptedEngine(llm, lambda request: [70, 71, 72])) as running:
        yield running


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server, monkeypatch):
    def tokenise(*args, **options):
        raise AssertionError("it was tokenised")

    longest = max(map(len, server.llm.tokenizer.get_vocab()))
    text = "a" * (400 * longest + 1)
    monkeypatch.setattr(type(server.llm.tokenizer), "__call__", tokenise)
    messages = [{"role": "user", "content": text}]
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    short = [{"role": "user", "content": "hi"}]
    said = [*short, {"role": "assistant", "content": "a", "reasoning": text}, *short]
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    places = "{% for tool in tools or [] %}{{ tool }}{% endfor %}" + server.llm.tokenizer.chat_template
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", places)
    for path, body in (
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/chat/completions", {"messages": short, "tools": tools}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a" * 400, text]}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": parts}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": messages}),
    ):
        if isinstance(body.get("prompt"), list):
            monkeypatch.undo()
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400 and "a context of 400 tokens holds" in answer.text, answer.text
        monkeypatch.setattr(type(server.llm.tokenizer), "__call__", tokenise)


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_is_decoded_once_and_beside_the_loop_however_often_it_is_repeated(
    server, monkeypatch, stream
):
    calls, decode = [], type(server.llm.tokenizer).decode

    def noting(tokenizer, ids, **options):
        if len(ids) > 100:
            calls.append(threading.current_thread())
        return decode(tokenizer, ids, **options)

    monkeypatch.setattr(type(server.llm.tokenizer), "decode", noting)
    body = {"prompt": [70] * 300, "n": 50, "max_tokens": 3, "echo": True, "stream": stream}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.text.count('"text":"ddd') >= 50
    assert len(calls) == 1 and server.thread not in calls


def test_a_request_arrives_when_it_enters_not_when_it_is_tokenised(server, monkeypatch):
    plain = server.service._requests

    def slowly(*args):
        time.sleep(0.1)
        return plain(*args)

    monkeypatch.setattr(server.service, "_requests", slowly)
    assert server.http.post("/v1/completions", json={"prompt": "ab"}).status_code == 200
    (request,) = server.engine.seen
    assert request.stats.first_token_at - request.arrived_at > 0.099


def chat(server, **more):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    return server.http.post("/v1/chat/completions", json=body, timeout=60)


def wanted(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def burst(server, schema):
    """Ask for a schema four times at once, and for a response of another kind meanwhile -> CPU seconds."""
    before = time.process_time()
    with ThreadPoolExecutor(5) as pool:
        bad = [pool.submit(chat, server, response_format=wanted(schema)) for _ in range(4)]
        good = pool.submit(chat, server, response_format={"type": "json_object"})
        assert good.result().status_code == 200, good.result().text
        assert [answer.result().status_code for answer in bad] == [400] * 4
    return time.process_time() - before


def test_hostile_schemas_at_once_are_refused_hold_nobody_up_and_leave_nothing_running(real_server):
    """Branches were compared pair by pair, in threads that went on for minutes."""
    branches = [{"enum": [f"{j} {i}" for i in range(4000)]} for j in range(64)]
    assert burst(real_server, {"oneOf": branches}) < 10 * burst(real_server, {"anyOf": branches})
    before, started = time.process_time(), time.perf_counter()
    time.sleep(0.3)
    assert time.process_time() - before < 0.5 * (time.perf_counter() - started)


def test_a_pattern_that_ends_in_a_backslash_is_refused(real_server):
    for more in ({"regex": "a\\"}, {"response_format": wanted({"type": "string", "pattern": "a\\"})}):
        answer = chat(real_server, **more)
        assert answer.status_code == 400 and "backslash" in answer.text
