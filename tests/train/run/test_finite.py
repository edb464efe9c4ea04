"""Steps whose loss or gradient is not finite, the precision of a run, and where its backward pass runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from eagle_kit.config.train import TrainConfig
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.train.optim.strategy import Strategy
from eagle_kit.train.parallel.processes import with_precision


def spoil(monkeypatch: pytest.MonkeyPatch, forwards: set[int], kind: str = "loss") -> None:
    """Make the loss, or the gradient alone, of some forwards, counted from 1, NaN."""
    forward, calls = TTTModule.forward, [0]

    def spoiled(self: TTTModule, *args: object) -> object:
        out = forward(self, *args)  # type: ignore[arg-type]
        calls[0] += 1
        if calls[0] not in forwards:
            return out
        if kind == "loss":
            return out._replace(loss=out.loss * float("nan"))
        loss = out.loss * 1.0
        loss.register_hook(lambda gradient: gradient * float("nan"))
        return out._replace(loss=loss)

    monkeypatch.setattr(TTTModule, "forward", spoiled)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"save_every": 1, "keep_last": 9, "gradient_accumulation": 1, "ema_decay": 0.5})
    spoil(monkeypatch, {3})
    assert run("--max-steps", "5") == 0
    assert [row.get("skipped", False) for row in run.metrics()] == [False, False, True, False, False]
    heads = {step: load_draft(run.output / f"step-{step}") for step in (2, 3, 4)}
    weights = {step: dict(head.named_parameters()) for step, head in heads.items()}
    assert all(torch.equal(weights[2][name], weights[3][name]) for name in weights[2])
    assert not all(torch.equal(weights[3][name], weights[4][name]) for name in weights[3])
    assert all(tensor.isfinite().all() for tensor in weights[4].values())
    told = capsys.readouterr()
    assert "step 3 is skipped" in told.err and "1 steps were skipped" in told.out


def test_several_such_steps_in_a_row_end_the_run_with_the_row(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"gradient_accumulation": 1})
    spoil(monkeypatch, {2, 4, 5, 6})
    assert run("--max-steps", "9") == 2
    assert len(run.metrics()) == 5
    told = capsys.readouterr().err
    named = re.search(
        r"not finite in 3 steps in a row; in step 6 with the packed sequences ([\d, ]+)\.", told
    )
    assert named is not None
    assert len(named[1].split(",")) == 2, "the rows of this step alone"


@pytest.mark.parametrize(("kind", "num_named"), [("loss", 1), ("gradient", 2)])
def test_a_loss_gives_its_row_away_and_a_gradient_could_be_any_row_s_of_the_step(
    make_run: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    num_named: int,
) -> None:
    """Two rows a step, each in a forward of its own; one of them is spoiled."""
    run = make_run(training={"max_steps": 9})
    spoil(monkeypatch, {4, 6, 8}, kind)
    assert run() == 2
    assert [row.get("skipped", False) for row in run.metrics()] == [False, True, True]
    assert [row["loss"] is None for row in run.metrics()] == [False, *[kind == "loss"] * 2]
    named = re.search(r"in step 4 with the packed sequences ([\d, ]+)\.", capsys.readouterr().err)
    assert named is not None and len(named[1].split(", ")) == num_named


def test_backward_runs_outside_of_autocast(make_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, seen = Strategy.backward, []

    def watched(self: Strategy, loss: torch.Tensor, *, last: bool) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), loss.dtype))
        backward(self, loss, last=last)

    monkeypatch.setattr(Strategy, "backward", watched)
    assert make_run(training={"precision": "bfloat16"})("--max-steps", "1") == 0
    assert set(seen) == {(False, torch.float32)}


def test_the_precision_auto_is_settled_by_the_device_and_said_first(
    make_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(training={"precision": "auto"})
    assert run("--max-steps", "1") == 0
    assert capsys.readouterr().out.splitlines()[0] == "runs on the CPU in float32"
    saved = yaml.safe_load((run.output / "run.yaml").read_text())
    assert saved["config"]["training"]["precision"] == "float32"
    assert run("--resume", "--max-steps", "2") == 0


@pytest.mark.parametrize(
    ("asked", "launched", "on_gpu", "settled"),
    [
        ("auto", "no", True, "bfloat16"),
        ("auto", "no", False, "float32"),
        ("auto", "bf16", False, "bfloat16"),
        ("float32", "no", True, "float32"),
        ("tf32", "no", False, "tf32"),
    ],
)
def test_precisions(
    monkeypatch: pytest.MonkeyPatch, asked: str, launched: str, on_gpu: bool, settled: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    config = TrainConfig.model_validate(
        {"target": "t", "data": {"source": "s"}, "output_dir": "o", "training": {"precision": asked}}
    )
    assert with_precision(config, on_gpu=on_gpu).training.precision == settled


def test_captured_states_that_are_given_settle_the_precision(tmp_path: Path) -> None:
    def settled(store: Path, asked: str) -> str:
        data = {"store": str(store)}
        settings = {"target": "t", "data": data, "output_dir": "o", "training": {"precision": asked}}
        return with_precision(TrainConfig.model_validate(settings), on_gpu=False).training.precision

    manifest = {
        "target": {"name": "t", "revision": None, "weights": "w0"},
        "layer_ids": [],
        "layer_ids_are": "inputs of layers",
        "last_hidden_state": "after the final norm",
        "precision": "bfloat16",
        "format": "computed",
        "hidden_size": 2,
        "data": {"source": "t", "max_length": 1, "supervised_tokens": 0, "rows": 0, "files": {}},
        "tensors": {},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert settled(tmp_path, "auto") == "bfloat16"
    assert settled(tmp_path, "float32") == "float32", "which is refused where the store is read"
    assert settled(tmp_path / "none", "auto") == "float32"
