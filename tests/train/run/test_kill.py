"""kill -9 at the worst moments of a save: what is left resumes to the bit; the steps since are repeated.

The kills are put in from outside: a child process runs the real command with one function made to end it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

CHILD = """
import json, os, signal, sys
from pathlib import Path

import safetensors.torch
import torch

from eagle_kit.train import __main__
from eagle_kit.train.run import folder as run_folder  # imported once, for every child
from eagle_kit.train.run import checkpoint as state
from eagle_kit.train.run import loop
from eagle_kit.train.run.metrics import JsonLines

config, outputs = sys.argv[1], json.loads(sys.argv[2])


def kill(owner, name, times, after):
    real, calls = getattr(owner, name), [0]

    def patched(*args, **kwargs):
        calls[0] += 1
        if calls[0] == times and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls[0] == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, patched)


OWNERS = {"torch": torch, "safetensors": safetensors.torch, "path": Path, "os": os, "rows": JsonLines,
          "state": state, "run_folder": run_folder, "folder": run_folder.RunFolder}
for output, (owner, name, times, after) in outputs.items():
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        kill(OWNERS[owner], name, times, after)
        code = __main__.main([config, "--max-steps", "7", f"output_dir={output}"])
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (output, status)
"""
MOMENTS = {  # what is called for the n-th time, and whether the kill comes after it; save_every is 2
    "before-the-first-save": ("safetensors", "save_file", 1, False),
    "between-optimizer-and-counters": ("torch", "save", 2, True),
    "after-the-rename": ("folder", "rotate", 2, False),
    "while-an-old-one-is-deleted": ("os", "unlink", 2, True),
    "behind-a-row-of-metrics": ("rows", "append", 5, True),
}


MET_ELSEWHERE = ("before-the-first-save", "behind-a-row-of-metrics")
"""Resumed without a checkpoint, and behind the last one: in test_resume.py without a kill."""


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([name for name in MOMENTS if name not in MET_ELSEWHERE], id="inside of a save"),
        pytest.param(MET_ELSEWHERE, id="beside a save", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_to_the_bit(make_run: Callable, moments: Sequence[str]) -> None:
    run = make_run(training={"save_every": 2, "keep_last": 1})
    torch.set_num_threads(1)
    assert run("--max-steps", "7") == 0
    whole = files(run.output / "step-7")
    killed = {str(run.folder / name): moment for name, moment in MOMENTS.items() if name in moments}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run.config), json.dumps(killed)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for name in moments:
        folder = run.folder / name
        assert (folder / "run.yaml").exists()
        if name == "while-an-old-one-is-deleted":
            assert any((folder / ".step-2.partial.old").iterdir())
        assert run("--resume", "--max-steps", "7", f"output_dir={folder}") == 0, name
        assert run.metrics(name) == run.metrics(), name
        assert files(folder / "step-7") == whole, name
        left = {path.name for path in folder.iterdir()}
        assert left == {"run.yaml", "metrics.jsonl", "judge.jsonl", "step-7"}, name


def files(checkpoint: Path) -> dict[str, bytes]:
    names = ("model.safetensors", "trainer/optimizer.pt")
    return {name: (checkpoint / name).read_bytes() for name in names}
