"""Keys, limits, aborts, clients that leave, engines that break, and shutting down."""

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest

from eagle_kit.cli import main
from eagle_kit.ops.cpu.memory import keep_large_blocks
from eagle_kit.server.api import service
from eagle_kit.server.api.connection import connection_limits
from eagle_kit.server.api.errors import ApiError
from eagle_kit.server.api.limits import ClientLimits, network_of
from tests.server.api.serving import serving, wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "a long response " * 8


def body(**changes):
    return {"messages": MESSAGES, **changes}


def test_a_key_is_demanded_everywhere_but_for_health_and_metrics(scripted):
    with serving(*scripted("abc"), api_key="se cret") as server:
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "Basic se cret"}):
            answer = server.http.post(CHAT, json=body(), headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["x-request-id"]
            assert answer.json()["error"]["type"] == "authentication_error"
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        right = {"Authorization": "bearer se cret"}
        assert server.http.post(CHAT, json=body(), headers=right).status_code == 200
        is_open = {"/health", "/health/ready", "/health/live", "/metrics"}
        for path, methods in server.http.get("/openapi.json", headers=right).json()["paths"].items():
            for method in methods:
                answer = server.http.request(method, path.replace("{name}", "tiny"))
                assert answer.status_code == (200 if path in is_open else 401), path
                is_open.discard(path)
        assert not is_open


@pytest.mark.parametrize("name", ["Authorization", "Content-Type", "Origin", "X-Request-Id"])
def test_a_header_that_decides_is_refused_when_it_comes_twice(scripted, name):
    with serving(*scripted("abc"), api_key="secret") as server:
        headers = [("Authorization", "Bearer secret"), ("Content-Type", "application/json")]
        twice = [*headers, (name, dict(headers).get(name, "a")), (name, "b")]
        answer = server.http.post(CHAT, content=b'{"messages": []}', headers=twice)
        assert answer.status_code == 400 and f"{name} was sent twice" in answer.json()["error"]["message"]


@pytest.mark.parametrize("given", [("--api-key", ""), ("--api-key", " key"), ()])
def test_an_empty_key_is_an_error_and_never_an_open_server(given, monkeypatch, capsys, tmp_path):
    if not given:
        monkeypatch.setenv("EAGLE_KIT_API_KEY", "")
    assert main(["serve", str(tmp_path), *given]) == 2
    assert "The API key is empty" in capsys.readouterr().err


def has_begun(engine, count):
    """Whether so many responses are being decoded."""
    return len(engine.running) == count and all(request.token_ids for request in engine.running)


def test_a_full_queue_is_a_503_that_says_when_to_come_back(scripted):
    llm, engine = scripted(LONG, slots=1, hold_at=6)
    with serving(llm, engine, max_queued=1) as server, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30) for _ in range(2)]
        wait_until(lambda: server.service.engine.num_live == 2)
        answer = server.http.post(CHAT, json=body())
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.json()["error"]["type"] == "service_unavailable"
        assert server.http.get("/health").json() == {"status": "ok"}
        engine.release()
        assert server.http.get("/health_generate").json() == {"status": "ok"}
        assert [one.result().status_code for one in both] == [200, 200]
        assert server.http.post(CHAT, json=body(n=2)).status_code == 200
        answer = server.http.post(CHAT, json=body(n=3))
        assert answer.status_code == 400, "three never fit"


def test_one_client_has_its_limits(scripted):
    llm, engine = scripted(LONG, slots=8, hold_at=6)
    with serving(llm, engine, max_parallel_per_client=2) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30)
        wait_until(lambda: server.service.engine.num_live == 1)
        answer = server.http.post(CHAT, json=body(n=2))
        assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
        assert answer.json()["error"]["code"] == "too_many_parallel_requests"
        assert answer.headers["retry-after"]
        several = {"prompt": ["a", "b"], "max_tokens": 3}
        assert server.http.post("/v1/completions", json=several).status_code == 429
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=30) as other:
            second = pool.submit(other.post, server.url + CHAT, json=body(n=2))
            wait_until(lambda: server.service.engine.num_live == 3)
            engine.release()
            assert first.result().status_code == second.result().status_code == 200
        for _ in range(2):  # those that have ended do not count any more
            wait_until(lambda: not server.service.limits._parallel)
            assert server.http.post(CHAT, json=body(n=2)).status_code == 200


