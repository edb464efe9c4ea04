"""The card of every format: YAML that the hub takes, commands that fit the files, what was not tried; and the
two commands of the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny import tiny_head, tiny_target
from tiny_run import make_target

from eagle_kit.cli import app
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.export import Facts, export_draft
from eagle_kit.models.loading.loader import read_target_config

RUN = {"accept_length": {"3,1,4": 1.5}, "data": {"source": "chats.jsonl", "vocab_coverage": 0.975}}


@pytest.fixture
def draft(tmp_path) -> Path:
    return save(tmp_path)


def save(tmp_path: Path, name: str = "", **changes) -> Path:
    head = tiny_head(tiny_target(num_layers=12), aux_layer_ids=(2, 6, 9), **changes)
    head.config = replace(head.config, target=name)
    save_draft(head, tmp_path / "ours", metadata=RUN)
    return tmp_path / "ours"


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_hub_reads_the_yaml(tmp_path, draft):
    export_draft(draft, tmp_path / "a", facts=Facts(licence="apache-2.0"))
    data = ModelCard.load(tmp_path / "a" / "README.md").data
    assert data.library_name == "eagle_kit" and data.pipeline_tag == "text-generation"
    assert data.license == "apache-2.0" and data.tags == ["eagle3", "speculative-decoding"]
    assert data.base_model is None  # of an unknown target
    assert "No licence was given" not in card(tmp_path / "a")
    export_draft(draft, tmp_path / "b")
    assert ModelCard.load(tmp_path / "b" / "README.md").data.license is None
    assert "No licence was given" in card(tmp_path / "b")


def test_every_card_names_its_own_files_and_the_exports_that_others_need(tmp_path, draft):
    for format in ("eagle-kit", "sglang", "vllm", "speculators", "eagle"):
        out = tmp_path / format
        export_draft(draft, out, format=format)
        text = card(out)
        assert f"--draft {out} --shape 5,4,16" in text
        for engine, flag in (("sglang", "--speculative-draft-model-path "), ("vllm", '"model": "')):
            folder = out if format == engine else f"{out}-{engine}"
            assert f"{flag}{folder}" in text
            needs_export = f"eagle-kit export {out} --format {engine} --out {out}-{engine}" in text
            assert needs_export == (format != engine)
        assert "It has not been served with SGLang or vLLM." in text
        assert text.count("not tried") == 2


def test_a_card_says_why_an_engine_cannot_serve_the_head(tmp_path):
    export_draft(save(tmp_path, norm_before_residual=True), tmp_path / "out")
    text = card(tmp_path / "out")
    assert "SGLang: This draft cannot be written for SGLang: its class takes the residual before" in text
    assert "launch_server" not in text and "vllm serve" in text


def test_a_card_tells_what_is_known_of_the_run(tmp_path, draft):
    export_draft(draft, tmp_path / "out")
    text = card(tmp_path / "out")
    assert "decoded accept length while training, shape 3,1,4: 1.5" in text
    assert "It can propose 67 of 131 tokens, 97.5 % of those in its training responses." in text
    assert "Accept lengths per task have not been measured." in text
    assert "without a chat template, or which one is not recorded" in text


def test_out_and_in_on_the_command_line(tmp_path, draft, capsys):
    out, back = tmp_path / "theirs", tmp_path / "back"
    assert app.main(["export", str(draft), "--out", str(out), "--format", "vllm", "--dtype", "keep"]) == 0
    assert "vLLM's command" in capsys.readouterr().out
    assert app.main(["import", str(out), "--out", str(back)]) == 0
    assert "eagle3 head, ours, for vLLM" in capsys.readouterr().out
    a, b = load_file(draft / "model.safetensors"), load_file(back / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()
    assert json.loads((draft / "config.json").read_text()) == json.loads((back / "config.json").read_text())
    assert "was imported" not in card(back)


@pytest.mark.parametrize("name", ["", "target"])
def test_the_printed_check_asks_for_a_target_only_where_the_draft_names_none(
    tmp_path, monkeypatch, name, capsys
):
    monkeypatch.chdir(tmp_path)
    config = read_target_config(make_target(tmp_path / "target"))
    head = Eagle3Head(replace(Eagle3Config.for_target(config, config.vocab_size), aux_layer_ids=(0, 1, 2)))
    head.config = replace(head.config, target=name)
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "vllm", format="vllm")
    assert app.main(["import", "vllm", "--out", "back"]) == 0
    assert ("--target TARGET" in capsys.readouterr().out) == (not name)


def test_a_mistake_on_the_command_line_is_two_lines_and_exit_code_2(tmp_path, draft, capsys):
    assert app.main(["import", str(draft), "--out", str(tmp_path / "o"), "--format", "eagle"]) == 2
    error = capsys.readouterr().err
    assert "not in the format eagle: it was recognised as ours" in error
    assert app.main(["import", str(tmp_path / "nothing"), "--out", str(tmp_path / "o")]) == 2
    assert app.main(["export", str(draft), "--out", str(tmp_path / "o"), "--eval", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "o").exists()
