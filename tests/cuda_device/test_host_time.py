"""The host's work a step: operations do not grow with the batch, and the benchmark reports what it finds."""

import json
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from benchmarks import cli
from benchmarks.case import Machine
from benchmarks.engine import host
from eagle_kit.core.sampling_params import SamplingParams
from tests.cuda_device.device import phase
from tests.cuda_device.engines import fixed_results

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
MOST_OPERATIONS = 30


@pytest.fixture(autouse=True)
def results():
    with fixed_results():
        yield


def counted(batch, shape, params, waiting=0):
    """Operations of 32 steps, in which every request fills two pages or more, and the copies of a step of
    them all."""
    machine = Machine.here(0, tiny=True)
    with host.serving(host.Load(batch, shape, waiting, params), machine) as engine:
        for _ in range(3):
            engine.step()
        running = engine.scheduler.running
        before = {request.number: len(request.sequence.allocation.pages) for request in running}
        with phase() as found:
            operations = host.operations(engine, 2 * engine.config.page_size)
        for request in engine.scheduler.running:
            assert len(request.sequence.allocation.pages) >= before[request.number] + 2
    assert found.counts["graph_launches"] == 2 * engine.config.page_size
    return operations, found.counts["copies"]


@pytest.mark.parametrize(
    ("shape", "params", "waiting"),
    [("none", SamplingParams(), 0), ("3,1,4", SamplingParams(), 3), ("3,1,4", SAMPLED, 0)],
)
def test_operations_of_a_step_are_the_same_for_every_batch(shape, params, waiting):
    """With a write for each request whose pages grew, 16 requests had 140 operations and 33 tensors from the
    host in a step."""
    few, _ = counted(2, shape, params, waiting)
    many, _ = counted(16, shape, params, waiting)
    for operations in (few, many):
        assert max(each.total() for each in operations) <= MOST_OPERATIONS
        assert {each[host.FROM_HOST] for each in operations} == {0, 1}, "page tables, where any of them grew"
    assert max(each.total() for each in many) <= max(each.total() for each in few) + 1


class Work(NamedTuple):
    """What a step asks of torch and of the device beside one replay of a graph."""

    operations: int
    allocations: int
    launches: int
    copies: int


USUAL = Work(operations=15, allocations=0, launches=0, copies=3)
"""A step whose requests need no further page."""
STEPS = {
    ("none", 2): {USUAL: 30, Work(22, 1, 1, 4): 2},
    ("none", 16): {USUAL: 30, Work(22, 1, 1, 4): 2},
    ("3,1,4", 2): {USUAL: 26, Work(23, 1, 1, 4): 6},
    ("3,1,4", 16): {USUAL: 16, Work(22, 1, 1, 4): 16},
    ("3,2,6", 16): {USUAL: 16, Work(22, 1, 1, 4): 16},
}
"""Work of 32 steps by shape and batch: the others write the rows of page tables that have grown."""


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("shape", "batch"), STEPS)
def test_the_work_of_a_decode_step_is_known_exactly(shape, batch, params):
    """A change of these counts is a change of the host's time: say in the commit why."""
    assert steps_of(shape, params, batch) == STEPS[shape, batch]


def steps_of(shape: str, params: SamplingParams, batch: int) -> Counter[Work]:
    """Work of each of the steps in which all requests fill two pages or more."""
    found: Counter[Work] = Counter()
    with host.serving(host.Load(batch, shape, params=params), Machine.here(0, tiny=True)) as engine:
        for _ in range(3):
            engine.step()
        for _ in range(2 * engine.config.page_size):
            with phase() as seen, host.Counting() as counting:
                allocations = host.allocations(engine.step)
            assert seen.counts["graph_launches"] == 1 and seen.counts["captures"] == 0
            found[Work(counting.counts.total(), allocations, seen.launches, seen.counts["copies"])] += 1
    return found


def test_the_benchmark_of_the_host_runs(tmp_path, capsys):
    path = tmp_path / "h.json"
    code = cli.main(["engine", "--host", "--tiny", "--out", str(path), "--no-progress"])
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert code == 0 and list(rows)[:2] == ["host: batch 1, none", "host: batch 8, none"]
    assert list(rows)[-2:] == ["prompt: 512 tokens", "prompt: 512 tokens, eager"]
    for row in rows.values():
        figures = row["figures"]
        assert figures[host.IN_CALLS] > 0
        if row["group"] == "host":
            assert 0 < figures["step us, least"] <= figures["median"] and figures["from the host"] == 1
        else:
            assert 0 < figures["prompt us, least"] <= figures["median"]
            assert figures["a layer us"] < figures["prompt us, least"]
            assert figures["allocations"] > 0
    for length in host.PROMPT_LENGTHS:
        replayed = rows[f"prompt: {length} tokens"]["figures"]
        eager = rows[f"prompt: {length} tokens, eager"]["figures"]
        assert replayed["a layer us"] < eager["a layer us"] > 0
        assert replayed["torch operations"] < eager["torch operations"]
    assert rows["host: batch 8, 3,1,4"]["figures"]["tokens a request"] == pytest.approx(2.5, abs=0.1)
    assert cli.main(["engine", "--host", "--model", "tiny"]) == 2


@pytest.mark.nightly
def test_the_figures_of_every_load():
    """Printed: `make test-cuda-device ARGS="-k figures_of_every_load -s"`."""
    machine = Machine.here(0, tiny=True)
    print(f"\nmicroseconds of the host, {torch.get_num_threads()} threads")
    for load in host.loads():
        figures = host.measure(load, machine)["figures"]
        print(f"{load!s:40}", *(f"{name} {value:.1f}" for name, value in figures.items()), sep="  ")
        assert figures["step us, least"] > 0
