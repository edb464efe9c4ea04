"""The benchmark of a training step: all ways compute the same, and figures follow from what was timed."""

import json

import pytest
import torch
from tiny_run import make_target

from benchmarks.cli import main
from benchmarks.train.ratios import RatioOptions, made_up_row, measure_ratios, peak_bytes
from benchmarks.train.step import measure_rate
from eagle_kit.models.loading.loader import load_target

SMALL = RatioOptions(length=181, supervised_share=0.4, ttt_length=3, draft_vocab_size=60)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(make_target(tmp_path_factory.mktemp("target")))


def test_every_way_to_compute_a_step_has_one_loss_and_gradient(target):
    result = measure_ratios(SMALL, target, repeats=1)
    figures, times, peaks = (result[name] for name in ("figures", "times_us", "peak_bytes"))
    assert figures["loss difference"] < 1e-5 and figures["gradient difference"] < 1e-4
    assert min(result["losses"].values()) > 0.1
    assert result["supervised_share"] == pytest.approx(0.4, abs=0.01) and result["documents"] == 3
    assert set(times) == {"ours", "every row", "published", "kept logits", "optimizer"}
    for name in ("every row", "published", "kept logits"):
        ratio = times["ours"]["median"] / times[name]["median"]
        assert figures[f"time ours/{name}"] == pytest.approx(ratio, rel=1e-3)
        assert figures[f"memory ours/{name}"] == pytest.approx(peaks["ours"] / peaks[name])
    assert figures["memory ours/published"] < 1


def test_the_row_is_made_of_conversations_with_responses():
    row = made_up_row(RatioOptions(length=100, supervised_share=0.5), 40)
    assert row.doc_start.unique().tolist() == [0, 30, 63] and int(row.ids.max()) < 40
    for number, (start, stop) in enumerate(((0, 30), (30, 63), (63, 100))):
        responses = row.response[start:stop]
        assert set(responses.tolist()) == {-1, number} and (responses.diff() >= 0).all(), (
            "a prompt, then its response"
        )
        assert int((responses == number).sum()) == round(0.5 * (stop - start))


def test_the_rate_is_that_of_the_needed_arithmetic(target):
    result = measure_rate(target, SMALL)
    figures, times = result["figures"], result["times_us"]
    seconds = 1e-6 * (times["capture"]["median"] + times["head"]["median"])
    assert figures["tokens/s"] == pytest.approx(181 / seconds, rel=1e-3)
    done = sum(figures[f"{name} GFLOP/s"] * 1e-6 * times[name]["median"] for name in times)
    assert figures["needed GFLOP/s"] == pytest.approx(done / seconds, rel=1e-3)
    assert 0 < figures["share of torch_mm"] < 1 and figures["peak memory GB"] > 0


def test_peak_is_that_of_what_lives_together():
    def run() -> None:
        first = torch.zeros(1_000_000)
        del first
        kept = torch.zeros(2_000_000), torch.zeros(500_000)
        del kept

    assert 10e6 <= peak_bytes(run, torch.device("cpu")) < 11e6


def test_a_target_that_is_not_there_is_a_mistake_and_no_case_that_is_left_out(tmp_path, capsys):
    path = tmp_path / "t.json"
    assert main(["train", "--target", str(tmp_path / "none"), "--out", str(path)]) == 2
    assert "none" in capsys.readouterr().err and not path.exists()


def test_the_command_writes_ratios_and_targets(tmp_path):
    path = tmp_path / "t.json"
    words = ["--model", "tiny", "--length", "90", "--ttt-length", "2", "--out", str(path), "--no-progress"]
    assert main(["train", *words]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    (row,) = result["cases"].values()
    assert row["status"] == "ok" and row["length"] == 90 and row["rows_of_steps"][1] > 0
    time, memory = result["targets"]
    assert time["measured"] == row["figures"]["time ours/published"]
    assert memory["met"] == (row["figures"]["memory ours/kept logits"] <= 0.5)
