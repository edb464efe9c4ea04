"""`make-draft` end to end on a tiny target: interrupted, gone on with, and what it leaves."""

import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tiny_run import TEMPLATE, make_conversations, make_target

from eagle_kit.cli import make_draft, stage_commands
from eagle_kit.cli.app import main
from eagle_kit.cli.stage_commands import COMMANDS
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.train.plan.budget import OWN_PHASE, RAW_PHASE
from eagle_kit.train.plan.pilot import ExpectedCosts


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The command, for a target whose stages take seconds."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("eagle_kit.train.plan.pilot.START_S", 1.0)
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
    (out / make_draft.STATE).unlink()
    monkeypatch.setattr("eagle_kit.train.plan.pilot.START_S", 15.0)
    calls = []
    monkeypatch.setattr(stage_commands, "call", lambda words, note: calls.append(words) or 2)
    assert main(words) == 2 and not calls
    error = capsys.readouterr().err
    assert "--budget 90s is too short" in error and re.search(r"Give at least \d+m,", error)


def change_state(out, change):
    """Write the log of an interrupted call again, changed."""
    state = json.loads((out / make_draft.STATE).read_text())
    change(state)
    (out / make_draft.STATE).write_text(json.dumps(state))


@pytest.mark.parametrize("setting", [{"processes": 3}, {"recipe": 1}])
def test_another_number_of_processes_or_another_recipe_does_not_go_on(
    words, tmp_path, monkeypatch, capsys, setting
):
    Commands(monkeypatch, stops="train")
    assert main(words) == 130
    change_state(tmp_path / "out", lambda state: state["asked"].update(setting))
    assert main(words) == 2
    assert "was begun with other settings" in capsys.readouterr().err


def test_no_processes_are_refused(words, capsys):
    assert main([*words, "--processes", "0"]) == 2
    assert "--processes is 0" in capsys.readouterr().err


def test_nothing_answered_and_no_time_left_are_told(words, tmp_path, monkeypatch, capsys):
    Commands(monkeypatch, stops="train")
    assert main(words) == 130
    figures = {"tokens_per_s": 500.0, "kept_tokens_per_s": 900.0, "kept_tokens": 1e9}

    def attempt(conversations):
        def change(state):
            state["done"]["pilot-training"] = figures
            state["done"]["pilot-responses"]["conversations"] = conversations
            state["spent_s"] = {"pilot-responses": 5.0, "pilot-training": 80.0}

        change_state(tmp_path / "out", change)
        assert main(words) == 2
        return capsys.readouterr().err

    assert "could be answered" in attempt(0)
    assert "leaves nothing of --budget 90s" in attempt(16)


def test_what_the_first_stage_refuses_can_be_corrected_in_the_same_folder(
    words, tmp_path, monkeypatch, capsys
):
    calls = []
    monkeypatch.setattr(stage_commands, "call", lambda words, note: calls.append(words) or 2)
    assert main([*words, "--tasks", "nothing"]) == 2 and main(words) == 2
    assert "was begun with other settings" not in capsys.readouterr().err
    assert "nothing" in calls[0] and "nothing" not in calls[1]
    assert not (tmp_path / "out" / "pilot.yaml").exists(), "it would have the settings of the first call"


LENGTHS = (2.25, 2.5, 2.75)
"""Accept length of each shape of the made-up evaluation."""


