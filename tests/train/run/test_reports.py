"""What a run says of itself while it goes on: judgements, where the time goes, trackers, reports."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_run import make_config

from eagle_kit.checkpoints.draft import load_draft
from eagle_kit.cli import app
from eagle_kit.core.errors import UserError
from eagle_kit.core.stats import SpecStats
from eagle_kit.train.__main__ import main
from eagle_kit.train.run import clock
from eagle_kit.train.run.clock import LAPS
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


class Reported(NamedTuple):
    """A run of two sessions that was judged after 10 and 20 steps, and followed by every tracker without a
    network.

    Attributes:
        folder: of the run.
        said: printed by the second session.
        replies: of the target to the judge's prompts, in the second session.
    """

    folder: Path
    said: str
    replies: list[list[int]]

    def judgements(self) -> list[dict[str, Any]]:
        return lines(self.folder / "judge.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        return lines(self.folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("reported")
    config = make_config(
        folder,
        judge={"every": 10, "shapes": ["3,1,4", "2,2,5"]},
        head={"draft_vocab_size": 60},
        training={"save_every": 10},
        tracking={"report": True, "tensorboard": True},
    )
    judges: list[Judge] = []
    judge = Judge.judge

    def judge_and_note(self: Judge, head: Any) -> Judgement:
        judges.append(self)
        return judge(self, head)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "judge", judge_and_note)
        for words in (["--max-steps", "10"], ["--resume", "--max-steps", "20"]):
            said = io.StringIO()
            with redirect_stdout(said):
                assert main([str(config), *words]) == 0
            AcceleratorState._reset_state(reset_partial_state=True)
    assert judges[-1].replies is not None
    return Reported(folder / "run", said.getvalue(), judges[-1].replies)


def test_judgements_agree_between_engine_and_trainer(reported: Reported) -> None:
    rows = reported.judgements()
    assert [row["step"] for row in rows] == [10, 20]
    for row in rows:
        assert row["simulated_accept_length"] == {"3,1,4": row["accept_length"]["3,1,4"]}
        assert row["num_different_replies"] == 0


def test_a_judgement_says_how_far_drafts_got_and_what_the_draft_can_say(reported: Reported) -> None:
    row = reported.judgements()[-1]
    for shape, reached in row["acceptance_per_position"].items():
        assert reached == sorted(reached, reverse=True) and 0 < reached[0] < 1
        # A verify emits its accepted drafts and a bonus; a reply's last one may end before the bonus.
        verifies = row["num_verifies"][shape]
        assert row["accept_length"][shape] <= 1 + sum(reached) + 1e-9
        assert row["accept_length"][shape] >= 1 + sum(reached) - 4 / verifies
    assert row["simulated_acceptance_per_position"]["3,1,4"] == row["acceptance_per_position"]["3,1,4"]
    assert set(row["simulated_acceptance_per_position"]) == {"3,1,4"}
    sayable = set(load_draft(reported.folder / "step-20").target_ids.tolist())
    assert len(sayable) == 60
    said = [token for reply in reported.replies for token in reply]
    assert row["vocab_coverage"] == sum(token in sayable for token in said) / len(said)
    assert 0 < row["vocab_coverage"] < 1
    assert row["tokens"] == sum(step["tokens"] for step in reported.steps())


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


def test_a_page_is_drawn_again_by_its_command(reported: Reported, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "judge.jsonl", "run.yaml"):
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


def test_tensorboard_gets_judgements_and_steps_once(reported: Reported) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(reported.folder / "tensorboard" / "eagle-kit"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 21))
    assert [event.value for event in events.Scalars("decoded/3,1,4")] == pytest.approx(
        [row["accept_length"]["3,1,4"] for row in reported.judgements()]
    )
    assert {"seconds/backward", "decoded/vocab_coverage", "decoded/3,1,4/at least 1"} <= set(
        events.Tags()["scalars"]
    )


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
