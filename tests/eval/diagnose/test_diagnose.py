"""The command from end to end: tiny random models on the disk with faults in their files, and trained models
beside a running server."""

import copy
import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from fake_server import fake, vllm
from safetensors.torch import load_file, save_file
from tiny import tiny_head
from tiny_rule import learned_head, texts
from tiny_rule_llm import trained_llm
from tiny_run import TEMPLATE, make_target

from eagle_kit.cli import app
from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.findings import Finding
from eagle_kit.eval.diagnose import run as module
from eagle_kit.eval.diagnose.causes import Cause
from eagle_kit.eval.diagnose.models import Models
from eagle_kit.eval.diagnose.report import as_record, as_text
from eagle_kit.eval.diagnose.run import Diagnosis, diagnose, diagnose_models
from eagle_kit.eval.diagnose.server import ServerClient
from eagle_kit.models.loading.loader import load_target
from tests.server.api.serving import serving

NUM_TEXTS = 16
"""Responses of a head that has learned a rule: enough to tell its misreading from chance."""
WORDS = ["--limit", "12", "--max-tokens", "40", "--context", "0"]
FEW = ["--limit", "8", "--max-tokens", "36"]
"""Where figures need not be sure."""


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


@pytest.fixture(scope="module")
def of_a_random_head(folders):
    """The diagnosis of the random head."""
    task = str(folders / "chats.jsonl")
    config = DiagnoseConfig(task=task, limit=12, max_tokens=40, context=512)
    return diagnose(folders / "head", folders / "target", config, is_quiet=True)


def test_a_random_head_is_a_fault_in_text_and_in_json(folders, draft, capsys, monkeypatch, of_a_random_head):
    monkeypatch.setattr(module, "diagnose", lambda *_, **__: of_a_random_head)
    assert run(folders, draft, "--context", "512") == 1
    text = capsys.readouterr().out
    assert "likely causes of low acceptance" in text and "\n  1. " in text and "\n     -> " in text
    assert "tokens per verify" in text and "± " in text
    assert "in texts of up to 512 tokens" in text and "256-" in text and "context cut to each chat" in text
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


def test_half_types_are_read_again_in_float32_and_too_short_texts_are_said(folders, draft, capsys):
    assert run(folders, draft, *FEW, "--dtype", "bfloat16", "--context", "256", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16" and "dtype" in {trial["subject"] for trial in found["trials"]}
    assert found["skipped"].startswith("Acceptance by position was left out: texts of 256 tokens")
    assert found["context"] is None and "larger --context" in found["skipped"]


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


@pytest.mark.parametrize("fault", ["rolled", "left out", "of another head"])
def test_another_map_of_a_fingerprinted_head_is_named_before_anything_is_decoded(
    folders, draft, capsys, fault
):
    """As exports of ours have it; without the fingerprint it is tried: tests/.../test_real_faults.py."""
    numbers = torch.arange(90)
    ids = load_file(draft / "model.safetensors")["d2t"] + numbers
    other = {
        "rolled": ids.roll(1),
        "left out": numbers,
        "of another head": torch.randperm(300, generator=torch.Generator().manual_seed(5))[:90],
    }
    change(draft, d2t=other[fault] - numbers, t2d=None)
    assert run(folders, draft) == 1
    text = capsys.readouterr().out
    assert "is not the one it was saved with" in text and "tokens per verify" not in text


def test_another_template_is_said_and_measured(folders, draft, tmp_path, capsys):
    """Tools are tried too where the target's template has a place for them."""
    shutil.copytree(folders / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    )
    config = json.loads((draft / "config.json").read_text())
    config["eagle_kit"]["template_hash"] = "0123456789abcdef"
    (draft / "config.json").write_text(json.dumps(config))
    assert run(tmp_path, draft, *FEW, "--task", str(folders / "chats.jsonl"), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (cause,) = [cause for cause in found["causes"] if cause["subject"] == "chat template"]
    assert "trained with another template" in cause["evidence"] and "behind" in cause["evidence"]
    names = [each["name"] for each in found["formats"]]
    assert names[0] == "the target's own" and "Llama 3's" in names and TEMPLATE.startswith("{%")
    assert "ChatML" not in names, "it is the target's own"
    assert "the same with a tool" in names and "the same with a system prompt" in names


def test_a_server_that_is_not_there_is_said_before_anything_is_loaded(folders, draft, capsys, monkeypatch):
    monkeypatch.setattr(module, "load_models", None)
    with fake(None) as (url, _):
        assert run(folders, draft, "--base-url", url) == 2
    assert "--enable-metrics" in capsys.readouterr().err
    assert run(folders, draft, "--base-url", "http://127.0.0.1:9") == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code"), [(UserError("It broke.", "Mend it."), 2), (KeyboardInterrupt(), 130)]
)
def test_what_was_found_is_printed_before_what_ended_it(folders, draft, capsys, monkeypatch, failure, code):
    found = Diagnosis((Cause("RoPE", "Another base.", "Write it."),), (), failure=failure)
    monkeypatch.setattr(module, "diagnose", lambda *_, **__: found)
    assert run(folders, draft) == code
    printed = capsys.readouterr()
    assert "1. RoPE: Another base." in printed.out and printed.err


def test_a_target_without_a_chat_template_is_not_compared_with_a_server(folders, draft, tmp_path, capsys):
    shutil.copytree(folders / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").unlink()
    with fake(vllm) as (url, bodies):
        words = ["--task", str(folders / "chats.jsonl"), "--base-url", url]
        assert run(tmp_path, draft, *words) == 2
    assert "has no chat template" in capsys.readouterr().err and bodies == []


@contextmanager
def trained_server(head, shape):
    llm = trained_llm(head, shape)
    with serving(llm, llm.engine()) as server:
        yield ServerClient(server.url)


@pytest.fixture
def beside(tmp_path):
    """Diagnose a head that has learned a rule beside a server -> the diagnosis."""
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in text.prompt)}) for text in texts(NUM_TEXTS)]
    (tmp_path / "rule.jsonl").write_text("\n".join(lines))
    config = DiagnoseConfig(task=str(tmp_path / "rule.jsonl"), limit=NUM_TEXTS, max_tokens=40, context=0)
    known = [Finding("ok", "chat template", "the one the draft was trained with.")]

    def diagnosed(server: ServerClient):
        head = learned_head()
        return diagnose_models(Models(trained_llm(head), head), known, config, server=server, is_quiet=True)

    return diagnosed


