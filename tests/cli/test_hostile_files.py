"""Files and options that nobody meant: one line of cause, one of remedy, exit code 2."""

import errno
import json
import os
from pathlib import Path

import pytest

from eagle_kit.cli import app

SHIPPED = "checkpoints/smollm2-135m-eagle3"
HOSTILE = {
    "nesting": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "5,000 digits": b'{"prompt": ' + b"1" * 5000 + b"}",
    "bytes": b"\xff\xfe\x00",
    "a cut object": b'{"a":',
    "a number": b"5",
    "a text": b'"x"',
    "half a character": b'{"prompt": "\\ud800", "drafts": [], "category": "\\ud800"}',
}
LONG = "a" * 5000
"""A name that no file system takes."""


def refused(capsys, *command: object) -> str:
    """Run a command that fails; its cause."""
    capsys.readouterr()
    assert app.main([str(word) for word in command]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    cause, remedy = lines[-2:]
    assert cause.startswith("error: ") and remedy.startswith("  -> ") and len(cause) < 6000
    return cause


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    from tiny_run import make_target

    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_every_command_that_reads_one(name, tmp_path, target, capsys):
    files = {suffix: tmp_path / f"file.{suffix}" for suffix in ("yaml", "json", "jsonl")}
    for path in files.values():
        path.write_bytes(HOSTILE[name])
    out = tmp_path / "out"
    for command in (["train"], ["data", "preview"]):
        assert str(files["yaml"]) in refused(capsys, *command, files["yaml"])
    refused(capsys, "generate", "--target", target, "--file", files["jsonl"])
    refused(capsys, "eval", "--target", target, "--draft", SHIPPED, "--tasks", files["jsonl"], "--out", out)
    refused(capsys, "export", SHIPPED, "--eval", files["json"], "--out", out)
    token_map = ("--draft", SHIPPED, "--token-map", files["json"])
    assert "token map" in refused(capsys, "generate", "--target", target, "--prompt", "a", *token_map)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_bytes(HOSTILE[name])
    refused(capsys, "import", draft, "--out", out)
    refused(capsys, "generate", "--target", draft, "--prompt", "a")
    assert not out.exists()


@pytest.mark.parametrize(
    "command",
    [
        ["train", LONG],
        ["validate", LONG],
        ["generate", "--file", LONG],
        ["generate", "--target", LONG, "--prompt", "a"],
        ["export", SHIPPED, "--out", LONG],
        ["import", LONG, "--out", "x"],
        ["report", LONG],
    ],
    ids=lambda command: " ".join(command)[:20],
)
def test_a_name_that_is_too_long_is_the_systems_refusal(command, target, capsys):
    words = ["--target", target] if command[0] == "validate" else []
    assert "File name too long" in refused(capsys, *command, *words)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space, or choose another folder."),
        (errno.EROFS, "Make it writable, or choose another folder."),
        (errno.EACCES, "Check names, rights and space."),
    ],
)
def test_the_remedy_of_what_the_system_refuses_is_the_right_one(number, remedy, capsys, monkeypatch):
    def full(args):
        raise OSError(number, os.strerror(number), "file")

    monkeypatch.setattr("eagle_kit.cli.report.run", full)
    assert app.main(["report", "run"]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--minutes", "nan"],
        ["demo", "--minutes", "inf"],
        ["data", "preview", "configs/smollm2-135m-eagle3.yaml", "--record", "9" * 30],
        ["validate", SHIPPED, "--decode", "0"],
    ],
    ids=" ".join,
)
def test_a_number_out_of_range_is_refused(command, capsys):
    assert command[-1][:9] in refused(capsys, *command)


def test_half_a_character_of_the_command_line_is_no_prompt(target, capsys):
    assert "lone surrogate" in refused(capsys, "generate", "--target", target, "--prompt", "\udcff")


def test_validate_decodes_with_the_draft_and_plainly(target, tmp_path, capsys):
    import torch
    from tiny import tiny_head

    from eagle_kit.drafts.files.draft import save_draft
    from eagle_kit.models.loading.loader import load_target

    assert app.main(["validate", str(target), "--target", str(target), "--decode", "8"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "decode:" in line]
    assert line.startswith("ok") and float(line.split("accept length ")[1].split()[0]) > 1.5

    torch.manual_seed(0)
    save_draft(tiny_head(load_target(target)), tmp_path / "random", metadata={})
    assert app.main(["validate", str(tmp_path / "random"), "--target", str(target), "--decode", "8"]) == 0
    out = capsys.readouterr().out
    assert "\nwarning decode: accept length 1." in out and "suspiciously few; chance gives 1." in out

    path = tmp_path / "random" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": -5}))
    assert app.main(["validate", str(path.parent), "--target", str(target), "--decode"]) == 2
    out = capsys.readouterr().out
    assert "says hidden_size -5 instead of a whole number" in out and "decode:" not in out
