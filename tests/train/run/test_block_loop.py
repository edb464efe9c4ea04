"""Runs that train a DFlash and a DSpark head: learn, validate, export, serve; and what they refuse."""

import json

import pytest
import torch
from tiny import tiny_target
from tiny_run import make_config

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.dspark.head import DSparkHead
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.drafts.registry import training_kind
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.__main__ import main as train

HEAD = "head={kind: dflash, num_layers: 2, block_size: 4}"
DSPARK = "head={kind: dspark, num_layers: 2, block_size: 3, markov_rank: 8}"
CHAIN = ["training.ttt_length=3", "training.num_anchors=6"]
VALIDATION = "validation={every: 4, prompts: 2, max_tokens: 8, shapes: ['3,1,4']}"


@pytest.mark.parametrize(("head", "method"), [(HEAD, "dflash"), (DSPARK, "dspark")])
def test_a_run_is_trained_validated_exported_and_served(tmp_path, head, method):
    words = [
        str(make_config(tmp_path)),
        head,
        *CHAIN,
        VALIDATION,
        "training.max_steps=8",
        "training.save_every=8",
    ]
    assert train([*words, "--dry-run"]) == 0
    assert train([*words, "training.learning_rate=0.01"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss_per_step" in row]
    assert steps[-1]["loss"] < steps[0]["loss"] and len(steps[0]["loss_per_step"]) == 3
    draft = tmp_path / "run" / "step-8"
    trained = load_draft(draft)
    assert (trained.config.most_steps, trained.config.num_layers) == (3, 2)
    assert {finding.level for finding in validate_draft(draft, tmp_path / "target")} == {"ok"}
    export_draft(draft, tmp_path / "vllm", format="vllm", target=tmp_path / "target")
    card = (tmp_path / "vllm" / "README.md").read_text()
    assert f'"method": "{method}"' in card and '"num_speculative_tokens": 3' in card
    plain = LLM(tmp_path / "target", max_context=64)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (expected,) = plain.generate(["a cat"], params)
    for folder in (draft, tmp_path / "vllm"):
        llm = LLM(plain.target, folder, tokenizer=plain.tokenizer, max_context=64, shape="3,1,4")
        (response,) = llm.generate(["a cat"], params)
        assert response.token_ids == expected.token_ids and response.stats.num_verifies > 0


@pytest.mark.parametrize(
    ("settings", "weight", "reads_token"),
    [
        ({"confidence_head": True, "markov_rank": 8}, 0.5, True),
        ({"confidence_head": True, "markov_rank": 0}, 0.5, False),
        ({"confidence_head": False, "markov_rank": 8}, 0.0, False),
    ],
)
def test_confidence_is_learned_where_there_is_a_head_for_it(settings, weight, reads_token):
    training = {}
    if settings["confidence_head"]:
        training["confidence_weight"] = 0.5
    config = TrainConfig(
        target="t",
        output_dir="o",
        data={"source": "a"},
        head={"kind": "dspark", "num_layers": 1, "block_size": 3, **settings},
        training=training,
    )
    draft = training_kind(config).new_config(config.head, tiny_target().config)
    assert DSparkHead(draft).predicts_confidence == (weight > 0)
    assert weight in (0.0, config.training.learning.confidence_weight)
    assert (draft.has_confidence, draft.confidence_reads_token) == (weight > 0, reads_token)
    assert draft.markov_rank == settings["markov_rank"]
    names = [name for name, _ in DSparkHead(draft).named_parameters()]
    assert any(name.startswith("confidence_head.") for name in names) == (weight > 0)


def test_a_head_with_a_vocabulary_of_its_own_is_trained_on_the_text_and_gone_on_from(tmp_path):
    config = str(make_config(tmp_path))
    head = "head={kind: dflash, num_layers: 1, block_size: 4, draft_vocab_size: 60}"
    words = [*CHAIN, VALIDATION, "training.save_every=8", "training.max_steps=8"]
    first = [config, head, *words, "training.loss=hard-ce", "training.learning_rate=0.01"]
    assert train(first) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss_per_step" in row]
    assert losses[-1] < losses[0]
    old = load_draft(tmp_path / "run" / "step-8")
    assert old.config.draft_vocab_size == 60 and int(old.t2d.sum()) == 60
    first_rows = load_target(tmp_path / "target").head_weight[old.token_map]
    change = (old.lm_head.weight - first_rows).abs().max()
    assert 0 < change < 0.2, "its output layer begins as the target's, and learns"
    begun = f"head={{kind: dflash, start_from: {tmp_path / 'run' / 'step-8'}}}"
    again = [f"output_dir={tmp_path / 'other'}", "training.loss={hard-ce: 0.1, tv: 0.9}"]
    assert train([config, begun, *words, *again]) == 0
    new = load_draft(tmp_path / "other" / "step-8")
    assert new.config == old.config and torch.equal(new.token_map, old.token_map)
    assert not torch.equal(new.lm_head.weight, old.lm_head.weight)
    head = f"head={{kind: dspark, start_from: {tmp_path / 'run' / 'step-8'}}}"
    assert train([config, head, *words, f"output_dir={tmp_path / 'third'}"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.ttt_length=4"], "a block drafts 3 tokens"),
        ([*CHAIN, "validation={every: 4, shapes: ['3,2,6']}"], "validation.shapes has 3,2,6"),
        ([*CHAIN, "head.mask_token_id=100000"], "head.mask_token_id is 100000"),
        ([*CHAIN, "head.fc_norm=true"], "head.fc_norm has no meaning"),
        ([*CHAIN, "head.markov_rank=8"], "head.markov_rank has no meaning"),
        ([DSPARK, *CHAIN, "head.block_size=4"], "a block drafts 4 tokens"),
        (
            [DSPARK, *CHAIN, "head.confidence_head=false", "training.confidence_weight=2"],
            "confidence_weight is set",
        ),
        ([*CHAIN, "head.draft_vocab_size=5000"], "draft_vocab_size is 5000, but the target has 300"),
    ],
)
def test_what_does_not_fit_a_block_is_refused(tmp_path, capsys, words, message):
    assert train([str(make_config(tmp_path)), HEAD, *words]) == 2
    assert message in capsys.readouterr().err
