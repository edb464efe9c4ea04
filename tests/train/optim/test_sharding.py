"""Two processes, started by accelerate from the files in train/accelerate, train the head that one does: with
DDP, FSDP2 and ZeRO, all to rounding; resume is bitwise, and a checkpoint goes on under another strategy."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle_kit.drafts.files.draft import load_draft

REPOSITORY = Path(__file__).parents[3]
STRATEGIES = ("fsdp2", "multi-gpu", "zero2", "zero3")
TRAINING = {"ttt_length": 3, "learning_rate": 1e-3, "epochs": 20, "sequences_per_step": 4, "warmup_steps": 1}
NAMED = {
    "fsdp2": (
        "sharded-target=training.target_placement=fsdp training.cache_hidden_states=disk "
        "validation.every=2 validation.max_tokens=6",
    ),
    "multi-gpu": (
        "accumulated=training.gradient_accumulation=1",
        "cut-target=training.target_placement=tensor-parallel training.cache_hidden_states=disk "
        "validation.every=2 validation.max_tokens=6",
    ),
}


def start(strategy: str, script: str, *arguments: str) -> str:
    """Run ``script`` in two processes; returns what they said on standard error."""
    file = REPOSITORY / "train" / "accelerate" / f"{strategy}.yaml"
    launcher = ["--num_processes", "2", "--main_process_port", "0"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *launcher),
            *(str(Path(__file__).with_name(script)), *arguments),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "STACKS_AFTER": "400"},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def launch(folder: Path, config: Path, strategy: str) -> Path:
    """Run ``launched.py``; returns where the runs are."""
    out = folder / strategy
    start(strategy, "launched.py", str(config), str(out), *NAMED.get(strategy, ()))
    assert (out / "done").read_text() == "2"
    return out


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("tokens_per_s", "seconds")} for line in lines
    ]


def check_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] and ours
    for a, b in zip(ours, theirs, strict=True):
        assert a["tokens"] == b["tokens"] and a["supervised_tokens"] == b["supervised_tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-5)


def files(checkpoint: Path) -> dict[str, bytes]:
    names = ("model.safetensors", "trainer/optimizer.pt")
    return {name: (checkpoint / name).read_bytes() for name in names}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("not installed: deepspeed")
    return request.param


def test_accelerate_launches_the_module_from_any_folder(make_run: Callable) -> None:
    """The command and the environment are those of ``accelerate launch``, which would import as much more."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    run = make_run(training={**TRAINING, "precision": "float32"})
    torch.set_num_threads(1)
    assert run("--max-steps", "1") == 0
    words = ["--cpu", "--num_processes", "1", "-m", "eagle_kit.train", str(run.config), "--max-steps", "1"]
    asked = launch_command_parser().parse_args([*words, f"output_dir={run.folder / 'launched'}"])
    command, environment = prepare_simple_launcher_cmd_env(_validate_launch_command(asked)[0])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=run.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    check_close(rows(run.folder / "launched"), run.metrics())


