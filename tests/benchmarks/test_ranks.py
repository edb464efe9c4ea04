"""`python benchmarks decode --tensor-parallel`: both engines are timed, and bytes of collectives are
those of the formula."""

import json

import pytest
from tiny import tiny_head
from tiny_run import make_target

from benchmarks.cli import main
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.models.loading.loader import load_target


@pytest.mark.nightly
def test_cycles_of_ranks_are_timed_beside_those_of_one_process(tmp_path):
    folder = make_target(tmp_path / "target")
    target = load_target(folder)
    save_draft(tiny_head(target), tmp_path / "draft", metadata={})
    words = ("--target", str(folder), "--draft", str(tmp_path / "draft"), "--tensor-parallel", "2")
    out = tmp_path / "ranks.json"
    assert main(["decode", *words, "--out", str(out), "--no-progress"]) == 0
    rows = json.loads(out.read_text())["cases"].values()
    assert len(rows) == 8
    layers, hidden = target.config.num_layers, target.config.hidden_size
    for row in rows:
        steps, _, nodes = map(int, row["shape"].split(",")) if row["shape"] != "none" else (0, 1, 1)
        sums = 2 * layers * row["batch"] * nodes * hidden * 4
        first = 8 * row["batch"] * (2 * (steps + 1) + 1) + 32 * row["batch"] * nodes * (steps > 0)
        given, most = (
            row["figures"]["kB given to collectives"] * 1e3,
            sums + 16 * row["batch"] * nodes + first,
        )
        assert given == pytest.approx(most) if row["batch"] == 1 else most / 8 < given < most + 1
        assert {*row["times_us"]} == {"2 ranks", "one process"}


def test_one_rank_is_refused(capsys):
    assert main(["decode", "--tensor-parallel", "1"]) == 2
    assert "--tensor-parallel is 1" in capsys.readouterr().err
