"""A run of two sources: drawn as its account says, resumed to the bit, validated by category."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import make_config, make_conversations

from eagle_kit.cli.app import main as cli
from eagle_kit.train.__main__ import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config whose second source, of two categories, begins half-way."""
    path = make_config(tmp_path, validation={"every": 8})
    own = make_conversations(tmp_path / "own.jsonl", count=12, seed=1)
    lines = [json.loads(line) for line in own.read_text().splitlines()]
    found = [{**line, "category": ("long", "short")[i // 2 % 2]} for i, line in enumerate(lines)]
    own.write_text("".join(f"{json.dumps(line)}\n" for line in found))
    raw = yaml.safe_load(path.read_text())
    raw["data"] |= {"mix": [{"source": raw["data"].pop("source"), "max_repeats": 2}]}
    raw["data"]["mix"].append({"source": str(own), "name": "own", "weight": 2.0, "phase": [0.5, 1.0]})
    raw["training"] = {**raw["training"], "max_steps": 8}
    path.write_text(yaml.safe_dump(raw))
    return path


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_draws_its_sources_in_their_phases_and_tells_them_apart(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config)]) == 0
    shown = capfd.readouterr()
    rows, (validated,) = rows_of(tmp_path / "run"), rows_of(tmp_path / "run", "validation.jsonl")
    assert all(set(row["simulated_accept_length_of"]) == {"chats"} for row in rows[:4])
    later = [row["simulated_accept_length_of"] for row in rows[4:]]
    assert {name for lengths in later for name in lengths} >= {"own: long", "own: short"}
    for lengths, row in zip(later, rows[4:], strict=True):
        assert min(lengths.values()) - 1e-9 <= row["simulated_accept_length"] <= max(lengths.values()) + 1e-9
    assert set(validated["accept_length_of"]) == {"chats", "own: long", "own: short"}
    lengths = validated["accept_length_of"].values()
    assert min(lengths) <= validated["accept_length"]["3,1,4"] <= max(lengths)
    assert all(f"{name} {value:.2f}" in shown.err for name, value in validated["accept_length_of"].items())

    parts = ["training.max_steps=8", f"output_dir={tmp_path / 'parts'}"]
    assert main([str(config), *parts, "--max-steps", "5"]) == 0
    assert main([str(config), *parts, "--resume"]) == 0
    assert [row["loss"] for row in rows_of(tmp_path / "parts")] == [row["loss"] for row in rows]
    assert main([str(config), *parts, "--resume", "data.mix=[]", "data.source=x.jsonl"]) == 2


def test_the_account_says_what_is_drawn_without_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["data", "mix", str(config)]) == 0
    note, head, _, titles, _, *lines = capsys.readouterr().out.splitlines()
    assert "a response is cut at max_length" in note
    assert head.startswith("8 steps of 2 rows draw 16 rows")
    columns = titles.split()
    chats, own = (line.split() for line in lines)
    assert columns[0] == "source" and chats[0] == "chats" and own[0] == "own"
    assert "0% to 100%" in lines[0] and "50% to 100%" in lines[1]
    drawn = [int(line[-4]) for line in (chats, own)]
    assert sum(drawn) == 16 and drawn[1] in (5, 6)

    # Conversations, rows and tokens that are held; rows and tokens drawn; the share of tokens; repetitions.
    tokens = []
    for line, weight in ((chats, "1"), (own, "2")):
        documents, rows, held = (int(cell.replace(",", "")) for cell in line[1:4])
        assert 0 < documents <= held and line[4] == weight
        drawn_rows, drawn_tokens, _, repetitions = (float(c.strip("%").replace(",", "")) for c in line[-4:])
        tokens.append(held * drawn_rows / rows)
        assert drawn_tokens == pytest.approx(tokens[-1], abs=0.51)
        assert repetitions == pytest.approx(drawn_rows / rows, abs=0.0051)
    shares = [float(line[-2].strip("%")) for line in (chats, own)]
    assert shares == pytest.approx([100 * each / sum(tokens) for each in tokens], abs=0.051)
    assert f"about {sum(tokens):,.0f} tokens" in head
    assert not (tmp_path / "run").exists()


def test_too_few_repetitions_are_refused_before_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(config), "training.max_steps=500"]
    assert main(words) == 2
    assert "max_repeats" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert cli(["data", "mix", *words]) == 2
