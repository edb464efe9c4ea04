"""Two machines, which are two launchers on this one: training, another number of them, a lost one, stores."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from nodes import Launcher, accelerate, finish, run_nodes, start_nodes, torchrun
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eagle_kit.cli import main
from eagle_kit.data.hidden_states.store import StateStore

TRAINING = {"sequences_per_step": 4, "epochs": 20, "save_every": 2, "precision": "float32"}


def check_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] and ours
    for a, b in zip(ours, theirs, strict=True):
        assert a["tokens"] == b["tokens"] and a["supervised_tokens"] == b["supervised_tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [torchrun, accelerate], ids=["torchrun", "accelerate"])
def test_a_run_goes_on_with_another_number_of_machines_or_says_why_not(
    make_run: Callable, launcher: Launcher
) -> None:
    """Four processes on two machines, then two on one, then one: the losses of one process all the way."""
    run = make_run(training=TRAINING, validation={"every": 2, "max_tokens": 6})
    torch.set_num_threads(1)
    assert run("--max-steps", "6") == 0
    moved = f"output_dir={run.folder / 'moved'}"
    run_nodes(2, 2, "train", str(run.config), moved, "--max-steps", "2", launcher=launcher)
    assert json.loads((run.folder / "moved/step-2/eagle_kit.json").read_text())["machine"].startswith("4 x")
    three = start_nodes(3, 1, "train", str(run.config), moved, "--resume", launcher=launcher)
    first, second = finish(three)[:2]
    assert first.code != 0 != second.code
    assert "sequences_per_step is 4, which 3 processes cannot share equally" in first.said + second.said
    command = ("-m", "eagle_kit.cli", "train", str(run.config), moved, "--resume", "--max-steps", "4")
    run_nodes(1, 2, *command, launcher=launcher)
    assert run("--resume", "--max-steps", "6", moved) == 0
    check_close(run.metrics("moved"), run.metrics())
    validated = [
        [json.loads(line) for line in (run.folder / name / "validation.jsonl").read_text().splitlines()]
        for name in ("run", "moved")
    ]
    assert [row["num_verifies"].keys() for row in validated[0]] == [
        row["num_verifies"].keys() for row in validated[1]
    ]
    for mine, other in zip(*validated, strict=True):
        assert mine["num_different_responses"] == other["num_different_responses"] == 0
        assert mine["accept_length"] == pytest.approx(other["accept_length"], rel=0.05)


@pytest.mark.nightly
def test_a_machine_that_is_lost_ends_the_run_on_the_other_one_with_one_sentence(make_run: Callable) -> None:
    run = make_run(training={**TRAINING, "max_steps": 10_000, "save_every": 2, "keep_last": 1})
    nodes = start_nodes(2, 1, "train", str(run.config))
    while not any(run.output.glob("step-*")) and all(node.poll() is None for node in nodes):
        time.sleep(0.1)
    lost = nodes[1]
    for process in [*psutil.Process(lost.pid).children(recursive=True), psutil.Process(lost.pid)]:
        process.send_signal(signal.SIGKILL)
    left = finish(nodes, 60)[0]
    assert left.code not in (0, None)
    ours = left.said.split("Traceback")[0]  # what follows is the launcher's own
    assert ours.count("error in process 0 of 2: Another process of this run has ended.") == 1
    assert "RuntimeError" not in left.said and "gloo" not in left.said
    assert run("--resume", "--max-steps", str(len(run.metrics()) + 1)) == 0


@pytest.mark.nightly
def test_a_machine_that_falls_silent_is_missed_by_the_other_one(make_run: Callable) -> None:
    """Its processes are stopped: no connection is closed, and collectives wait."""
    training = {**TRAINING, "max_steps": 10_000, "keep_last": 1, "peer_timeout_s": 8.0}
    run = make_run(training=training)
    nodes = start_nodes(2, 1, "train", str(run.config))
    while not any(run.output.glob("step-*")) and all(node.poll() is None for node in nodes):
        time.sleep(0.1)
    tree = [*psutil.Process(nodes[1].pid).children(recursive=True), psutil.Process(nodes[1].pid)]
    for process in tree:
        process.suspend()
    try:
        left = finish(nodes[:1], 120)[0]
    finally:
        for process in tree:
            process.kill()
    assert left.code not in (0, None)
    assert "error in process 0 of 2: Process 1 of 2 has not been heard from for 8 seconds." in left.said
    assert run("--resume", "--max-steps", str(len(run.metrics()) + 1)) == 0


@pytest.mark.nightly
def test_machines_write_a_store_together_and_learn_from_it(make_run: Callable, tmp_path: Path) -> None:
    """A part of the rows each, computed here or read from another engine's files; all are read by both."""
    run = make_run(training=TRAINING)
    both, given = run.folder / "both", run.folder / "given"
    command = ("-m", "eagle_kit.cli", "data")
    assert main(["data", "capture", str(run.config), "--out", str(run.folder / "alone")]) == 0
    alone = StateStore(run.folder / "alone")
    run_nodes(2, 1, *command, "capture", str(run.config), "--out", str(both))
    states, layers = engine_files(run, tmp_path)
    imported = ("import-states", str(run.config), "--from", str(states), "--layers", *layers)
    run_nodes(2, 1, *command, *imported, "--out", str(given))
    rows = sorted(alone.rows())
    expected = alone.read(rows)
    assert expected is not None
    for folder in (both, given):
        store = StateStore(folder)
        assert sorted(store.rows()) == rows and len(store.shards()) == 2
        found = store.read(rows)
        assert found is not None
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4)
    learned = ("train", str(run.config), f"data.store={both}", f"output_dir={run.folder / 'two'}")
    run_nodes(2, 1, *learned, "--max-steps", "3")
    assert run("--max-steps", "3") == 0
    check_close(run.metrics("two"), run.metrics())


@pytest.mark.nightly
def test_machines_share_a_target_that_is_cut_over_all_their_processes(make_run: Callable) -> None:
    run = make_run(training=TRAINING, validation={"every": 2, "max_tokens": 6})
    cut = (
        "training.target_placement=tensor-parallel",
        f"output_dir={run.folder / 'cut'}",
        "--max-steps",
        "2",
    )
    run_nodes(2, 1, "train", str(run.config), *cut)
    assert run("--max-steps", "2") == 0
    check_close(run.metrics("cut"), run.metrics())
    counted = [
        json.loads((run.folder / name / "validation.jsonl").read_text())["num_verifies"]
        for name in ("run", "cut")
    ]
    assert counted[0] == counted[1]


def engine_files(run: Any, folder: Path) -> tuple[Path, list[str]]:
    """States of the run's texts as vLLM's extraction writes them, the last one behind the final norm as
    transformers has it -> the folder, and the layers."""
    texts, states = folder / "texts.jsonl", folder / "states"
    states.mkdir()
    assert main(["data", "texts", str(run.config), "--out", str(texts)]) == 0
    model = AutoModelForCausalLM.from_pretrained(run.folder / "target", dtype=torch.float32)
    for i, line in enumerate(texts.read_text().splitlines()):
        ids = torch.tensor(json.loads(line)["input_ids"])
        with torch.no_grad():
            found = model(ids[None], output_hidden_states=True).hidden_states
        hidden = torch.stack([state[0] for state in found], dim=1).contiguous()
        save_file({"hidden_states": hidden, "token_ids": ids}, states / f"{i}.safetensors")
    return states, [*map(str, range(len(found) - 1)), "final"]