def test_one_client_has_its_requests_a_minute(scripted, monkeypatch):
    monkeypatch.setattr("eagle_kit.server.api.limits.time", SimpleNamespace(monotonic=lambda: 1000.0))
    with serving(*scripted("abc"), max_requests_per_minute=2) as server:
        statuses = [server.http.post(CHAT, json=body()).status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        answer = server.http.post(CHAT, json=body())
        assert answer.headers["retry-after"] == "31"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_client_with_many_choices_does_not_close_the_queue_to_others(scripted):
    llm, engine = scripted(LONG, slots=8, hold_at=6)
    other_address = httpx.HTTPTransport(local_address="127.0.0.2")
    with (
        serving(llm, engine, max_queued=254) as server,
        httpx.Client(transport=other_address, timeout=30) as other,
        ThreadPoolExecutor(4) as pool,
    ):
        counts = (128, 128, 6)
        greedy = [
            pool.submit(httpx.post, server.url + CHAT, json=body(n=n, max_tokens=50), timeout=30)
            for n in counts
        ]
        wait_until(lambda: server.service.engine.num_live == sum(counts))
        newcomer = pool.submit(other.post, server.url + CHAT, json=body())
        wait_until(lambda: server.service.engine.num_live == sum(counts) + 1)
        assert server.http.post(CHAT, json=body()).status_code == 503
        engine.release()
        assert newcomer.result().status_code == 200
        assert {answer.result().status_code for answer in greedy} == {200}


def num_allowed(limits, client, most=9):
    """How many requests of a client are allowed now."""
    for count in range(most):
        try:
            limits.count(client)
        except ApiError as refusal:
            assert refusal.status == 429
            return count
    return most


def test_requests_a_minute_come_back_with_the_time_and_are_each_clients_own(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("eagle_kit.server.api.limits.time", SimpleNamespace(monotonic=lambda: clock.now))
    limits = ClientLimits(per_minute=4)
    assert (num_allowed(limits, "a"), num_allowed(limits, "b")) == (4, 4)
    clock.now += 14.9
    assert num_allowed(limits, "a") == 0
    clock.now += 15.2  # 30 seconds in all: two of four
    assert num_allowed(limits, "a") == 2
    clock.now += 3600.0
    assert num_allowed(limits, "a") == 4, "what is not used is not saved"
    for i in range(10_001):  # the addresses of those that may ask again are forgotten
        limits.count(f"client {i}")
    assert num_allowed(limits, "a") == 0


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1::5", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::5", "2001:db8:0:2::/64"),
        ("fe80::1%lo", "fe80::/64"),
        ("::1", "::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_the_addresses_of_one_ipv6_network_are_one_client(address, name):
    assert network_of(address) == name


def test_many_addresses_that_rest_take_no_memory(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("eagle_kit.server.api.limits.time", SimpleNamespace(monotonic=lambda: clock.now))
    limits = ClientLimits(max_parallel=1, per_minute=60)
    for i in range(30_000):
        limits.count(f"client {i}")
        limits.enter(f"client {i}", 1)
        limits.leave(f"client {i}", 1)
        clock.now += 0.01
    assert len(limits._buckets) < 20_000 and not limits._parallel


class CountingDict(dict):
    """Dictionary that counts the entries that are iterated over."""

    num_seen = 0

    def __iter__(self):
        for key in super().__iter__():
            self.num_seen += 1
            yield key

    def items(self):
        self.num_seen += len(self)
        return super().items()


def test_a_request_costs_the_same_however_many_clients_there_are(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("eagle_kit.server.api.limits.time", SimpleNamespace(monotonic=lambda: clock.now))
    limits = ClientLimits(per_minute=60)
    limits._buckets = CountingDict()
    buckets = limits._buckets
    for i in range(12_000):
        limits.count(f"client {i}")
    assert limits._buckets is buckets and buckets.num_seen <= 4 * 12_000
    clock.now += 61.0
    for i in range(6_000):
        limits.count(f"new client {i}")
    assert len(limits._buckets) == 6_000 and buckets.num_seen <= 4 * 18_000


def test_a_response_can_be_aborted_by_its_id_or_with_all_others(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine) as server, ThreadPoolExecutor(3) as pool:

        def start(name):
            headers = {"X-Request-Id": name}
            return pool.submit(httpx.post, server.url + CHAT, json=body(n=1), headers=headers, timeout=30)

        one, two, three = (start(name) for name in ("one", "job-two", "three"))
        wait_until(lambda: has_begun(engine, 3))
        assert server.http.post("/abort", json={"request_id": "nobody"}).json() == {"num_aborted": 0}
        assert server.http.post("/abort", json={"request_id": "job-one"}).json() == {"num_aborted": 0}
        assert server.http.post("/abort", json={"request_id": "chatcmpl-job-two"}).json() == {
            "num_aborted": 1
        }
        choice = two.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort" and choice["message"]["content"] == LONG[:6]
        assert server.http.post("/abort", json={"abort_all": True}).json() == {"num_aborted": 2}
        for each in (one, three):
            assert each.result().json()["choices"][0]["finish_reason"] == "abort"
        wait_until(lambda: not server.service._live)


def test_requests_of_one_id_are_aborted_together_and_end_apart(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine) as server, ThreadPoolExecutor(3) as pool:

        def start(**changes):
            content = {"prompt": "ab", "max_tokens": 20, **changes}
            headers = {"X-Request-Id": "same"}
            url = f"{server.url}/v1/completions"
            return pool.submit(httpx.post, url, json=content, headers=headers, timeout=30)

        for given in ("same", "cmpl-same"):
            short = start(max_tokens=3)
            both = [start(), start(n=2)]
            assert short.result().json()["choices"][0]["finish_reason"] == "length"
            wait_until(lambda: has_begun(engine, 3))
            assert not any(each.done() for each in both), "they go on"
            assert server.http.post("/abort", json={"request_id": given}).json() == {"num_aborted": 3}
            for each in both:
                reasons = {choice["finish_reason"] for choice in each.result().json()["choices"]}
                assert reasons == {"abort"}
            wait_until(lambda: not server.service._live)
        # The first of two responses ends with the context, and is not there any more to be aborted.
        mixed = start(prompt=[[5] * 397, [5]], max_tokens=None)
        wait_until(lambda: has_begun(engine, 1) and engine.totals.num_finished["length"] == 3)
        live = server.service._live
        wait_until(
            lambda: [each.finish_reason for theirs in live.values() for each in theirs].count(None) == 1
        )
        assert server.http.post("/abort", json={"request_id": "same"}).json() == {"num_aborted": 1}
        reasons = [choice["finish_reason"] for choice in mixed.result().json()["choices"]]
        assert reasons == ["length", "abort"]


def started(server, **changes):
    """A connection on which a chat was asked for."""
    content = json.dumps(body(**changes))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(scripted, stream):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine) as server:
        with started(server, stream=stream, n=2) as connection:
            wait_until(lambda: has_begun(engine, 2))
            if stream:
                assert connection.recv(10), "it leaves amid a stream"
        wait_until(lambda: not engine.has_work and server.service.engine.num_live == 0)
        assert engine.totals.num_finished == {"abort": 2}
        engine.release()
        assert server.http.post(CHAT, json=body(max_tokens=3)).status_code == 200


def test_a_stream_begins_with_the_first_token_of_any_of_its_choices(scripted):
    llm, engine = scripted(LONG, slots=1, hold_at=6)
    with serving(llm, engine) as server, started(server, stream=True, n=2) as connection:
        assert b" 200 " in connection.recv(2000)
        assert engine.num_running == engine.num_waiting == 1
        engine.release()


def test_an_engine_that_breaks_fails_every_request_and_never_hangs(scripted):
    llm, engine = scripted(LONG, slots=1, hold_at=6)
    with serving(llm, engine) as server, ThreadPoolExecutor(3) as pool:
        url = server.url + CHAT
        stream = pool.submit(httpx.post, url, json=body(stream=True), timeout=30)
        wait_until(lambda: has_begun(engine, 1))
        whole = [pool.submit(httpx.post, url, json=body(), timeout=30) for _ in range(2)]
        wait_until(lambda: server.service.engine.num_live == 3)
        engine.fail_at = 0
        for each in whole:
            assert each.result().status_code == 500
            assert each.result().json()["error"]["code"] == "engine_failed"
        lines = [line for line in stream.result().text.splitlines() if line]
        assert "engine_failed" in lines[-2] and lines[-1] == "data: [DONE]"
        assert server.http.post(CHAT, json=body()).status_code == 500
        for path in ("/health", "/health/ready", "/health/live", "/health_generate"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": "unhealthy"})
        assert server.http.get("/metrics").status_code == 200
        assert server.service.engine.num_live == 0


def test_shutting_down_finishes_what_can_finish_in_time(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine, grace_period_s=20.0) as server, ThreadPoolExecutor(2) as pool:
        url = server.url + CHAT
        whole = pool.submit(httpx.post, url, json=body(), timeout=30)
        stream = pool.submit(httpx.post, url, json=body(stream=True), timeout=30)
        wait_until(lambda: has_begun(engine, 2))
        server.stop()
        wait_until(lambda: server.service.engine.health == "draining")
        engine.release()
        assert whole.result().json()["choices"][0]["message"]["content"] == LONG
        assert whole.result().json()["choices"][0]["finish_reason"] == "stop"
        assert "abort" not in stream.result().text and stream.result().text.endswith("data: [DONE]\n\n")
        server.thread.join(20)
        assert not server.thread.is_alive() and engine.totals.num_finished == {"stop": 2}


def test_shutting_down_returns_what_there_is_when_the_time_is_over(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine, grace_period_s=0.1) as server, ThreadPoolExecutor(2) as pool:
        url = server.url + CHAT
        whole = pool.submit(httpx.post, url, json=body(), timeout=30)
        stream = pool.submit(httpx.post, url, json=body(stream=True), timeout=30)
        wait_until(lambda: has_begun(engine, 2))
        server.stop()
        choice = whole.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort" and choice["message"]["content"] == LONG[:6]
        assert '"finish_reason":"abort"' in stream.result().text
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert not server.service.engine._thread.is_alive()


def test_a_probe_sees_an_engine_that_emits_nothing(scripted, monkeypatch):
    llm, engine = scripted(LONG, slots=1)
    monkeypatch.setattr(service, "PROBE_LASTS_S", 0.0)
    with serving(llm, engine, max_queued=0) as server:
        assert server.http.get("/health_generate").json() == {"status": "ok"}
        engine.most_tokens = 0
        with monkeypatch.context() as patched:
            patched.setattr(service, "PROBE_S", 0.1)
            answer = server.http.get("/health_generate")
        assert (answer.status_code, answer.json()) == (503, {"status": "busy"})
        engine.release()
        wait_until(lambda: server.service.engine.num_live == 0)
        assert server.http.get("/health_generate").status_code == 200


def test_a_probe_ends_in_time_when_a_step_does_not(scripted, monkeypatch):
    llm, engine = scripted(LONG, slots=1)
    monkeypatch.setattr(service, "PROBE_S", 0.1)
    has_begun_step = threading.Event()
    may_end = threading.Event()
    plain = engine.step

    def step():
        has_begun_step.set()
        assert may_end.wait(20)
        return plain()

    monkeypatch.setattr(engine, "step", step)
    with serving(llm, engine) as server, ThreadPoolExecutor(1) as pool:
        response = pool.submit(server.http.post, CHAT, json=body(max_tokens=3))
        assert has_begun_step.wait(20)
        answer = httpx.get(f"{server.url}/health_generate")
        assert (answer.status_code, answer.json()) == (503, {"status": "busy"})
        may_end.set()
        assert response.result().status_code == 200


def test_probes_share_one_generation_and_its_answer_for_a_while(scripted, monkeypatch):
    llm, engine = scripted(LONG, slots=2)
    monkeypatch.setattr(service, "PROBE_LASTS_S", 3600.0)
    with serving(llm, engine) as server, ThreadPoolExecutor(20) as pool:

        def probe(_):
            return server.http.get("/health_generate").status_code

        assert set(pool.map(probe, range(100))) == {200} and len(engine.seen) == 1, "whoever asks"
        assert engine.seen[0].priority > 2**31 - 1, "it goes before all that others may ask for"
        monkeypatch.setattr(service, "PROBE_LASTS_S", 0.0)
        assert probe(None) == 200 and len(engine.seen) == 2


def test_requests_that_are_read_keep_the_interpreter_only_shortly_from_the_engine(scripted):
    usual = 0.005
    sys.setswitchinterval(usual)
    with serving(*scripted("abc")):
        assert sys.getswitchinterval() < usual / 10
    assert sys.getswitchinterval() == usual


def test_what_never_ran_is_sent_elsewhere_at_once_when_the_server_stops(scripted):
    llm, engine = scripted(LONG, slots=1, hold_at=6)
    with serving(llm, engine, grace_period_s=20.0) as server, ThreadPoolExecutor(4) as pool:
        url = server.url + CHAT
        running = pool.submit(httpx.post, url, json=body(), timeout=30)
        wait_until(lambda: len(engine.running) == 1)
        waiting = [pool.submit(httpx.post, url, json=body(stream=s, n=2), timeout=30) for s in (False, True)]
        wait_until(lambda: server.service.engine.num_live == 5)
        server.stop()
        answers = [each.result() for each in waiting]
        assert not running.done() and engine.running
        for answer in answers:
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "overloaded"
        engine.release()
        assert running.result().json()["choices"][0]["message"]["content"] == LONG


def test_what_has_no_token_when_the_time_is_over_is_a_503(scripted):
    llm, engine = scripted(LONG, slots=1, hold_at=0)
    with serving(llm, engine) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30)
        wait_until(lambda: len(engine.running) == 1)
        server.stop()
        assert running.result().status_code == 503


def test_while_responses_finish_it_is_alive_but_not_ready_and_refuses_what_comes(scripted):
    llm, engine = scripted(LONG, hold_at=6)
    with serving(llm, engine, grace_period_s=20.0) as server, ThreadPoolExecutor(1) as pool:
        for path in ("/health", "/health/ready", "/health/live"):
            assert server.http.get(path).json() == {"status": "ok"}
        running = pool.submit(httpx.post, server.url + CHAT, json=body(stream=True), timeout=30)
        wait_until(lambda: has_begun(engine, 1))
        server.stop()
        wait_until(lambda: server.service.engine.health == "draining")
        for path, status in (
            ("/health", 503),
            ("/health/ready", 503),
            ("/health/live", 200),
            ("/health_generate", 503),
        ):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()) == (status, {"status": "draining"})
            assert answer.headers["connection"] == "close"
        for stream in (False, True):
            answer = httpx.post(server.url + CHAT, json=body(stream=stream))  # on a new connection
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        engine.release()
        assert "abort" not in running.result().text and running.result().text.endswith("data: [DONE]\n\n")
        server.thread.join(5)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_does_not_wait_for_responses_that_finish(scripted, first):
    llm, engine = scripted(LONG, slots=1, hold_at=6)
    with serving(llm, engine, grace_period_s=60.0) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, server.url + CHAT, json=body(stream=True), timeout=30)
        wait_until(lambda: has_begun(engine, 1))
        server.server.handle_exit(first, None)
        wait_until(lambda: server.service.engine.health == "draining")
        assert server.thread.is_alive() and engine.running
        server.server.handle_exit(signal.SIGINT, None)
        server.thread.join(5)
        assert not server.thread.is_alive()
        assert '"finish_reason":"abort"' in running.result().text


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_sigterm_that_is_sent_again_cuts_no_response(scripted, first):
    llm, engine = scripted(LONG, slots=1, hold_at=6)
    with serving(llm, engine, grace_period_s=60.0) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30)
        wait_until(lambda: has_begun(engine, 1))
        server.server.handle_exit(first, None)
        wait_until(lambda: server.service.engine.health == "draining")
        for _ in range(2):
            server.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.2)  # the server looks for signals every 0.05 s
        engine.release()
        assert running.result().json()["choices"][0]["message"]["content"] == LONG
        server.thread.join(5)
        assert not server.thread.is_alive() and engine.totals.num_finished == {"stop": 1}


