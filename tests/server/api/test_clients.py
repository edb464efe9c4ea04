"""What a client cannot do: be served under a foreign name, choose its address, hide a request in another,
have its text echoed without bound, use an endpoint without limits, or end the responses of others."""

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest

from eagle_kit.cli import serve as command
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar.compiler import GrammarCompiler
from eagle_kit.server.api import routes_tokens
from tests.server.api.serving import serving, wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "a long response " * 8
NAME = "z" * 3000


def has_begun(engine, count):
    """Whether so many responses are being decoded."""
    return len(engine.running) == count and all(request.token_ids for request in engine.running)


def exchange(server, data: bytes) -> bytes:
    """All that a server sends on a connection until it closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


def client_at(server, address):
    """A client with another address of this machine."""
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(transport=transport, base_url=server.url, timeout=30)


LOCAL = [
    "[::ffff:127.0.0.1]",
    "localhost",
    "LOCALHOST:1",
    "localhost.",
    "a.localhost:80",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]:8000",
]
FOREIGN = [
    *(
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "xlocalhost",
        "0.0.0.0:8000",
        "10.0.0.1",
    ),
    *("", ":80", ".", "[::2]", "[::1", "a b", "127.0.0.1.evil.example", "evil.example@localhost", "\x80"),
    *("localhost/evil.example", "localhost:evil", "evil.example\\.localhost", "evil.example\t.localhost"),
]


def test_hosts_and_origins_of_others_are_refused_where_there_is_no_key(scripted):
    with serving(*scripted("abc"), allowed_host="Model.example, x") as server:

        def status(**headers):
            given = {name: value.encode("latin-1") for name, value in headers.items()}
            return server.http.get("/v1/models", headers=given).status_code

        hosts = [*LOCAL, "model.example:80", "MODEL.example"]
        assert {status(host=name) for name in hosts} == {200}
        assert [status(host=name) for name in FOREIGN] == [403] * len(FOREIGN)
        pages = [*(f"http://{name}" for name in LOCAL), "https://model.example"]
        assert {status(origin=page) for page in pages} == {200}
        foreign = [*(f"http://{name}" for name in FOREIGN), "null", "localhost", "file://"]
        assert [status(origin=page) for page in foreign] == [403] * len(foreign)
        for path in (CHAT, "/abort", "/health", "/metrics", "/docs", "/nowhere"):
            assert server.http.post(path, json={}, headers={"Host": "evil.example"}).status_code == 403
        answer = server.http.get("/v1/models", headers={"Host": "evil.example"}).json()["error"]
        assert answer["code"] == "host_not_allowed" and "--allowed-host" in answer["message"]
        assert b" 200 " in exchange(server, b"GET /health HTTP/1.0\r\n\r\n"), "programs may name none"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 403),
        ({"host": "localhost"}, 403),
        ({"host": "127.0.0.1", "allowed_host": "evil.example"}, 200),
        ({"api_key": "key"}, 200),
        ({"host": "0.0.0.0"}, 200),
        ({"host": "0.0.0.0", "allowed_host": "model.example"}, 403),
        ({"api_key": "key", "allowed_host": "model.example"}, 403),
    ],
)
def test_hosts_are_checked_on_loopback_without_a_key_or_where_names_are_given(scripted, settings, expected):
    with serving(*scripted("abc"), **{"allowed_host": None, **settings}) as server:
        headers = {"Host": "evil.example", "Authorization": "Bearer key"}
        assert server.http.get("/v1/models", headers=headers).status_code == expected


@pytest.mark.parametrize("wrong", ["http://a", "a:80", "*", "", "a,,b", "a/b", " "])
def test_wrong_names_of_hosts_are_refused(wrong):
    with pytest.raises(UserError, match="allowed host"):
        ServerConfig(model_name="m", allowed_host=wrong)


@pytest.mark.parametrize("wrong", ["*", "", "proxy", "10.0.0.1/8", "127.0.0.1,"])
def test_wrong_addresses_of_proxies_are_refused(wrong):
    with pytest.raises(UserError, match="proxy"):
        ServerConfig(model_name="m", forwarded_allow_ips=wrong)


def forwarded(server, *values):
    """Status of a request with these headers ``X-Forwarded-For``."""
    headers = [("X-Forwarded-For", value) for value in values]
    return server.http.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code


def test_a_client_does_not_choose_its_address(scripted, monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with serving(*scripted("abc"), max_requests_per_minute=2) as server:
        assert [forwarded(server, f"10.0.0.{i}") for i in range(4)] == [200, 200, 429, 429]


def test_a_proxy_that_is_named_tells_the_address(scripted):
    with serving(*scripted("abc"), max_requests_per_minute=1, forwarded_allow_ips="127.0.0.1") as server:
        assert [forwarded(server, "10.0.0.1") for _ in range(2)] == [200, 429]
        assert [forwarded(server, "10.0.0.2") for _ in range(2)] == [200, 429]
        # What a client wrote stands before what the proxy added, in one header or two.
        assert forwarded(server, "10.0.0.9, 10.0.0.2") == forwarded(server, "10.0.0.9", "10.0.0.2") == 429
        with client_at(server, "127.0.0.2") as other:  # which is none of the proxies
            given = [{"X-Forwarded-For": f"10.0.1.{i}"} for i in range(2)]
            answers = [other.post("/tokenize", json={"prompt": "a"}, headers=each) for each in given]
            assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nContent-Length: 60\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
        b"HTTP/1.1\r\ntransfer-encoding: Chunked\r\ncontent-length: 0",
        b"HTTP/1.0\r\nTransfer-Encoding: chunked",
    ],
)
@pytest.mark.parametrize("path", [b"/health", b"/tokenize", b"/nowhere"])
def test_a_request_behind_one_of_two_lengths_is_never_answered(scripted, head, path):
    with serving(*scripted("abc")) as server:
        hidden = b"0\r\n\r\nGET /v1/models/evil HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = exchange(server, b"POST " + path + b" " + head + b"\r\nHost: x\r\n\r\n" + hidden)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1
        assert b"evil" not in answer and b"connection: close" in answer.lower()


def nested(name):
    """Bodies in which ``name`` is a key or a value that is refused."""
    tool = {"type": "function", "function": {"name": "f"}}
    return [
        {name: 1},
        {"model": name},
        {"response_format": {name: 1}},
        {"response_format": {"type": name}},
        {"logit_bias": {name: 1}},
        {"logit_bias": {name: "a"}},
        {"metadata": {name: 1}},
        {"chat_template_kwargs": {name: 1}},
        {"chat_template_kwargs": {"messages": name, name: 2}},
        {"tools": [{**tool, name: 1}]},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": name}}},
        {"tools": [tool], "tool_choice": name},
        {"tool_choice": {"type": "function", "function": {"name": name[:250]}}},
        {"messages": [{"role": name, "content": "a"}]},
        {"messages": [{"role": "user", "content": "a", name: 1}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": name, name: 1}]}]},
        {"stop": {name: 1}},
    ]


@pytest.mark.parametrize("letter", ["z", "\x01", "\U0001f600"])
def test_errors_echo_200_characters(scripted, letter):
    name = letter * 3000

    def check(answer):
        assert 400 <= answer.status_code < 500, (answer.request.content[:60], answer.text[:300])
        error = answer.json()["error"]
        for text in filter(None, (error["message"], error["param"])):
            escaped = letter if letter.isprintable() else repr(letter)[1:-1]
            assert letter * 201 not in text and escaped * 201 not in text and len(text) <= 1003

    with serving(*scripted("abc")) as server:
        for body in nested(name):
            check(server.http.post(CHAT, json={"messages": MESSAGES, **body}))
            check(server.http.post("/v1/completions", json={"prompt": "a", **body}))
            check(server.http.post("/tokenize", json={"prompt": 1, **body}))
        for path in ("/abort", "/detokenize"):
            check(server.http.post(path, json={name: 1}))
        if letter.isascii() and letter.isprintable():
            check(server.http.get(f"/{name}"))
            check(server.http.get(f"/v1/models/{name}"))
            check(server.http.request(name, "/health"))
            check(server.http.post(CHAT, content=b"{}", headers={"Content-Type": name}))
            check(server.http.get("/health", headers={"Host": name}))
            check(server.http.get("/health", headers={"Origin": f"http://{name}"}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": NAME},
        {"$ref": NAME},
        {"properties": {NAME: {"not": {}}}},
        {"properties": {NAME: {"oneOf": [{}, {}]}}},
        {"format": NAME},
        {"pattern": f"({NAME}"},
        {"pattern": f"(?P<{NAME}>a)\\k<{NAME}>"},
        {NAME: 1},
    ],
)
def test_errors_of_grammars_echo_200_characters(tokenizer, schema):
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0])
    with pytest.raises(UserError) as refusal:
        compiler.start(Grammar("json_schema", json.dumps(schema)))
    assert NAME[:201] not in str(refusal.value) and len(str(refusal.value)) < 500


COUNTED = [
    ("POST", "/tokenize", {"json": {"prompt": "a"}}),
    ("POST", "/detokenize", {"json": {"tokens": [1]}}),
    ("POST", "/abort", {"json": {"request_id": "a"}}),
    ("POST", CHAT, {"json": {"messages": MESSAGES}}),
    ("POST", "/v1/completions", {"json": {"prompt": "a"}}),
    ("GET", "/health_generate", {}),
    ("GET", "/v1/models", {}),
    ("GET", "/openapi.json", {}),
    # Refused with 400, 415, 404, 405, 403 and 401.
    ("POST", "/tokenize", {"content": b"{", "headers": {"Content-Type": "application/json"}}),
    ("POST", "/tokenize", {"headers": [("Content-Type", "a"), ("Content-Type", "b")]}),
    ("POST", CHAT, {"content": b"{", "headers": {"Content-Type": "text/plain"}}),
    ("GET", "/nowhere", {}),
    ("GET", "/v1/models/other", {}),
    ("GET", "/tokenize", {}),
    ("GET", "/v1/models", {"headers": {"Host": "evil.example"}}),
    ("GET", "/v1/models", {"headers": {"Authorization": "Bearer wrong"}}),
]


@pytest.mark.parametrize("is_spent", [False, True])
def test_every_request_counts_against_the_limit_whatever_comes_of_it(scripted, monkeypatch, is_spent):
    """A request is refused after others, and others after it."""
    monkeypatch.setattr("eagle_kit.server.api.limits.time", SimpleNamespace(monotonic=lambda: 1000.0))
    settings = {"api_key": "key", "allowed_host": "127.0.0.1"}
    with serving(*scripted("abc"), max_requests_per_minute=1, **settings) as server:
        right = {"Authorization": "Bearer key"}
        server.http.headers = {**server.http.headers, **right}
        buckets = server.service.limits._buckets
        for method, path, given in COUNTED:
            buckets.clear()
            if is_spent:
                assert server.http.get("/v1/models").status_code == 200
            answer = server.http.request(method, path, **given)
            assert (answer.status_code == 429) == is_spent, (path, answer.text)
            assert server.http.get("/v1/models").status_code == 429, (path, answer.text)
        assert not server.service.limits._parallel
        for path in ("/health", "/health/ready", "/health/live", "/metrics"):
            assert server.http.get(path).status_code == 200


def test_responses_of_other_clients_are_aborted_by_no_id_that_can_be_guessed(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine) as server, ThreadPoolExecutor(3) as pool:

        def start(http, **headers):
            return pool.submit(http.post, CHAT, json={"messages": MESSAGES}, headers=headers)

        def abort(http, **body):
            return http.post("/abort", json=body).json()["num_aborted"]

        with client_at(server, "127.0.0.2") as other:
            mine, theirs = (start(http, **{"X-Request-Id": "job-1"}) for http in (server.http, other))
            unnamed = start(server.http)
            wait_until(lambda: has_begun(engine, 3))
            made = next(name.id for name in server.service._live if not name.is_chosen)
            assert len(made) == 32
            assert abort(other, request_id="job-1") == 1
            assert theirs.result().json()["choices"][0]["finish_reason"] == "abort"
            assert not mine.done() and not unnamed.done()
            assert abort(other, abort_all=True) == 0
            assert abort(other, request_id="chatcmpl-job-1") == 0
            assert abort(other, request_id=f"chatcmpl-{made}") == 1
            unnamed.result()
            assert abort(server.http, abort_all=True) == 1
            for each in (mine, unnamed):
                assert each.result().json()["choices"][0]["finish_reason"] == "abort"
        wait_until(lambda: not server.service._live)


class Stopped(Exception):
    """Ends the command behind its checks."""


def words_at_start(monkeypatch, capsys, *words):
    """What `serve` prints before it looks for the model."""

    def stop(*args):
        raise Stopped

    monkeypatch.setattr("eagle_kit.server.api.startup.find_model", stop)
    from eagle_kit.cli import app

    with pytest.raises(Stopped):
        command.run(app.parse(["serve", "model", "--port", "0", *words]))
    return capsys.readouterr().err


def test_an_open_server_and_a_key_that_others_see_are_warned_of(monkeypatch, capsys):
    monkeypatch.delenv("EAGLE_KIT_API_KEY", raising=False)
    open_server = "whoever reaches this machine"
    seen_key = "see the --api-key"
    assert open_server in words_at_start(monkeypatch, capsys, "--host", "0.0.0.0")
    assert words_at_start(monkeypatch, capsys) == ""
    assert words_at_start(monkeypatch, capsys, "--host", "localhost") == ""
    said = words_at_start(monkeypatch, capsys, "--host", "0.0.0.0", "--api-key", "key")
    assert seen_key in said and open_server not in said
    monkeypatch.setenv("EAGLE_KIT_API_KEY", "key")
    assert words_at_start(monkeypatch, capsys, "--host", "0.0.0.0") == ""


def test_the_shipped_proxy_tells_the_address_that_it_sees():
    from pathlib import Path

    text = (Path(__file__).parents[3] / "serve" / "haproxy.cfg").read_text()
    lines = [line.strip() for line in text.splitlines()]
    assert "option forwardfor" in lines and "http-request del-header X-Forwarded-For" in lines


def test_bodies_are_json(scripted):
    """A length alone, and chunks alone, are read as before."""
    with serving(*scripted("abc")) as server:
        content = json.dumps({"prompt": "a"}).encode()
        kind = {"Content-Type": "application/json"}
        assert server.http.post("/tokenize", content=content, headers=kind).status_code == 200
        assert server.http.post("/tokenize", content=iter([content]), headers=kind).status_code == 200


def test_a_client_with_many_prompts_does_not_hold_the_tokenizer(scripted, monkeypatch):
    gate = threading.Event()
    order = []

    def tokenize(llm, text, *args):
        order.append(text)
        assert gate.wait(20)
        return [1]

    monkeypatch.setattr(routes_tokens, "text_prompt", tokenize)
    with (
        serving(*scripted("abc")) as server,
        client_at(server, "127.0.0.2") as other,
        ThreadPoolExecutor(6) as pool,
    ):
        waiting = server.service._worker._queue._waiting
        asked = [pool.submit(server.http.post, "/tokenize", json={"prompt": "many"}) for _ in range(5)]
        wait_until(lambda: len(order) == 1 and list(map(len, waiting.values())) == [4])
        asked.append(pool.submit(other.post, "/tokenize", json={"prompt": "one"}))
        wait_until(lambda: len(waiting) == 2)
        gate.set()
        assert [future.result().status_code for future in asked] == [200] * 6
    assert order == ["many", "one", "many", "many", "many", "many"]


def sending(server, address, num_bytes):
    """A connection that has sent so much of a larger body."""
    connection = socket.create_connection(("127.0.0.1", server.port), 10, (address, 0))
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: 1000\r\n\r\n" + b" " * num_bytes)
    return connection


def test_bodies_that_are_received_at_once_are_bounded_and_leave_room_for_clients_with_little(scripted):
    """Room for 32 bodies of 1,000 bytes, and for 8 more of clients with at most two."""
    with serving(*scripted("abc"), max_body_bytes=1000) as server, ExitStack() as stack:
        room = server.service.body_room
        most = 32_000
        for count in range(1, 33):
            stack.enter_context(sending(server, "127.0.0.1", 999))
            wait_until(lambda count=count: room.num_held == 999 * count)

        def post(http, size):
            return http.post("/tokenize", content=b'{"prompt":"a"}'.ljust(size))

        server.http.headers["Content-Type"] = "application/json"
        refused = post(server.http, 900)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert f"{most} are allowed" in refused.json()["error"]["message"]
        assert post(server.http, 2000).status_code == 413
        with client_at(server, "127.0.0.2") as other:
            other.headers["Content-Type"] = "application/json"
            assert post(other, 1000).status_code == 200
            stack.enter_context(sending(server, "127.0.0.2", 999))
            stack.enter_context(sending(server, "127.0.0.2", 999))
            wait_until(lambda: room.num_held == 999 * 34)
            assert post(other, 1000).status_code == 503
        stack.close()
        wait_until(lambda: room.num_held == 0)
        assert post(server.http, 900).status_code == 200
        wait_until(lambda: not room._num_held_by_client)


def test_a_body_has_its_room_until_its_request_is_over(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine) as server, ThreadPoolExecutor(1) as pool:
        sent = json.dumps({"messages": MESSAGES}).encode()
        kind = {"Content-Type": "application/json"}
        asked = pool.submit(server.http.post, CHAT, content=sent, headers=kind)
        wait_until(lambda: has_begun(engine, 1))
        assert server.service.body_room.num_held == len(sent)
        engine.release()
        assert asked.result().status_code == 200
        wait_until(lambda: server.service.body_room.num_held == 0)


NO_HTTP = [
    b"\x00\x01\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close, upgrade\r\nUpgrade: websocket\r\n\r\n",
]


def test_requests_that_cannot_be_read_are_not_logged(scripted, caplog):
    logger = logging.getLogger("uvicorn")
    with serving(*scripted("abc")) as server:
        logger.addHandler(caplog.handler)
        try:
            for data in NO_HTTP:
                assert exchange(server, data).startswith(b"HTTP/1.1 ")
        finally:
            logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []
