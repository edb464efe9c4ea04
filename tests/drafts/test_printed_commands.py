"""The commands that an export prints and that a card holds, run as printed, from another folder."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli import app
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.draft_files import WEIGHTS_KEY
from eagle_kit.models.loading.loader import load_target, target_fingerprint
from eagle_kit.models.loading.target_folders import remember_folder

SHORT = ("--max-tokens", "4", "--max-context", "64")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft as a training leaves it, in a folder whose name has a blank, and its target somewhere else."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    target = make_target(tmp_path / "models" / "small target")
    weights = target_fingerprint(target)
    remember_folder(weights, target)
    metadata = {"target": target.name, WEIGHTS_KEY: weights}
    head = tiny_head(load_target(target))
    head.config = replace(head.config, target=target.name)
    save_draft(head, tmp_path / "work" / "trained", metadata=metadata)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work" / "trained"


def run_elsewhere(command: str, *more: str) -> int:
    """Run a command as it is printed, with further flags, in a folder that has nothing in it."""
    program, *words = shlex.split(command)
    assert program == "eagle-kit"
    here = Path.cwd()
    os.chdir(here.parent / "elsewhere")
    try:
        return app.main([*words, *more])
    finally:
        os.chdir(here)


@pytest.mark.parametrize("given", [True, False])
def test_the_command_that_an_export_prints_works(
    trained: Path, capsys: pytest.CaptureFixture[str], given: bool
) -> None:
    target = ["--target", "../models/small target"] if given else []
    assert app.main(["export", "trained", "--out", "my draft", *target]) == 0
    command = capsys.readouterr().out.partition("try it with ")[2].strip()
    assert run_elsewhere(command, *SHORT) == 0
    captured = capsys.readouterr()
    assert "accept length" in captured.out
    assert ("weights of the draft" in captured.err) is not given


def test_the_commands_of_a_card_work(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["export", "trained", "--out", "my draft"]) == 0
    card = Path("my draft/README.md").read_text()
    ours = card.partition("This engine:")[2].split("```")[1]
    generate, serve = ours.removeprefix("sh").strip().splitlines()
    assert run_elsewhere(generate, *SHORT) == 0
    assert "accept length" in capsys.readouterr().out

    # A server's memory is planned, by the same words: the target is found by the draft's weights.
    assert run_elsewhere(serve, "--plan") == 0
    assert "small target" in capsys.readouterr().out

    # The evaluation, of one prompt.
    match = re.search(r"Measure it with `([^`]+)`", card)
    assert match is not None
    Path("task.jsonl").write_text('{"id": "a", "prompt": "What is it?"}\n')
    task = ("--tasks", str(Path("task.jsonl").resolve()), "--shapes", "2,1,3", "--no-plots")
    assert run_elsewhere(match[1], *task, *SHORT, "--out", str(Path("results").resolve())) == 0


def test_a_card_names_no_target_by_its_folder(trained: Path) -> None:
    assert app.main(["export", "trained", "--out", "my draft"]) == 0
    card = Path("my draft/README.md").read_text()
    assert "--target" not in card and "models/small" not in card
