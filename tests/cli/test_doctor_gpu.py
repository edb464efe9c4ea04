"""`eagle-kit doctor --gpu` where there is no GPU, and with options that do not go together."""

import pytest
import torch

from eagle_kit.cli.app import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--gpu"]) == 2
    printed = capsys.readouterr()
    assert "GPU" in printed.err and printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--out", "x.json"], "--gpu"),
        (["--target", "x"], "--gpu"),
        (["--only", "norm"], "--gpu"),
        (["--gpu", "--draft", "x"], "--target"),
    ],
)
def test_options_that_do_not_go_together_are_mistakes(words, named, capsys):
    assert main(["doctor", *words]) == 2
    assert named in capsys.readouterr().err
