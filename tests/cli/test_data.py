"""`eagle-kit data`: what it prints, and what it refuses in two lines."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny_run import make_config

from eagle_kit.cli.app import main
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.vocab_map import load_vocab_map
from eagle_kit.data.packed_data import load_packed_data
from eagle_kit.drafts.files.token_map import load_token_map
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.loading.source import load_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = make_config(tmp_path)
    mute = {"messages": [{"role": "user", "content": "Anybody?"}]}
    late = {
        "messages": [
            {"role": "assistant", "content": "Late."},
            {"role": "user", "content": "Go on?"},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, (mute, late))) + "\n" + chats.read_text())
    return path


def error(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("error: ") and lines[-1].startswith("  -> ")
    return lines[-2]


def test_prepare_says_what_was_left_out_and_where_it_is_listed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", str(config)]) == 0
    out = capsys.readouterr().out
    assert "it begins with a response, which is left out: 1 conversations of" in out
    listed = Path(out.partition("listed in ")[2].splitlines()[0])
    assert "no assistant turn" in listed.read_text()
    assert "skipped        no assistant turn (1)" in out
    assert main(["data", "mix", str(config), "training.max_steps=4"]) == 0
    assert "skipped        no assistant turn (1)" in capsys.readouterr().out


def test_preview_of_a_conversation_that_training_skips_says_why(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "preview", str(config)]) == 2
    assert "chats.jsonl:1: no assistant turn" in error(capsys)
    assert main(["data", "preview", str(config), "--record", "1"]) == 0
    assert "Yes." in capsys.readouterr().out


def test_a_source_that_is_missing_is_named_before_the_tokenizer_is_read(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(yaml.safe_load(config.read_text())["target"]) / "tokenizer.json").unlink()
    missing = f"data.source={tmp_path / 'none.jsonl'}"
    for command in (["data", "preview"], ["data", "prepare"], ["train"]):
        assert main([*command, str(config), missing]) == 2
        assert "none.jsonl does not exist" in error(capsys)


def test_preview_of_an_empty_file_says_that_it_has_no_conversation(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert main(["data", "preview", str(config), f"data.source={empty}"]) == 2
    assert "empty.jsonl has no conversation." in error(capsys)
    assert main(["data", "preview", str(config), "--record", "1", f"data.source={empty}"]) == 2
    assert "empty.jsonl has no conversation number 1." in error(capsys)


def test_preview_and_prompts_say_what_they_could_not_read(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, some = tmp_path / "bad.jsonl", tmp_path / "some.jsonl"
    bad.write_text('{"words": "?"}\n[]\n')
    some.write_text('{"words": "?"}\n{"prompt": "Why?", "completion": "So."}\n')
    assert main(["data", "preview", str(config), f"data.source={bad}"]) == 2
    assert "2 records cannot be read: no messages" in error(capsys)
    assert main(["data", "preview", str(config), f"data.source={some}"]) == 0
    assert "note: before it, 1 records cannot be read: no messages" in capsys.readouterr().out
    command = ["data", "prompts", "--limit", "1", "--source"]
    assert main([*command, str(bad), "--out", str(tmp_path / "p.jsonl")]) == 2
    assert "2 records cannot be read" in error(capsys)
    assert main([*command, str(some), "--out", str(tmp_path / "p.jsonl")]) == 0
    assert "1 records cannot be read" in capsys.readouterr().err
    assert main([*command, str(some), "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in error(capsys)


def test_vocab_writes_the_map_that_training_would_make(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "words.npz"
    assert main(["data", "vocab", str(config), "--out", str(out), "head.draft_vocab_size=40"]) == 0
    with np.load(out) as file:
        tokenizer, size = str(file["tokenizer"]), len(file["t2d"])
    assert len(load_vocab_map(out, tokenizer, 40, np.ones(size)).d2t) == 40
    assert main(["data", "vocab", str(config), "--out", str(tmp_path)]) == 2
    assert "is a folder" in error(capsys)


@pytest.mark.parametrize("kind", ["eagle1", "mtp"])
def test_vocab_writes_a_token_map_for_heads_that_propose_every_token(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The most frequent tokens of the responses, counted here in the packed sequences."""
    words = [f"head={{kind: {kind}}}"]
    out = tmp_path / "freq.npz"
    assert main(["data", "vocab", str(config), "--out", str(out), "--size", "24", *words]) == 0
    assert f"--speculative-token-map {out}" in capsys.readouterr().out
    target = Path(yaml.safe_load(config.read_text())["target"])
    ids = load_token_map(out, read_target_config(target).vocab_size, target)
    assert len(ids) == 24

    data = load_packed_data(load_config(TrainConfig, config).data, load_tokenizer(target), None)
    counts = np.load(data.folder / "counts.npy")
    assert counts[ids].min() >= np.delete(counts, ids).max() and counts[ids].sum() > 0

    # A map of another tokenizer has other words under the same numbers.
    with np.load(out) as file:
        arrays = dict(file) | {"tokenizer": "another"}
    np.savez(out, **arrays)
    with pytest.raises(UserError, match="another tokenizer"):
        load_token_map(out, read_target_config(target).vocab_size, target)


@pytest.mark.parametrize("out", [".", "file/deep/out.jsonl"])
def test_regenerate_refuses_an_out_that_cannot_be_written_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "file").write_text("")
    command = ["data", "regenerate", "--source", "a.jsonl", "--target", "/none", "--out", str(tmp_path / out)]
    assert main(command) == 2
    assert str(tmp_path) in error(capsys)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs is '[1]'"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs is '{'"),
        (["--decontaminate", "nothing"], "no file 'nothing'"),
        (["--near-duplicates", "1.5"], "near_duplicates is 1.5"),
        (["--samples", "2"], "would be the same"),
    ],
)
def test_regenerate_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], cause: str
) -> None:
    command = [
        "data",
        "regenerate",
        "--source",
        "a.jsonl",
        "--target",
        "/none",
        "--out",
        str(tmp_path / "o.jsonl"),
    ]
    assert main([*command, *flags]) == 2
    assert cause in error(capsys)
