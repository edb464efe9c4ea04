"""The line of the log about a server's traffic."""

import logging
import re
import time
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from eagle_kit.cli.serve import show_stats_log
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.ops.device_memory import GpuMemory
from eagle_kit.server.stats_log import LOGGER_NAME, Counts, has_news, stats_line
from tests.server.api.serving import serving, wait_until

CHAIN = SpecShape(4, 1, 5)
IDLE = Counts(
    at=100.0,
    num_running=0,
    num_waiting=0,
    kv_usage=0.0,
    num_prompt_tokens=1000,
    num_cached_prompt_tokens=100,
    num_generated_tokens=5000,
    num_drafts=1000,
    num_draft_tokens=4000,
    num_accepted_tokens=2000,
    num_finished=7,
    shapes=Counter({CHAIN: 900}),
    memory=None,
)
BUSY = replace(
    IDLE,
    at=110.0,
    num_running=3,
    num_waiting=2,
    kv_usage=0.125,
    num_prompt_tokens=1400,
    num_cached_prompt_tokens=200,
    num_generated_tokens=5500,
    num_drafts=1200,
    num_draft_tokens=4800,
    num_accepted_tokens=2300,
    shapes=Counter({CHAIN: 1000, NO_SPECULATION: 25}),
    memory=GpuMemory(total=80 * 10**9, free=20 * 10**9, reserved=50 * 10**9, allocated=40 * 10**9),
)
"""Ten seconds later: 400 prompt tokens, 100 of them cached, 500 tokens, 200 verifies, 300 of 800 accepted."""


def test_the_line_has_the_figures_of_its_interval():
    assert stats_line(IDLE, BUSY) == (
        "Avg prompt throughput: 40.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, Mean acceptance length: 2.50, "
        "Avg draft acceptance rate: 37.5%, Shapes: 4,1,5 80% | none 20%, GPU memory: 60.0 of 80.0 GB"
    )


def test_what_did_not_occur_is_left_out():
    assert stats_line(IDLE, replace(IDLE, at=102.0, num_running=1)) == (
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, KV cache usage: 0.0%"
    )


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (IDLE, replace(IDLE, at=110.0), False),
        (IDLE, BUSY, True),
        (BUSY, BUSY, True),
        (BUSY, replace(BUSY, num_running=0, num_waiting=0), True),
        (IDLE, replace(IDLE, num_finished=8), True),
        (IDLE, replace(IDLE, num_generated_tokens=5001, num_finished=8), True),
    ],
    ids=["idle", "begins", "goes on", "ends", "aborted between", "served between"],
)
def test_an_idle_server_writes_nothing_and_the_end_of_traffic_is_a_line(before, now, expected):
    assert has_news(before, now) == expected


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER_NAME]


def test_a_server_writes_lines_while_it_answers_and_one_when_it_has_answered(scripted, caplog):
    llm, engine = scripted("a long response " * 8, hold_at=6)
    caplog.set_level(logging.INFO, LOGGER_NAME)
    with serving(llm, engine, log_stats_interval_s=0.02) as server:
        assert not lines_of(caplog)
        body = {"prompt": "abc", "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            wait_until(lambda: len(lines_of(caplog)) >= 3)
            engine.release()
            answer.read()
        wait_until(lambda: "Running: 0 reqs" in lines_of(caplog)[-1])
        count = len(lines_of(caplog))
        time.sleep(0.2)  # several intervals
        assert len(lines_of(caplog)) == count
    lines = lines_of(caplog)
    assert "Running: 1 reqs, Waiting: 0 reqs" in lines[0]
    drafts = re.compile("Mean acceptance length: 2.[5-9].*, Shapes: 3,1,4 100%")
    assert any(drafts.search(line) for line in lines)


def test_an_interval_of_zero_writes_no_line(scripted, caplog):
    with (
        caplog.at_level(logging.INFO, LOGGER_NAME),
        serving(*scripted("abc"), log_stats_interval_s=0) as server,
    ):
        server.http.post("/v1/completions", json={"prompt": "abc"})
        assert not lines_of(caplog)


def test_the_command_prints_the_lines_with_their_time(capsys):
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.level
    show_stats_log()
    show_stats_log()
    try:
        logger.info("%s", stats_line(IDLE, BUSY))
    finally:
        (handler,) = logger.handlers
        logger.removeHandler(handler)
        logger.setLevel(before)
    printed = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Avg prompt.*GB\n", printed)
