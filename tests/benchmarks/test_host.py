"""The host's work a step: what is counted does not grow with the batch; the benchmark says what it finds."""

import json

import pytest

from benchmarks.cli import main
from benchmarks.engine import host
from eagle_kit.core.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1)


def counted(batch, shape, params, waiting=0):
    """Operations of 32 steps, in which every request fills two pages or more."""
    with host.serving(host.Load(batch, shape, waiting, params)) as engine:
        for _ in range(3):
            engine.step()
        written = engine.runner.slots.page_table.clone()
        found = host.operations(engine, 2 * engine.config.page_size)
        assert (engine.runner.slots.page_table != written).sum() >= 2 * batch
    return found


@pytest.mark.parametrize(
    ("shape", "params", "waiting"),
    [("none", SamplingParams(), 0), ("3,1,4", SamplingParams(), 3), ("3,1,4", SAMPLED, 0)],
)
def test_operations_and_copies_of_a_step_are_the_same_for_every_batch(shape, params, waiting):
    """With a write for each request whose pages grew, 16 requests had 140 operations and 33 tensors from the
    host in a step."""
    few, many = (counted(batch, shape, params, waiting) for batch in (2, 16))
    for counts in (few, many):
        assert max(each.total() for each in counts) <= 20
    assert {each[host.FROM_HOST] for each in few + many} == {0, 1}, "page tables, where any of them grew"


def test_tokens_come_back_as_if_they_had_been_computed():
    with host.serving(host.Load(5, "3,1,4")) as engine:
        requests = list(engine.scheduler.running)
        before = [len(request.token_ids) for request in requests]
        for _ in range(4):
            assert sorted(each.number for each in engine.step()) == [0, 1, 2, 3, 4]
        assert [len(r.token_ids) - n for r, n in zip(requests, before, strict=True)] == [4, 8, 12, 16, 4]
        assert all(request.read().startswith(" w") for request in requests)


def test_the_benchmark_of_the_host_runs(tmp_path):
    path = tmp_path / "h.json"
    code = main(["engine", "--host", "--tiny", "--out", str(path), "--no-progress"])
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert code == 0 and list(rows)[:2] == ["host: batch 1, none", "host: batch 8, none"]
    for row in rows.values():
        figures = row["figures"]
        assert 0 < figures["step us, least"] <= figures["median"] and figures["from the host"] == 1
    assert main(["engine", "--host", "--model", "tiny"]) == 2
