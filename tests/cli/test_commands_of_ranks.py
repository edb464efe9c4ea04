"""`generate`, `eval` and `tune` with `--tensor-parallel`: the same text and acceptance as of one process."""

import json
from pathlib import Path

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli.app import main
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import load_target

pytestmark = pytest.mark.nightly
RANKS = ("--tensor-parallel", "2")
COMMON = ("--device", "cpu", "--max-tokens", "10", "--max-context", "96")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_target(tmp_path / "target")
    save_draft(tiny_head(load_target(tmp_path / "target")), tmp_path / "draft", metadata={})
    lines = [{"id": f"q{i}", "turns": [f"What is {i}?"]} for i in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_generate(folder, capsys):
    words = ("--target", str(folder / "target"), "--draft", str(folder / "draft"), "--shape", "3,1,4")
    found = []
    for ranks in ((), RANKS):
        assert (
            main(["generate", *words, *COMMON, *ranks, "--prompt", "A cat", "--prompt", "Two", "--json"]) == 0
        )
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        found.append([(line["text"], line["finish_reason"]) for line in lines])
    assert found[0] == found[1] and len(found[0]) == 2


def test_eval(folder):
    words = ("--target", str(folder / "target"), "--draft", str(folder / "draft"), "--shapes", "3,1,4")
    tasks = ("--tasks", str(folder / "questions.jsonl"), "--no-plots")
    found = []
    for name, ranks in (("one", ()), ("two", RANKS)):
        assert main(["eval", *words, *tasks, *COMMON, *ranks, "--out", str(folder / name)]) == 0
        lines = map(json.loads, (folder / name / "answers.jsonl").read_text().splitlines())
        found.append([(line["id"], line["shape"], line["token_ids"], line["identical"]) for line in lines])
    assert found[0] == found[1] and len(found[0]) == 6
    assert '"tensor_parallel": 2' in (folder / "two" / "settings.json").read_text()


def test_eval_of_several_drafts_is_refused(folder, capsys):
    words = ("--target", str(folder / "target"), "--draft", str(folder / "draft"), str(folder / "draft"))
    tasks = ("--tasks", str(folder / "questions.jsonl"), "--no-plots", "--name", "a", "b")
    assert main(["eval", *words, *tasks, *COMMON, *RANKS, "--out", str(folder / "out")]) == 2
    assert "an evaluation has one engine, and 2 drafts were given" in capsys.readouterr().err


def test_tune(folder, capsys, monkeypatch):
    """Recorded drafts of both ranks are in step, and so are timed cycles; acceptance is that of one."""
    words = [str(folder / "draft"), "--target", str(folder / "target"), "--batch-size", "2"]
    tasks = ("--tasks", str(folder / "questions.jsonl"), "--limit", "3")
    found = []
    for name, ranks in (("one", ()), ("two", RANKS)):
        monkeypatch.setenv("EAGLE_KIT_CACHE", str(folder / name))
        assert main(["tune", *words, *tasks, *COMMON, *ranks, "--graph-mode", "off"]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line)
        measured = json.loads(Path(lines["acceptance"].strip()).read_text())
        found.append({key: value for key, value in measured.items() if key not in ("about", "draft")})
    assert found[0] == found[1] and found[0]
