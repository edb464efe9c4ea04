"""Responses of servers: order, retries, refusals, a server that dies, reasoning and token ids."""

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle_kit.cli.app import main
from eagle_kit.core.errors import UserError
from eagle_kit.datagen.regenerate import server as module
from eagle_kit.datagen.regenerate.files import NotWritten
from eagle_kit.datagen.regenerate.regenerate import TOO_LONG
from eagle_kit.datagen.regenerate.responder import GeneratedResponse


class Script:
    """A chat server that answers a turn with itself reversed.

    Args:
        fails: status to answer for the number of a request, or None to answer it.
        extra: entries of a message; ``answer``: of the whole answer; ``choice``: of the choice.
    """

    def __init__(self, fails=lambda number: None, message=None, answer=None, choice=None, models=("m",)):
        self.fails, self.models = fails, models
        self.message, self.answer, self.choice = message or {}, answer or {}, choice or {}
        self.bodies, self.headers, self.running, self.most = [], [], 0, 0
        self.lock = threading.Lock()

    def post(self, body, headers):
        with self.lock:
            self.bodies.append(body)
            self.headers.append(headers)
            number = len(self.bodies)
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.01)
        with self.lock:
            self.running -= 1
        if status := self.fails(number):
            return status, {"error": {"message": f"failure {number}"}}
        turn = body["messages"][-1]["content"]
        message = {"role": "assistant", "content": turn[::-1], **self.message}
        choice = {"message": message, "finish_reason": "stop", **self.choice}
        return 200, {"choices": [choice], "usage": {"completion_tokens": len(turn)}, **self.answer}


@contextmanager
def serving(script):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send(self, status, body, headers=None):
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            assert self.path == "/v1/models"
            self.send(200, {"data": [{"id": name} for name in script.models]})

        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send(*script.post(body, headers))

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


@pytest.fixture
def source(tmp_path):
    lines = []
    for number in range(20):
        turns = [f"question {number}", f"more of {number}"]
        messages = [{"role": "user", "content": turn} for turn in turns]
        lines.append(
            json.dumps(
                {
                    "id": f"c{number}",
                    "messages": [
                        m for turn in messages for m in (turn, {"role": "assistant", "content": "x"})
                    ],
                }
            )
        )
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def ask(source, url, *arguments):
    out = source.with_name("out.jsonl")
    command = ["data", "regenerate", "--source", str(source), "--out", str(out), "--base-url", url]
    code = main([*command, "--max-tokens", "32", "--concurrency", "4", *arguments])
    records = out.read_text().splitlines() if out.exists() else []
    return code, [json.loads(line) for line in records]


def test_conversations_come_in_order_and_later_turns_see_earlier_responses(source):
    script = Script()
    with serving(script) as url:
        code, records = ask(source, url, "--temperature", "0.7", "--top-p", "0.9", "--seed", "3")
    assert code == 0 and [record["id"] for record in records] == [f"c{n}" for n in range(20)]
    assert [m["content"] for m in records[4]["messages"]] == [
        "question 4", "4 noitseuq", "more of 4", "4 fo erom",
    ]  # fmt: skip
    body = next(b for b in script.bodies if len(b["messages"]) == 3)
    assert body["model"] == "m" and (body["temperature"], body["top_p"]) == (0.7, 0.9)
    assert len({b["seed"] for b in script.bodies}) == 40 and 1 < script.most <= 4
    about = json.loads(source.with_name("out.settings.json").read_text())
    assert "unknown" in about["target"]


def test_passing_failures_are_retried(source):
    script = Script(
        fails=lambda number: 503 if number % 3 == 0 else 429 if number % 3 == 1 and number < 9 else None
    )
    with serving(script) as url:
        code, records = ask(source, url)
    assert code == 0 and len(records) == 20 and len(script.bodies) > 40


def test_settings_of_responses_are_sent_and_an_address_may_end_in_v1(source):
    script = Script()
    sampling = ("--temperature", "0.7", "--top-k", "5", "--min-p", "0.1")
    with serving(script) as url:
        code, _ = ask(source, f"{url}/v1/", *sampling, "--limit", "1")
    assert code == 0
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    sent = {name: script.bodies[0][name] for name in names}
    assert sent == dict(zip(names, (32, 0.7, 1.0, 5, 0.1), strict=True))
    assert "return_token_ids" not in script.bodies[0] and "authorization" not in script.headers[0]


