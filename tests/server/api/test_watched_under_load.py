"""Health, metrics, the log and profiles while 64 streams run."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tiny import tiny_head

from eagle_kit.engine.llm import LLM
from eagle_kit.server.stats_log import LOGGER_NAME
from tests.server.api.serving import serving, wait_until

NUM_STREAMS = 64
NUM_TOKENS = 60


@pytest.fixture
def llm(target_folder):
    """A random target with a random head, and room for eight streams at a time."""
    plain = LLM(str(target_folder), max_context=128)
    head = tiny_head(plain.target, draft_vocab_size=67)
    sizes = {"max_batch_size": 8, "max_context": 128, "page_size": 4}
    return LLM(str(target_folder), head, shape="3,1,4", **sizes)


def streamed(url, number):
    """Read a stream to its end -> its events."""
    body = {"prompt": [5 + number % 7, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def test_a_server_is_watched_while_64_streams_run(llm, tmp_path, caplog):
    caplog.set_level(logging.INFO, LOGGER_NAME)
    engine = llm.engine()
    has_ended = threading.Event()
    profiles = []

    def watch(http):
        """Ask for health and metrics, and make profiles one after the other, until all streams have ended."""
        while not has_ended.is_set():
            assert http.get("/health").json() == {"status": "ok"}
            assert "eagle_kit:num_requests_running" in http.get("/metrics").text
            assert http.post("/start_profile", json={"num_steps": 5}).status_code == 200
            profiles.append(http.post("/stop_profile").json())

    with (
        serving(llm, engine, profile_dir=tmp_path, log_stats_interval_s=0.05) as server,
        ThreadPoolExecutor(NUM_STREAMS + 1) as pool,
    ):
        watching = pool.submit(watch, server.http)
        streams = [pool.submit(streamed, server.url, number) for number in range(NUM_STREAMS)]
        ended = [stream.result() for stream in streams]
        has_ended.set()
        watching.result()
        wait_until(lambda: not engine.has_work)

    assert all(lines[-1] == "data: [DONE]" for lines in ended)
    assert engine.totals.num_generated_tokens == NUM_STREAMS * NUM_TOKENS
    assert engine.totals.num_finished == {"length": NUM_STREAMS}
    files = {name for profile in profiles for name in profile["files"]}
    assert {path.name for path in tmp_path.iterdir()} == files and len(files) == len(profiles) > 0
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER_NAME]
    assert any("Running: 8 reqs" in line for line in lines)
