"""Runs that train EAGLE-1 heads: learn, validate, resume, export, serve; and what they refuse."""

import json
import shutil

import pytest
import torch
import yaml
from kinds_of import algorithm_of
from published_eagle1 import PublishedEagle1
from safetensors.torch import load_file

from eagle_kit.cli import main
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.plan.sizes import head_sizes

NOISE = {"kind": "uniform", "amount": 0.1, "per_tokens": 512}
STEPS = {"sequences_per_step": 2, "save_every": 4, "learning_rate": 0.01, "feature_noise": NOISE}
EAGLE = {**STEPS, "ttt_length": 1}
HASS = {
    **STEPS,
    "ttt_length": 3,
    "step_decay": 1.0,
    "detach_steps": True,
    "regression": {"topk_weight": 1.0, "topk": 10},
}
VALIDATION = {"every": 4, "prompts": 2, "max_tokens": 8, "shapes": ["3,1,4", "3,2,6"]}


@pytest.fixture
def eagle1_run(make_run):
    """A run of an EAGLE-1 head: what the tests' config says of EAGLE-3 heads is taken out."""

    def make(head=None, **sections):
        run = make_run(**sections)
        config = yaml.safe_load(run.config.read_text())
        config["head"] = {"kind": "eagle1", **(head or {})}
        run.config.write_text(yaml.safe_dump(config))
        return run

    return make


