"""N steps equal k steps, a stop of any kind, and N - k steps: to the bit. Two processes equal one, nearly."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nodes import run_nodes, train_on_forked_nodes

from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.train.run.checkpoint import load_checkpoint

REPOSITORY = Path(__file__).parents[3]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_draft(folder).state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_resume_repeats_the_steps_after_the_last_checkpoint(make_run: Callable) -> None:
    run = make_run(training={"save_every": 5})
    assert run("--max-steps", "9") == 0
    whole = run.metrics()
    # as after a crash at step 9: no checkpoint of it, and a row cut off
    shutil.rmtree(run.output / "step-9")
    with (run.output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    (run.output / ".step-9.partial").mkdir()
    assert run("--resume", "--max-steps", "9") == 0
    assert run.metrics() == whole


def test_steps_draw_from_no_global_state(make_run: Callable) -> None:
    """So a checkpoint holds none: order, noise and validated prompts have generators of their own."""
    run = make_run(
        validation={"every": 2, "max_tokens": 6},
        training={"feature_noise": {"kind": "uniform", "amount": 0.1}},
    )
    after = []
    for steps in ("2", "5"):
        python, numpy = random.getstate(), np.random.get_state()[1].tolist()
        assert run("--max-steps", steps, f"output_dir={run.folder / steps}") == 0
        assert random.getstate() == python and np.random.get_state()[1].tolist() == numpy
        after.append(torch.random.get_rng_state())
    assert torch.equal(*after), "the head's first weights are all that is drawn from torch's"
    assert not list(run.folder.rglob("rng.pt"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(
    make_run: Callable, signalled: Callable, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    run = make_run(training={"max_steps": 100_000})
    with signalled(lambda: run.num_steps >= 3, number):
        assert run() == 130
    assert f"Go on with: eagle-kit train {run.config} --resume" in capsys.readouterr().out
    done = len(run.metrics())
    assert done >= 3
    assert (run.output / f"step-{done}" / "trainer" / "optimizer.pt").exists()
    assert run("--resume", "--max-steps", str(done + 3)) == 0
    straight = str(run.folder / "straight")
    assert run("--max-steps", str(done + 3), f"output_dir={straight}") == 0
    assert run.metrics() == run.metrics("straight")


@pytest.mark.parametrize("arrives", ["before", "during"])
def test_a_signal_is_answered_with_the_validation_that_is_due(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arrives: str
) -> None:
    from eagle_kit.core.stats import SpecStats
    from eagle_kit.train.run import validation
    from eagle_kit.train.run.step import Stepper

    make_step = Stepper.step

    def step(self: Stepper, state: Any) -> Any:
        if arrives == "before" and state.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return make_step(self, state)

    def validated(self: validation.Validator, *_: object) -> validation.ValidationResult:
        if arrives == "during":
            os.kill(os.getpid(), signal.SIGINT)
        return validation.ValidationResult({"3,1,4": SpecStats(10, 12)}, {}, 0)

    monkeypatch.setattr(Stepper, "step", step)
    monkeypatch.setattr(validation.Validator, "validate", validated)
    run = make_run(validation={"every": 2}, training={"max_steps": 9})
    assert run() == 130
    assert len(run.metrics()) == 2
    said = capsys.readouterr().err
    assert ("this step is finished and saved first" in said) == (arrives == "before")
    assert ("the validation of this step is finished" in said) == (arrives == "during")
    assert ("The validation that is due after step 2 runs first." in said) == (arrives == "before")


def test_a_second_trainer_is_refused_until_the_first_is_dead(
    make_run: Callable, fork: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"max_steps": 100_000, "save_every": 1})
    first = fork(run)
    while not (run.output / "step-3").exists():
        assert not first.has_ended
        time.sleep(0.005)
    for more in ([], ["--resume"]):
        assert run(*more, "--max-steps", "9") == 2
        message = capsys.readouterr().err
        assert f"Another process is writing to {run.output}." in message and "Wait for it" in message
    assert run("--resume", "--dry-run") == 0
    first.kill()
    assert first.wait() == -signal.SIGKILL
    done = len(run.metrics())
    assert (run.output / ".lock").exists()
    assert run("--resume", "--max-steps", str(done + 1)) == 0
    assert [row["step"] for row in run.metrics()] == list(range(1, done + 2))
    assert not (run.output / ".lock").exists()


@pytest.mark.parametrize("launcher", ["forked", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_two_processes_as_on_two_machines_equal_one(make_run: Callable, launcher: str) -> None:
    run = make_run(validation={"every": 2, "max_tokens": 6})
    assert run("--max-steps", "4") == 0
    both = run.folder / "both"
    arguments = [str(run.config), f"output_dir={both}", "--max-steps", "4"]
    if launcher == "torchrun":
        run_nodes(2, 1, "train", *arguments)
    else:
        assert train_on_forked_nodes(2, arguments) == [0, 0]
    one, two = run.metrics(), run.metrics("both")
    assert [row["step"] for row in two] == [1, 2, 3, 4]
    for a, b in zip(one, two, strict=True):
        assert b["tokens"] == a["tokens"] and b["supervised_tokens"] == a["supervised_tokens"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    metadata = json.loads((both / "step-4" / "eagle_kit.json").read_text())
    assert metadata["machine"].startswith("2 x")
    command = yaml.safe_load((both / "run.yaml").read_text())["command"]
    assert command == f"eagle-kit train {run.config} output_dir={both} --max-steps 4"
    validated = json.loads((both / "validation.jsonl").read_text().splitlines()[0])
    alone = json.loads((run.output / "validation.jsonl").read_text().splitlines()[0])
    assert validated["accept_length"] == pytest.approx(alone["accept_length"], rel=0.05)


@pytest.mark.nightly
def test_what_stops_one_process_is_said_once_and_ends_the_others(make_run: Callable) -> None:
    run = make_run()
    assert run("--max-steps", "1") == 0
    script = (
        "import os, sys\n"
        "from eagle_kit.core.errors import UserError\n"
        "from eagle_kit.train.__main__ import main\n"
        "from eagle_kit.train.run import validation\n"
        "def refuse(*_):\n"
        "    raise UserError('No validation here.', 'Call one.')\n"
        "if os.environ['RANK'] == '1':\n"
        "    validation.Validator.validate = refuse\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (run.folder / "watched.py").write_text(script)
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *(
                str(run.folder / "watched.py"),
                str(run.config),
                "--resume",
                "--max-steps",
                "3",
                "validation.every=2",
                "validation.max_tokens=4",
            ),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert launched.returncode != 0
    ours = launched.stderr.split("Traceback")[0]  # what follows is the launcher's own
    assert "error in process 1 of 2: No validation here." in ours
    assert "gloo" not in launched.stderr and "RuntimeError" not in launched.stderr


def test_schedule_does_not_depend_on_where_a_run_stops(make_run: Callable) -> None:
    run = make_run()
    assert run("--max-steps", "3") == 0
    longer = str(run.folder / "longer")
    assert run("--max-steps", "6", f"output_dir={longer}") == 0
    assert [row["lr"] for row in run.metrics("longer")][:3] == [row["lr"] for row in run.metrics()]


def test_resume_with_another_setting_is_refused_by_name(
    copy_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run("two steps")
    before = (run.output / "metrics.jsonl").read_bytes()
    assert run("--resume", "training.learning_rate=1.0e-3", "data.max_length=128", "validation.every=5") == 2
    message = capsys.readouterr().err
    assert (
        "training.learning_rate" in message and "data.max_length" in message and "validation" not in message
    )
    assert (run.output / "metrics.jsonl").read_bytes() == before


def test_validating_and_saving_may_change_on_resume(copy_run: Callable) -> None:
    run = copy_run("two steps")
    assert (
        run(
            "--resume",
            "--max-steps",
            "4",
            "validation.every=2",
            "validation.max_tokens=4",
            "training.save_every=1",
        )
        == 0
    )
    assert len(run.metrics()) == 4 and (run.output / "best").exists()


@pytest.mark.parametrize(
    "left",
    [
        "no folder",
        pytest.param("an empty folder", marks=pytest.mark.nightly),
        "half a run.yaml",
        "no checkpoint",
    ],
)
def test_resume_before_the_first_checkpoint_begins_the_run_and_says_so(
    make_run: Callable, copy_run: Callable, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    run = copy_run("two steps") if left == "no checkpoint" else make_run()
    if left in ("an empty folder", "half a run.yaml"):
        run.output.mkdir()
    if left == "half a run.yaml":
        (run.output / ".run.yaml.77.partial").write_text("comm")
    if left == "no checkpoint":
        shutil.rmtree(run.output / "step-2")
    assert run("--resume", "--max-steps", "2") == 0
    assert f"{run.output} has no checkpoint yet: from step 0 of 2" in capsys.readouterr().out
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert (run.output / "step-2").is_dir() and not list(run.output.glob(".*"))


def test_resume_in_a_folder_of_other_files_is_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    run.output.mkdir()
    (run.output / "notes.txt").write_text("mine")
    assert run("--resume") == 2
    assert "run.yaml is missing" in capsys.readouterr().err
    assert [path.name for path in run.output.iterdir()] == ["notes.txt"]


def test_a_validated_run_cannot_go_on_with_another_measure(
    copy_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kept best accept length is of the first shape, these prompts and this length."""
    run = copy_run("judged")
    for change, named in (
        ("validation.shapes=['1,1,2', '3,1,4']", "the first of validation.shapes (3,1,4 -> 1,1,2)"),
        ("validation.prompts=3", "validation.prompts (4 -> 3)"),
        ("validation.max_tokens=5", "validation.max_tokens (8 -> 5)"),
    ):
        assert run("--resume", "--max-steps", "7", change) == 2
        assert named in capsys.readouterr().err
    free = (
        "validation.shapes=['3,1,4', '1,1,2']",
        "validation.patience=9",
        "validation.every=1",
        "validation.batch_size=1",
    )
    assert run("--resume", "--max-steps", "7", *free) == 0
    rows = [json.loads(line) for line in (run.output / "validation.jsonl").read_text().splitlines()]
    assert [(row["step"], len(row["accept_length"])) for row in rows] == [(2, 1), (4, 1), (6, 1), (7, 2)]


