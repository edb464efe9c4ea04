"""A soak: what it does to a real server, and what it calls a failure."""

import asyncio
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from tiny import tiny_head
from tiny_run import make_target

from benchmarks.cli import main
from benchmarks.soak import run
from benchmarks.soak.clients import MIX, Load, Wait
from benchmarks.soak.run import Alone, Sample, judge
from benchmarks.soak.wire import Answer, Server
from eagle_kit.engine.llm import LLM
from tests.server.api.serving import serving

ALONE = {(0, "greedy"): Alone(0.1, 1.0, "four")}


def load_of(whole=2.9, others=1.0, text="four", **outcomes) -> Load:
    load = Load(Server("127.0.0.1", 1), random.Random(0), 100)
    load.waits = [Wait(1.0, (0, "greedy"), 0.2, whole, others, text)]
    load.outcomes = {name: Counter([outcome]) for name, outcome in outcomes.items()}
    return load


def failures_of(load: Load, memory=(1, 2, 2)) -> list[str]:
    return judge(load, ALONE, [Sample(float(i), float(gb), 1.0) for i, gb in enumerate(memory)])["failures"]


def test_what_is_a_failure():
    assert failures_of(load_of(probe="200", leaver="left")) == []
    assert "longer than their fair share" in failures_of(load_of(whole=3.1))[0]
    assert failures_of(load_of(whole=3.1, others=2.0)) == []
    assert "differ from those alone" in failures_of(load_of(text="five"))[0]
    assert failures_of(load_of(probe="500")) == ["probe: 1 times 500"]
    assert "memory grew from 2.00 to 2.20 GB" in failures_of(load_of(), (1, 2, 2.2))[0]
    assert failures_of(load_of(), (1, 2)) == ["it was too short to be judged"]


def test_others_are_counted_by_the_time_that_they_take(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    load = Load(Server("127.0.0.1", 1), random.Random(0), 100)
    with load.serving() as others:
        now = 1.0
        with load.serving():
            now = 4.0
        assert others() == pytest.approx(0.75)


class Broken:
    """Server whose first answers of /metrics are no metrics."""

    def __init__(self, *bodies):
        self.bodies = list(bodies)

    async def ask(self, path):
        if path == "/health":
            return Answer(200, b"")
        return Answer(200, self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0])


def test_metrics_that_cannot_be_read_are_counted_and_the_soak_goes_on(monkeypatch):
    monkeypatch.setattr(run, "WATCH_S", 0.001)
    load = load_of()
    load.server = Broken(b"<html>", b"\xff", b"process_resident_memory_bytes 1e9\n")
    samples = []
    options = SimpleNamespace(minutes=1, no_progress=True)

    async def watch():
        watching = asyncio.create_task(run._watch(load, samples, options))
        while len(samples) < 3 and not watching.done():
            await asyncio.sleep(0.001)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(watch())
    assert load.num_unreadable == 2 and len(samples) >= 3
    assert any("2 answers of /metrics" in failure for failure in failures_of(load))


@pytest.mark.nightly
def test_a_soak_of_a_real_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "WATCH_S", 0.3)
    folder, out = str(make_target(tmp_path / "target")), tmp_path / "soak.json"
    plain = LLM(folder, max_context=256)
    llm = LLM(folder, tiny_head(plain.target, draft_vocab_size=67), shape="3,1,4", max_context=256)
    with serving(llm, llm.engine(), max_queued=512) as server:
        words = ["--base-url", server.url, "--minutes", "0.06", "--seed", "1", "--no-progress"]
        main(["soak", *words, "--out", str(out)])
    record = json.loads(out.read_text())
    figures = record["figures"]
    assert figures["ordinary responses"] == figures["same text as alone"] == len(record["waits"]) > 0
    right = {kind.name: kind.right for kind in MIX}
    seen = {name: outcomes for name, outcomes in figures["requests"].items() if outcomes}
    assert {"ordinary", "probe", "refused"} <= seen.keys()
    assert {name: set(outcomes) - set(right[name]) for name, outcomes in seen.items()} == {
        name: set() for name in seen
    }
    assert "ordinary responses" in capsys.readouterr().out and (tmp_path / "soak.png").is_file()
    assert main(["soak", *words, "--out", str(out)]) == 2, "nobody answers now"
