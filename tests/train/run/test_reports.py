"""What a run says of itself while it goes on: judgements, where the time goes, trackers, reports."""

import base64
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_kit.cli import app
from eagle_kit.core.errors import UserError
from eagle_kit.core.stats import SpecStats
from eagle_kit.train.run.clock import LAPS, StepClock
from eagle_kit.train.run.judge import Judge, Judgement
from eagle_kit.train.run.report import compare_runs


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fake_run(folder: Path, lengths: list[float], shape: str = "3,1,4") -> Path:
    """The files of a run of one step a judgement, 100 tokens and half a second each."""
    folder.mkdir(parents=True)
    metrics, judged = [], []
    for step, length in enumerate(lengths, 1):
        split = {name: 0.5 / len(LAPS) for name in LAPS}
        metrics.append(
            {"step": step, "loss": 3.0 / step, "lr": 1e-3, "grad_norm": 1.0, "match_per_step": [0.3, 0.2]}
            | {"tokens": 100, "supervised_tokens": 70, "tokens_per_s": 200.0, "seconds": split}
        )
        judged.append(
            {"step": step, "accept_length": {shape: length}, "simulated_accept_length": {shape: length}}
            | {"acceptance_per_position": {shape: [0.5, 0.2, 0.1]}, "vocab_coverage": 0.9, "seconds": 1.0}
        )
    for name, rows in (("metrics", metrics), ("judge", judged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_judgement_says_how_far_drafts_got_and_what_the_draft_can_say(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(judge={"every": 20, "shapes": ["3,1,4", "2,2,5"]}, head={"draft_vocab_size": 60})
    judges, judge = [], Judge.judge
    monkeypatch.setattr(Judge, "judge", lambda self, head: judges.append(self) or judge(self, head))
    assert run("--max-steps", "20") == 0
    row = lines(run.output / "judge.jsonl")[0]
    for shape, reached in row["acceptance_per_position"].items():
        assert reached == sorted(reached, reverse=True) and 0 < reached[0] < 1
        # A verify emits its accepted drafts and a bonus; a reply's last one may end before the bonus.
        verifies = row["num_verifies"][shape]
        assert row["accept_length"][shape] <= 1 + sum(reached) + 1e-9
        assert row["accept_length"][shape] >= 1 + sum(reached) - 4 / verifies
    assert row["simulated_acceptance_per_position"]["3,1,4"] == row["acceptance_per_position"]["3,1,4"]
    assert set(row["simulated_acceptance_per_position"]) == {"3,1,4"}
    config = json.loads((run.output / "best" / "config.json").read_text())
    assert config["draft_vocab_size"] == 60
    from eagle_kit.checkpoints.draft import load_draft

    sayable = set(load_draft(run.output / "best").target_ids.tolist())
    said = [token for reply in judges[0].replies for token in reply]
    assert row["vocab_coverage"] == sum(token in sayable for token in said) / len(said)
    assert 0 < row["vocab_coverage"] < 1
    assert row["tokens"] == sum(step["tokens"] for step in lines(run.output / "metrics.jsonl"))


def test_judgements_of_processes_add_up() -> None:
    one = Judgement({"3,1,4": SpecStats(4, 7, [], [2, 1])}, {"3,1,4": SpecStats(4, 7, [], [2, 1])}, 1, 10, 8)
    two = Judgement({"3,1,4": SpecStats(6, 8, [], [2])}, {"3,1,4": SpecStats(6, 8, [], [2])}, 0, 12, 9)
    row = Judgement.total([one, two]).row()
    assert row["accept_length"] == row["simulated_accept_length"] == {"3,1,4": 1.5}
    assert row["acceptance_per_position"] == {"3,1,4": [0.4, 0.1]}
    assert (row["vocab_coverage"], row["num_different_replies"]) == (17 / 22, 1)


def test_patience_stops_a_run_that_no_longer_learns(make_run: Callable, capfd: pytest.CaptureFixture) -> None:
    """With no learning rate to speak of, the second judgement is the first one again."""
    run = make_run(judge={"every": 2, "patience": 2}, training={"learning_rate": 1e-12})
    assert run() == 0
    rows = lines(run.output / "judge.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6] and [row["best"] for row in rows] == [
        True,
        False,
        False,
    ]
    assert len({row["accept_length"]["3,1,4"] for row in rows}) == 1
    assert (run.output / "step-6").exists() and (run.output / "best").exists()
    out = capfd.readouterr()
    assert "No better accept length in 2 judgements; stopped." in out.out
    assert "1 of 2 without a better one" in out.err


def test_the_laps_of_a_step_are_its_time(make_run: Callable, capfd: pytest.CaptureFixture) -> None:
    run = make_run()
    assert run("--max-steps", "3") == 0
    for row in lines(run.output / "metrics.jsonl"):
        assert set(row["seconds"]) == set(LAPS)
        assert sum(row["seconds"].values()) == pytest.approx(row["tokens"] / row["tokens_per_s"], rel=0.3)
        assert min(row["seconds"][name] for name in ("capture", "forward", "backward", "optimizer")) > 0
    assert re.search(r"time    0m0\ds in 3 steps: data \d+%, capture \d+%", capfd.readouterr().out)


def test_a_lap_is_the_time_since_the_last() -> None:
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.03)
    clock.lap("capture")
    clock.lap("forward")
    time.sleep(0.06)
    clock.lap("capture")
    seconds = clock.seconds()
    assert 0.09 <= seconds["capture"] < 0.3 and seconds["forward"] < 0.02 and seconds["backward"] == 0


def test_a_run_leaves_a_page_that_needs_no_network(make_run: Callable, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(judge={"every": 4}, tracking={"report": True})
    assert run("--max-steps", "4") == 0
    page = (run.output / "report.html").read_text()
    assert "http" not in page and "<script" not in page
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    names = ("accept_length", "learning", "speed")
    assert [base64.b64decode(data) for data in pictures] == [
        (run.output / "curves" / f"{name}.png").read_bytes() for name in names
    ]
    assert not [path for path in run.output.rglob("*partial*")]
    (run.output / "report.html").unlink()
    assert app.main(["report", str(run.output)]) == 0
    assert (run.output / "report.html").exists()


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
    with pytest.raises(UserError, match="was not judged in the shape 3,1,4"):
        compare_runs({"a": [one], "b": [two]}, tmp_path / "out")
    assert app.main(["report", str(one), str(two)]) == 2
    assert app.main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl is missing" in capsys.readouterr().err


def test_tensorboard_gets_judgements_and_steps_once(make_run: Callable) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(judge={"every": 4}, tracking={"tensorboard": True}, training={"save_every": 4})
    assert run("--max-steps", "4") == 0
    assert run("--resume", "--max-steps", "8") == 0
    events = EventAccumulator(str(run.output / "tensorboard" / "eagle-kit"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    rows = lines(run.output / "judge.jsonl")
    assert [event.value for event in events.Scalars("decoded/3,1,4")] == pytest.approx(
        [row["accept_length"]["3,1,4"] for row in rows]
    )
    assert {"seconds/backward", "decoded/vocab_coverage", "decoded/3,1,4/at least 1"} <= set(
        events.Tags()["scalars"]
    )


def test_a_report_that_cannot_be_drawn_costs_no_step(
    make_run: Callable, capsys: pytest.CaptureFixture
) -> None:
    run = make_run(judge={"every": 2, "max_tokens": 4}, tracking={"report": True})
    assert run("--max-steps", "2") == 0
    shutil.rmtree(run.output / "curves")
    (run.output / "curves").write_text("in the way")
    assert run("--resume", "--max-steps", "5") == 0
    assert "The report could not be written" in capsys.readouterr().out
    assert (run.output / "step-5").exists()
