"""Log-probabilities take few bytes until they are sent, and their JSON is written in pieces."""

import json
import tracemalloc

import pytest

from eagle_kit.core.output import ResponseLogprobs
from eagle_kit.server.api import answer
from eagle_kit.server.api.params import MAX_REQUEST_LOGPROBS
from eagle_kit.server.api.responses import ChatChunk, ChatResponse, CompletionChunk, CompletionResponse
from eagle_kit.server.response_stream import Delta
from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = 'a "quoted" text, \\"logprobs":null, naïve 雲 \U0001f600 "choices":[] ' * 2
BODIES = [
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 3}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_speculation": True}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "max_tokens": 100, "echo": True}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "max_tokens": 100, "logprobs": 0}),
    (COMPLETIONS, {"prompt": [70, 71], "max_tokens": 100, "logprobs": 20, "n": 2, "stop": "\U0001f600"}),
]


@pytest.fixture(scope="module")
def server(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    llm = scripted_llm(tokenizer)
    with serving(llm, ScriptedEngine(llm, lambda request: ids)) as running:
        yield running


@pytest.fixture
def sent(monkeypatch):
    """Sizes of the pieces of bodies that the server writes."""
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    sizes = []
    send = RequestResponseCycle.send

    async def send_and_note(self, message):
        sizes.append(len(message.get("body", b"")))
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", send_and_note)
    return sizes


@pytest.fixture
def late_reader(monkeypatch):
    """Streams whose reader finds each response as one delta."""

    async def merge(responses):
        for index, response in enumerate(responses):
            yield index, await response.collect()

    monkeypatch.setattr(answer, "merge", merge)


def test_a_token_takes_few_bytes_in_a_request_and_in_its_reader():
    count = 1000
    values = [-float(i) for i in range(20)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    entries = ResponseLogprobs()
    unread = Delta()
    for start in range(0, count, 4):
        for token in range(start, start + 4):
            entries.append(-0.5, range(1000 + token, 1020 + token), values)
        unread.add(Delta("", [], entries.part(start, start + 4)))
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert num_bytes < 2 * 1.2 * (4 + 20 * 8) * count + 5000
    assert unread.logprobs == entries and len(entries) == count
    assert entries[-1].top[0] == (1999, 0.0)


@pytest.mark.parametrize("path, body", BODIES)
def test_the_bytes_of_a_response_are_those_of_its_schema(server, path, body):
    answer = server.http.post(path, json=body)
    schema = ChatResponse if path == CHAT else CompletionResponse
    left_out = None if "return_speculation" in body else {"speculation"}
    again = schema.model_validate(answer.json()).model_dump_json(exclude=left_out)
    assert answer.status_code == 200 and answer.content == again.encode()
    asks = "logprobs" in body
    assert all((choice["logprobs"] is not None) == asks for choice in answer.json()["choices"])


@pytest.mark.parametrize("path, body", BODIES)
def test_the_bytes_of_events_are_those_of_their_schema(server, late_reader, path, body):
    text = server.http.post(path, json={**body, "stream": True}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    schema = ChatChunk if path == CHAT else CompletionChunk
    assert events.pop() == "[DONE]"
    if "return_speculation" in body:
        assert json.loads(events.pop())["speculation"]
    for event in events:
        again = schema.model_validate_json(event).model_dump_json(exclude={"speculation", "usage"})
        assert event == again


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path, body", [BODIES[2], BODIES[7]])
def test_long_log_probabilities_are_written_in_pieces(
    server, late_reader, sent, monkeypatch, path, body, is_stream
):
    monkeypatch.setattr(answer, "CHUNK", 4000)
    found = server.http.post(path, json={**body, "stream": is_stream})
    one_token = 21 * 100  # bytes of its JSON, at most
    assert found.status_code == 200 and sum(sent) == len(found.content) > 20_000
    assert max(sent) < 4000 + one_token


def test_a_request_for_too_many_log_probabilities_is_refused(scripted):
    with serving(*scripted("ab", max_context=20_000, slots=2)) as server:
        num_tokens = MAX_REQUEST_LOGPROBS // (21 * 25)
        body = {"prompt": [70], "n": 25, "max_tokens": num_tokens, "logprobs": 20}
        assert server.http.post(COMPLETIONS, json=body).status_code == 200
        more_tokens = {"max_tokens": num_tokens + 1}
        for more in (more_tokens, {"n": 26}, {"prompt": ["a", "b"]}, {"n": 26, "stream": True}):
            refused = server.http.post(COMPLETIONS, json={**body, **more})
            assert refused.status_code == 400 and str(MAX_REQUEST_LOGPROBS) in refused.text
        chat = {"messages": MESSAGES, "n": 30, "logprobs": True, "top_logprobs": 20}
        refused = server.http.post(CHAT, json=chat)
        assert refused.status_code == 400 and "top_logprobs" in refused.text
        assert server.http.post(CHAT, json={**chat, "n": 19}).status_code == 200
