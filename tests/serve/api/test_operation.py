"""Keys, limits, aborts, clients that leave, engines that break, and shutting down."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve.api.serving import serving, wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "a long reply " * 8


def body(**changes):
    return {"messages": MESSAGES, **changes}


def test_a_key_is_demanded_everywhere_but_for_health_and_metrics(scripted):
    with serving(*scripted("abc"), api_key="se cret") as server:
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "Basic se cret"}):
            answer = server.http.post(CHAT, json=body(), headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["x-request-id"]
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        right = {"Authorization": "bearer se cret"}
        assert server.http.post(CHAT, json=body(), headers=right).status_code == 200
        assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


def test_a_full_queue_is_a_503_that_says_when_to_come_back(scripted):
    llm, engine = scripted(LONG, slots=1, step_s=0.02)
    with serving(llm, engine, max_queued=1) as server, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30) for _ in range(2)]
        wait_until(lambda: server.service.engine.num_live == 2)
        answer = server.http.post(CHAT, json=body())
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.http.get("/health_generate").json() == {"status": "busy"}
        assert [one.result().status_code for one in both] == [200, 200]
        assert server.http.post(CHAT, json=body(n=2)).status_code == 200
        answer = server.http.post(CHAT, json=body(n=3))
        assert answer.status_code == 400, "three never fit"


def test_one_client_has_its_limits(scripted):
    llm, engine = scripted(LONG, slots=8, step_s=0.02)
    with serving(llm, engine, max_parallel_per_client=2) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, server.url + CHAT, json=body(), timeout=30)
        wait_until(lambda: server.service.engine.num_live == 1)
        answer = server.http.post(CHAT, json=body(n=2))
        assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
        assert first.result().status_code == 200
        assert server.http.post(CHAT, json=body(n=2)).status_code == 200
    with serving(*scripted("abc"), max_requests_per_minute=2) as server:
        statuses = [server.http.post(CHAT, json=body()).status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        assert int(server.http.post(CHAT, json=body()).headers["retry-after"]) >= 29


def test_a_reply_can_be_aborted_by_its_id_or_with_all_others(scripted):
    llm, engine = scripted(LONG, step_s=0.02)
    with serving(llm, engine) as server, ThreadPoolExecutor(3) as pool:

        def start(name):
            headers = {"X-Request-Id": name}
            return pool.submit(httpx.post, server.url + CHAT, json=body(n=1), headers=headers, timeout=30)

        one, two, three = (start(name) for name in ("one", "two", "three"))
        wait_until(lambda: len(engine.running) == 3 and all(r.token_ids for r in engine.running))
        assert server.http.post("/abort", json={"request_id": "nobody"}).json() == {"num_aborted": 0}
        assert server.http.post("/abort", json={"request_id": "chatcmpl-two"}).json() == {"num_aborted": 1}
        choice = two.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort" and LONG.startswith(choice["message"]["content"]) and choice
        assert server.http.post("/abort", json={"abort_all": True}).json() == {"num_aborted": 2}
        for each in (one, three):
            assert each.result().json()["choices"][0]["finish_reason"] == "abort"
        wait_until(lambda: not server.service._live)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(scripted, stream):
    llm, engine = scripted(LONG * 8, max_context=1000, step_s=0.02)
    with serving(llm, engine) as server:
        with (
            pytest.raises(httpx.TimeoutException),
            httpx.stream("POST", server.url + CHAT, json=body(stream=stream, n=2), timeout=0.3) as answer,
        ):
            for _ in answer.iter_bytes():
                time.sleep(0.4)
                raise httpx.ReadTimeout("left while it streams")
        wait_until(lambda: not engine.has_work and server.service.engine.num_live == 0)
        assert engine.totals.num_finished == {"abort": 2}
        assert server.http.post(CHAT, json=body(max_tokens=3)).status_code == 200


def test_an_engine_that_breaks_fails_every_request_and_never_hangs(scripted):
    llm, engine = scripted(LONG, slots=1, step_s=0.02, fail_at=10)
    with serving(llm, engine) as server, ThreadPoolExecutor(3) as pool:
        url = server.url + CHAT
        stream = pool.submit(httpx.post, url, json=body(stream=True), timeout=30)
        wait_until(lambda: engine.totals.num_steps > 0)
        whole = [pool.submit(httpx.post, url, json=body(), timeout=30) for _ in range(2)]
        for each in whole:
            assert each.result().status_code == 500
            assert each.result().json()["error"]["code"] == "engine_failed"
        lines = [line for line in stream.result().text.splitlines() if line]
        assert "engine_failed" in lines[-2] and lines[-1] == "data: [DONE]"
        assert server.http.post(CHAT, json=body()).status_code == 500
        for path in ("/health", "/health_generate"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": "unhealthy"})
        assert server.http.get("/metrics").status_code == 200
        assert server.service.engine.num_live == 0


def test_shutting_down_finishes_what_can_finish_in_time(scripted):
    llm, engine = scripted(LONG, step_s=0.01)
    with serving(llm, engine, grace_period_s=20.0) as server, ThreadPoolExecutor(2) as pool:
        url = server.url + CHAT
        whole = pool.submit(httpx.post, url, json=body(), timeout=30)
        stream = pool.submit(httpx.post, url, json=body(stream=True), timeout=30)
        wait_until(lambda: len(engine.running) == 2)
        server.stop()
        assert whole.result().json()["choices"][0]["message"]["content"] == LONG
        assert whole.result().json()["choices"][0]["finish_reason"] == "stop"
        assert "abort" not in stream.result().text and stream.result().text.endswith("data: [DONE]\n\n")
        server.thread.join(20)
        assert not server.thread.is_alive() and engine.totals.num_finished == {"stop": 2}


def test_shutting_down_returns_what_there_is_when_the_time_is_over(scripted):
    llm, engine = scripted(LONG, step_s=0.1)
    with serving(llm, engine, grace_period_s=0.3) as server, ThreadPoolExecutor(2) as pool:
        url = server.url + CHAT
        whole = pool.submit(httpx.post, url, json=body(), timeout=30)
        stream = pool.submit(httpx.post, url, json=body(stream=True), timeout=30)
        wait_until(lambda: len(engine.running) == 2 and all(r.token_ids for r in engine.running))
        server.stop()
        choice = whole.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort" and LONG.startswith(choice["message"]["content"])
        assert choice["message"]["content"]
        assert '"finish_reason":"abort"' in stream.result().text
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert not server.service.engine._thread.is_alive()
