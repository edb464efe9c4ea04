"""Runs that train heads of a tiny DeepSeek: learn, validate, resume, export, serve; and what they refuse."""

import json
import shutil

import pytest
import torch
from kinds_of import algorithm_of
from safetensors.torch import load_file
from tiny_mtp import save_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.run.simulate import match_table

HEADS = {
    "eagle3": {"kind": "eagle3", "draft_vocab_size": 250},
    "eagle3-mla": {"kind": "eagle3-mla", "draft_vocab_size": 250},
    "mtp": {"kind": "mtp", "num_modules": 1},
    "mtp x 2": {"kind": "mtp", "num_modules": 2},
}
STEPS = {"ttt_length": 2, "sequences_per_step": 2, "save_every": 4}
VALIDATION = {"every": 4, "prompts": 2, "max_tokens": 8, "shapes": ["2,1,3"]}


def nightly(kind):
    return pytest.param(kind, marks=pytest.mark.nightly)


def without_sizes(run) -> None:
    """Take out what the tests' config says of EAGLE-3 heads."""
    text = run.config.read_text()
    run.config.write_text(text.replace("  draft_vocab_size: 250\n  intermediate_size: 80\n", ""))


@pytest.fixture
def deepseek_run(make_run, tmp_path):
    """A run whose target is a DeepSeek with ``modules`` of its own."""

    def make(modules: int = 2, **sections):
        run = make_run(**{"head": {"kind": "mtp"}, "training": STEPS, **sections})
        if sections.get("head", {"kind": "mtp"})["kind"] == "mtp":
            without_sizes(run)
        save_target(tmp_path / "made", modules=modules, vocab_size=300, eos_token_id=2, bos_token_id=1)
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.move(tmp_path / "made" / name, tmp_path / "target" / name)
        return run

    return make


