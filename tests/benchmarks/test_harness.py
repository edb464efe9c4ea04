"""The harness: failures stop nothing, a record is whole after every case and can be gone on with."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.case import Case, Cost, Form, Machine
from benchmarks.ceilings import Ceilings
from benchmarks.options import Options
from benchmarks.record import Record
from benchmarks.runner import Benchmark, conduct
from benchmarks.table import format_row, heading
from benchmarks.verdict import at_least, at_most
from eagle_kit.core.errors import UserError
from eagle_kit.ops.timing import Timer, Timing, matmul_rates

CPU = torch.device("cpu")
MACHINE = Machine(CPU, torch.float32, Timer(CPU, budget_s=0.0, least=4), Ceilings(1e3, 1e4, 1e-6), 3)


def refuse(machine):
    raise RuntimeError("the kernel is broken\nin many lines")


def leave_out(machine):
    raise UserError("The pool is too small.", "Raise it.")


def interrupt(machine):
    raise KeyboardInterrupt


def ok(machine):
    return {"figures": {"seed": machine.seed}}


def run(path, *measures, **options):
    cases = [Case("group", measure.__name__, measure) for measure in measures]
    defaults = {"out": path, "no_progress": True, "command": "the command"}
    code = conduct(Benchmark("test", cases, {"model": "m"}), MACHINE, Options(**{**defaults, **options}))
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_a_time_is_a_median_with_its_spread():
    timing = Timing.of([5.0, 1.0, 3.0], "clock")
    assert timing == (3.0, 1.0, 5.0, 3, "clock")
    assert timing.in_us() == {"median": 3e6, "low": 1e6, "high": 5e6, "repeats": 3, "how": "clock"}
    ten = Timing.of([float(i) for i in range(20)], "clock")
    assert (ten.median, ten.low, ten.high) == (9.5, 2.0, 17.0)
    calls = []
    timed = Timer(CPU, budget_s=0.0, least=4).time(lambda: calls.append(1))
    assert timed.repeats == 4 and len(calls) == 6 and timed.how == "clock"


@pytest.mark.parametrize(("budget_s", "repeats"), [(0.0, 2), (5.0, 2), (7.0, 3), (40.0, 20), (1e9, 25)])
def test_runs_are_repeated_as_often_as_the_budget_allows(monkeypatch, budget_s, repeats):
    """Runs of two seconds, at least twice and at most 25 times."""
    now = [0.0]

    def step():
        now[0] += 2.0

    monkeypatch.setattr("eagle_kit.ops.timing.time.perf_counter", lambda: now[0])
    timed = Timer(CPU, budget_s=budget_s, least=2, most=25).time(step)
    assert timed == (2.0, 2.0, 2.0, repeats, "clock")


def test_runs_in_a_row_are_timed_from_one_to_the_next(monkeypatch):
    now = [0.0]

    def step():
        now[0] += 2.0

    monkeypatch.setattr("eagle_kit.ops.timing.time.perf_counter", lambda: now[0])
    assert Timer(CPU).time_in_a_row(step, repeats=3, warmup=1) == (2.0, 2.0, 2.0, 3, "clock, in a row")


def test_matmul_rates_are_of_this_machine():
    rates = matmul_rates(128)
    assert set(rates) >= {"torch_mm"} and all(1e7 < rate < 1e15 for rate in rates.values())


def test_a_floor_is_the_larger_of_bytes_and_arithmetic_of_each_part():
    assert Cost(4_000, 100).seconds(MACHINE.ceilings) == 4.0
    assert Cost(4_000, 90_000).seconds(MACHINE.ceilings) == 9.0
    fast = MACHINE._replace(timer=Timer(CPU, budget_s=0.0, least=1))
    row = fast.compare({"ours": lambda: Form(lambda: None)}, Cost(4_000, 100), Cost(1_000, 90_000))
    assert (row["bytes"], row["flops"], row["bound"]) == (5_000, 90_100, "flops")
    assert (row["floor_us"], row["byte_floor_us"]) == (13e6, 5e6)
    median = 1e-6 * row["times_us"]["ours"]["median"]
    assert row["share"] == pytest.approx(13 / median, rel=0.3)
    assert row["gb_per_s"] == pytest.approx(5e-6 / median, rel=0.3)


def test_a_floor_is_told_by_the_data_sheet_too_where_there_is_one():
    ceilings = replace(MACHINE.ceilings, sheet_bytes_per_s=2e3)
    fast = MACHINE._replace(timer=Timer(CPU, budget_s=0.0, least=1), ceilings=ceilings)
    row = fast.compare({"ours": lambda: Form(lambda: None)}, Cost(4_000, 100), Cost(1_000, 9_000))
    assert (row["floor_us"], row["sheet_floor_us"], row["bound"]) == (5e6, 2.9e6, "bytes")
    assert row["sheet_share"] / row["share"] == pytest.approx(2.9 / 5)
    assert row["tflop_per_s"] / row["gb_per_s"] == pytest.approx(9_100 / 5_000 / 1e3)
    assert "sheet_share" not in MACHINE.compare({"ours": lambda: Form(lambda: None)}, Cost(1))


def test_a_line_has_the_times_of_all_forms_and_the_figures():
    def time(median):
        return {"median": median, "low": 0.5 * median, "high": 3 * median}

    row = {
        "status": "ok",
        "case": "the case",
        "times_us": {"ours": time(200.0), "theirs": time(500.0), "broken": {"error": "no such kernel"}},
        "floor_us": 150.0,
        "share": 0.75,
        "gb_per_s": 1234.5,
        "tflop_per_s": 0.125,
        "figures": {"accept": 3.14159, "lossless": True, "tokens": 5_000, "shape": "auto"},
    }

    # Figures are on a line of their own.
    times, figures = format_row(row).splitlines()
    assert " ".join(times.split()) == (
        "the case 200 100..600 150 0.75 1,234.5 0.125 ours: theirs 2.50, broken failed"
    )
    assert figures == "      accept 3.14, lossless yes, tokens 5,000, shape auto"
    assert "GB/s" in heading("g", row) and "GB/s" not in heading("g", {"times_us": {}})
    assert heading("g", {}) == "g"

    # Rows without times.
    for status, line in (
        ({"status": "ok", "figures": {"a": 1}}, "x a 1"),
        ({"status": "failed", "error": "E: it broke"}, "x FAILED: E: it broke"),
        ({"status": "left out", "reason": "no room"}, "x left out: no room"),
    ):
        assert " ".join(format_row({"case": "x", **status}).split()) == line


def test_another_form_that_fails_is_recorded_and_ours_is_not_forgiven():
    def broken():
        raise ValueError("no such kernel")

    row = MACHINE.compare({"ours": lambda: Form(lambda: None), "theirs": broken})
    assert row["times_us"]["theirs"] == {"error": "ValueError: no such kernel"}
    assert row["times_us"]["ours"]["repeats"] == 4 and "floor_us" not in row
    with pytest.raises(ValueError, match="no such kernel"):
        MACHINE.compare({"ours": broken})


def test_the_record_says_when_where_and_with_what(tmp_path):
    code, data = run(tmp_path / "sub" / "r.json", ok)
    assert code == 0 and data["kind"] == "test" and data["command"] == "the command"
    assert {"date", "machine", "versions", "ceilings", "targets", "device_state"} <= data.keys()
    assert {"torch", "python", "triton"} <= data["versions"].keys() and data["machine"]["threads"] >= 1
    assert data["settings"] == {"model": "m", "device": "CPU", "dtype": "torch.float32"}
    assert data["seed"] == 3 and data["running"] is None
    row = data["cases"]["group: ok"]
    assert row.pop("seconds") >= 0
    assert row == {"group": "group", "case": "ok", "status": "ok", "figures": {"seed": 3}}


def test_a_failure_is_recorded_and_stops_nothing(tmp_path):
    code, data = run(tmp_path / "r.json", refuse, leave_out, ok)
    rows = data["cases"].values()
    assert code == 1 and [row["status"] for row in rows] == ["failed", "left out", "ok"]
    assert data["cases"]["group: refuse"]["error"] == "RuntimeError: the kernel is broken"


def test_cases_are_saved_one_by_one_and_taken_up(tmp_path):
    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, ok, interrupt)
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["cases"]["group: ok"]["status"] == "ok" and saved["running"] == "group: interrupt"
    code, data = run(path, ok, interrupt, leave_out, resume=True)
    assert code == 1 and data["cases"]["group: ok"] == saved["cases"]["group: ok"]
    assert data["cases"]["group: interrupt"] == {"status": "failed", "error": "It ended the process."}
    assert data["cases"]["group: leave_out"]["status"] == "left out" and len(data["resumed"]) == 1


def test_what_finds_no_time_is_left_out_and_done_later(tmp_path):
    path = tmp_path / "r.json"
    code, data = run(path, ok, minutes=1e-9)
    row = data["cases"]["group: ok"]
    assert code == 0 and (row["status"], row["reason"]) == ("left out", "no time was left")
    code, data = run(path, ok, resume=True)
    assert code == 0 and data["cases"]["group: ok"]["status"] == "ok"


def test_a_file_of_other_settings_is_not_mixed_in(tmp_path):
    path = tmp_path / "r.json"
    Record(path, {}, {"sizes": "full"})
    with pytest.raises(UserError, match="sizes"):
        Record(path, {}, {"sizes": "tiny"}, resume=True)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match=path.name):
        Record(path, {}, {"sizes": "tiny"}, resume=True)
    with pytest.raises(UserError, match="below.json"):
        Record(path / "below.json", {}, {})


def test_a_missing_matplotlib_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    drawn = []
    benchmark = Benchmark("test", [Case("g", "ok", ok)], {}, plot=lambda data, path: drawn.append(path))
    options = Options(out=tmp_path / "r.json", no_progress=True)
    with pytest.raises(UserError, match="matplotlib"):
        conduct(benchmark, MACHINE, options)
    assert conduct(benchmark, MACHINE, replace(options, no_plot=True)) == 0 and not drawn


def test_a_target_takes_the_worst():
    found = [(0.9, "here"), (0.8, "there")]
    low, high = at_least("share", 0.85, found), at_most("ratio", 0.85, found)
    assert (low.measured, low.at, low.met) == (0.8, "there", False)
    assert (high.measured, high.at, high.met) == (0.9, "here", False)
    assert at_least("x", 0.8, found).met and at_most("x", 0.9, found).met, "the bound itself is met"
    assert at_least("x", 1.0, found, counts=False).met is None
    assert at_most("x", 1.0, []).met is None
