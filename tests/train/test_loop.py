"""A run from nothing: it learns, leaves a servable draft and a tidy folder, and refuses what cannot work."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from eagle_kit.checkpoints.draft import load_draft
from eagle_kit.core.request import SamplingParams
from eagle_kit.serve.llm import LLM


def test_loss_falls_and_match_rises(make_run: Callable) -> None:
    run = make_run()
    assert run("--max-steps", "40") == 0
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 41))
    first, last = rows[:5], rows[-5:]
    assert sum(row["loss"] for row in last) < 0.95 * sum(row["loss"] for row in first)
    assert sum(row["match_per_step"][0] for row in last) > sum(row["match_per_step"][0] for row in first)


def test_bfloat16_learns_judges_and_resumes_as_fp32_does(make_run: Callable) -> None:
    run = make_run()
    assert run("--max-steps", "10") == 0
    half = make_run(training={"precision": "bfloat16"}, judge={"every": 10})
    elsewhere = f"output_dir={run.folder / 'half'}"
    assert half("--max-steps", "5", elsewhere) == 0
    assert half("--resume", "--max-steps", "10", elsewhere) == 0
    rounded, exact = half.metrics("half"), run.metrics()
    assert rounded[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-3)
    for ours, theirs in zip(rounded, exact, strict=True):  # AdamW's first steps magnify every rounding
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)


def test_metrics_row_is_the_weighted_mean_of_its_steps(make_run: Callable) -> None:
    run = make_run(training={"step_weights": [1.0, 0.5, 0.25]})
    assert run("--max-steps", "2") == 0
    row = run.metrics()[0]
    names = (
        "step loss lr grad_norm loss_per_step match_per_step simulated_accept_length tokens supervised_tokens"
    )
    assert set(row) == set(names.split())
    weighted = sum(w * loss for w, loss in zip((1.0, 0.5, 0.25), row["loss_per_step"], strict=True)) / 1.75
    assert row["loss"] == pytest.approx(weighted, rel=1e-5)


def test_run_folder_holds_config_metrics_checkpoints_and_best(make_run: Callable) -> None:
    run = make_run(judge={"every": 5})
    assert run("--max-steps", "10", "training.save_every=3", "training.keep_last=2") == 0
    names = {path.name for path in run.output.iterdir()}
    assert {"run.yaml", "metrics.jsonl", "judge.jsonl", "best", "step-9", "step-10"} <= names
    assert not {"step-3", "step-6"} & names and not any("partial" in name for name in names)
    saved = yaml.safe_load((run.output / "run.yaml").read_text())
    assert saved["config"]["training"]["save_every"] == 3
    assert "--max-steps 10" in saved["command"] and "torch" in saved["versions"]


@pytest.mark.parametrize("name", ["step-6", "best"])
def test_every_checkpoint_is_servable_as_saved(make_run: Callable, name: str) -> None:
    run = make_run(judge={"every": 3})
    assert run("--max-steps", "6") == 0
    llm = LLM(run.folder / "target", run.output / name, max_context=128)
    plain = llm.generate(["The cat sees the dog."], SamplingParams(max_tokens=8), shape="none")
    drafted = llm.generate(["The cat sees the dog."], SamplingParams(max_tokens=8), shape="3,1,4")
    assert drafted[0].token_ids == plain[0].token_ids and drafted[0].stats.num_verifies > 0


def test_best_is_the_checkpoint_with_the_longest_decoded_accept_length(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_kit.core.stats import SpecStats
    from eagle_kit.train import judge

    scripted = iter((12, 19, 15, 17))

    def judged(self: judge.Judge, head: object) -> judge.Judgement:
        return judge.Judgement({"3,1,4": SpecStats(10, next(scripted))}, {}, 0)

    monkeypatch.setattr(judge.Judge, "judge", judged)
    run = make_run(judge={"every": 2}, training={"save_every": 2, "keep_last": 9})
    assert run("--max-steps", "8") == 0
    best, fourth = load_draft(run.output / "best"), load_draft(run.output / "step-4")
    assert torch.equal(best.fc.weight, fourth.fc.weight)
    rows = [json.loads(line) for line in (run.output / "judge.jsonl").read_text().splitlines()]
    assert [row["best"] for row in rows] == [True, True, False, False]
    metadata = json.loads((run.output / "best" / "eagle_kit.json").read_text())
    assert metadata["step"] == 4 and metadata["accept_length"] == {"3,1,4": 1.9}


def test_patience_ends_the_run(make_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_kit.core.stats import SpecStats
    from eagle_kit.train import judge

    monkeypatch.setattr(
        judge.Judge, "judge", lambda self, head: judge.Judgement({"3,1,4": SpecStats(10, 11)}, {}, 0)
    )
    run = make_run(judge={"every": 1, "patience": 2})
    assert run() == 0
    assert len(run.metrics()) == 3


def test_judgement_rows_agree_between_engine_and_trainer(make_run: Callable) -> None:
    run = make_run(judge={"every": 15, "shapes": ["3,1,4", "2,2,5"]})
    assert run("--max-steps", "30") == 0
    rows = [json.loads(line) for line in (run.output / "judge.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["simulated_accept_length"] == {"3,1,4": row["accept_length"]["3,1,4"]}
        assert row["num_different_replies"] == 0


def test_sequence_normalisation_and_several_rows_a_forward_change_the_weights_only(
    make_run: Callable,
) -> None:
    run = make_run()
    assert run("--max-steps", "1") == 0
    assert (
        run(
            "--max-steps", "1", "output_dir=" + str(run.folder / "packed"), "training.gradient_accumulation=1"
        )
        == 0
    )
    separate, packed = run.metrics()[0], run.metrics("packed")[0]
    assert packed["loss"] == pytest.approx(separate["loss"], rel=1e-5)
    assert packed["grad_norm"] == pytest.approx(separate["grad_norm"], rel=1e-4)
    other = str(run.folder / "sequence")
    assert run("--max-steps", "1", "output_dir=" + other, "training.loss_normalisation=sequence") == 0
    assert run.metrics("sequence")[0]["loss_per_step"] == pytest.approx(separate["loss_per_step"], rel=1e-5)
    assert run.metrics("sequence")[0]["loss"] != pytest.approx(separate["loss"], rel=1e-5)


def test_captured_states_on_disk_train_to_the_bit(make_run: Callable) -> None:
    run = make_run(training={"max_steps": 12})
    assert run() == 0
    assert run("training.cache_hidden_states=disk", "output_dir=" + str(run.folder / "first")) == 0
    assert list((run.folder / "cache").rglob("row-*.safetensors"))
    assert run("training.cache_hidden_states=disk", "output_dir=" + str(run.folder / "second")) == 0
    assert run.metrics() == run.metrics("first") == run.metrics("second")


def test_dry_run_prints_the_estimate_and_writes_nothing(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert run("--dry-run") == 0
    text = capsys.readouterr().out
    for word in ("memory", "disk", "time", " cover "):
        assert word in text
    assert not run.output.exists()


def test_stop_after_saves_and_ends_well(make_run: Callable) -> None:
    run = make_run(training={"max_steps": 100000})
    assert run("--stop-after", "1s") == 0
    assert (run.output / f"step-{len(run.metrics())}" / "trainer" / "state.json").exists()


def test_wandb_offline_writes_into_the_run_folder(make_run: Callable) -> None:
    pytest.importorskip("wandb")
    run = make_run(tracking={"wandb": "offline"})
    assert run("--max-steps", "2") == 0
    assert list((run.output / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.sequences_per_step=6", "training.gradient_accumulation=4"], "gradient_accumulation"),
        (["head.aux_layer_ids=[1, 2, 9]"], "aux_layer_ids"),
        (["head.draft_vocab_size=5000"], "5000"),
        (["data.eval_conversations=0", "judge.every=2"], "eval_conversations"),
        (["target=/nowhere/at/all"], "/nowhere/at/all"),
        (["data.source=missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    make_run: Callable, capsys: pytest.CaptureFixture[str], overrides: list[str], named: str
) -> None:
    run = make_run()
    assert run(*overrides) == 2
    assert named in capsys.readouterr().err
    assert not run.output.exists()


def test_a_used_output_folder_is_refused(make_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    run.output.mkdir()
    (run.output / "notes.txt").write_text("mine")
    assert run() == 2
    assert "--resume" in capsys.readouterr().err
    assert [path.name for path in run.output.iterdir()] == ["notes.txt"]


def test_no_disk_space_is_said_and_leaves_nothing_half_written(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle_kit.train import state

    run = make_run()
    monkeypatch.setattr(
        state.shutil, "disk_usage", lambda folder: Path and type("Usage", (), {"free": 1000})()
    )
    assert run("--max-steps", "2") == 2
    assert "MB" in capsys.readouterr().err
    assert {path.name for path in run.output.iterdir()} <= {"run.yaml", "metrics.jsonl"}