@pytest.mark.parametrize("kind", [nightly("eagle3"), "eagle3-mla", nightly("mtp"), "mtp x 2"])
def test_a_head_learns_is_validated_resumed_exported_and_served(deepseek_run, tmp_path, kind):
    run = deepseek_run(head=HEADS[kind], training={**STEPS, "learning_rate": 0.01}, validation=VALIDATION)
    assert run("--max-steps", "8") == 0
    rows = run.metrics()
    assert rows[7]["loss"] < rows[0]["loss"], "it does not learn"
    validated = [json.loads(line) for line in (run.output / "validation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in validated] == [4, 8]
    assert all(row["num_different_responses"] == 0 for row in validated)
    assert all(row["accept_length"] == row["simulated_accept_length"] for row in validated)
    whole = load_file(run.output / "step-8" / "model.safetensors")

    shutil.rmtree(run.output / "step-8")
    assert run("--resume", "--max-steps", "8") == 0
    again = load_file(run.output / "step-8" / "model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert run.metrics() == rows

    out = tmp_path / "exported"
    export_draft(run.output / "step-8", out, target=tmp_path / "target")
    assert not [f for f in validate_draft(out, tmp_path / "target") if f.level == "error"]
    assert algorithm_of(out) == ("NEXTN" if "mtp" in kind else "EAGLE3")
    card = (out / "README.md").read_text()
    assert ("MTP draft module" in card) == ("mtp" in kind) and ("over latents of 36 + 8" in card) == (
        kind != "eagle3"
    )
    plain = LLM(tmp_path / "target", max_context=64)
    llm = LLM(plain.target, out, tokenizer=plain.tokenizer, max_context=64)
    params = SamplingParams(max_tokens=10)
    responses = [
        engine.generate(["a cat"], params, shape=shape)[0]
        for engine, shape in ((plain, None), (llm, "2,1,3"))
    ]
    assert responses[0].token_ids == responses[1].token_ids and responses[1].stats.num_verifies > 0


@pytest.mark.parametrize("init", ["checkpoint", "last-layer", "random"])
def test_modules_start_as_they_are_told(deepseek_run, tmp_path, init):
    run = deepseek_run(
        modules=1, head={"kind": "mtp", "init": init}, training={**STEPS, "learning_rate": 1e-12}
    )
    assert run("--max-steps", "1") == 0
    head = load_draft(run.output / "step-1")
    target = load_target(tmp_path / "target")
    theirs = load_file(tmp_path / "target" / "model.safetensors")
    last = {"checkpoint": 4, "last-layer": 3, "random": None}[init]
    module = head.layers[0]
    mine = {"self_attn.o_proj.weight": module.self_attn.o_proj.weight}
    mine["mlp.experts.5.down_proj.weight"] = module.mlp.experts.down_proj[5]
    for name, tensor in mine.items():
        for layer in (3, 4):
            same = torch.allclose(tensor, theirs[f"model.layers.{layer}.{name}"], atol=1e-6)
            assert same == (layer == last), (name, layer)
    is_softened = torch.allclose(module.shared_head.norm.weight, target.norm.weight * 0.1, atol=1e-6)
    assert is_softened == (init != "checkpoint")
    assert head.lm_head is None and not any("shared_head.head" in name for name in head.state_dict())
    assert all(bool(p.isfinite().all()) for p in head.parameters())


def test_gate_biases_are_left_alone(deepseek_run, tmp_path):
    run = deepseek_run(modules=1, training={**STEPS, "learning_rate": 0.01})
    assert run("--max-steps", "2") == 0
    name = "mlp.gate.e_score_correction_bias"
    before = load_file(tmp_path / "target" / "model.safetensors")[f"model.layers.4.{name}"]
    after = load_file(run.output / "step-2" / "model.safetensors")
    assert torch.equal(after[f"model.layers.0.{name}"], before)
    moved = load_file(tmp_path / "target" / "model.safetensors")["model.layers.4.mlp.gate.weight"]
    assert not torch.equal(after["model.layers.0.mlp.gate.weight"], moved)


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        ({"head": {"kind": "mtp"}, "training": {**STEPS, "ttt_length": 3}}, "each of the 2 modules"),
        ({"validation": {**VALIDATION, "shapes": ["3,1,4"]}}, "more than a chain of 2 steps"),
        ({"validation": {**VALIDATION, "shapes": ["2,2,4"]}}, "more than a chain of 2 steps"),
        (
            {
                "head": {"kind": "mtp", "num_modules": 3, "init": "checkpoint"},
                "training": {**STEPS, "ttt_length": 3},
            },
            "the target's checkpoint has 2",
        ),
    ],
)
def test_settings_that_do_not_fit_the_modules_are_refused_before_training(
    deepseek_run, capsys, sections, cause
):
    run = deepseek_run(**sections)
    assert run() == 2
    assert cause in capsys.readouterr().err
    assert not run.output.exists()


@pytest.mark.parametrize(
    ("kind", "cause"), [("eagle3-mla", "no latent attention"), ("mtp", "targets of DeepSeek, GLM and Qwen")]
)
def test_a_llama_target_is_refused(make_run, capsys, kind, cause):
    run = make_run()
    run.config.write_text(run.config.read_text().replace("head:\n", f"head:\n  kind: {kind}\n"))
    if kind == "mtp":
        without_sizes(run)
    assert run() == 2
    assert cause in capsys.readouterr().err


def test_the_match_table_of_several_modules_is_what_serving_drafts(tmp_path):
    """Row by row: the tokens that the engine proposes behind every row of a text."""
    from tiny_engine import resolved

    from eagle_kit.core.shape import SpecShape
    from eagle_kit.engine.engine import Engine
    from eagle_kit.engine.load_draft import load_draft_model
    from eagle_kit.engine.request import Request

    save_target(tmp_path / "t", modules=3, vocab_size=11)
    target = load_target(tmp_path / "t")
    draft = load_draft_model(tmp_path / "t", target, algorithm="NEXTN")
    engine = Engine(target, draft, resolved(1, 64, kv_tokens=200, page_size=4))
    engine.use_shape(SpecShape(3, 1, 4))
    seen = []
    propose = engine.runner.drafter.propose

    def record(*args):
        seen.append((int(args[0].seq_lens[0]), propose(*args)))
        return seen[-1][1]

    engine.runner.drafter.propose = record
    request = Request(0, [1, 2, 3, 4], SamplingParams(max_tokens=20))
    engine.add_request(request)
    while engine.has_work:
        engine.step()
    ids = torch.tensor(request.prompt_ids + request.token_ids)
    table = match_table(target, draft.head, ids, 4, 3)
    assert len(seen) > 3
    for length, proposed in seen:
        row, tokens = length - 4, proposed.tree.tokens[0, 1:].tolist()
        if row < len(table):
            known = ids[length + 1 : length + 4].tolist()
            leading = [a == b for a, b in zip(tokens, known, strict=False)]
            accepted = (leading + [False]).index(False)
            assert table[row, :accepted].all(), "what the engine accepts, the table has"
            if accepted < min(3, len(known)):
                assert not table[row, accepted]


@pytest.mark.parametrize("kind", [nightly("eagle3-mla"), "mtp"])
def test_states_on_disk_teach_the_same(deepseek_run, kind):
    run = deepseek_run(head=HEADS[kind], training=STEPS)
    assert run("--max-steps", "3") == 0
    online = load_file(run.output / "step-3" / "model.safetensors")
    for _ in range(2):  # the first fills the store, the second reads it
        shutil.rmtree(run.output)
        assert run("--max-steps", "3", "training.cache_hidden_states=disk") == 0
        kept = load_file(run.output / "step-3" / "model.safetensors")
        assert all(torch.equal(online[name], kept[name]) for name in online)


def test_modules_that_a_curriculum_has_not_come_to_have_gradients_of_zeros(deepseek_run, tmp_path):
    """Other processes wait for the gradient of every weight."""
    from eagle_kit.config.train import TrainingConfig
    from eagle_kit.data.chat.dataset import load_prepared
    from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
    from eagle_kit.models.loading.source import load_tokenizer
    from eagle_kit.objective.batch import make_micro_batch, row_weights
    from eagle_kit.objective.target_features import capture_features
    from eagle_kit.objective.ttt_module import TTTModule

    run = deepseek_run()
    assert run("--max-steps", "1") == 0
    folder = next((run.folder / "cache" / "data").iterdir())
    data = load_prepared(folder, folder.name, load_tokenizer(tmp_path / "target"), None)
    target = load_target(tmp_path / "target")
    head = MTPHead(MTPConfig(target.config, 2)).bind(target.lm_head)
    module = TTTModule(head, target.embed_tokens.weight, target.head_weight, TrainingConfig(ttt_length=2))
    forward = make_micro_batch(data, [0], 1, torch.device("cpu"))
    features = capture_features(target, forward.ids, forward.doc_start, (), forward.plan.is_teacher)
    weights = row_weights(forward, [1.0], "tokens", forward.plan.counts, 1)
    module(forward, *features, features.hidden, weights).loss.backward()
    second = dict(head.layers[1].named_parameters())
    assert all(p.grad is not None and not p.grad.any() for p in second.values() if p.requires_grad)
    assert head.layers[0].eh_proj.weight.grad.any()


def test_a_resumed_run_may_not_be_validated_by_longer_chains_than_it_has_modules(deepseek_run, capsys):
    run = deepseek_run(head={"kind": "mtp", "num_modules": 2})
    assert run("--max-steps", "1") == 0
    assert run("--resume", "validation.every=2", "validation.shapes=['3,1,4']") == 2
    assert "a chain of 2 steps" in capsys.readouterr().err
