"""`make-draft` end to end on a tiny target: interrupted, gone on with, and what it leaves."""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from tiny_run import make_conversations, make_target

from eagle_kit.cli import make_draft
from eagle_kit.cli.app import main


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The command, for a target whose stages take seconds."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(make_draft, "LEAST_BUDGET_S", 1.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"The {noun}"}) for noun in ("cat", "dog")))
    source = make_conversations(tmp_path / "chats.jsonl", count=120)
    target = make_target(tmp_path / "target")
    out = ["--out", str(tmp_path / "out"), "--tasks", str(prompts)]
    return ["make-draft", str(target), "--budget", "90s", "--source", str(source), *out]


def test_too_small_a_budget_and_other_settings_are_refused(words, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / make_draft.STATE).write_text(json.dumps({"asked": {"target": "another"}, "done": {"raw": {}}}))
    assert main(words) == 2
    assert "was begun with other settings" in capsys.readouterr().err
    monkeypatch.setattr(make_draft, "LEAST_BUDGET_S", 300.0)
    assert main(words) == 2
    assert "--budget is 90s" in capsys.readouterr().err


def test_another_number_of_processes_or_another_recipe_does_not_go_on(words, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    making = make_draft.Making(make_draft_args(words), 90.0, out)
    for change in ({"processes": 3}, {"recipe": 1}):
        asked = {**making.state["asked"], **change}
        (out / make_draft.STATE).write_text(json.dumps({"asked": asked, "done": {"raw": {}}}))
        assert main(words) == 2
        assert "was begun with other settings" in capsys.readouterr().err
    assert main([*words, "--processes", "0"]) == 2
    assert "--processes is 0" in capsys.readouterr().err


def test_nothing_answered_and_no_time_left_are_told(words, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    asked = make_draft.Making(make_draft_args(words), 90.0, out).state["asked"]
    pilots = {
        "pilot-replies": {"conversations": 0, "tokens": 0, "tokens_per_s": 0.0},
        "pilot-training": {"tokens_per_s": 500.0, "kept_tokens_per_s": 900.0, "kept_tokens": 1e9},
    }
    spent = {"pilot-replies": 5.0, "pilot-training": 80.0}

    def attempt():
        state = {"asked": asked, "done": pilots, "spent_s": spent}
        (out / make_draft.STATE).write_text(json.dumps(state))
        assert main(words) == 2
        return capsys.readouterr().err

    assert "could be answered" in attempt()
    pilots["pilot-replies"] = {"conversations": 16, "tokens": 1600, "tokens_per_s": 300.0}
    assert "leaves nothing of --budget 90s" in attempt()


def make_draft_args(words):
    """Arguments of the command, parsed."""
    parser = argparse.ArgumentParser()
    make_draft.configure(parser)
    return parser.parse_args(words[1:])


def test_what_the_first_stage_refuses_can_be_corrected_in_the_same_folder(
    words, tmp_path, monkeypatch, capsys
):
    calls = []
    monkeypatch.setattr(make_draft, "_call", lambda words: calls.append(words) or 2)
    assert main([*words, "--tasks", "nothing"]) == 2 and main(words) == 2
    assert "was begun with other settings" not in capsys.readouterr().err
    assert "nothing" in calls[0] and "nothing" not in calls[1]


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_a_draft_is_made_in_pieces_and_measured(processes, words, tmp_path, capfd):
    out, words = tmp_path / "out", [*words, "--processes", str(processes)]
    line = "from eagle_kit.cli import make_draft as m; m.LEAST_BUDGET_S = 1.0\n"
    script = f"import sys\n{line}from eagle_kit.cli.app import main\nsys.exit(main({words!r}))"
    process = subprocess.Popen([sys.executable, "-c", script])
    while process.poll() is None and not (out / "training" / "metrics.jsonl").is_file():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 130
    done = json.loads((out / make_draft.STATE).read_text())["done"]
    assert "replies" in done and "training" not in done

    assert main(words) == 0
    state = json.loads((out / make_draft.STATE).read_text())
    for name, made in done.items():
        assert state["done"][name] == made, "a stage that was done is done again"
    commands = [shlex.split(command) for command in (out / make_draft.COMMANDS).read_text().splitlines()]
    assert yaml.safe_load((out / "training" / "run.yaml").read_text())["resumed"], "it was saved when stopped"
    train = {1: "eagle-kit train", 2: "torchrun --standalone"}[processes]
    assert [" ".join(command[:2]) for command in commands] == [
        "eagle-kit data", train, "eagle-kit data", "eagle-kit data", "eagle-kit data", train,
        "eagle-kit export", "eagle-kit eval", "eagle-kit export", "eagle-kit tune",
    ]  # fmt: skip
    for name in ("config.json", "README.md", "tuning.json", "model.safetensors"):
        assert (out / "draft" / name).is_file(), name
    seen = json.loads((out / "training" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    config = yaml.safe_load((out / "training.yaml").read_text())
    assert seen == config["training"]["max_steps"]
    mix = {part["name"]: part for part in config["data"]["mix"]}
    assert "raw" in mix and sum(part["weight"] for name, part in mix.items() if name != "raw") <= 1.001
    summary = json.loads((out / "eval" / "summary.json").read_text())
    assert summary["greedy_identical"]
    assert "tokens seen" in (out / make_draft.REPORT).read_text()
    printed = capfd.readouterr().out
    assert "plan " in printed and "expect " in printed
    assert main(words) == 0, "everything is done, and said again"
