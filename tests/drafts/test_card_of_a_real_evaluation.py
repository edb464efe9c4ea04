"""The card reads summary.json as eagle-kit eval writes it, not as somebody remembers it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.config.eval import EvalConfig
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.export import Facts, export_draft
from eagle_kit.eval.engines import NamedSetting
from eagle_kit.eval.runner import name_drafts, run_eval
from eagle_kit.eval.summary import find_row
from eagle_kit.models.loading.loader import load_target

METADATA = {"command": "accelerate launch train configs/a.yaml", "tokens_seen": 123456, "seconds": 62.0}


def engines(target: str, settings: Sequence[NamedSetting]) -> list[Any]:
    """Plain decoding, and drafts of which two tokens are always accepted."""
    return [FakeLLM(None), *(FakeLLM(setting.draft, 2) for setting in settings)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    head = tiny_head(load_target(target))
    head.config = replace(head.config, target="tiny")
    save_draft(head, tmp_path / "draft", metadata=METADATA)
    return tmp_path / "draft"


def evaluate(tmp_path: Path, drafts: list[Path]) -> dict[str, Any]:
    tasks = []
    for task in ("one", "two"):
        rows = [{"id": f"p{i}", "category": "ab"[i % 2], "turns": [f"{task} {i}"]} for i in range(4)]
        path = tmp_path / f"{task}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks.append(str(path))
    return run_eval(
        "a-target",
        name_drafts(drafts),
        EvalConfig(tasks=tasks, shapes=("3,1,4", "3,2,6"), max_tokens=13, plots=False),
        out=tmp_path / "eval",
        quiet=True,
        command="eagle-kit eval --draft checkpoints/draft",
        engines=engines,
    )


def test_the_card_shows_every_task_and_shape_with_the_measured_figures(
    tmp_path: Path, target: Path, draft: Path
) -> None:
    summary = evaluate(tmp_path, [draft])
    export_draft(draft, tmp_path / "out", target=target, facts=Facts(summary["paths"]["summary"]))
    card = (tmp_path / "out" / "README.md").read_text()
    table = [line.split(" | ") for line in card.splitlines() if line.startswith("| ")][1:]
    cells = {(line[0].removeprefix("| "), line[1]): line[2:] for line in table}
    assert set(cells) == {(task, shape) for task in ("all", "one", "two") for shape in ("3,1,4", "3,2,6")}
    for (task, shape), (accept_length, speed, speedup, responses) in cells.items():
        row = find_row(summary, "draft", shape, task)
        assert 1.5 < row["accept_length"] <= 3
        assert accept_length == f"{row['accept_length']:.2f}"
        assert (speed, speedup) == (f"{row['decode_tokens_per_s']:.2f}", f"{row['speedup']:.2f}")
        assert int(responses.rstrip(" |")) == (8 if task == "all" else 4)
    assert "identical to plain decoding: yes" in card
    assert "`eagle-kit eval --draft checkpoints/draft`" in card
    assert f"cpu {summary['machine']['cpu']}" in card and f"torch {summary['versions']['torch']}" in card
    assert "`accelerate launch train configs/a.yaml`" in card and "123,456" in card


def test_of_several_drafts_the_exported_one_is_shown(tmp_path: Path, target: Path, draft: Path) -> None:
    other = tmp_path / "other"
    save_draft(tiny_head(load_target(target), seed=5), other, metadata={})
    summary = evaluate(tmp_path, [other, draft])
    assert {row["draft"] for row in summary["rows"]} == {None, "other", "draft"}
    export_draft(draft, tmp_path / "out", target=target, facts=Facts(summary["paths"]["summary"]))
    card = (tmp_path / "out" / "README.md").read_text()
    assert len([line for line in card.splitlines() if line.startswith("| all | 3,1,4")]) == 1
