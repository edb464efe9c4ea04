"""The comparison of a study: means, ranges and ratios of the heads of each arm, in three files."""

import json

import pytest

from recipes.compare import compare

SHAPES = ["4,1,5", "2,2,4"]
PARTS = [("all", "all"), ("t", "all"), ("t", "x"), ("t", "y"), ("u", "all")]
HEADS = {"first": ["a0", "a1"], "other": ["b0", "b1"]}


def length(head, shape, task, category):
    """Another accept length for every row."""
    place = 10 * SHAPES.index(shape) + PARTS.index((task, category))
    return 2.0 + {"a0": 0.0, "a1": 0.2, "b0": 0.5, "b1": 0.9}[head] + place / 100


def made_summary():
    """What an evaluation of four heads gives, as far as a comparison reads it."""
    rows = []
    for task, category in PARTS:
        rows.append(
            {"draft": None, "shape": "none", "task": task, "category": category, "accept_length": 1.0}
        )
        for heads in HEADS.values():
            for head in heads:
                for shape in SHAPES:
                    found = length(head, shape, task, category)
                    where = {"draft": head, "shape": shape, "task": task, "category": category}
                    rows.append({**where, "accept_length": found})
    settings = {"shapes": SHAPES, "tasks": {"t": "1", "u": "2"}, "limit": 4, "max_tokens": 9, "seed": 3}
    about = {"date": "today", "command": "c", "machine": {}, "versions": {}, "greedy_identical": True}
    return {**about, "settings": settings, "rows": rows}


TRAINED = {
    head: {"tokens_seen": 1000 * i, "seconds": 60.0 * i, "peak_memory_gb": 1.5 * i, "parameters": 2e6 * i}
    for i, head in enumerate(["a0", "a1", "b0", "b1"], 1)
}


def test_arms_are_compared_by_the_means_of_their_heads(tmp_path):
    pytest.importorskip("matplotlib")
    text = compare(made_summary(), HEADS, {"first": "as it is", "other": ""}, TRAINED, tmp_path)
    result = json.loads((tmp_path / "study.json").read_text())
    assert result["settings"] == {"tasks": {"t": "1", "u": "2"}, "limit": 4, "max_tokens": 9, "seed": 3}
    assert (result["date"], result["command"], result["greedy_identical"]) == ("today", "c", True)

    # What each arm took, and its figures.
    first, other = result["arms"]
    assert (first["arm"], first["about"], other["about"]) == ("first", "as it is", "")
    assert first["tokens_seen"] == [1000, 2000] and other["seconds"] == [180.0, 240.0]
    assert other["peak_memory_gb"] == [4.5, 6.0] and other["parameters"] == [6e6, 8e6]
    assert len(other["figures"]) == len(SHAPES) * len(PARTS)
    for mine, base in zip(other["figures"], first["figures"], strict=True):
        where = mine["shape"], mine["task"], mine["category"]
        expected = [[length(head, *where) for head in heads] for heads in HEADS.values()]
        assert [base["accept_lengths"], mine["accept_lengths"]] == [pytest.approx(each) for each in expected]
        means = [sum(each) / 2 for each in expected]
        assert (base["mean"], mine["mean"]) == pytest.approx(tuple(means))
        assert (base["ratio"], mine["ratio"]) == pytest.approx((1.0, means[1] / means[0]))
    assert (tmp_path / "study.md").read_text() == text
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_tasks_the_range_over_seeds_and_what_training_took(tmp_path):
    pytest.importorskip("matplotlib")
    summary = made_summary()
    for row in summary["rows"]:
        if (row["draft"], row["shape"], row["task"]) == ("b1", SHAPES[1], "all"):
            row["accept_length"] = None  # it decoded nothing
    text = compare(summary, HEADS, {"first": "as it is", "other": ""}, TRAINED, tmp_path)
    chain, tree = text.split("Accept length, shape ")[1:]
    assert chain.startswith("4,1,5, 2 seeds:") and tree.startswith("2,2,4, 2 seeds:")
    head, _, first, other = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in chain.splitlines() if "|" in line
    ]
    assert head[:6] == ["arm", "t", "u", "all tasks", "seeds", "against the first"]
    assert first[:6] == ["first: as it is", "2.110", "2.140", "2.100", "2.000 to 2.200", "1.000"]
    assert other[:6] == ["other", "2.710", "2.740", "2.700", "2.500 to 2.900", "1.286"]
    assert first[6:] == ["3.0", "1,500", "1.5", "2.25"] and other[6:] == ["7.0", "3,500", "3.5", "5.25"]
    assert "2.600 to 2.600" in tree, "of the seeds that decoded something"