@pytest.mark.parametrize("name", ["optimizer.pt", "state.json"])
def test_damaged_trainer_state_is_refused_with_the_folder_to_delete(
    copy_run: Callable, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = copy_run("two steps")
    path = run.output / "step-2" / "trainer" / name
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:200] + bytes(300), b"\x80\x02cos\nsystem\n."):
        path.write_bytes(damaged)
        assert run("--resume") == 2
        assert f"Delete {run.output / 'step-2'}" in capsys.readouterr().err


def test_an_optimiser_s_state_of_another_head_is_refused(
    copy_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run("two steps")
    path = run.output / "step-2" / "trainer" / "optimizer.pt"
    wrong = torch.load(path, weights_only=True)
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    for state in ({}, {"state": {}, "param_groups": [{"params": [0]}]}, [1], wrong):
        torch.save(state, path)
        assert run("--resume") == 2
        assert f"Delete {run.output / 'step-2'}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "config: [", "config: 3", "\x00\xff", "- a"])
def test_a_damaged_run_yaml_is_refused(
    make_run: Callable, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    run = make_run()
    run.output.mkdir()
    (run.output / "run.yaml").write_bytes(text.encode("latin-1"))
    assert run("--resume") == 2
    assert "run.yaml" in capsys.readouterr().err


def test_resume_says_where_it_goes_on_and_clears_what_a_crash_left(
    copy_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run("judged")
    (run.output / "best").rename(run.output / ".best.here.77.old")  # killed while best/ was replaced
    (run.output / ".best.here.77.partial").mkdir()
    (run.output / ".step-7.partial").mkdir()
    before = weights(run.output / ".best.here.77.old")
    capsys.readouterr()
    assert run("--resume", "--max-steps", "6") == 0
    assert "from step 6 of 6" in capsys.readouterr().out
    assert same(weights(run.output / "best"), before)
    assert not [path for path in run.output.iterdir() if path.name.startswith(".")]


def test_a_run_goes_on_with_a_copy_of_its_data_and_not_with_other_data(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    chats = run.folder / "chats.jsonl"
    assert run("--max-steps", "2") == 0
    os.utime(chats, ns=(5, 5))
    assert run("--resume", "--max-steps", "3") == 0
    with chats.open("a") as file:
        file.write(chats.read_text().splitlines()[0].replace("The", "One") + "\n")
    assert run("--resume", "--max-steps", "4") == 2
    assert "other data" in capsys.readouterr().err


def test_resume_of_a_finished_run_changes_nothing(make_run: Callable) -> None:
    run = make_run(training={"max_steps": 3})
    assert run() == 0
    rows = run.metrics()
    assert run("--resume") == 0
    assert run.metrics() == rows


def test_one_of_several_processes_on_a_cpu_can_load_its_checkpoint(copy_run: Callable) -> None:
    run = copy_run("two steps")
    found = load_checkpoint(run.output / "step-2", torch.device("cpu", 0))
    assert found.state.step == 2 and found.optimizer_state["state"]
