"""Export: the right checkpoint, in bf16, with a card that tells what is known and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_p_eagle, tiny_target
from tiny_mtp import load_modules
from tiny_mtp import save_target as save_mtp_target
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.dflash.kind import DFLASH
from eagle_kit.drafts.dspark.kind import DSPARK
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.card import Card, model_card
from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.draft_files import read_metadata
from eagle_kit.drafts.files.export import Facts, export_draft, find_checkpoint, import_draft, without_folders
from eagle_kit.drafts.p_eagle.kind import P_EAGLE
from eagle_kit.models.loading.loader import load_target

METADATA = {
    "target": "tiny",
    "command": "eagle-kit train /home/somebody/configs/a.yaml data.source=/data/chats.jsonl",
    "data": {"source": "/data/chats.jsonl", "conversations": 1234, "vocab_coverage": 0.98765},
    "step": 4000,
    "tokens_seen": 7654321,
    "seconds": 7384.2,
    "machine": "1 x CPU, 2 threads",
    "accept_length": {"4,1,5": 1.8345},
    "config": {"training": {"ttt_length": 7, "learning_rate": 8e-4, "betas": [0.9, 0.95], "save_every": 100}},
    "versions": {"torch": "2.13.0"},
}


def row(draft: str | None, task: str, shape: str, category: str = "all", accept_length: float | None = 2.125):
    return {
        "task": task,
        "category": category,
        "draft": draft,
        "shape": shape,
        "num_answers": 8,
        "accept_length": accept_length,
        "decode_tokens_per_s": 41.5,
        "speedup": 0.87,
    }


def summary(**places: Path) -> dict:
    """A summary.json of drafts (name -> folder)."""
    rows = [row(None, "all", "none", accept_length=None)]
    for name in places:
        rows += [row(name, "all", "4,1,5"), row(name, "ours", "5,4,16"), row(name, "ours", "5,4,16", "maths")]
    return {
        "drafts": [{"name": name, "path": str(path)} for name, path in places.items()],
        "rows": rows,
        "greedy_identical": True,
        "command": "eagle-kit eval --draft /home/somebody/best",
        "machine": {"cpu": "Some CPU", "threads": 2, "gpu": None},
        "target": {"name": "tiny", "device": "cpu", "dtype": "float32"},
        "settings": {"max_tokens": 64, "limit": None, "batch_size": 1, "seed": 0, "out": "x"},
        "versions": {"torch": "2.13.0"},
        "date": "2026-01-02T03:04:05+00:00",
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture
def run(tmp_path, target) -> Path:
    """A run folder with two checkpoints, the later one without being best."""
    for step in (8, 16):
        head = tiny_head(load_target(target), seed=step)
        head.config = replace(head.config, target="tiny")
        save_draft(head, tmp_path / "run" / f"step-{step}", metadata={**METADATA, "step": step})
        (tmp_path / "run" / f"step-{step}" / "trainer").mkdir()
    return tmp_path / "run"


def test_the_best_checkpoint_is_taken_then_the_last_one(run):
    assert find_checkpoint(run) == run / "step-16"
    save_draft(tiny_head(tiny_target()), run / "best", metadata={})
    assert find_checkpoint(run) == run / "best"
    assert find_checkpoint(run / "step-8") == run / "step-8"


def test_a_folder_without_draft_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no draft"):
        find_checkpoint(tmp_path)


def test_an_exported_draft_is_small_servable_and_complete(run, target, tmp_path):
    out = tmp_path / "out" / "draft"
    assert export_draft(run, out, target=target) == run / "step-16"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "eagle_kit.json",
        "model.safetensors",
    ]
    exported, trained = load_draft(out), load_draft(run / "step-16")
    assert torch.equal(exported.fc.weight, trained.fc.weight.bfloat16().float())
    assert torch.equal(exported.d2t, trained.d2t)
    assert exported.config == trained.config
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["best", "step-16"])
def test_a_checkpoint_of_a_run_is_not_replaced_by_its_rounded_copy(run, target, tmp_path, name):
    save_draft(tiny_head(tiny_target()), run / "best", metadata={})
    (run / "run.yaml").write_text("config: {}\n")
    before = (run / name / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="is a checkpoint of a training run"):
        export_draft(run, run / name, target=target)
    with pytest.raises(UserError, match="is a checkpoint of a training run"):
        import_draft(run / "best", run / name)
    assert (run / name / "model.safetensors").read_bytes() == before


def test_absolute_folders_stay_at_home(run, target, tmp_path):
    export_draft(run, tmp_path / "draft", target=target)
    for name in ("README.md", "eagle_kit.json"):
        text = (tmp_path / "draft" / name).read_text()
        assert "/home" not in text and "/data" not in text
        assert "data.source=chats.jsonl" in text
    assert read_metadata(tmp_path / "draft")["tokens_seen"] == 7654321


def test_a_target_folder_is_published_by_its_name(target, tmp_path):
    head = tiny_head(load_target(target))
    head.config = replace(head.config, target=str(target))
    save_draft(head, tmp_path / "step", metadata={})
    export_draft(tmp_path / "step", tmp_path / "draft")
    assert load_draft(tmp_path / "draft").config.target == "tiny"
    assert str(target.parent) not in (tmp_path / "draft" / "README.md").read_text()


def test_only_absolute_folders_are_cut():
    text = "python /usr/bin/x --out runs/a/b org/model https://host/a/b 3/4 ~/c/d =/tmp/e.json"
    assert without_folders(text) == "python x --out runs/a/b org/model https://host/a/b 3/4 ~/c/d =e.json"
    assert without_folders({"a": ["/x/y/z", 1, None]}) == {"a": ["z", 1, None]}


def test_a_draft_that_does_not_fit_is_not_exported(run, tmp_path):
    other = make_target(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 301}))
    with pytest.raises(UserError, match="vocabulary: the draft was made for 300, the target has 301"):
        export_draft(run, tmp_path / "draft", target=other)
    assert not (tmp_path / "draft").exists()


def test_the_card_holds_the_figures_of_this_draft_only(run, target, tmp_path):
    out, path = tmp_path / "draft", tmp_path / "summary.json"
    path.write_text(json.dumps(summary(mine=run / "step-16", other=tmp_path / "elsewhere")))
    export_draft(run, out, target=target, facts=Facts(path))
    card = (out / "README.md").read_text()
    table = [line for line in card.splitlines() if line.startswith("| ")]
    assert table[1:] == [
        "| all | 4,1,5 | 2.12 | 41.50 | 0.87 | 8 |",
        "| ours | 5,4,16 | 2.12 | 41.50 | 0.87 | 8 |",
    ]
    assert "identical to plain decoding: yes" in card
    assert "cpu Some CPU, threads 2, device cpu, dtype float32" in card
    assert "`eagle-kit eval --draft best`" in card


def test_an_evaluation_of_the_exported_folder_is_of_this_draft_too(run, target, tmp_path):
    out = tmp_path / "draft"
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary(other=tmp_path / "elsewhere", mine=out)))
    export_draft(run, out, target=target, facts=Facts(path))
    assert (out / "README.md").read_text().count("| ours | 5,4,16 |") == 1


def test_what_must_stay_exact_is_not_rounded_and_does_not_count_as_another_type(tmp_path):
    """Biases by which experts are chosen; the card then names the type of the others."""
    save_mtp_target(tmp_path / "target")
    head = load_modules(tmp_path / "target")
    name = "layers.0.mlp.gate.e_score_correction_bias"
    with torch.no_grad():
        head.get_parameter(name).add_(1e-5)
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors[f"model.{name}"], head.get_parameter(name))
    del tensors[f"model.{name}"]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "in bfloat16" in card and "several types" not in card


def test_modules_in_fp8_are_multiplied_out_for_another_type(tmp_path):
    # Modules whose projections are sixteenths in fp8.
    save_mtp_target(tmp_path / "target")
    save_draft(load_modules(tmp_path / "target"), tmp_path / "theirs", metadata={})
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    meant = {}
    for name in [name for name in tensors if name.endswith("proj.weight") and "eh_proj" not in name]:
        values = (tensors[name] * 16).to(torch.float8_e4m3fn)
        tensors[name] = values
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 16)
        meant[name] = (values.float() / 16).bfloat16()
    save_file(tensors, path)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    raw |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [256, 256]}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(raw))

    # In bfloat16 they are what they meant; in their own type they stay.
    export_draft(tmp_path / "theirs", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert meant and all(torch.equal(found[name], tensor) for name, tensor in meant.items())
    assert not [name for name in found if name.endswith("scale_inv")]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    export_draft(tmp_path / "theirs", tmp_path / "kept", dtype=None)
    assert load_file(tmp_path / "kept" / "model.safetensors").keys() == tensors.keys()


def test_an_evaluation_of_other_drafts_is_refused(run, target, tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary(a=tmp_path / "a", b=tmp_path / "b")))
    with pytest.raises(UserError, match="measured a, b, and none of them is this draft"):
        export_draft(run, tmp_path / "draft", target=target, facts=Facts(path))
    path.write_text("{}")
    with pytest.raises(UserError, match=r"is not the summary.json"):
        export_draft(run, tmp_path / "draft", target=target, facts=Facts(path))
    assert not (tmp_path / "draft").exists()


def test_the_card_tells_how_it_was_trained_and_how_to_serve_it():
    head = tiny_head(tiny_target(), fc_norm=True)
    config = replace(head.config, target="smollm2-135m-instruct")
    card = model_card(Card(EAGLE3, config, METADATA, "checkpoints/head"))
    for words in (
        "base_model: HuggingFaceTB/SmolLM2-135M-Instruct",
        "draft vocabulary of 67 of 131 tokens, in bfloat16",
        "Options: fc_norm",
        "quantised copy",
        "* data: source /data/chats.jsonl, conversations 1,234, vocab coverage 0.9877",
        "* optimiser steps: 4,000",
        "* tokens seen: 7,654,321",
        "* time: 2 h 3 min",
        "* settings: ttt_length 7, learning_rate 0.0008, betas 0.9, 0.95",
        "shape 4,1,5: 1.83",
        "Not measured yet",
        "eagle-kit generate --target smollm2-135m-instruct --draft checkpoints/head",
        "--speculative-draft-model-path checkpoints/head",
        '"method": "eagle3"',
    ):
        assert words in card, words


def test_the_card_names_the_settings_of_an_unusual_recipe():
    head = tiny_head(tiny_target())
    chosen = {"ttt_length": 7, "loss": "lk-alpha", "optimizer": "muon", "ema_decay": 0.99}
    chosen |= {"muon_learning_rate_ratio": 3.0}
    chosen["feature_noise"] = {"kind": "uniform", "amount": 0.1, "unit": "rms", "per_tokens": None}
    card = model_card(Card(EAGLE3, head.config, {"config": {"training": chosen}}, "checkpoints/head"))
    named = "ttt_length 7, loss lk-alpha, optimizer muon, ema_decay 0.99, muon_learning_rate_ratio 3"
    noise = "feature_noise (kind uniform, amount 0.1, unit rms)"
    assert f"* settings: {named}, {noise}\n" in card


ALWAYS = {
    "ttt_length": (7, "ttt_length 7"),
    "learning_rate": (8e-4, "learning_rate 0.0008"),
    "betas": ([0.9, 0.95], "betas 0.9, 0.95"),
    "step_decay": (0.8, "step_decay 0.8"),
    "loss_normalisation": ("tokens", "loss_normalisation tokens"),
    "sequences_per_step": (8, "sequences_per_step 8"),
    "epochs": (3, "epochs 3"),
}
"""Settings that a card names: a value, and its words."""
WHERE_UNUSUAL = {
    "step_weights": (None, [1.0, 0.5], "step_weights 1, 0.5"),
    "dpace_alpha": (None, 0.5, "dpace_alpha 0.5"),
    "ttt_curriculum": (None, [2, 4], "ttt_curriculum 2, 4"),
    "detach_steps": (False, True, "detach_steps True"),
    "regression": (None, 0.1, "regression 0.1"),
    "loss": ("ce", "kl", "loss kl"),
    "loss_rows": ("serving", "published", "loss_rows published"),
    "feature_noise": (None, {"kind": "uniform"}, "feature_noise (kind uniform)"),
    "optimizer": ("adamw", "muon", "optimizer muon"),
    "muon_learning_rate_ratio": (1.0, 2.0, "muon_learning_rate_ratio 2"),
    "ema_decay": (None, 0.99, "ema_decay 0.99"),
    "schedule": ("cosine", "wsd", "schedule wsd"),
    "num_anchors": (512, 64, "num_anchors 64"),
    "down_sample_ratio": (None, 0.8, "down_sample_ratio 0.8"),
    "down_sample_ratio_min": (0.2, 0.3, "down_sample_ratio_min 0.3"),
    "confidence_weight": (1.0, 0.5, "confidence_weight 0.5"),
}
"""Settings that a card names where they are other than usual: the usual value, another, and its words."""


def lines_of(metadata=None, config=None, **facts) -> list[str]:
    """Lines of the card of a head."""
    if config is None:
        config = tiny_head(tiny_target()).config
    card = Card(EAGLE3, replace(config, target="tiny"), metadata or {}, "head", **facts)
    return model_card(card).splitlines()


def test_the_card_names_each_setting_that_matters_and_no_other():
    usual = {name: value for name, (value, *_) in WHERE_UNUSUAL.items()}
    training = usual | {name: value for name, (value, _) in ALWAYS.items()} | {"save_every": 100}
    words = [each for _, each in ALWAYS.values()]
    assert f"* settings: {', '.join(words)}" in lines_of({"config": {"training": training}})
    for name, (_, other, said) in WHERE_UNUSUAL.items():
        assert f"* settings: {said}" in lines_of({"config": {"training": usual | {name: other}}}), name
    assert not [line for line in lines_of({"config": {"training": usual}}) if "settings" in line]


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({"command": "train a.yaml"}, "* command, folders left out: `train a.yaml`"),
        ({"data": {"chat_sets": 2, "left_out": None}}, "* data: chat sets 2"),
        ({"data": "chats.jsonl"}, "* data: chats.jsonl"),
        ({"config": {"head": {"start_from": "org/head"}}}, "* began with the weights of: org/head"),
        ({"step": 12345}, "* optimiser steps: 12,345"),
        ({"tokens_seen": 0}, "* tokens seen: 0"),
        ({"seconds": 59.6}, "* time: 1 min 0 s"),
        ({"seconds": 3599.4}, "* time: 59 min 59 s"),
        ({"seconds": 3600}, "* time: 1 h 0 min"),
        ({"peak_memory_gb": 12.3456}, "* peak memory of a process: 12.35 GB"),
        ({"machine": "8 x GPU"}, "* machine: 8 x GPU"),
        ({"versions": {"torch": "2.13.0"}}, "* versions: torch 2.13.0"),
    ],
)
def test_the_card_tells_each_fact_of_a_run(metadata, line):
    assert line in lines_of(metadata)


def test_the_card_says_what_was_not_tried():
    config = tiny_head(tiny_target()).config
    template = "without a chat template, or which one"
    measured = "have not been measured."
    gpu = "It has not been measured on a GPU"
    sampled = "sampled responses have not been measured"
    found = "\n".join(lines_of())
    assert template in found and measured in found and gpu not in found and sampled not in found
    assert template not in "\n".join(lines_of(config=replace(config, template_hash="0123")))

    # Measured on either device, greedily or not.
    for device, temperature in (("cpu", 0.0), ("cuda:0", 0.7), ("cuda", None), (None, 1.0)):
        found = summary(mine=Path("head"))
        found["target"]["device"] = device
        found["settings"]["temperature"] = temperature
        text = "\n".join(lines_of(summary=found))
        assert (gpu in text) == (device in ("cpu", None)) and (sampled in text) == (not temperature)
        assert "Accept lengths per task have not been measured." not in text

    # From elsewhere.
    imported = {"imported": {"layout": "vLLM (layers.0.*)"}}
    line = "* It was imported: vLLM (layers.0.*). Weights and numbers above are as they were there."
    assert line in lines_of(imported)

    # Tokens that it can propose.
    covered = {"data": {"vocab_coverage": 0.975}}
    assert any("67 of 131 tokens, 97.5 %" in line for line in lines_of(covered))
    assert not any("can propose" in line for line in lines_of(covered, replace(config, draft_vocab_size=131)))


@pytest.mark.parametrize(("identical", "word"), [(True, "yes"), (False, "no"), (None, "not compared")])
def test_the_card_says_whether_greedy_responses_were_the_same(identical, word):
    found = summary(mine=Path("head")) | {"greedy_identical": identical}
    found["rows"][1]["speedup"] = None
    lines = lines_of(summary=found)
    assert f"* greedy responses identical to plain decoding: {word}" in lines
    assert "| all | 4,1,5 | 2.12 | 41.50 | - | 8 |" in lines
    assert "* settings: max_tokens 64, batch_size 1, seed 0" in lines
    assert "* date: 2026-01-02T03:04:05+00:00" in lines and "* versions: torch 2.13.0" in lines


@pytest.mark.parametrize(
    ("kind", "tiny", "shape", "algorithm", "speculative"),
    [
        (EAGLE3, tiny_head, "5,4,16", "EAGLE3", {"method": "eagle3", "num_speculative_tokens": 4}),
        (
            P_EAGLE,
            tiny_p_eagle,
            "5,1,6",
            "P-EAGLE",
            {"method": "eagle3", "num_speculative_tokens": 5, "parallel_drafting": True},
        ),
        (DSPARK, tiny_dspark, "6,1,7", "DSPARK", {"method": "dspark", "num_speculative_tokens": 6}),
        (DFLASH, tiny_dflash, "5,1,6", "DFLASH", {"method": "dflash", "num_speculative_tokens": 5}),
    ],
)
def test_commands_ask_for_the_shape_that_suits_the_kind(kind, tiny, shape, algorithm, speculative):
    """vLLM drafts chains: as long as ours, or one step shorter than a tree."""
    config = replace(tiny(tiny_target()).config, target="org/model@v2")
    text = model_card(Card(kind, config, {}, "me/draft", format="sglang"))
    steps, topk, tokens = shape.split(",")
    assert f"eagle-kit generate --target org/model@v2 --draft me/draft --shape {shape} " in text
    assert f"--model-path org/model --speculative-algorithm {algorithm} " in text
    flags = f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} "
    assert f"{flags}--speculative-num-draft-tokens {tokens}\n" in text
    assert "eagle-kit export me/draft --format vllm --out me/draft-vllm\nvllm serve org/model " in text
    given = json.loads(text.split("--speculative-config '")[1].split("'")[0])
    assert given == speculative | {"model": "me/draft-vllm"}


def test_the_card_of_a_head_that_drafts_in_one_pass_names_the_rows_that_it_learned():
    target = tiny_target()
    chosen = {"ttt_length": 7, "num_anchors": 64, "confidence_weight": 0.5, "down_sample_ratio": None}
    settings = {"config": {"training": chosen}}
    card = model_card(Card(DSPARK, tiny_dspark(target).config, settings, "checkpoints/head"))
    assert "* settings: ttt_length 7, num_anchors 64, confidence_weight 0.5\n" in card
    chosen |= {"num_anchors": 512, "confidence_weight": 1.0, "down_sample_ratio": 0.8}
    card = model_card(Card(P_EAGLE, tiny_p_eagle(target).config, settings, "checkpoints/head"))
    assert "* settings: ttt_length 7, down_sample_ratio 0.8\n" in card


def test_a_card_without_facts_invents_none():
    for metadata in ({}, {"target": "tiny"}):
        card = model_card(Card(EAGLE3, tiny_head(tiny_target()).config, metadata, "head"))
        assert "Nothing is recorded about the training." in card
        assert "tokens seen" not in card


def test_the_card_has_the_accept_length_against_tokens_of_a_run_that_was_judged_twice():
    config = replace(tiny_head(tiny_target()).config, target="tiny")
    judged = [{"tokens_seen": 1_200_000, "accept_length": {"4,1,5": 1.5, "5,4,16": 1.875}}]
    card = model_card(Card(EAGLE3, config, {**METADATA, "judged": judged}, "head"))
    assert "against tokens seen" not in card
    judged.append({"tokens_seen": 2_400_000, "accept_length": {"4,1,5": 1.5625, "2,2,4": 1.75}})
    card = model_card(Card(EAGLE3, config, {**METADATA, "judged": judged, "tokens_before": 5_000}, "head"))
    assert "* tokens seen: 7,654,321, after 5,000 of what it began with\n" in card
    head, *lines = card[card.index("| tokens seen") :].splitlines()[:4]
    assert head == "| tokens seen | 4,1,5 | 2,2,4 |"
    assert lines == ["|--:|--:|--:|", "| 1,200,000 | 1.500 | - |", "| 2,400,000 | 1.562 | 1.750 |"]


@pytest.mark.parametrize("target", ["../model", "../model.Q4.gguf", "models/model.Q4.gguf", "models/base"])
def test_the_card_names_no_path_as_a_repository(tmp_path, monkeypatch, target):
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    head = tiny_head(tiny_target())
    card = model_card(Card(EAGLE3, replace(head.config, target=target), {}, "me/draft"))
    assert "base_model" not in card and "--target" not in card, "it is found by the hash of its weights"


def test_the_card_of_a_draft_for_a_revision_names_the_repository():
    head = tiny_head(tiny_target())
    card = model_card(Card(EAGLE3, replace(head.config, target="org/model@v2"), {}, "me/draft"))
    assert "base_model: org/model\n" in card and "--target org/model@v2 --draft me/draft" in card