HALF_A_REQUEST = (
    f'POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"mess'
).encode()


def half_a_request(server):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(HALF_A_REQUEST)
    connection.settimeout(10)
    return connection


def test_a_body_that_never_arrives_holds_neither_memory_nor_the_shutdown(scripted, monkeypatch):
    with serving(*scripted("abc"), grace_period_s=20.0) as server:
        monkeypatch.setattr("eagle_kit.server.api.body.READ_S", 0.2)
        with half_a_request(server) as connection:
            answer = b"".join(iter(lambda: connection.recv(2000), b""))
            assert b" 408 " in answer and b"body_timeout" in answer
        monkeypatch.setattr("eagle_kit.server.api.body.READ_S", 60.0)
        with half_a_request(server) as connection:
            wait_until(lambda: len(server.server.server_state.tasks) == 1)
            server.stop()
            assert b" 503 " in connection.recv(2000)
            server.thread.join(5)
            assert not server.thread.is_alive()


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(scripted, caplog):
    with serving(*scripted("abc")) as server:
        half_a_request(server).close()
        assert server.http.get("/health").status_code == 200
        wait_until(lambda: not server.server.server_state.tasks)
    assert not caplog.records


def test_freed_memory_goes_back_to_the_system(scripted, monkeypatch):
    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    if not keep_large_blocks():
        pytest.skip("needs glibc")
    monkeypatch.setattr("eagle_kit.server.api.app.TRIM_EVERY_S", 0.2)
    with serving(*scripted("abc")):
        blocks = [bytearray(60_000) for _ in range(5000)]
        above = bytearray(60_000)  # so that the heap cannot shrink from its end
        full = resident()
        del blocks
        wait_until(lambda: resident() < full - 200_000_000)
        del above