def test_neutral_settings_are_sent_too(source):
    """A server would take its model's own for them."""
    script = Script()
    with serving(script) as url:
        assert ask(source, url, "--limit", "1")[0] == 0
    body = script.bodies[0]
    assert (body["top_k"], body["min_p"]) == (-1, 0.0)
    assert (body["repetition_penalty"], body["temperature"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"base_url": "127.0.0.1:8000"}, "--base-url is '127.0.0.1:8000'"),
        ({"base_url": "http://x", "concurrency": 0}, "concurrency is 0"),
        ({"base_url": "http://x", "retries": -1}, "retries are -1"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused(options, cause):
    with pytest.raises(UserError, match=cause):
        module.ServerOptions(**options)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_every_passing_failure_is_tried_again(source, status):
    script = Script(fails=lambda number: status if number == 1 else None)
    with serving(script) as url:
        code, records = ask(source, url, "--limit", "1", "--retries", "1")
    assert code == 0 and len(records) == 1 and len(script.bodies) == 3


@pytest.mark.parametrize("status", [400, 413, 422])
def test_every_refusal_leaves_its_prompt_out(source, status):
    script = Script(fails=lambda number: status if number == 5 else None)
    with serving(script) as url:
        code, records = ask(source, url)
    assert code == 0 and len(records) == 19


def test_a_server_that_says_how_long_to_wait_is_waited_for(source):
    class Busy(Script):
        def post(self, body, headers):
            status, answer = super().post(body, headers)
            times.append(time.monotonic())
            if status == 200:
                return status, answer
            return status, answer, {"Retry-After": "0.5"}

    times = []
    script = Busy(fails=lambda number: 429 if number <= 2 else None)
    with serving(script) as url:
        code, records = ask(source, url, "--limit", "1", "--retries", "2", "--max-turns", "1")
    assert code == 0 and len(records) == 1
    first, second, third = times
    assert second - first >= 0.5 and third - second >= 0.5


def test_an_interrupt_ends_requests_that_wait(source):
    """As Ctrl-C does, though a server wants a wait of minutes."""

    class Busy(Script):
        def post(self, body, headers):
            with self.lock:
                self.bodies.append(body)
                is_first = len(self.bodies) == 1
            if is_first:
                os.kill(os.getpid(), signal.SIGINT)  # to the process, so that its main thread wakes
            return 429, {"error": {"message": "busy"}}, {"Retry-After": "100"}

    # As a command finds it, whatever an earlier test of this process has left.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with serving(Busy()) as url:
            assert ask(source, url)[0] == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 30


def test_a_server_that_dies_half_way_loses_nothing(source, capsys):
    script = Script(fails=lambda number: 500 if number > 25 else None)
    with serving(script) as url:
        code, records = ask(source, url, "--retries", "1")
    error = capsys.readouterr().err
    assert code == 2 and "2 times in a row" in error and "failure" in error
    whole = len(records)
    assert 0 < whole < 20
    with serving(Script()) as url:
        code, records = ask(source, url)
    assert code == 0 and sorted(r["id"] for r in records) == sorted(f"c{n}" for n in range(20))
    assert all(len(record["messages"]) == 4 for record in records)


@pytest.mark.parametrize("status", [401, 404])
def test_a_key_or_a_model_that_is_wrong_ends_the_run(source, capsys, status):
    script = Script(fails=lambda number: status)
    with serving(script) as url:
        code, records = ask(source, url)
    assert code == 2 and not records and len(script.bodies) <= 4  # one of each thread
    assert "failure" in capsys.readouterr().err


def test_a_server_that_refuses_everything_ends_the_run(source, capsys):
    script = Script(fails=lambda number: 400)
    with serving(script) as url:
        code, records = ask(source, url)
    assert code == 2 and not records and len(script.bodies) <= 8 + 3
    assert "refuses every request" in capsys.readouterr().err


def test_a_prompt_that_is_refused_is_left_out(source, capsys):
    script = Script(fails=lambda number: 400 if number in (3, 30) else None)
    with serving(script) as url:
        code, records = ask(source, url)
    assert code == 0 and len(records) == 19 and sum(len(r["messages"]) == 2 for r in records) == 1
    assert "the server refuses it: failure 3" in source.with_name("out.skipped.txt").read_text()


def test_settings_that_a_server_does_not_know_are_left_out_once(source):
    class Strict(Script):
        def post(self, body, headers):
            status, answer = super().post(body, headers)
            if "repetition_penalty" in body:
                return 400, {"error": {"message": "Unrecognized request argument: repetition_penalty"}}
            return status, answer

    script = Strict()
    with serving(script) as url:
        code, records = ask(source, url)
    assert code == 0 and len(records) == 20
    assert sum("repetition_penalty" in body for body in script.bodies) <= 4


def test_long_conversations_end_by_what_the_server_counts(source):
    script = Script(answer={"usage": {"prompt_tokens": 900, "completion_tokens": 200}})
    with serving(script) as url:
        code, records = ask(source, url, "--limit", "3", "--max-prompt-tokens", "1000")
    assert code == 0 and [len(record["messages"]) for record in records] == [2, 2, 2]
    manifest = json.loads(source.with_name("out.manifest.json").read_text())
    assert manifest["shortened"] == {TOO_LONG: 3} and manifest["left_out"] == {}


def test_no_server_is_one_sentence(source, capsys):
    code, records = ask(source, "http://127.0.0.1:9", "--retries", "0")
    assert code == 2 and not records
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_beside_the_text(source, key):
    script = Script(message={key: "thought"})
    with serving(script) as url:
        code, records = ask(source, url, "--limit", "2")
    assert code == 0 and records[0]["messages"][1]["reasoning_content"] == "thought"
    assert all("reasoning_content" not in m for body in script.bodies for m in body["messages"])


@pytest.mark.parametrize(("reason", "num_records"), [("length", 2), ("stop", 0)])
def test_a_thought_without_an_answer_is_kept_where_it_was_cut(source, reason, num_records):
    script = Script(message={"content": None, "reasoning_content": "I add"}, choice={"finish_reason": reason})
    with serving(script) as url:
        code, records = ask(source, url, "--limit", "2")
    assert code == 0 and [record["finish_reasons"] for record in records] == [["length"]] * num_records


def test_tools_and_template_arguments_are_sent_and_calls_answered_by_the_recorded_results(tmp_path):
    class Caller(Script):
        def post(self, body, headers):
            status, answer = super().post(body, headers)
            if body["messages"][-1]["role"] == "user":
                call = {"id": "new", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                said = {"content": None, "tool_calls": [call], "reasoning_content": "thought"}
                answer["choices"][0] |= {"message": said, "finish_reason": "tool_calls"}
            return status, answer

    old = {"id": "old", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [old]},
        {"role": "tool", "content": "result", "tool_call_id": "old"},
        {"role": "assistant", "content": "theirs"},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "a", "messages": messages, "tools": [tool]}))
    kwargs = {"enable_thinking": True}
    with serving(script := Caller()) as url:
        code, records = ask(tmp_path / "chats.jsonl", url, "--chat-template-kwargs", json.dumps(kwargs))
    assert code == 0 and [message["role"] for message in records[0]["messages"]] == [
        m["role"] for m in messages
    ]
    asked, answered = script.bodies
    assert asked["tools"] == answered["tools"] == records[0]["tools"] == [tool]
    assert asked["chat_template_kwargs"] == records[0]["chat_template_kwargs"] == kwargs
    said, result = answered["messages"][1:]
    assert (
        said["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
        and said["reasoning_content"] == "thought"
    )
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] == "new" and result["content"] == "result"


