"""What a run says of itself while it goes on: validations, where the time goes, trackers, reports."""

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_run import make_config

from eagle_kit.cli import app
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.report.plots import has_matplotlib
from eagle_kit.train.__main__ import main
from eagle_kit.train.run import clock, progress
from eagle_kit.train.run.clock import LAPS
from eagle_kit.train.run.curves import RunCurves, smooth
from eagle_kit.train.run.describe import validation_line
from eagle_kit.train.run.progress import format_seconds
from eagle_kit.train.run.report import compare_runs, write_report
from eagle_kit.train.run.trackers import check_trackers, draws_report, tracker_options
from eagle_kit.train.run.validation import ValidationResult, Validator


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fake_run(folder: Path, lengths: list[float], shape: str = "3,1,4") -> Path:
    """The files of a run of one step a validation, 100 tokens and half a second each."""
    folder.mkdir(parents=True)
    metrics, validated = [], []
    for step, length in enumerate(lengths, 1):
        split = {name: 0.5 / len(LAPS) for name in LAPS}
        metrics.append(
            {"step": step, "loss": 3.0 / step, "lr": 1e-3, "grad_norm": 1.0, "match_per_step": [0.3, 0.2]}
            | {"tokens": 100, "supervised_tokens": 70, "tokens_per_s": 200.0, "seconds": split}
        )
        validated.append(
            {"step": step, "accept_length": {shape: length}, "simulated_accept_length": {shape: length}}
            | {"acceptance_per_position": {shape: [0.5, 0.2, 0.1]}, "vocab_coverage": 0.9, "seconds": 1.0}
        )
    for name, rows in (("metrics", metrics), ("validation", validated)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Reported(NamedTuple):
    """A run of two sessions that was validated after 10 and 20 steps, and followed by every tracker without a
    network.

    Attributes:
        folder: of the run.
        said: printed by the second session.
        responses: of the target to the prompts of validation, in the second session.
    """

    folder: Path
    said: str
    responses: list[list[int]]

    def validations(self) -> list[dict[str, Any]]:
        return lines(self.folder / "validation.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        return lines(self.folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("reported")
    config = make_config(
        folder,
        validation={"every": 10, "shapes": ["3,1,4", "2,2,5"]},
        head={"draft_vocab_size": 60},
        training={"save_every": 10, "log_every": 2},
        tracking={"report": True, "tensorboard": True, "project": "heads"},
    )
    validators: list[Validator] = []
    validate = Validator.validate

    def validate_and_note(self: Validator, *given: Any) -> ValidationResult:
        validators.append(self)
        return validate(self, *given)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validator, "validate", validate_and_note)
        for words in (["--max-steps", "10"], ["--resume", "--max-steps", "20"]):
            said = io.StringIO()
            with redirect_stdout(said):
                assert main([str(config), *words]) == 0
            AcceleratorState._reset_state(reset_partial_state=True)
    assert validators[-1].responses is not None
    return Reported(folder / "run", said.getvalue(), validators[-1].responses)


def test_validations_agree_between_engine_and_trainer(reported: Reported) -> None:
    rows = reported.validations()
    assert [row["step"] for row in rows] == [10, 20]
    for row in rows:
        assert row["simulated_accept_length"] == {"3,1,4": row["accept_length"]["3,1,4"]}
        assert row["num_different_responses"] == 0


def test_a_validation_says_how_far_drafts_got_and_what_the_draft_can_say(reported: Reported) -> None:
    row = reported.validations()[-1]
    for shape, reached in row["acceptance_per_position"].items():
        assert reached == sorted(reached, reverse=True) and 0 < reached[0] < 1
        # A verify emits its accepted drafts and a bonus; a response's last one may end before the bonus.
        verifies = row["num_verifies"][shape]
        assert row["accept_length"][shape] <= 1 + sum(reached) + 1e-9
        assert row["accept_length"][shape] >= 1 + sum(reached) - 4 / verifies
    assert row["simulated_acceptance_per_position"]["3,1,4"] == row["acceptance_per_position"]["3,1,4"]
    assert set(row["simulated_acceptance_per_position"]) == {"3,1,4"}
    sayable = set(load_draft(reported.folder / "step-20").token_map.tolist())
    assert len(sayable) == 60
    said = [token for response in reported.responses for token in response]
    assert row["vocab_coverage"] == sum(token in sayable for token in said) / len(said)
    assert 0 < row["vocab_coverage"] < 1
    assert row["tokens"] == sum(step["tokens"] for step in reported.steps())
    spent = sum(step["tokens"] / step["tokens_per_s"] for step in reported.steps())
    assert row["train_seconds"] == pytest.approx(spent, abs=0.06), "of both sessions"


def test_a_checkpoint_and_the_last_lines_account_for_the_whole_run(reported: Reported) -> None:
    # The checkpoint's figures are sums of the steps.
    about = json.loads((reported.folder / "step-20" / "eagle_kit.json").read_text())
    state = json.loads((reported.folder / "step-20" / "trainer" / "state.json").read_text())
    validated = reported.validations()
    steps = reported.steps()
    tokens, supervised = (sum(step[name] for step in steps) for name in ("tokens", "supervised_tokens"))
    assert (state["step"], state["tokens"], state["supervised_tokens"]) == (20, tokens, supervised)
    assert (about["step"], about["tokens_seen"]) == (20, tokens)
    assert about["seconds"] == pytest.approx(validated[-1]["train_seconds"], abs=0.11)
    assert about["peak_memory_gb"] == pytest.approx(state["peak_memory_gb"], abs=1e-3)

    # The lines that are printed at the start.
    data = about["data"]
    assert 0 < data["supervised_tokens"] < data["tokens"] and data["conversations"] > 20
    assert f"data    {data['conversations']} conversations, " in reported.said
    share = data["supervised_tokens"] / data["tokens"]
    assert f" rows, {data['tokens']} tokens, {share:.0%} supervised; 6 " in reported.said
    assert f"vocab   60 of 300 cover {data['vocab_coverage']:.2%}" in reported.said

    # The lines that are printed at the end.
    best = max(validated, key=lambda row: row["accept_length"]["3,1,4"])
    assert (state["best_step"], state["best_accept_length"]) == (best["step"], best["accept_length"]["3,1,4"])
    line = f"best    accept length {state['best_accept_length']:.3f} (3,1,4) at step {best['step']}"
    assert line in reported.said
    assert f"validation 0m0{sum(row['seconds'] for row in validated):.0f}s" in reported.said
    assert f"curves  {reported.folder / 'report.html'}" in reported.said


def test_the_laps_of_a_step_are_its_time(reported: Reported) -> None:
    shares = []
    for row in reported.steps():
        assert set(row["seconds"]) == set(LAPS)
        assert min(row["seconds"][name] for name in ("capture", "forward", "backward", "optimizer")) > 0
        shares.append(sum(row["seconds"].values()) * row["tokens_per_s"] / row["tokens"])
    assert max(shares) < 1.05, "laps are parts of the step, but for rounding"
    assert max(shares) > 0.9, "and together all of it, unless another process was given the processor"
    assert re.search(r"time    0m\d\ds in 20 steps: data \d+%, capture \d+%", reported.said)


def test_a_lap_is_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((10.0, 10.25, 10.25, 11.0))
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    step_clock = clock.StepClock(torch.device("cpu"))
    for name in ("capture", "forward", "capture"):
        step_clock.lap(name)
    assert step_clock.seconds() == {**dict.fromkeys(LAPS, 0.0), "capture": 1.0}


def test_a_run_leaves_a_page_that_needs_no_network(reported: Reported) -> None:
    page = (reported.folder / "report.html").read_text()
    assert "http" not in page and "<script" not in page
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    names = ("accept_length", "learning", "speed")
    assert [base64.b64decode(data) for data in pictures] == [
        (reported.folder / "curves" / f"{name}.png").read_bytes() for name in names
    ]
    assert not [path for path in reported.folder.rglob("*partial*")]


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "matplotlib"])
def test_what_a_tracker_needs_is_asked_for_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def config(**tracking: Any) -> TrainConfig:
        return TrainConfig(target="t", output_dir="runs/mine/", data={"source": "a"}, tracking=tracking)

    wanted = {
        "wandb": {"wandb": "offline"},
        "tensorboard": {"tensorboard": True},
        "matplotlib": {"report": True},
    }

    # A package that is missing is asked for by its own setting.
    monkeypatch.setitem(sys.modules, package, None)
    for name, tracking in wanted.items():
        if name == package:
            with pytest.raises(UserError, match=f"{package} is not installed") as error:
                check_trackers(config(**tracking))
            assert f"tracking.{next(iter(tracking))}=" in error.value.remedy

    # Options of the trackers, and the page of curves.
    check_trackers(config())
    assert tracker_options(config()) == {}
    assert tracker_options(config(wandb="online", tensorboard=True)) == {
        "wandb": {"dir": "runs/mine/", "mode": "online", "name": "mine"},
        "tensorboard": {},
    }
    told = {"entity": "us", "group": "heads", "name": "first", "tags": ["a", "b"]}
    assert tracker_options(config(wandb="offline", **told)) == {
        "wandb": {"dir": "runs/mine/", "mode": "offline", **told}
    }
    assert tracker_options(config(tensorboard=True), step=7) == {"tensorboard": {"purge_step": 8}}
    assert [draws_report(config(report=report)) for report in (True, False)] == [True, False]
    assert draws_report(config()) == has_matplotlib()


