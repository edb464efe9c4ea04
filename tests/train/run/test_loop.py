"""A run from nothing: it learns, leaves a servable draft and a tidy folder, and refuses what cannot work."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from eagle_kit.config.train import ValidationConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.train.run.validation import choose_prompts


def test_bfloat16_learns_validates_and_resumes_as_fp32_does(make_run: Callable) -> None:
    run = make_run()
    assert run("--max-steps", "10") == 0
    half = make_run(training={"precision": "bfloat16"}, validation={"every": 10})
    elsewhere = f"output_dir={run.folder / 'half'}"
    assert half("--max-steps", "5", elsewhere) == 0
    assert half("--resume", "--max-steps", "10", elsewhere) == 0
    rounded, exact = half.metrics("half"), run.metrics()
    # Near ties of the tiny target, which rounding breaks, decide which rows are learned; and AdamW's first
    # steps magnify every rounding.
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)


def test_metrics_row_is_the_weighted_mean_of_its_steps(make_run: Callable) -> None:
    run = make_run(training={"step_weights": [1.0, 0.5, 0.25]})
    assert run("--max-steps", "2") == 0
    row = run.metrics()[0]
    names = "step loss lr grad_norm loss_per_step learned_per_step match_per_step simulated_accept_length"
    assert set(row) == set(f"{names} tokens supervised_tokens".split())
    shares = row["learned_per_step"]
    assert all(0.2 < share < 1.0 for share in shares)  # the tiny target often says what the draft cannot
    steps = zip((1.0, 0.5, 0.25), row["loss_per_step"], shares, strict=True)
    assert row["loss"] == pytest.approx(sum(w * loss * share for w, loss, share in steps) / 1.75, rel=1e-5)


def test_loss_per_step_is_the_mean_over_the_rows_that_carry_loss(make_run: Callable) -> None:
    """A fresh head says nothing: whatever its vocabulary leaves out, guessing evenly costs log Vd."""
    run = make_run(head={"lm_head_init": "random"}, training={"learning_rate": 1e-9})
    assert run("--max-steps", "1", "head.draft_vocab_size=60") == 0
    row = run.metrics()[0]
    assert max(row["learned_per_step"]) < 0.9
    assert row["loss_per_step"] == pytest.approx([math.log(60)] * 3, rel=0.1)


def test_run_folder_holds_config_metrics_checkpoints_and_best(session_run: Callable) -> None:
    run = session_run("judged")
    names = {path.name for path in run.output.iterdir()}
    assert {"run.yaml", "metrics.jsonl", "validation.jsonl", "best", "step-4", "step-6"} <= names
    assert "step-2" not in names and not any("partial" in name for name in names)
    saved = yaml.safe_load((run.output / "run.yaml").read_text())
    assert saved["config"]["training"]["save_every"] == 2
    assert "--max-steps 6" in saved["command"] and "torch" in saved["versions"]


def test_a_session_that_max_steps_ends_validates_when_the_run_in_one_go_would(make_run: Callable) -> None:
    run = make_run(validation={"every": 4, "prompts": 1, "max_tokens": 4})
    assert run("--max-steps", "5") == 0
    rows = [json.loads(line) for line in (run.output / "validation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4]


@pytest.mark.parametrize("name", ["step-6", "best"])
def test_every_checkpoint_is_servable_as_saved(session_run: Callable, name: str) -> None:
    run = session_run("judged")
    llm = LLM(run.folder / "target", run.output / name, max_context=128)
    plain = llm.generate(["The cat sees the dog."], SamplingParams(max_tokens=8), shape="none")
    drafted = llm.generate(["The cat sees the dog."], SamplingParams(max_tokens=8), shape="3,1,4")
    assert drafted[0].token_ids == plain[0].token_ids and drafted[0].stats.num_verifies > 0


def test_best_is_the_checkpoint_with_the_longest_decoded_accept_length(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_kit.core.stats import SpecStats
    from eagle_kit.train.run import validation

    scripted = iter((12, 19, 15, 17))

    def validated(self: validation.Validator, *_: object) -> validation.ValidationResult:
        return validation.ValidationResult({"3,1,4": SpecStats(10, next(scripted))}, {}, 0)

    monkeypatch.setattr(validation.Validator, "validate", validated)
    run = make_run(validation={"every": 2}, training={"save_every": 2, "keep_last": 9})
    assert run("--max-steps", "8") == 0
    best, fourth = load_draft(run.output / "best"), load_draft(run.output / "step-4")
    assert torch.equal(best.fc.weight, fourth.fc.weight)
    rows = [json.loads(line) for line in (run.output / "validation.jsonl").read_text().splitlines()]
    assert [row["best"] for row in rows] == [True, True, False, False]
    metadata = json.loads((run.output / "best" / "eagle_kit.json").read_text())
    assert metadata["step"] == 4 and metadata["accept_length"] == {"3,1,4": 1.9}


def test_patience_ends_the_run_after_worse_validations_in_a_row(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A better one begins the count anew; an equal one is not better."""
    from eagle_kit.core.stats import SpecStats
    from eagle_kit.train.run import validation

    scripted = iter((11, 11, 13, 12, 13))
    monkeypatch.setattr(
        validation.Validator,
        "validate",
        lambda *_: validation.ValidationResult({"3,1,4": SpecStats(10, next(scripted))}, {}, 0),
    )
    run = make_run(validation={"every": 1, "patience": 2})
    assert run("--max-steps", "3") == 0
    assert run("--resume") == 0
    assert len(run.metrics()) == 5
    rows = [json.loads(line) for line in (run.output / "validation.jsonl").read_text().splitlines()]
    assert [row["best"] for row in rows] == [True, False, True, False, False]
    state = json.loads((run.output / "step-5" / "trainer" / "state.json").read_text())
    assert (state["best_step"], state["best_accept_length"], state["num_worse"]) == (3, 1.3, 2)


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
    run = make_run(training={"max_steps": 5})
    assert run() == 0
    assert run("training.cache_hidden_states=disk", "output_dir=" + str(run.folder / "first")) == 0
    assert list((run.folder / "cache").rglob("states-*.safetensors"))
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


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_dry_run_of_an_existing_run_changes_nothing(
    copy_run: Callable, capsys: pytest.CaptureFixture[str], resume: list[str]
) -> None:
    run = copy_run("judged")
    before = {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()}
    assert run("--dry-run", "--max-steps", "9", *resume) == 0
    assert ("time    3 steps" if resume else "time    9 steps") in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()} == before