def test_headers_that_never_end_are_refused_in_time(scripted, monkeypatch):
    monkeypatch.setattr("eagle_kit.server.api.connection.HEADERS_S", 0.3)
    with serving(*scripted("abc")) as server:
        line = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        for kept_open in (False, True):
            for begun in (b"", line + b"X-Slow: 1")[kept_open:]:
                with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                    if kept_open:
                        connection.sendall(line + b"\r\n")
                        assert b" 200 " in connection.recv(2000)
                    connection.sendall(begun)
                    answer = b"".join(iter(lambda c=connection: c.recv(2000), b""))
                    assert (b" 408 " in answer and b"headers_timeout" in answer) is bool(begun)
        assert server.http.get("/health").status_code == 200
        time.sleep(0.5)  # idle between two requests is no lateness
        assert server.http.get("/health").status_code == 200


def is_open(connection):
    connection.settimeout(0.0)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def limit_connections(monkeypatch, most):
    """Let the next server have ``most`` connections."""
    monkeypatch.setattr("eagle_kit.server.api.connection.MOST_CONNECTIONS", most)
    monkeypatch.setattr("eagle_kit.server.api.connection.CONNECTIONS_PER_REQUEST", 0)


@pytest.mark.parametrize(
    "begun", [b"GET /health HTTP/1.1\r\nX-Slow: 1", HALF_A_REQUEST], ids=["head", "body"]
)
def test_clients_that_do_not_send_their_requests_keep_nobody_from_connecting(scripted, monkeypatch, begun):
    limit_connections(monkeypatch, 8)
    with serving(*scripted("abc")) as server, ExitStack() as stack:
        half = []
        for _ in range(30):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connection.sendall(begun)
            half.append(connection)
        assert server.http.get("/health").status_code == 200
        assert len(server.server.server_state.connections) <= 8
        wait_until(lambda: sum(map(is_open, half)) < 8)
        assert is_open(half[-1]) and not is_open(half[0])


