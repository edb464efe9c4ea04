"""The command from end to end: tiny random models on the disk, faults in their files, a running server."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_head
from tiny_run import TEMPLATE, make_target

from eagle_kit.checkpoints.draft import save_draft
from eagle_kit.cli import app
from eagle_kit.models.loading.loader import load_target
from eagle_kit.serve.llm import LLM
from tests.serve.api.serving import serving

WORDS = ["--limit", "12", "--max-tokens", "40", "--context", "0"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a random head for it, and a task."""
    root = tmp_path_factory.mktemp("diagnose")
    target = make_target(root / "target")
    save_draft(tiny_head(load_target(target), draft_vocab_size=90, std=0.05), root / "head", metadata={})
    nouns = ("cat", "dog", "house", "river", "stone", "cloud", "tree", "bird", "road", "hill", "lake", "moon")
    lines = [json.dumps({"prompt": f"The {noun} sees the {nouns[-i]}."}) for i, noun in enumerate(nouns)]
    (root / "chats.jsonl").write_text("\n".join(lines))
    (root / "few.jsonl").write_text("\n".join(lines[:3]))
    return root


@pytest.fixture
def draft(folders, tmp_path):
    shutil.copytree(folders / "head", tmp_path / "head")
    return tmp_path / "head"


def run(folders, draft, *words, target="target"):
    return app.main(
        [
            *("diagnose", str(draft), "--target", str(folders / target)),
            *("--task", str(folders / "chats.jsonl"), *WORDS, *words),
        ]
    )


def change(draft, **tensors):
    """Replace tensors of a draft; None removes one."""
    path = draft / "model.safetensors"
    kept = {name: each for name, each in {**load_file(path), **tensors}.items() if each is not None}
    save_file(kept, path, metadata={"format": "pt"})


def forget_map(draft):
    """Without the fingerprint of its map, as a head of another trainer."""
    path = draft / "config.json"
    config = json.loads(path.read_text())
    del config["eagle_kit"]["vocab_map"]
    path.write_text(json.dumps(config))


def test_a_random_head_is_a_fault_in_text_and_in_json(folders, draft, capsys):
    assert run(folders, draft) == 1
    text = capsys.readouterr().out
    assert "likely causes of low acceptance" in text and "\n  1. " in text and "\n     -> " in text
    assert "tokens per verify" in text and "± " in text
    assert run(folders, draft, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["healthy"] and found["dtype"] == "float32" and found["engine"]["num_different"] == 0
    first = found["causes"][0]
    assert first["subject"] in ("too little training", "another target") and first["is_found"]
    assert "vocabulary coverage" not in {cause["subject"] for cause in found["causes"]}
    assert len(found["acceptance"]) == 4 and 0 <= found["acceptance"][0]["mean"] < 0.2
    assert {finding["subject"] for finding in found["findings"]} >= {"layer ids", "rope", "weights"}
    assert {trial["subject"] for trial in found["trials"]} <= {
        *("layer ids", "one-slot shift", "vocabulary map", "norm convention", "order of inputs", "RoPE"),
    }


def test_half_types_are_read_again_in_float32(folders, draft, capsys):
    assert run(folders, draft, "--dtype", "bfloat16", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16" and "dtype" in {trial["subject"] for trial in found["trials"]}


def test_nan_in_a_weight_is_named_before_anything_is_decoded(folders, draft, capsys):
    weight = load_file(draft / "model.safetensors")["fc.weight"]
    weight[2, 3] = float("nan")
    change(draft, **{"fc.weight": weight})
    assert run(folders, draft) == 1
    text = capsys.readouterr().out
    assert "1. weights: Fc.weight has 1 values that are not finite, the first at [2, 3]." in text
    assert "tokens per verify" not in text


@pytest.mark.parametrize("has_t2d", [True, False])
def test_token_ids_in_place_of_offsets_are_named(folders, draft, capsys, has_t2d):
    d2t = load_file(draft / "model.safetensors")["d2t"]
    ids = d2t + torch.arange(len(d2t))
    forget_map(draft)
    change(draft, d2t=ids, **({} if has_t2d else {"t2d": None}))
    assert run(folders, draft) == 1
    assert "holds token ids, not offsets" in capsys.readouterr().out


def test_another_template_is_said_and_measured(folders, draft, tmp_path, capsys):
    config = json.loads((draft / "config.json").read_text())
    config["eagle_kit"]["template_hash"] = "0123456789abcdef"
    (draft / "config.json").write_text(json.dumps(config))
    assert run(folders, draft, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (cause,) = [cause for cause in found["causes"] if cause["subject"] == "chat template"]
    assert "trained with another template" in cause["evidence"] and "behind" in cause["evidence"]
    names = [each["name"] for each in found["formats"]]
    assert names[0] == "the target's own" and "Llama 3's" in names and TEMPLATE.startswith("{%")
    assert "ChatML" not in names, "it is the target's own"


def test_long_texts_are_read_by_position(folders, draft, capsys):
    assert run(folders, draft, "--context", "512") == 1
    text = capsys.readouterr().out
    assert "in texts of up to 512 tokens" in text and "256-" in text and "context cut to each chat" in text


def test_our_own_server_accepts_what_our_engine_does(folders, draft, capsys):
    llm = LLM(str(folders / "target"), draft=str(draft), shape="3,1,4", max_batch_size=4)
    with serving(llm, llm.engine()) as server:
        assert run(folders, draft, "--base-url", server.url + "/v1", "--json") == 1
        found = json.loads(capsys.readouterr().out)["server"]
    assert found["verdict"] == "eagle-kit accepts what our engine does." and found["ours"]["shape"] == "3,1,4"
    there, here = found["acceptance_per_position"], found["ours"]["acceptance_per_position"]
    assert there[: len(here)] == pytest.approx(here) and found["num_verifies"] > 100
    assert found["accept_length"] == pytest.approx(found["ours"]["accept_length"], abs=0.02)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["/no/such/draft"], "neither a folder here nor a hub id"),
        (["DRAFT", "--shape", "4,1,5"], "--shape was given without a server"),
        (["DRAFT", "--limit", "3"], "--limit is 3"),
        (["DRAFT", "--task", "FEW"], "has 3 prompts, too few to tell a cause from chance"),
        (["DRAFT", "--task", "nothing"], "There is no task and no file"),
        (["DRAFT", "--max-tokens", "8", "--limit", "8"], "too few to tell a cause from chance"),
        (["DRAFT", "--base-url", "localhost:1"], "not a URL"),
        (["TARGET"], "is a whole model"),
    ],
)
def test_mistakes_are_one_sentence_of_cause_and_one_of_remedy(folders, draft, words, cause, capsys):
    names = {"DRAFT": str(draft), "TARGET": str(folders / "target"), "FEW": str(folders / "few.jsonl")}
    words = [names.get(word, word) for word in words]
    task = [] if "--task" in words else ["--task", str(folders / "chats.jsonl")]
    target = [] if "TARGET" in names and words[0] == names["TARGET"] else ["--target", names["TARGET"]]
    assert app.main(["diagnose", *words, *target, *task]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert cause in lines[-2] and lines[-1].startswith("  -> ")