def test_a_dry_run_with_cached_states_counts_their_capture_and_makes_none(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"cache_hidden_states": "disk"})
    assert run("--dry-run", "--max-steps", "3") == 0
    assert "for the states of 6 rows" in capsys.readouterr().out
    assert not (run.folder / "cache" / "states").exists()
    assert run("--max-steps", "2") == 0
    assert run("--dry-run", "--max-steps", "3") == 0
    assert "for the states of 2 rows" in capsys.readouterr().out.rpartition("head")[2]


def test_prompts_that_do_not_fit_the_validate_s_context_are_counted(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(validation={"every": 1, "prompts": 9})
    target = json.loads((run.folder / "target" / "config.json").read_text())
    longest = "The " + "very " * 9 + "end."
    messages = [{"role": "user", "content": longest}, {"role": "assistant", "content": "Yes."}]
    chats = run.folder / "chats.jsonl"
    chats.write_text(json.dumps({"messages": messages}) + "\n" + chats.read_text())
    target["max_position_embeddings"] = len(f"user\n{longest}\nassistant\n") + 10  # 12 more do not fit
    (run.folder / "target" / "config.json").write_text(json.dumps(target))
    assert run("--max-steps", "1") == 0
    out = capsys.readouterr().out
    assert "eval    every 1 steps: 5 prompts, 12 tokens each" in out
    assert "validation.prompts asks for 9, 6 are held out" in out and "1 of 6 prompts are left out" in out
    assert run("--max-steps", "1", "validation.max_tokens=400", f"output_dir={run.folder / 'none'}") == 2
    assert "No held-out prompt has room for 400" in capsys.readouterr().err


def test_a_sample_of_the_data_is_shown_where_it_is_asked_for(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert run("--dry-run", "data.preview=true") == 0
    assert "sample  " in capsys.readouterr().out
    assert run("--dry-run") == 0
    assert "sample  " not in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_no_steps_at_all_are_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    run = make_run()
    assert run("--max-steps", steps) == 2
    assert f"--max-steps is {steps}" in capsys.readouterr().err and not run.output.exists()


def test_prompts_are_the_first_that_have_room_for_a_response() -> None:
    config = ValidationConfig(every=1, prompts=3, max_tokens=8)
    heldout = [[1] * length for length in (12, 13, 4, 5)]
    assert choose_prompts(heldout, config, 20) == [0, 2], "of the first three, up to 20 - 8 tokens"
    assert choose_prompts(heldout, ValidationConfig(every=0), 20) == []
    with pytest.raises(UserError, match="no prompts are held out"):
        choose_prompts([], config, 20)
    with pytest.raises(UserError, match="has room for 8 more tokens in a context of 11"):
        choose_prompts(heldout, config, 11)


def test_wandb_that_is_not_installed_is_said_before_anything_is_written(
    make_run: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # accelerate notes which trackers are installed at its first import, and keeps that for later tests.
    importlib.import_module("accelerate.tracking")
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = make_run(tracking={"wandb": "offline"})
    assert run("--max-steps", "2") == 2
    assert "wandb is not installed" in capsys.readouterr().err
    assert not run.output.exists()


def test_wandb_that_does_not_start_leaves_no_run_folder(
    make_run: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise RuntimeError("no login")

    monkeypatch.setattr(wandb, "init", refuse)
    run = make_run(tracking={"wandb": "online"})
    assert run("--max-steps", "2") == 2
    assert "wandb did not start: no login." in capsys.readouterr().err
    assert not run.output.exists()


@pytest.mark.parametrize("setting", ["output_dir", "data.cache_dir"])
def test_a_folder_that_cannot_be_written_is_a_user_error(
    make_run: Callable, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    run = make_run()
    (run.folder / "file").write_text("")
    assert run("--max-steps", "1", f"{setting}={run.folder / 'file' / 'deep' / 'er'}") == 2
    assert len(capsys.readouterr().err.strip().splitlines()[-2:]) == 2
    assert not run.output.exists()


def test_a_vocabulary_map_comes_from_a_file_and_another_tokenizer_s_is_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle_kit.cli.app import main

    run = make_run()
    path = run.folder / "words"
    assert main(["data", "vocab", str(run.config), "head.draft_vocab_size=30", "--out", str(path)]) == 0
    assert f"head.vocab_map={path} head.draft_vocab_size=30" in capsys.readouterr().out
    few = ["--max-steps", "1", f"head.vocab_map={path}"]
    assert run(*few) == 2
    assert "has 30 tokens, but head.draft_vocab_size is 250" in capsys.readouterr().err
    assert run(*few, "head.draft_vocab_size=30", "data.limit=20") == 0
    head = load_draft(run.output / "step-1")
    assert torch.equal(head.t2d[:259].nonzero()[:, 0], head.token_map) and len(head.token_map) == 30
    tokenizer = run.folder / "target" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|nothing|>"))
    assert run(*few, "head.draft_vocab_size=30", f"output_dir={run.folder / 'other'}") == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_stop_after_saves_says_how_to_go_on_and_is_told_from_done(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"max_steps": 100000})
    assert run("--stop-after", "1s", "--max-steps", "99999") == 130
    done = len(run.metrics())
    assert (run.output / f"step-{done}" / "trainer" / "state.json").exists()
    out = capsys.readouterr().out
    assert f"Stopped after step {done} of 100000." in out
    again = f"eagle-kit train {run.config} --max-steps 99999 --stop-after 1s"
    assert f"Go on with: {again} --resume\n" in out
    about = json.loads((run.output / f"step-{done}" / "eagle_kit.json").read_text())
    assert about["command"] == again


def test_one_command_repeated_makes_a_step_each_time_and_comes_to_its_end(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"max_steps": 3})
    again = ("--resume", "--stop-after", "0.001")
    assert [run(*again) for _ in range(4)] == [130, 130, 0, 0]
    out = capsys.readouterr().out
    assert f"resume  {run.output} has no checkpoint yet: from step 0 of 3\n" in out
    assert f"resume  {run.output} from step 2 of 3\n" in out
    assert out.count("Go on with: ") == 2 and out.count("All 3 steps are done.") == 2
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]


def test_max_steps_is_done_and_says_how_to_go_on_without_it(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"max_steps": 3})
    go_on = f"Go on with: eagle-kit train {run.config} training.save_every=9 --resume\n"
    for flag in (["--max-steps", "1"], ["--max-steps=2", "--resume"], ["--max", "2", "--resume"]):
        assert run(*flag, "training.save_every=9") == 0
        out = capsys.readouterr().out
        assert f"Step {len(run.metrics())} of 3 is done, where --max-steps stops." in out and go_on in out
    assert run("--max-steps", "8", "--resume", "training.save_every=9") == 0, "the schedule is no longer"
    out = capsys.readouterr().out
    assert "All 3 steps are done." in out and "Go on with" not in out
    assert len(run.metrics()) == 3


def test_a_resumed_run_is_the_same_run_of_wandb(make_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's own files: the names of its folders have the id of the run."""
    wandb = pytest.importorskip("wandb")
    asked = []
    init = wandb.init

    def note(**options: object) -> object:
        asked.append(options)
        return init(**options)

    monkeypatch.setattr(wandb, "init", note)
    run = make_run(tracking={"wandb": "offline", "entity": "us", "group": "heads", "tags": ["a"]})
    assert run("--max-steps", "1") == 0
    # The session that goes on has another name of the run, and its own folder of wandb.
    assert run("--max-steps", "2", "--resume", "tracking.name=second") == 0
    for options in asked:
        wanted = {"resume": "allow", "entity": "us", "group": "heads", "tags": ["a"], "mode": "offline"}
        assert {key: options[key] for key in wanted} == wanted
    assert [options["name"] for options in asked] == [run.output.name, "second"]

    identity = (run.output / "wandb-run-id.txt").read_text().strip()
    assert [options["id"] for options in asked] == [identity, identity]
    folders = list((run.output / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(f"-{identity}" in folder.name for folder in folders)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.sequences_per_step=6", "training.gradient_accumulation=4"], "gradient_accumulation"),
        (["head.aux_layer_ids=[1, 2, 9]"], "aux_layer_ids"),
        (["head.draft_vocab_size=5000"], "5000"),
        (["data.eval_conversations=0", "validation.every=2"], "eval_conversations"),
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
    from eagle_kit.core import files

    run = make_run()
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda folder: Path and type("Usage", (), {"free": 1000})()
    )
    assert run("--max-steps", "2") == 2
    assert "MB" in capsys.readouterr().err
    assert {path.name for path in run.output.iterdir()} <= {"run.yaml", "metrics.jsonl"}