def test_connections_that_are_being_answered_stay_and_the_next_is_closed(scripted, monkeypatch):
    limit_connections(monkeypatch, 2)
    with serving(*scripted(LONG, hold_at=6)) as server, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30) for _ in range(2)]
        wait_until(lambda: server.service.engine.num_live == 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            assert connection.recv(1) == b""
        server.engine.release()
        assert [answer.result().status_code for answer in both] == [200, 200]


def test_clients_that_do_not_read_their_responses_keep_nobody_from_connecting(scripted, monkeypatch):
    limit_connections(monkeypatch, 2)
    with serving(*scripted("abc")) as server, ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        connections = server.server.server_state.connections
        wait_until(lambda: len(connections) == 2 and all(each.flow.write_paused for each in connections))
        assert server.http.get("/health").status_code == 200
        assert len(connections) == 2


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "connections", "backlog"),
    [
        (1024, 1_048_576, 5184, 4096, 512),
        (1024, -1, 5184, 4096, 512),
        (1024, 4096, 4096, 3008, 512),
        (200, 200, None, 86, 25),
        (65_536, 1_048_576, None, 4096, 512),
        (-1, -1, None, 4096, 512),
        (64, 64, None, 1, 8),
    ],
)
def test_connections_fit_the_limit_of_open_files(monkeypatch, soft, hard, raised_to, connections, backlog):
    raised = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: raised.append(limits))
    assert connection_limits(0) == (connections, backlog)
    assert raised == ([(raised_to, hard)] if raised_to else [])


