"""`eagle-kit bench` as its user runs it on a tiny model: figures of what was decoded, and refusals."""

import itertools
import json

import pytest
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.cli.app import main
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.request import RequestStats
from eagle_kit.eval import speed
from eagle_kit.eval.side_by_side import Decoded
from eagle_kit.models.loading.loader import load_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a head for it, and a task of six prompts."""
    root = tmp_path_factory.mktemp("bench")
    target = make_target(root / "target")
    save_draft(tiny_head(load_target(target), draft_vocab_size=90), root / "head", metadata={})
    lines = [{"id": str(i), "category": "x", "turns": [f"Number {i} sees the dog."]} for i in range(6)]
    (root / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def words_of(folders, *more):
    words = ["bench", "--target", str(folders / "target"), "--draft", str(folders / "head")]
    return [*words, "--tasks", str(folders / "chat.jsonl"), *more]


def test_every_shape_is_measured_beside_plain_decoding(folders, tmp_path, capsys):
    out = tmp_path / "figures" / "b.json"
    sizes = ("--shapes", "1,1,2", "auto", "--batches", "1", "2", "--rounds", "2", "--max-tokens", "8")
    assert main(words_of(folders, *sizes, "--out", str(out))) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    rows = record["rows"]
    assert [(row["batch_size"], row["shape"]) for row in rows] == [
        (batch, shape) for batch in (1, 2) for shape in ("none", "1,1,2", "auto")
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["least"] <= row["times_plain"] <= row["most"]
        if row["shape"] == "none":
            assert row["times_plain"] == 1.0 and row["accept_length"] is None
        if row["shape"] == "1,1,2":
            assert 1.0 <= row["accept_length"] <= 2.0
    assert record["settings"]["rounds"] == 2 and record["settings"]["draft"] == str(folders / "head")
    printed = capsys.readouterr().out
    assert "accept length" in printed and str(out) in printed


class Request:
    """A request with acceptance statistics."""

    def __init__(self, num_verifies, num_emitted_tokens):
        self.stats = RequestStats(spec=SpecStats(num_verifies, num_emitted_tokens))


def test_a_shape_is_compared_within_rounds(folders, tmp_path, monkeypatch, capsys):
    """Texts and the machine differ by round, so medians over all rounds would meet different rounds."""
    warm_up = {"none": 1.0, "3,1,4": 1.0}
    rounds = iter(
        [
            warm_up,
            {"none": 10.0, "3,1,4": 20.0},
            {"none": 20.0, "3,1,4": 30.0},
            {"none": 40.0, "3,1,4": 40.0},
        ]
    )
    accepted = itertools.count(5)

    def decode(llms, prompts, params, **options):
        num_emitted_tokens = next(accepted)
        rates = next(rounds)
        return {shape: Decoded([Request(4, num_emitted_tokens)], rates[shape], 1.0) for shape in llms}

    monkeypatch.setattr(speed, "decode_side_by_side", decode)
    out = tmp_path / "b.json"
    words = ("--shapes", "3,1,4", "--batches", "1", "--rounds", "3", "--out", str(out))
    assert main(words_of(folders, *words)) == 0
    row = json.loads(out.read_text(encoding="utf-8"))["rows"][1]
    assert (row["shape"], row["tokens_per_s"]) == ("3,1,4", 30.0)
    assert (row["times_plain"], row["least"], row["most"]) == (1.5, 1.0, 2.0)
    assert row["accept_length"] == pytest.approx((6 + 7 + 8) / 12)


def test_prompts_that_leave_no_room_are_refused(folders, capsys):
    assert main(words_of(folders, "--max-context", "40", "--max-tokens", "39")) == 2
    assert "No prompt leaves room" in capsys.readouterr().err


def test_responses_of_one_token_are_refused(folders, capsys):
    assert main(words_of(folders, "--shapes", "1,1,2", "--batches", "1", "--max-tokens", "1")) == 2
    assert "too short to be timed" in capsys.readouterr().err
