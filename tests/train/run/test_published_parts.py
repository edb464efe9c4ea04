"""Runs that train heads with the parts that other trainers write by default: they learn, resume to the bit,
are exported, imported again and served."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target

EAGLE3 = {"draft_vocab_size": 250, "intermediate_size": 80, "aux_layer_ids": [1, 2, 3]}
HEADS = {
    "speculators' defaults": {
        **{"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
        **EAGLE3,
    },
    "Qwen3's layer and an embedding of its own": {**EAGLE3, "qk_norm": True, "own_embedding": True},
    "final states": {**EAGLE3, "aux_layer_ids": []},
    "p-eagle": {
        **{
            "kind": "p-eagle",
            "num_layers": 2,
            "qk_norm": True,
            "norm_before_fc": True,
            "own_embedding": True,
        },
        **{"sliding_window": 40, **EAGLE3},
    },
    "eagle1": {"kind": "eagle1", "own_embedding": True, "fc_bias": False, "intermediate_size": 80},
}
PEER = {"final states": "vllm", "eagle1": "vllm"}
"""Formats that they are exported in; speculators' where none is named."""


@pytest.fixture
def run_of(make_run):
    def make(head, **sections):
        run = make_run(**sections)
        config = yaml.safe_load(run.config.read_text())
        config["head"] = head
        run.config.write_text(yaml.safe_dump(config))
        return run

    return make


def is_served(target, head) -> bool:
    """Whether a few responses are plain decoding's."""
    llm = LLM(target, str(head), shape="3,1,4", max_batch_size=2, max_context=128)
    prompts = [[5, 9, 12, 40], [7, 3]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    drafted = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, shape="none")
    assert all(response.stats.num_verifies for response in drafted)
    return [response.token_ids for response in drafted] == [response.token_ids for response in plain]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_trained_resumed_exported_imported_and_served(run_of, tmp_path, name):
    run = run_of(HEADS[name], training={"save_every": 4, "learning_rate": 3e-3})
    assert run("--max-steps", "8") == 0
    losses = [row["loss"] for row in run.metrics()]
    assert sum(losses[4:]) < sum(losses[:4]), "it does not learn"
    whole = load_file(run.output / "step-8" / "model.safetensors")
    shutil.rmtree(run.output / "step-8")
    assert run("--resume", "--max-steps", "8") == 0
    again = load_file(run.output / "step-8" / "model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[key], again[key]) for key in whole)

    # To a peer and back: the same weights, of which the embedding is one.
    target = str(run.output.parent / "target")
    model = load_target(target)
    trained = load_draft(run.output / "step-8", target=model)
    peer = PEER.get(name, "speculators")
    export_draft(run.output / "step-8", tmp_path / "peer", format=peer, dtype=None, target=target)
    foreign = tmp_path / "peer" / "config.json"
    config = json.loads(foreign.read_text())
    del config["eagle_kit"]
    foreign.write_text(json.dumps(config))
    import_draft(tmp_path / "peer", tmp_path / "back", target=target, format=None)
    back = load_draft(tmp_path / "back", target=model)
    for (one, a), (other, b) in zip(trained.named_parameters(), back.named_parameters(), strict=True):
        assert one == other and torch.equal(a, b), one
    assert [each.cause for each in validate_draft(tmp_path / "back", target) if each.level == "error"] == []
    assert is_served(target, tmp_path / "back")


def test_a_narrower_head_of_another_trainer_is_trained_on(run_of, tmp_path):
    """Its embedding is its own: it is trained, and comes out with the head."""
    from tiny import tiny_head

    from eagle_kit.drafts.files.draft import save_draft

    run = run_of({"start_from": str(tmp_path / "narrow")}, training={"save_every": 4})
    target = str(run.output.parent / "target")
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 56}
    head = tiny_head(load_target(target), 200, aux_layer_ids=(1, 2, 3), own_embedding=True, **sizes)
    save_draft(head, tmp_path / "narrow", metadata={})
    assert run("--max-steps", "4") == 0
    export_draft(run.output / "step-4", tmp_path / "out", dtype=None, target=target)
    out = load_draft(tmp_path / "out", target=load_target(target))
    assert out.embed_tokens.weight.shape == head.embed_tokens.weight.shape
    assert not torch.equal(out.embed_tokens.weight, head.embed_tokens.weight)
    assert is_served(target, tmp_path / "out")