def test_token_ids_are_kept_where_the_server_returns_them(source, capsys):
    script = Script(answer={"prompt_token_ids": [5, 6]}, choice={"token_ids": [7]})
    with serving(script) as url:
        code, records = ask(source, url, "--ids", "--limit", "2")
    assert code == 0 and records[0]["ids"] == [5, 6, 7] and script.bodies[0]["return_token_ids"] is True
    source.with_name("out.jsonl").unlink()
    with serving(Script()) as url:
        code, _ = ask(source, url, "--ids")
    assert code == 2 and "token ids" in capsys.readouterr().err


def test_several_models_need_a_name_and_keys_come_from_the_environment(source, capsys, monkeypatch):
    script = Script(models=("one", "two"))
    with serving(script) as url:
        assert ask(source, url)[0] == 2
        assert "one, two" in capsys.readouterr().err
        assert ask(source, url, "--model", "two", "--api-key-env", "NO_SUCH_KEY")[0] == 2
        monkeypatch.setenv("A_KEY", "secret")
        assert ask(source, url, "--model", "two", "--api-key-env", "A_KEY", "--limit", "1")[0] == 0
    assert script.bodies[0]["model"] == "two" and script.headers[0]["authorization"] == "Bearer secret"


def responder_of(answer, monkeypatch):
    """A responder whose request number N is answered by ``answer(N)``; all are answered at the same time."""

    async def send(self, client, prompt, params):
        await asyncio.sleep(0.01 * (prompt > 0))
        return answer(prompt)

    monkeypatch.setattr(module.ServerResponder, "_answer", send)
    return module.ServerResponder(module.ServerOptions("http://127.0.0.1:1", model="m", concurrency=4))


def test_responses_under_way_are_taken_after_an_unexpected_error(monkeypatch):
    def answer(number):
        if number == 0:
            raise RuntimeError("unexpected")
        return GeneratedResponse("a", "stop", 1)

    taken = []
    with pytest.raises(RuntimeError, match="unexpected"):
        responder_of(answer, monkeypatch).answer(
            range(9), range(9), lambda number, response: taken.append(number)
        )
    assert taken == [1, 2, 3]


def test_nothing_is_taken_after_a_response_that_cannot_be_written(monkeypatch):
    def take(number, response):
        taken.append(number)
        if number == 1:
            raise NotWritten("The disk is full.", "Free some space.")

    taken = []
    with pytest.raises(NotWritten):
        responder_of(lambda number: GeneratedResponse("a", "stop", 1), monkeypatch).answer(
            range(9), range(9), take
        )
    assert taken == [0, 1]