@pytest.mark.parametrize(
    ("recipe", "bias"),
    [pytest.param(EAGLE, True, id="eagle", marks=pytest.mark.nightly), pytest.param(HASS, False, id="hass")],
)
def test_a_head_learns_is_validated_resumed_exported_and_served(eagle1_run, tmp_path, capsys, recipe, bias):
    run = eagle1_run({"fc_bias": bias, "intermediate_size": 80}, training=recipe, validation=VALIDATION)
    assert run("--max-steps", "8") == 0
    said = capsys.readouterr().out
    assert "its final states feed the head" in said and "300 of 300 cover 100.00%" in said
    rows = run.metrics()
    assert rows[7]["loss"] < rows[0]["loss"], "it does not learn"
    assert rows[7]["learned_per_step"] == [1.0] * recipe["ttt_length"]
    validated = [json.loads(line) for line in (run.output / "validation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in validated] == [4, 8]
    assert all(row["num_different_responses"] == 0 for row in validated)
    assert all(row["accept_length"]["3,1,4"] == row["simulated_accept_length"]["3,1,4"] for row in validated)
    whole = load_file(run.output / "step-8" / "model.safetensors")
    names = {"fc.weight", "layers.0.post_attention_layernorm.weight", *({"fc.bias"} if bias else ())}
    names |= {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    assert whole.keys() == names | {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}

    shutil.rmtree(run.output / "step-8")
    assert run("--resume", "--max-steps", "8") == 0
    again = load_file(run.output / "step-8" / "model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert run.metrics() == rows

    out = tmp_path / "exported"
    export_draft(run.output / "step-8", out, target=tmp_path / "target")
    findings = {finding.subject: finding.level for finding in validate_draft(out, tmp_path / "target")}
    assert findings == dict.fromkeys(
        (
            "layout",
            "hidden size",
            "vocabulary",
            "context",
            "rope",
            "weights",
            "chat template",
            "target weights",
        ),
        "ok",
    )
    assert algorithm_of(out) == "EAGLE"
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and config.get("bias", True) == bias
    card = (out / "README.md").read_text()
    assert "# EAGLE-1 draft head" in card and "--speculative-algorithm EAGLE " in card
    plain = LLM(tmp_path / "target", max_context=64)
    llm = LLM(plain.target, out, tokenizer=plain.tokenizer, max_context=64)
    params = SamplingParams(max_tokens=10)
    (expected,) = plain.generate(["a cat"], params, shape=None)
    for shape in ("2,1,3", "3,2,6"):
        (response,) = llm.generate(["a cat"], params, shape=shape)
        assert response.token_ids == expected.token_ids and response.stats.num_verifies > 0


def test_the_saved_head_is_the_published_definition(eagle1_run, tmp_path):
    """A checkpoint's tensors in the published forward give the states of the loaded head."""
    run = eagle1_run(training=EAGLE)
    assert run("--max-steps", "4") == 0
    folder, target = run.output / "step-4", load_target(tmp_path / "target")
    published = PublishedEagle1(load_file(folder / "model.safetensors"), 4, 2, eps=1e-6)
    head = load_draft(folder, target=target)
    assert isinstance(head, Eagle1Head) and head.training and all(p.requires_grad for p in head.parameters())
    hidden, ids = torch.randn(11, 64, generator=torch.Generator().manual_seed(0)), torch.arange(40, 51)
    from eagle_kit.ops.attention.prefill import prefill_attention

    embeds = target.embed(ids)
    ours = head(hidden, embeds, torch.arange(11), lambda layer, q, k, v: prefill_attention(q, k, v, 0.25))
    theirs = published([hidden.double()], embeds.double(), [torch.ones(11, 11).tril().bool()])
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(ours), ours @ target.head_weight.T, rtol=1e-4, atol=1e-4)


def test_states_on_disk_and_other_forwards_teach_the_same_under_noise(eagle1_run):
    run = eagle1_run(training=EAGLE)
    assert run("--max-steps", "3") == 0
    online = load_file(run.output / "step-3" / "model.safetensors")
    for _ in range(2):  # the first fills the store, the second reads it
        shutil.rmtree(run.output)
        assert run("--max-steps", "3", "training.cache_hidden_states=disk") == 0
        kept = load_file(run.output / "step-3" / "model.safetensors")
        assert all(torch.equal(online[name], kept[name]) for name in online)
    shutil.rmtree(run.output)
    assert run("--max-steps", "3", "training.gradient_accumulation=1") == 0
    together = load_file(run.output / "step-3" / "model.safetensors")
    for name in online:
        torch.testing.assert_close(online[name], together[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("head.draft_vocab_size=100", "draft_vocab_size has no meaning for a head of the kind eagle1"),
        ("head.aux_layer_ids=[1]", "aux_layer_ids has no meaning"),
        ("head.init=last-layer", "init has no meaning"),
        ("training.feature_noise.amount=0", "greater than 0"),
        ("training.feature_noise.kind=laplace", "uniform"),
        ("training.loss=tv", "training.loss has no meaning"),
        ("training.regression={feature_weight: 0, token_weight: 0}", "one of the weights must be above 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(eagle1_run, capsys, override, cause):
    run = eagle1_run(training=EAGLE)
    assert run(override) == 2
    assert cause in capsys.readouterr().err and not run.output.exists()


@pytest.mark.parametrize("override", ["training.regression.topk_weight=1.0", "head.fc_bias=false"])
def test_what_is_for_eagle1_is_refused_for_eagle3(make_run, capsys, override):
    run = make_run()
    assert run(override) == 2
    assert "has no meaning for a head of the kind eagle3" in capsys.readouterr().err


def test_a_run_of_before_these_settings_can_be_resumed(copy_run):
    run = copy_run("two steps")
    path = run.output / "run.yaml"
    kept = yaml.safe_load(path.read_text())
    del kept["config"]["training"]["detach_steps"], kept["config"]["head"]["qk_norm"]
    path.write_text(yaml.safe_dump(kept))
    assert run("--resume", "--max-steps", "3") == 0


def test_a_head_is_checked_and_has_no_vocabulary_map(eagle1_run, tmp_path, capsys):
    run = eagle1_run(training=EAGLE)
    assert run("--max-steps", "1") == 0
    assert main(["validate", str(run.output / "step-1"), "--target", str(tmp_path / "target")]) == 0
    assert main(["data", "vocab", str(run.config), "--out", str(tmp_path / "v.npz")]) == 2
    assert "proposes every token" in capsys.readouterr().err


def test_fc_is_counted_once_and_at_every_step():
    config = Eagle1Config(48, 6, 2, 8, 100, 331, 1e-5, 1e4, None)
    sizes = head_sizes(config)
    assert (sizes.fuse, sizes.num_layers) == (0, 1)
    assert sizes.before == 2 * 48 * 48 + 48 * 80 and sizes.after == 48 * 48 + 3 * 48 * 100
    assert sizes.total == sizes.before + sizes.after + 48 + 48 and sizes.output == 331 * 48


def test_the_shipped_config_is_the_published_recipe():
    from pathlib import Path

    config = load_config(TrainConfig, Path(__file__).parents[3] / "configs" / "smollm2-135m-eagle1.yaml")
    assert config.head.kind == "eagle1" and config.head.num_counted_tokens is None
    assert (
        config.training.feature_noise.model_dump(exclude={"unit"}) == NOISE
        and config.training.ttt_length == 1
    )
    weights = config.training.learning.regression
    assert (weights.feature_weight, weights.token_weight) == (1.0, 0.1)
    assert config.training.betas == (0.9, 0.95) and config.training.clip_norm == 0.5
