"""`python benchmarks tune` as its user runs it on a tiny model: figures of what was decoded, and verdicts."""

import json
import sys

import pytest
from tiny import tiny_head
from tiny_run import make_target

from benchmarks.cli import main
from benchmarks.peers import _vllm
from benchmarks.tune.cells import judged
from benchmarks.tune.sizes import AUTO
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import load_target


@pytest.fixture
def folders(tmp_path):
    target = make_target(tmp_path / "target")
    save_draft(tiny_head(load_target(target), draft_vocab_size=90), tmp_path / "head", metadata={})
    lines = [{"id": str(i), "category": "x", "turns": [f"Number {i} sees the dog."]} for i in range(5)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_every_cell_is_measured_and_drawn(folders, capsys):
    pytest.importorskip("matplotlib")
    words = ["tune", "--target", str(folders / "target"), "--draft", str(folders / "head")]
    words += ["--tasks", str(folders / "chat.jsonl"), "noise", "--batches", "2", "--rounds", "2"]
    words += ["--shapes", "1,1,2", "2,2,4", "--max-tokens", "4", "--seed", "3", "--no-progress"]
    code = main([*words, "--out", str(folders / "tune.json")])
    record = json.loads((folders / "tune.json").read_text(encoding="utf-8"))
    rows = list(record["cases"].values())
    assert [row["status"] for row in rows] == ["ok"] * len(rows), capsys.readouterr().out
    cells = {(row["task"], row["batch"]): row for row in rows if "ratios" in row}
    names = "chat", "noise"
    assert set(cells) == {(task, 2) for task in names}
    for row in cells.values():
        rounds = row["rounds"]
        assert set(rounds) == {"none", "1,1,2", "2,2,4", AUTO} and sum(row["shapes"].values()) > 0
        assert len(rounds["none"]) == len(rounds[AUTO]) == 2 >= len(rounds["1,1,2"]) >= 1
        pairs = [a / b for a, b in zip(rounds[AUTO], rounds["none"], strict=True)]
        assert row["figures"]["auto over plain"] == pytest.approx(sum(pairs) / 2)
        low, high = row["intervals"][AUTO]
        assert low <= row["ratios"][AUTO] <= high
    [cold] = [row for row in rows if "course" in row and "ratios" not in row]
    assert len(cold["course"]) == 2 and cold["figures"]["auto over plain"] == cold["course"][-1] > 0
    peers = [row["figures"] for row in rows if row.get("peers")]
    assert len(peers) == 1 and peers[0]["transformers tokens/s"] > 0
    assert (folders / "tune.png").stat().st_size > 10_000
    assert code in (0, 1)  # the times of a tiny model are noise


def test_a_shape_of_few_rounds_is_compared_in_these():
    """The first text is the easiest to draft; a shape that met it alone is no better for that."""
    rates = {
        "none": [10.0, 10.0, 10.0, 10.0],
        "auto": [20.0, 12.0, 11.0, 12.0],
        "3,1,4": [18.0, 11.0, 10.0, 11.0],
        "5,4,16": [15.0],
    }
    found = judged(rates, ["3,1,4", "5,4,16"])
    assert found["figures"]["auto over plain"] == pytest.approx(1.2)
    assert found["ratios"]["5,4,16"] == pytest.approx(1.2 * 15 / 20)
    assert found["figures"]["best fixed (3,1,4)"] == pytest.approx(1.1)
    assert found["figures"]["auto over best in a round"] == pytest.approx((12 / 11 + 11 / 10) / 2)


def test_what_is_compared_is_compared_within_rounds():
    """Rounds differ in text and in the machine, and medians over all of them meet different rounds."""
    rates = {"none": [10.0, 10.0, 10.0], "auto": [10.0, 12.0, 14.0], "1,1,2": [11.0, 13.0, 12.0]}
    found = judged(rates, ["1,1,2"])["figures"]
    assert found["auto over plain"] == pytest.approx(1.2)
    assert found["best fixed (1,1,2)"] == pytest.approx(1.2)
    assert found["auto over best in a round"] == pytest.approx(12 / 13)
    rates["1,1,2"] = [9.0, 9.5, 10.0]
    rates["auto"] = [9.0, 9.8, 11.0]
    found = judged(rates, ["1,1,2"])["figures"]
    assert found["auto over best in a round"] == pytest.approx(0.98), "plain decoding is the best"


def test_vllm_waits_as_it_would_without_us(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nread line; [ -z "$GOMP_SPINCOUNT" ] && echo 1 || echo 2\n')
    python.chmod(0o755)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    for ours, answer in (("1000", 1.0), (None, 2.0)):
        if ours:
            monkeypatch.setenv("EAGLE_KIT_SPINCOUNT", ours)
        else:
            monkeypatch.delenv("EAGLE_KIT_SPINCOUNT")
        with _vllm(str(python), {"target": "t", "head": "h", "drafts": 0, "batch": 1}) as seconds:
            assert seconds([[1, 2]], 4) == answer


def test_a_python_without_vllm_is_a_user_error():
    settings = {"target": "t", "head": "h", "drafts": 0, "batch": 1}
    with _vllm(sys.executable, settings) as seconds, pytest.raises(UserError) as found:
        seconds([[1, 2]], 4)
    assert "vllm" in found.value.cause and "--vllm" in found.value.remedy