@pytest.mark.parametrize("shape", [pytest.param("3,1,4", marks=pytest.mark.nightly), "3,2,6"])
def test_our_own_server_accepts_what_our_engine_does(beside, shape):
    with trained_server(learned_head(), shape) as server:
        found = beside(server)
    record = as_record(found)["server"]
    assert record["verdict"] == "eagle-kit accepts what our engine does." and found.is_healthy
    ours = record["ours"]
    assert ours["shape"] == shape and ours["accept_length"] > 1.5 and record["num_verifies"] > 100
    there, here = record["acceptance_per_position"], ours["acceptance_per_position"]
    assert there[: len(here)] == pytest.approx(here) and record["other_traffic"] == 0
    assert record["accept_length"] == pytest.approx(ours["accept_length"], abs=0.1)
    assert f"our engine, {shape}" in as_text(found, "head")


def test_a_server_that_reads_the_head_otherwise_is_named_with_its_misreading(beside):
    head = copy.deepcopy(learned_head())
    layer = head.midlayer.self_attn.qkv_proj
    layer.weight.data = torch.cat(layer.weight.data.chunk(2, 1)[::-1], 1)
    with trained_server(head, "4,1,5") as server:
        (cause,) = beside(server).causes
    assert cause.subject == "the other engine" and "prompts and texts agree" in cause.evidence
    assert "Ours accepts as much with feature before embedding" in cause.evidence and cause.cost > 0.2


def test_a_server_whose_shape_is_not_known_is_not_accused(beside):
    def metrics(asked: int) -> str:
        return f"sglang:spec_verify_calls_total {asked}\nsglang:generation_tokens_total {asked}"

    with fake(metrics) as (url, _):
        found = beside(ServerClient(url))
    assert found.is_healthy and found.server.ours is None and "give --shape" in found.server.verdict
    assert "our engine," not in as_text(found, "head")


def test_a_server_that_fails_between_responses_takes_nothing_of_what_was_found(beside, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with fake(vllm, 500) as (url, _):
        found = beside(ServerClient(url))
    assert found.server is None and found.measured is not None and found.replay is not None
    assert "it broke" in str(found.failure)
    monkeypatch.setattr(ServerClient, "replay", interrupted)
    assert isinstance(beside(ServerClient("http://127.0.0.1:9")).failure, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["/no/such/draft"], "neither a folder here nor a hub id"),
        (["DRAFT", "--shape", "4,1,5"], "--shape was given without a server"),
        (["DRAFT", "--limit", "3"], "--limit is 3"),
        (["DRAFT", "--task", "FEW"], "has 3 prompts, too few to tell a cause from chance"),
        (["DRAFT", "--task", "nothing"], "There is no task and no file"),
        (["/no", "--max-tokens", "8", "--limit", "8"], "64 tokens, too few to tell a cause from chance"),
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
