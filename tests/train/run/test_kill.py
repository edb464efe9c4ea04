"""kill -9 at the worst moments of a save: what is left resumes to the bit; the steps since are repeated.

The kills are put in from outside: a forked process runs the real command with one function made to end it.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from eagle_kit.train.run.folder import RunFolder
from eagle_kit.train.run.metrics import JsonLines

MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
    "before-the-first-save": (safetensors.torch, "save_file", 1, False),
    "between-optimizer-and-counters": (torch, "save", 2, True),
    "after-the-rename": (RunFolder, "rotate", 2, False),
    "while-an-old-one-is-deleted": (os, "unlink", 4, True),  # two are of the saves before
    "behind-a-row-of-metrics": (JsonLines, "append", 5, True),
}
"""What is called for the n-th time, and whether the kill comes after it; ``save_every`` is 2."""


MET_ELSEWHERE = ("before-the-first-save", "behind-a-row-of-metrics")
"""Resumed without a checkpoint, and behind the last one: in test_resume.py without a kill."""


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([name for name in MOMENTS if name not in MET_ELSEWHERE], id="inside of a save"),
        pytest.param(MET_ELSEWHERE, id="beside a save", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_to_the_bit(
    make_run: Callable, run_until_killed: Callable, moments: Sequence[str]
) -> None:
    run = make_run(training={"save_every": 2, "keep_last": 1})
    assert run("--max-steps", "7") == 0
    whole = files(run.output / "step-7")
    for name in moments:
        folder = run.folder / name
        train = partial(run, "--max-steps", "7", f"output_dir={folder}")
        run_until_killed(train, *MOMENTS[name])
        assert (folder / "run.yaml").exists()
        if name == "while-an-old-one-is-deleted":
            assert any((folder / ".step-2.partial.old").iterdir())
        assert run("--resume", "--max-steps", "7", f"output_dir={folder}") == 0, name
        assert run.metrics(name) == run.metrics(), name
        assert files(folder / "step-7") == whole, name
        left = {path.name for path in folder.iterdir()}
        assert left == {"run.yaml", "metrics.jsonl", "validation.jsonl", "step-7"}, name


def files(checkpoint: Path) -> dict[str, bytes]:
    names = ("model.safetensors", "trainer/optimizer.pt")
    return {name: (checkpoint / name).read_bytes() for name in names}