@pytest.mark.nightly
def test_the_module_is_launched_from_any_folder_with_a_file_of_deepspeed_s(make_run: Callable) -> None:
    """ZeRO 1 of a ``ds_config`` in two processes gives the losses of one process without DeepSpeed."""
    pytest.importorskip("deepspeed")
    run = make_run(training={**TRAINING, "precision": "float32"})
    torch.set_num_threads(1)
    assert run("--max-steps", "2") == 0

    settings = {"zero_optimization": {"stage": 1, "overlap_comm": "auto"}, "train_batch_size": 4}
    (run.folder / "ds.json").write_text(json.dumps(settings))
    ours = yaml.safe_load((REPOSITORY / "train" / "accelerate" / "zero2.yaml").read_text())
    del ours["mixed_precision"]  # accelerate refuses it beside a file of DeepSpeed's own
    ours["deepspeed_config"] = {
        "deepspeed_config_file": str(run.folder / "ds.json"),
        "zero3_init_flag": False,
        "deepspeed_multinode_launcher": "standard",
    }
    (run.folder / "accelerate.yaml").write_text(yaml.safe_dump(ours))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
    command += ["--num_processes", "2", "--main_process_port", "0", "-m", "eagle_kit.train"]
    command += [str(run.config), "--max-steps", "2", f"output_dir={run.folder / 'two'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=run.folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    check_close(rows(run.folder / "two"), run.metrics())


@pytest.mark.nightly
def test_two_processes_train_the_head_of_one_and_resume_to_the_bit(make_run: Callable, strategy: str) -> None:
    run = make_run(training=TRAINING)
    torch.set_num_threads(1)
    assert run("--max-steps", "6", "training.save_every=3", "training.keep_last=9") == 0
    out = launch(run.folder, run.config, strategy)

    check_close(rows(out / "whole"), run.metrics())
    assert rows(out / "resumed") == rows(out / "whole")
    assert files(out / "resumed" / "step-6") == files(out / "whole" / "step-6")

    one, two = (load_draft(folder / "step-6").state_dict() for folder in (run.output, out / "whole"))
    assert one.keys() == two.keys()
    for name, weight in one.items():  # AdamW's first steps are of the size of the learning rate
        torch.testing.assert_close(two[name], weight, rtol=0, atol=2e-4)

    moments = [
        torch.load(folder / "step-6" / "trainer" / "optimizer.pt", weights_only=True)
        for folder in (run.output, out / "whole")
    ]
    assert moments[0]["state"].keys() == moments[1]["state"].keys()
    for number, mine in moments[0]["state"].items():
        other = moments[1]["state"][number]
        assert float(mine["step"]) == float(other["step"]) == 6
        torch.testing.assert_close(other["exp_avg"], mine["exp_avg"], rtol=1e-3, atol=1e-6)

    validated = run.folder / "judged"
    assert (
        run("--max-steps", "2", "validation.every=2", "validation.max_tokens=6", f"output_dir={validated}")
        == 0
    )
    for text in NAMED.get(strategy, ()):  # a large forward, or a shared target: the same figures
        folder = out / text.partition("=")[0]
        check_close(rows(folder), run.metrics()[:2])
        if "validation.every" in text:  # decoded by both together
            mine, other = (
                json.loads((each / "validation.jsonl").read_text()) for each in (validated, folder)
            )
            assert other["num_different_responses"] == 0 and mine["num_verifies"] == other["num_verifies"]
            assert mine["accept_length"] == other["accept_length"]
            assert mine["vocab_coverage"] == other["vocab_coverage"]

    # one process goes on from what two have left behind, with the same rows of data
    assert run("--resume", "--max-steps", "8", f"output_dir={out / 'whole'}") == 0
    assert run("--resume", "--max-steps", "8") == 0
    check_close(rows(out / "whole")[6:], run.metrics()[6:])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gradient", "loss"])
def test_what_is_not_finite_in_one_process_is_skipped_by_all(
    make_run: Callable, strategy: str, kind: str
) -> None:
    run = make_run(training={**TRAINING, "save_every": 99})
    out = run.folder / f"{strategy}-{kind}"
    said = start(strategy, "launched_spoiled.py", str(run.config), str(out), kind)
    processes = [json.loads((out / f"process-{rank}.json").read_text()) for rank in (0, 1)]
    assert [process["code"] for process in processes] == [2, 2]
    mine, other = (process["rows"] for process in processes)
    assert mine == other  # weights, moments and random states, to the bit
    # Steps 2, 4, 5 and 6 are spoiled in process 1; the last of them ends the run.
    assert [row["finite"] for row in mine] == [True, False, True, False, False]
    assert [row["skipped"] for row in mine] == [0, 1, 1, 2, 3]
    for name in ("weights", "moments"):
        first, second, third, fourth, fifth = (row[name] for row in mine)
        assert first == second != third == fourth == fifth
    assert [row.get("skipped", False) for row in rows(out / "run")] == [False, True, False, True, True]
    # Four rows a step: a loss that is NaN gives its two away; a gradient could be any process's.
    named = re.search(r"in 3 steps in a row; in step 6 with the packed sequences ([\d, ]+)", said)
    assert named is not None and len(named[1].split(", ")) == (2 if kind == "loss" else 4)