def test_a_full_queue_keeps_nobody_from_connecting(scripted, monkeypatch):
    monkeypatch.setattr("eagle_kit.server.api.connection.MOST_CONNECTIONS", 2)
    with serving(*scripted(LONG, hold_at=6), max_queued=8) as server, ThreadPoolExecutor(16) as pool:
        most = server.service.engine.capacity
        answers = [pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30) for _ in range(most)]
        wait_until(lambda: server.service.engine.num_live == most)
        assert server.http.get("/health").status_code == 200
        server.engine.release()
        assert [answer.result().status_code for answer in answers] == [200] * most


def test_a_client_that_never_reads_is_cut_off(scripted, monkeypatch):
    monkeypatch.setattr("eagle_kit.server.api.connection.UNREAD_S", 0.3)
    with serving(*scripted("abc", max_context=30_000), max_queued=200) as server:
        text = json.dumps({"prompt": [70] * 29_000, "n": 100, "max_tokens": 3, "echo": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{text}".encode())
            wait_until(lambda: server.service.engine.num_live > 0 or server.engine.seen)
            wait_until(lambda: not server.server.server_state.connections)
        wait_until(lambda: not server.server.server_state.tasks)


def test_a_client_that_has_read_again_is_not_cut_off(scripted, monkeypatch):
    monkeypatch.setattr("eagle_kit.server.api.connection.UNREAD_S", 2.0)
    with serving(*scripted("abc", max_context=30_000), max_queued=200) as server:
        text = json.dumps({"prompt": [70] * 29_000, "n": 100, "max_tokens": 3, "echo": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(10)
            connection.connect(("127.0.0.1", server.port))

            # It reads the beginning, pauses until its buffer is full, and reads the rest.
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{text}".encode())
            answer = connection.recv(100_000)
            time.sleep(0.1)  # its buffer is full meanwhile
            size = int(answer.lower().partition(b"content-length: ")[2].split()[0])
            left = size - len(answer.partition(b"\r\n\r\n")[2])
            while left > 0:
                left -= len(connection.recv(200_000))

            # It asks again on the same connection.
            time.sleep(2.5)  # longer than it may leave anything unread
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in connection.recv(2000)


def test_a_client_that_reads_slowly_gets_its_whole_response_from_a_server_that_is_stopped_too(
    scripted, monkeypatch
):
    # The checks of what is unread do not run by the clock, but when the client has read something.
    unread_s = 3600.0
    timers = []
    call_later = asyncio.BaseEventLoop.call_later

    def record(loop, delay, callback, *args, **kwargs):
        timer = call_later(loop, delay, callback, *args, **kwargs)
        if delay == unread_s:
            timers.append((loop, timer, callback, *args))
        return timer

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", record)
    monkeypatch.setattr("eagle_kit.server.api.connection.UNREAD_S", unread_s)
    monkeypatch.setattr("eagle_kit.server.api.server.SLACK_S", 0)
    checked = []

    def check(timer, callback, unread):
        if not timer.cancelled():
            timer.cancel()
            checked.append(unread)
            callback(unread)

    engine = scripted("abc", max_context=100_000)
    with serving(*engine, max_queued=200, grace_period_s=60.0) as server:
        text = json.dumps({"prompt": [70] * 90_000, "n": 120, "max_tokens": 3, "echo": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Length: {len(text)}\r\nContent-Type: application/json\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall((head + text).encode())
            pieces = [connection.recv(100_000)]
            server.stop()
            while piece := connection.recv(200_000):
                pieces.append(piece)
                loop, timer, callback, unread = timers[-1] if timers else (None,) * 4
                if unread is None:  # the first check only takes the number of unread bytes
                    continue
                if callback.__self__.transport.get_write_buffer_size() < unread:
                    timers.pop()
                    loop.call_soon_threadsafe(check, timer, callback, unread)
        content = b"".join(pieces).partition(b"\r\n\r\n")[2]
        assert len(json.loads(content)["choices"]) == 120
        assert len(checked) > 1
