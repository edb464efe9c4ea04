"""Targets of benchmarks, judged on made-up rows, and names of their files."""

import argparse
from pathlib import Path

import pytest

from benchmarks.engine.host import host_targets
from benchmarks.engine.suite import engine_targets
from benchmarks.options import Options
from benchmarks.train.step import training_targets
from benchmarks.tune.cells import interval
from benchmarks.tune.judge import verdicts
from benchmarks.tune.prompts import part_of
from benchmarks.tune.suite import name_of


def cell(draft, batch, task, auto, best, **ratios):
    figures = {"auto over plain": auto, "auto over best in a round": best}
    values = {"draft": draft, "batch": batch, "task": task}
    return {**values, "figures": figures, "ratios": {"auto": auto, **ratios}, "course": [auto]}


TUNED = [
    cell("ours", 1, "chat", 2.0, 1.05, **{"1,1,2": 1.0, "4,1,5": 2.0}),
    cell("ours", 8, "chat", 1.1, 0.96, **{"1,1,2": 1.0, "4,1,5": 0.5}),
    cell("ours", 1, "noise", 0.97, 1.0, **{"1,1,2": 1.0, "4,1,5": 1.0}),
    cell("theirs", 1, "chat", 1.2, 1.0, **{"1,1,2": 1.0, "4,1,5": 1.0}),
    {"draft": "ours", "batch": 1, "task": "chat", "figures": {"auto over plain": 0.99}, "course": [0.99]},
    {"draft": "ours", "batch": 8, "figures": {"choosing us": 9.0, "share of a cycle": 0.003}},
    {
        "draft": "ours",
        "batch": 1,
        "task": "chat",
        "peers": True,
        "figures": {"times transformers": 3.5, "times vLLM at its best": 1.3},
    },
]


def test_choosing_shapes_is_judged_by_the_worst_cell():
    found = {each.target: each for each in verdicts(["1,1,2", "4,1,5"], TUNED, True)}

    # Against plain decoding and the best shape of a cell.
    plain, cold, best, mean, choosing, *worth = found.values()
    assert (plain.measured, plain.at, plain.met) == (0.97, "ours, batch 1, noise", False)
    assert (cold.measured, cold.at, cold.met) == (0.99, "ours", True)
    assert (best.measured, best.at, best.met) == (0.96, "ours, batch 8, chat", False)
    auto = (2.0 * 1.1 * 0.97 * 1.2) ** 0.25
    assert (mean.measured, mean.at, mean.met) == (pytest.approx(auto), "1,1,2", True)
    assert (choosing.measured, choosing.at, choosing.met) == (0.003, "ours, batch 8", False)

    # Against each target of a task.
    judged = [(each.wanted, each.measured, each.met) for each in worth]
    assert judged == [
        (1.25, 2.0, True),  # neither noise nor the other draft
        (1.2, 1.1, False),
        (1.35, 1.3, False),
        (1.35, None, None),
        (3.0, 3.5, True),
        (2.7, None, None),
    ]


def test_the_engine_is_judged_by_cycles_that_speculate_windows_and_the_host():
    def cycle(shape, share, case, **figures):
        row = {"group": "cycle", "status": "ok", "case": case, "shape": shape, "share": share}
        return row | {"figures": figures}

    times = {"1 node": {"median": 2.0}, "8 nodes": {"median": 2.1}}
    rows = [
        cycle("none", 0.1, "plain", host_us=10.0),
        cycle("3,1,4", 0.8, "chain", host_us=149.0),
        cycle("5,4,16", 0.75, "tree"),
        {**cycle("3,1,4", 0.2, "off"), "group": "off"},
        {"group": "verify", "status": "ok", "case": "context 64", "times_us": times},
        {"group": "verify", "status": "failed", "case": "context 99"},
    ]
    found = [(each.measured, each.at, each.met) for each in engine_targets(rows, True)]
    assert found == [
        (pytest.approx(1 / 0.75), "tree", True),
        (pytest.approx(1 / 0.75), "tree", False),
        (pytest.approx(1.05), "context 64", True),
        (149.0, "chain", True),
    ]
    assert [each.met for each in engine_targets(rows, False)] == [None] * 4


def test_the_host_and_training_are_judged_by_their_marks():
    # The host's time of a step.
    rows = []
    for batch, least in ((64, 400.0), (64, 501.0), (256, 1400.0), (8, 9e9)):
        row = {"batch": batch, "case": f"case {batch} {least}", "status": "ok"}
        rows.append(row | {"figures": {"step us, least": least}})
    rows.append({"batch": 256, "case": "broken", "status": "failed"})
    found = [(each.wanted, each.measured, each.at, each.met) for each in host_targets(rows, True)]
    assert found == [(500.0, 501.0, "case 64 501.0", False), (1500.0, 1400.0, "case 256 1400.0", True)]

    # Training against the published one.
    step = {"time ours/published": 0.4, "memory ours/kept logits": 0.6}
    rows = [{"group": "training step", "case": "T", "figures": step}, {"group": "rate", "figures": {}}]
    assert [(each.measured, each.met) for each in training_targets(rows, True)] == [(0.4, True), (0.6, False)]


def test_a_median_lies_in_its_interval_and_rounds_go_round_the_prompts():
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    low, high = interval(values)
    assert 1.0 <= low < 3.0 < high <= 100.0 and interval([2.0] * 5) == (2.0, 2.0)
    narrow = interval(values, share=0.2)
    assert low <= narrow[0] <= 3.0 <= narrow[1] < high
    prompts = [[1], [2], [3]]
    assert part_of(prompts, 0, 2) == [[1], [2]] and part_of(prompts, 1, 2) == [[3], [1]]
    assert (name_of("runs/a/draft"), name_of("runs/a/best"), name_of("head")) == ("a", "best", "head")


def test_options_have_a_seed_of_their_own_and_files_names_of_date_and_device():
    given = argparse.Namespace(out=None, resume=False, minutes=2.5, seed=None, tiny=True, no_plot=None)
    options = Options.of(given, "c")
    assert (options.minutes, options.tiny, options.no_plot, options.command) == (2.5, True, False, "c")
    assert options.seed > 0 and Options.of(argparse.Namespace(seed=7), "").seed == 7
    place = options.path("engine", "NVIDIA H100 (80GB)", full=True)
    assert place.parent == Path("kernels/results") and place.name.startswith("engine-2")
    assert place.name.endswith("-nvidia-h100-80gb.json")
    assert options.path("engine", "CPU", full=False).parent == Path("results")
    assert Options(out=Path("a.json")).path("engine", "CPU", full=True) == Path("a.json")
