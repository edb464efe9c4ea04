"""Two processes, started by accelerate from the files in train/accelerate, train the head that one does: with
DDP, FSDP2 and ZeRO, all to rounding; resume is bitwise, and a checkpoint goes on under another strategy."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_kit.checkpoints.draft import load_draft

REPOSITORY = Path(__file__).parents[3]
STRATEGIES = ("fsdp2", "multi-gpu", "zero2", "zero3")
TRAINING = {"ttt_length": 3, "learning_rate": 1e-3, "epochs": 20, "sequences_per_step": 4, "warmup_steps": 1}
NAMED = {
    "fsdp2": ("sharded-target=training.target_placement=fsdp training.cache_hidden_states=disk",),
    "multi-gpu": ("accumulated=training.gradient_accumulation=1",),
}


def launch(folder: Path, config: Path, strategy: str) -> Path:
    """Run ``launched.py`` in two processes; returns where the runs are."""
    out = folder / strategy
    file = REPOSITORY / "train" / "accelerate" / f"{strategy}.yaml"
    launcher = ["--num_processes", "2", "--main_process_port", "0"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *launcher),
            *(str(Path(__file__).with_name("launched.py")), str(config), str(out)),
            *NAMED.get(strategy, ()),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "STACKS_AFTER": "400"},
    )
    assert done.returncode == 0, done.stderr
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


@pytest.mark.slow
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

    for text in NAMED.get(strategy, ()):  # a large forward, or a sharded target: the same figures
        check_close(rows(out / text.partition("=")[0]), run.metrics()[:2])

    # one process goes on from what two have left behind, with the same rows of data
    assert run("--resume", "--max-steps", "8", f"output_dir={out / 'whole'}") == 0
    assert run("--resume", "--max-steps", "8") == 0
    check_close(rows(out / "whole")[6:], run.metrics()[6:])
