"""The export for speculators in its own model class: the same tensors, the same logits for three steps."""

import json
from pathlib import Path

import pytest
import torch
from draft_rows import eagle3_logits
from safetensors.torch import load_file
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.models.loading.loader import load_target

speculators = pytest.importorskip(
    "speculators", reason="pip install speculators, in an environment of its own"
)

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}
VARIANTS = {
    "plain": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "residual after its norm": {"norm_before_residual": True},
    "biases": {"attention_bias": True},
    "scaled RoPE": {"rope_scaling": SCALED},
    "two layers": {"aux_layer_ids": (0, 1)},
    "its defaults": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    "Qwen3's layer": {"qk_norm": True},
    "a window": {"sliding_window": 6},
    "an embedding of its own": {"own_embedding": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("targets") / "tiny")


def load(folder: Path, target: Path):
    """Their class with their weights; the verifier is here and not on a hub, and attention a dense one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["speculators_config"]["verifier"]["name_or_path"] = str(target)
    path.write_text(json.dumps(raw))
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(folder, config=config)
    assert type(model) is Eagle3DraftModel
    # without an embedding in the checkpoint, 0.9.0 leaves its own as torch.empty made it
    is_brought = "embed_tokens.weight" in load_file(folder / "model.safetensors")
    model._load_verifier_weights(overwrite_embed_tokens=not is_brought)
    return model.eval()


@torch.no_grad()
def their_logits(model, aux: torch.Tensor, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Their forward, which returns the best tokens only: logits are what leaves its last matmul."""
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    documents = torch.zeros(1, len(ids), dtype=torch.int64)
    model(hidden_states=aux[None], input_ids=ids[None], document_ids=documents, ttt_steps=steps)
    handle.remove()
    return seen


@pytest.mark.parametrize("name", VARIANTS)
def test_their_class_gives_our_logits_for_every_step(tmp_path, target, name):
    model = load_target(target)
    head = tiny_head(model, **{"aux_layer_ids": (0, 1, 3), **VARIANTS[name]})
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format="speculators", dtype=None, target=target)
    theirs = load(tmp_path / "theirs", target)
    assert torch.equal(theirs.d2t, head.d2t) and torch.equal(theirs.t2d, head.t2d)
    table = head.embedding(model.embed_tokens.weight)
    assert torch.equal(theirs.embed_tokens.weight, table)
    generator = torch.Generator().manual_seed(2)
    width = len(head.config.aux_layer_ids) * head.config.target_hidden_size
    aux = torch.randn(17, width, generator=generator)
    ids = torch.randint(0, model.config.vocab_size, (17,), generator=generator)
    pairs = zip(
        their_logits(theirs, aux, ids, 3), eagle3_logits(head, table.__getitem__, aux, ids, 3), strict=True
    )
    for step, (a, b) in enumerate(pairs):
        assert b.abs().max() > 1
        # behind the end both pad with id 0
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4), (step, (a - b).abs().max())


def test_what_their_class_saves_comes_in_with_the_same_logits(tmp_path, target):
    """A checkpoint that speculators itself wrote: ours from there has every bit of it."""
    model = load_target(target)
    head = tiny_head(model, norm_before_residual=True, aux_layer_ids=(0, 1, 3))
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format="speculators", dtype=None, target=target)
    load(tmp_path / "theirs", target).save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw.pop("eagle_kit", None)  # as of another trainer
    (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
    seen = import_draft(tmp_path / "saved", tmp_path / "in")
    assert seen.format == "speculators"
    ours = load_draft(tmp_path / "in")
    for (name, a), b in zip(head.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert ours.config.norm_before_residual and ours.config.rope_theta == head.config.rope_theta
    export_draft(tmp_path / "in", tmp_path / "back", format="speculators", dtype=None)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == raw
    back, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "saved"))
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