class Commands:
    """In place of the stages' processes: notes their commands, and leaves the files that each would leave,
    after ten seconds by the clock.

    Args:
        stops: name of a command of ours that is interrupted the first time.
    """

    def __init__(self, monkeypatch, stops=None):
        self.stops = stops
        self.given = []
        self.now = 0.0
        monkeypatch.setattr(stage_commands, "call", self)
        monkeypatch.setattr(stage_commands, "time", SimpleNamespace(monotonic=lambda: self.now))

    def __call__(self, words, note):
        # Note the command.
        self.now += 10.0
        program, *words = words[2:]
        self.given.append([program.rpartition(".")[2], *words])
        flags = dict(itertools.pairwise(words))
        name = words[0]
        if name == "data":
            name = words[1]
        if name == self.stops:
            self.stops = None
            return 130

        # Leave its files.
        if name == "regenerate":
            self.regenerate(Path(flags["--out"]), int(flags["--limit"]))
        elif name == "prompts":
            Path(flags["--out"]).write_text(json.dumps({"prompt": "Why?"}) + "\n")
        elif name == "train":
            self.train(yaml.safe_load(Path(words[1]).read_text()))
        elif name == "eval":
            self.evaluate(Path(flags["--out"]))
        return 0

    def regenerate(self, path, limit):
        turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "The cat sees. " * 9}]
        path.write_text((json.dumps({"messages": turns}) + "\n") * min(limit, 60))

    def train(self, config):
        out = Path(config["output_dir"])
        steps = config["training"]["max_steps"]
        (out / f"step-{steps}").mkdir(parents=True)
        about = {"data": {"tokens": 5000, "conversations": 100}}
        (out / f"step-{steps}" / "eagle_kit.json").write_text(json.dumps(about))
        row = {"tokens": 400, "tokens_per_s": 800.0, "seconds": {"capture": 0.25}}
        rows = [row | {"tokens_per_s": 1.0}, *[row] * (steps - 1)]
        lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, start=1)]
        (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (Path(config["data"]["cache_dir"]) / "states").mkdir(parents=True, exist_ok=True)

    def evaluate(self, out):
        rows = []
        for shape, length in zip(make_draft.SHAPES, LENGTHS, strict=True):
            row = {"draft": "draft", "shape": shape, "task": "all", "category": "all"}
            rows.append(row | {"accept_length": length, "speedup": length - 1})
        out.mkdir()
        (out / "summary.json").write_text(json.dumps({"rows": rows}))


def flags_of(command):
    """Values of the flags of a command that have one each."""
    return {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}


def test_every_stage_is_the_command_that_it_is_said_to_be(words, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    commands = Commands(monkeypatch)
    words[words.index("90s")] = "20m"
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    words += ["--chat-template", str(template)]
    assert main([*words, "--tracking", "wandb=offline", "project=p"]) == 0
    target = words[1]
    source = words[words.index("--source") + 1]
    tasks = words[words.index("--tasks") + 1]

    # The stages in their order.
    names = [command[2] if command[1] == "data" else command[1] for command in commands.given]
    assert " ".join(names) == ("regenerate train prompts regenerate regenerate train export eval export tune")
    pilot, pilot_training, prompts, answers, responses, training, export, evaluation, card, tune = (
        commands.given
    )
    for command, file, asked, most in (
        (pilot, "responses", source, 192),
        (answers, "answers", str(out / "prompts.jsonl"), 768),
        (responses, "responses", source, 192),
    ):
        flags = flags_of(command)
        assert (flags["--source"], flags["--out"]) == (asked, str(out / f"{file}.jsonl"))
        assert (flags["--target"], flags["--decontaminate"]) == (target, tasks)
        assert (flags["--max-turns"], flags["--max-tokens"]) == ("1", "256")
        assert flags["--max-prompt-tokens"] == str(most)

    # Numbers of responses and prompts.
    numbers = [int(flags_of(each)["--limit"]) for each in (pilot, prompts, answers, responses)]
    assert numbers[0] == 16 and numbers[1] == numbers[2] > 1
    missing = 3 * numbers[1] - 60
    assert 0 <= numbers[3] - missing < 3, "the 60 answered prompts are to be a third"

    # The chat template, of all stages that render chats.
    for command in (pilot, answers, responses, evaluation, tune):
        assert flags_of(command)["--chat-template"] == str(template)
    for name in ("pilot", "training"):
        assert yaml.safe_load((out / f"{name}.yaml").read_text())["data"]["chat_template"] == str(template)

    # Training, export and evaluation.
    assert flags_of(prompts)["--source"] == source
    assert pilot_training[1:] == ["train", str(out / "pilot.yaml"), "--resume"]
    tracked = ["tracking.wandb=offline", "tracking.project=p", 'tracking.group="out"']
    assert training[1:] == ["train", str(out / "training.yaml"), *tracked, "--resume"]
    assert evaluation[-4:] == ["--tracking", "wandb=offline", "project=p", 'group="out"']
    assert export[1:4] == ["export", str(out / "training"), "--out"]
    assert export[4:] == [str(out / "draft"), "--target", target]
    assert card == [*export, "--eval", str(out / "eval")]
    assert flags_of(evaluation)["--draft"] == str(out / "draft")
    assert flags_of(evaluation)["--name"] == "draft" and flags_of(evaluation)["--tasks"] == tasks
    assert 2 <= int(flags_of(evaluation)["--limit"]) <= 32
    assert tune[1:3] == ["tune", str(out / "draft")] and "--ship" in tune and tune[-2:] == ["--passes", "1"]

    # Measurements of the pilot.
    state = json.loads((out / make_draft.STATE).read_text())
    measured = state["done"]["pilot-training"]
    assert measured["tokens_per_s"] == 800.0, "the first steps are left out"
    assert measured["kept_tokens_per_s"] == 400 / (400 / 800 - 0.25)
    assert measured["tokens_per_conversation"] == 50
    assert state["done"]["pilot-responses"]["conversations"] == 16
    assert not (out / "cache" / "states").exists(), "the disk is given back"

    # The list of commands and the report.
    lines = (out / COMMANDS).read_text().splitlines()
    assert [shlex.split(line)[1:] for line in lines] == [each[1:] for each in commands.given]
    report = (out / make_draft.REPORT).read_text()
    steps = yaml.safe_load((out / "training.yaml").read_text())["training"]["max_steps"]
    assert f"{400 * steps:,} tokens seen" in report and "| tune | 0.2 |" in report
    for shape, length in zip(make_draft.SHAPES, LENGTHS, strict=True):
        line = next(line for line in report.splitlines() if line.startswith(f"| {shape} "))
        assert f"| {length:.2f} | {length - 1:.2f} |" in line
    printed = capsys.readouterr().out
    assert report in printed
    assert "== 1/10 pilot-responses: eagle-kit data" in printed and "== 10/10 tune: eagle-kit" in printed

    # A second call has nothing left to do.
    commands.given.clear()
    assert main(words) == 0 and not commands.given, "what is done is not done again"


def test_a_short_budget_is_measured_briefly_and_as_long_when_gone_on_with(words, tmp_path, monkeypatch):
    costs = ExpectedCosts(1.0, response_token=0.02, row_token=1e-3, step_flops=1e9, flops_per_s=1e9)
    monkeypatch.setattr("eagle_kit.train.plan.pilot.expected_costs", lambda *given: costs)
    commands = Commands(monkeypatch)
    words[words.index("90s")] = "20m"
    assert main([*words, "--dry-run"]) == 0
    responses, _ = commands.given
    few = int(flags_of(responses)["--limit"])
    assert few < 16
    config = yaml.safe_load((tmp_path / "out" / "pilot.yaml").read_text())
    assert config["training"]["max_steps"] < 8 and config["data"]["max_length"] < 1024
    assert main([*words, "--dry-run"]) == 0 and len(commands.given) == 2
    state = json.loads((tmp_path / "out" / make_draft.STATE).read_text())
    assert state["choices"]["pilot"]["responses"] == few


def test_the_configs_are_of_the_recipe_the_responses_and_the_time(words, tmp_path, monkeypatch):
    Commands(monkeypatch)
    words[words.index("90s")] = "20m"
    assert main(words) == 0
    out = tmp_path / "out"
    pilot, training = (yaml.safe_load((out / f"{name}.yaml").read_text()) for name in ("pilot", "training"))
    for config in (pilot, training):
        assert load_config(TrainConfig, out / "pilot.yaml")
        assert config["data"]["decontaminate"] == [words[words.index("--tasks") + 1]]
        assert config["data"]["eval_conversations"] == 16 and config["training"]["optimizer"] == "muon"
        assert config["target"] == words[1]

    # The pilot.
    assert pilot["data"]["limit"] == 200 and pilot["data"]["source"] == words[words.index("--source") + 1]
    assert pilot["validation"]["every"] == 0 and pilot["training"]["max_steps"] == 8
    assert pilot["training"]["cache_hidden_states"] == "off"

    # The training.
    steps = training["training"]["max_steps"]
    assert steps > 8 and training["training"]["save_every"] == steps // 4
    assert training["training"]["cache_hidden_states"] in ("disk", "off")
    validations = max(min(steps // 250, 4), 1)
    assert training["validation"]["every"] == -(-steps // validations) <= steps

    # Its mixture.
    raw, responses, answers = training["data"]["mix"]
    assert (raw["name"], responses["name"], answers["name"]) == ("raw", "responses", "answers")
    assert raw["phase"] == list(RAW_PHASE)
    assert responses["phase"] == answers["phase"] == list(OWN_PHASE)
    assert responses["weight"] + answers["weight"] == pytest.approx(1, abs=0.002)
    assert responses["weight"] == answers["weight"], "of as many tokens"
    assert raw["limit"] >= 32
    load_config(TrainConfig, out / "training.yaml")


@pytest.mark.parametrize("name", ["pilot.yaml", "training.yaml"])
def test_a_config_that_was_half_written_is_written_again(words, tmp_path, monkeypatch, capsys, name):
    """A whole line more or less is valid YAML, of another recipe."""
    Commands(monkeypatch)
    words[words.index("90s")] = "20m"

    def half(write):
        def written(path, data, *options, **named):
            if name not in path.name:
                return write(path, data, *options, **named)
            write(path, data[: len(data) // 2], *options, **named)
            raise OSError(28, "No space left on device")

        return written

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half(Path.write_text))
        patch.setattr(Path, "write_bytes", half(Path.write_bytes))
        assert main(words) == 2
    assert not [path for path in (tmp_path / "out").iterdir() if name in path.name]
    assert main(words) == 0
    assert yaml.safe_load((tmp_path / "out" / name).read_text())["validation"]


def test_what_was_interrupted_is_done_once_more_and_no_more(words, tmp_path, monkeypatch, capsys):
    commands = Commands(monkeypatch, stops="export")
    words[words.index("90s")] = "2h"
    assert main(words) == 130
    assert commands.given[-1][1] == "export" and len(commands.given) == 7
    state = json.loads((tmp_path / "out" / make_draft.STATE).read_text())
    assert "training" in state["done"] and "export" not in state["done"] and "export" in state["spent_s"]
    assert main(words) == 0
    assert [each[1] for each in commands.given[7:]] == ["export", "eval", "export", "tune"]
    assert "--passes" not in commands.given[-1], "a long budget has time for all of them"


def test_a_dry_run_measures_and_says_the_plan(words, tmp_path, monkeypatch, capsys):
    commands = Commands(monkeypatch)
    words[words.index("90s")] = "20m"
    assert main([*words, "--dry-run"]) == 0
    assert len(commands.given) == 2
    printed = capsys.readouterr().out
    assert "plan " in printed and "expect  accept length about" in printed


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_a_draft_is_made_in_pieces_and_measured(processes, words, tmp_path, capfd):
    out, words = tmp_path / "out", [*words, "--processes", str(processes)]
    line = "from eagle_kit.train.plan import pilot; pilot.START_S = 1.0\n"
    script = f"import sys\n{line}from eagle_kit.cli.app import main\nsys.exit(main({words!r}))"
    process = subprocess.Popen([sys.executable, "-c", script])
    while process.poll() is None and not (out / "training" / "metrics.jsonl").is_file():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 130
    done = json.loads((out / make_draft.STATE).read_text())["done"]
    assert "responses" in done and "training" not in done

    assert main(words) == 0
    state = json.loads((out / make_draft.STATE).read_text())
    for name, made in done.items():
        assert state["done"][name] == made, "a stage that was done is done again"
    commands = [shlex.split(command) for command in (out / COMMANDS).read_text().splitlines()]
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