def test_a_page_is_drawn_again_by_its_command(reported: Reported, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "validation.jsonl", "run.yaml"):
        shutil.copy(reported.folder / name, tmp_path)
    assert app.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 3


def test_a_report_that_cannot_be_drawn_costs_no_step(
    copy_run: Callable, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    run = copy_run("two steps")
    (run.output / "curves").write_text("in the way")
    assert run("--resume", "--max-steps", "3", "tracking.report=true") == 0
    assert "The report could not be written" in capsys.readouterr().out
    assert (run.output / "step-3").exists()


def test_tensorboard_gets_validations_and_steps_once(reported: Reported) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(reported.folder / "tensorboard" / "heads"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    assert list(logged) == list(range(2, 21, 2)), "every second step, as training.log_every says"
    steps = {row["step"]: row for row in reported.steps()}
    assert [logged[step] for step in logged] == pytest.approx([steps[step]["loss"] for step in logged])
    third = [event.value for event in events.Scalars("match_per_step/2")]
    assert third == pytest.approx([steps[step]["match_per_step"][2] for step in logged])
    assert [event.value for event in events.Scalars("decoded/3,1,4")] == pytest.approx(
        [row["accept_length"]["3,1,4"] for row in reported.validations()]
    )
    assert {"seconds/backward", "decoded/vocab_coverage", "simulated/3,1,4", "loss_per_step/0"} <= set(
        events.Tags()["scalars"]
    )
    reached = [event.value for event in events.Scalars("decoded/3,1,4/at least 1")]
    by_position = [row["acceptance_per_position"]["3,1,4"] for row in reported.validations()]
    assert reached == pytest.approx([shares[0] for shares in by_position if shares])


def test_validations_of_processes_add_up() -> None:
    one = ValidationResult(
        {"3,1,4": SpecStats(4, 7, [], [2, 1])}, {"3,1,4": SpecStats(4, 7, [], [2, 1])}, 1, 10, 8
    )
    two = ValidationResult({"3,1,4": SpecStats(6, 8, [], [2])}, {"3,1,4": SpecStats(6, 8, [], [2])}, 0, 12, 9)
    row = ValidationResult.total([one, two]).row()
    assert row["accept_length"] == row["simulated_accept_length"] == {"3,1,4": 1.5}
    assert row["acceptance_per_position"] == {"3,1,4": [0.4, 0.1]}
    assert (row["vocab_coverage"], row["num_different_responses"]) == (17 / 22, 1)


def test_patience_stops_a_run_that_no_longer_learns(make_run: Callable, capfd: pytest.CaptureFixture) -> None:
    """With no learning rate to speak of, the second validation is the first one again."""
    run = make_run(validation={"every": 2, "patience": 2}, training={"learning_rate": 1e-12})
    assert run() == 0
    rows = lines(run.output / "validation.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6] and [row["best"] for row in rows] == [
        True,
        False,
        False,
    ]
    assert len({row["accept_length"]["3,1,4"] for row in rows}) == 1
    assert (run.output / "step-6").exists() and (run.output / "best").exists()
    out = capfd.readouterr()
    assert "No better accept length in 2 validations; stopped." in out.out
    assert "1 of 2 without a better one" in out.err


def table_of(page: str, title: str) -> list[list[str]]:
    """Cells of the page's table whose head or first column has ``title``."""
    for table in re.findall(r"<table>(.*?)</table>", page):
        rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
        if title in rows[0] or title in [row[0] for row in rows]:
            return rows
    raise AssertionError(f"no table of {title}")


def test_a_page_has_the_figures_of_the_run_its_sources_and_its_validations(tmp_path: Path) -> None:
    """Thirteen validations, the second one the best; a source that joins behind the first three steps."""
    pytest.importorskip("matplotlib")
    # A made-up run.
    lengths = [1.2, 1.9, *[1.3 + i / 100 for i in range(11)]]
    run = fake_run(tmp_path / "run", lengths)
    metrics = lines(run / "metrics.jsonl")
    validated = lines(run / "validation.jsonl")
    for step, row in enumerate(metrics, 1):
        row["simulated_accept_length_of"] = {"all": step / 10}
        if step > 3:
            row["simulated_accept_length_of"]["late"] = 2.0
    metrics[-1]["loss"] = None
    for row, length in zip(validated, lengths, strict=True):
        row["best"] = length in (1.2, 1.9)
        row["accept_length_of"] = {"all": length, "late": length + 1}
    for name, rows in (("metrics", metrics), ("validation", validated)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run, tmp_path / "out").read_text()

    # Its three tables.
    facts = dict(table_of(page, "steps"))
    assert facts == {
        "steps": "13",
        "tokens": "1,300",
        "supervised rows at step 0": "910",
        "time in steps": "0m06s",
        "time in validations": "0m13s",
        "loss": f"{3.0 / 12:.4f}",
        "best accept length, 3,1,4": "1.900 at step 2",
        "target&#x27;s own tokens the draft can say": "90.00%",
    }
    sources = table_of(page, "documents")[1:]
    assert sources == [
        ["all", "13", "0.150", "1.250", "1.900", "1.400"],
        ["late", "10", "2.000", "2.000", "2.900", "2.400"],
    ]
    last = table_of(page, "3,1,4")[1:]
    later = [[str(step), f"{lengths[step - 1]:.3f}"] for step in range(4, 14)]
    assert [row[:2] for row in last] == [["2 *", "1.900"], *later]
    assert last[0][2] == "50 20 10"


def test_curves_are_over_steps_tokens_and_time(tmp_path: Path) -> None:
    run = RunCurves.read(fake_run(tmp_path / "run", [1.2, 1.5, 1.5]))
    rows, lengths = run.accept_lengths("3,1,4")
    assert lengths == [1.2, 1.5, 1.5] and run.best("3,1,4") == (rows[1], 1.5), "the first of equals"
    assert run.x("step", rows[1:]) == [2, 3]
    assert run.x("tokens", rows[1:]) == pytest.approx([2e-4, 3e-4])
    assert run.x("time", rows[1:]) == pytest.approx([1 / 60, 1.5 / 60])
    assert run.x("tokens", [{"step": 9}]) == [0.0]
    assert (run.name, run.shapes, run.tokens) == ("run", ["3,1,4"], 300)
    assert sum(run.seconds.values()) == pytest.approx(1.5) and set(run.seconds) == set(LAPS)
    smoothed = smooth([1.0, None, 3.0])
    assert smoothed == [1.0, 1.0, 3.0], "a short curve is not smoothed, and a gap adds nothing"
    assert smooth([0.0] * 100 + [1.0] * 100)[110] == pytest.approx(1 - 0.8**11, rel=1e-6)
    assert np.isnan(smooth([None])[0])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0m00s"), (75, "1m15s"), (3599, "59m59s"), (3600, "1h00m"), (3725, "1h02m"), (90061, "25h01m")],
)
def test_durations_are_shown(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_a_validation_is_one_sentence() -> None:
    # Not the best one, with everything that there can be.
    row = {
        "step": 40,
        "accept_length": {"3,1,4": 1.25, "2,2,5": 1.5},
        "simulated_accept_length": {"3,1,4": 1.2},
        "acceptance_per_position": {"3,1,4": [0.5, 0.25], "2,2,5": [0.9]},
        "accept_length_of": {"a": 1.1, "b": 1.4},
        "vocab_coverage": 0.913,
        "best": False,
        "num_different_responses": 2,
        "seconds": 61.0,
    }
    assert validation_line(row, 1, 3) == (
        "step 40: decoded accept length 3,1,4: 1.250, 2,2,5: 1.500 (simulated 3,1,4: 1.200), 50 25 % by "
        "position (a 1.10, b 1.40), vocabulary covers 91.3%, 1 of 3 without a better one; 2 responses differ "
        "from plain decoding [1m01s]"
    )

    # The best one, with as little as possible.
    plain = {**row, "simulated_accept_length": {}, "vocab_coverage": None, "best": True}
    plain |= {"num_different_responses": 0, "accept_length_of": None}
    assert validation_line(plain, 0, 3) == (
        "step 40: decoded accept length 3,1,4: 1.250, 2,2,5: 1.500 (simulated for chains only), 50 25 % by "
        "position, the best so far [1m01s]"
    )


def test_the_progress_line_smooths_and_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps behind six of ten, two seconds each: two are left, or as long as ``--stop-after`` leaves."""
    for stop_after, left in ((None, "0m04s"), (5.0, "0m01s"), (3.0, "0m00s")):
        moments = iter((100.0, 102.0, 104.0))
        clock = SimpleNamespace(perf_counter=moments.__next__)
        monkeypatch.setattr(progress, "time", clock)
        with progress.ProgressLine(10, 6, stop_after) as line:
            for step, loss in ((7, 2.0), (8, 4.0)):
                result: Any = SimpleNamespace(
                    loss=loss, simulated_of={"a": loss, "b": 1.0}, match_per_step=[0.5, 0.25]
                )
                result.simulated_accept_length = 1.75
                result.tokens_per_s = 321.0
                line.update(step, result)
        shown = capsys.readouterr().err.split("\r")[-1]
        assert "step 8/10" in shown
        # (0.95 * 2 + 4) / 1.95: the first value weighs no more than its share.
        assert f"loss 3.026 match 50 25 % accept 1.75 (a 3.03, b 1.00) 321 tok/s left {left}" in shown


def test_the_progress_line_says_that_a_validation_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    result: Any = SimpleNamespace(
        loss=2.0, simulated_of={}, match_per_step=[0.5], simulated_accept_length=1.5, tokens_per_s=321.0
    )
    with progress.ProgressLine(10, 6) as line:
        line.update(7, result)
        line.validating(0, 4)
        shown = capsys.readouterr().err.split("\r")[-1]
        assert "step 7/10" in shown and "321 tok/s" in shown and "validating" in shown and "1/4" in shown
        line.validating(4, 4)
        assert "validating" not in capsys.readouterr().err.split("\r")[-1]


def test_runs_are_compared_by_label_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    base = [fake_run(tmp_path / "a", [1.2, 1.5, 1.4]), fake_run(tmp_path / "b", [1.1, 1.3, 1.3])]
    other = fake_run(tmp_path / "c", [1.3, 1.68])
    result = compare_runs({"base": base, "other": [other]}, tmp_path / "out")
    first, second = result.rows
    assert first["best_of"] == [1.5, 1.3] and first["best"] == pytest.approx(1.4)
    assert first["spread"] == pytest.approx(0.02**0.5) and first["last"] == pytest.approx(1.35)
    assert second["gain"] == pytest.approx(0.2) and second["tokens"] == 200
    assert second["seconds"] == pytest.approx(1.0)
    assert result.png.read_bytes().startswith(b"\x89PNG")
    words = ["report", f"base={base[0]},{base[1]}", str(other), "--out", str(tmp_path / "cli")]
    assert app.main(words) == 0
    assert "| base | 1.400 ± 0.141 of 2 | +0.0% | 1.350 | 3 | 0.00 |" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    one, two = fake_run(tmp_path / "a", [1.2]), fake_run(tmp_path / "b", [1.2], shape="2,2,5")
    with pytest.raises(UserError, match="was not validated in the shape 3,1,4"):
        compare_runs({"a": [one], "b": [two]}, tmp_path / "out")
    assert app.main(["report", str(one), str(two)]) == 2
    assert app.main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl is missing" in capsys.readouterr().err
