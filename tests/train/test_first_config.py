"""A first config: read back by the trainer's own reader, with the text of each key above it."""

from pathlib import Path

import pytest

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.train.__main__ import main as train
from tests.data.chat.test_no_template import remove_template
from tests.support.tiny_run import make_target


def test_a_first_config_is_one_that_the_trainer_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(tmp_path / "small")
    path = tmp_path / "new" / "mine.yaml"
    assert train([str(path), "--init", str(target)]) == 0
    config = load_config(TrainConfig, path)
    assert config.target == str(target) and config.output_dir == "runs/mine"
    assert config.head.draft_vocab_size is not None and config.head.draft_vocab_size <= 8192
    lines = path.read_text().split("\n")
    assert lines[lines.index("  ttt_length: 7") - 1] == "  # Steps K of training-time test."
    assert all(len(line) <= 120 for line in lines if str(tmp_path) not in line)

    # What is there is not lost.
    capsys.readouterr()
    assert train([str(path), "--init", str(target)]) == 2
    assert "mine.yaml exists" in capsys.readouterr().err
    assert path.read_text().split("\n") == lines
    assert train([str(tmp_path / "more.yaml"), "--init", str(target), "training.epochs=3"]) == 2
    assert "Give --init alone" in capsys.readouterr().err


def test_a_target_that_is_not_there_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([str(tmp_path / "mine.yaml"), "--init", "/nowhere/at/all"]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


def test_a_target_without_a_chat_template_learns_from_texts(tmp_path: Path) -> None:
    target = remove_template(make_target(tmp_path / "base"))
    path = tmp_path / "mine.yaml"
    assert train([str(path), "--init", str(target)]) == 0
    assert load_config(TrainConfig, path).data.source == "texts.jsonl"
    text = path.read_text()
    assert "data regenerate" not in text and '{"text": "..."}' in text
