"""P-EAGLE heads exported for speculators in its own model class: the logits of every row of every depth."""

import json
from pathlib import Path

import pytest
import torch
from draft_rows import p_eagle_logits
from tiny import tiny_p_eagle
from tiny_run import make_target

from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.models.loading.loader import load_target

speculators = pytest.importorskip(
    "speculators", reason="pip install speculators, in an environment of its own"
)

LENGTH, DEPTHS = 19, 5
SIZES = {"aux_layer_ids": (0, 1, 3)}
VARIANTS = {
    "plain": {},
    "residual after its norm": {"norm_before_residual": True},
    "normed states": {"fc_norm": True},
    "one layer": {"num_layers": 1},
    "biases": {"attention_bias": True},
    "one norm before fc": {"norm_before_fc": True},
    "Qwen3's layers in a window": {"qk_norm": True, "sliding_window": 7, "sliding_layers": (0, 1, 2)},
    "a window in one layer": {"sliding_window": 7, "sliding_layers": (1,)},
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
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

    config = PEagleSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(folder, config=config)
    assert type(model) is PEagleDraftModel
    model._load_verifier_weights(overwrite_embed_tokens=False)
    return model.eval()


@torch.no_grad()
def their_logits(model, aux: torch.Tensor, ids: torch.Tensor):
    """Their training forward, which returns a loss: logits are what leaves its last matmul, and which rows it
    drew at each depth is drawn again."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle.data import generate_cod_sample_indices

    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
    loss_mask = torch.ones(1, len(ids))
    loss_mask[0, 0] = 0  # a row drawn there at depth 1 would have its anchor at -1
    options = {"num_depths": DEPTHS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    torch.manual_seed(3)
    model(
        hidden_states=aux[None],
        input_ids=ids[None],
        document_ids=torch.zeros(1, len(ids), dtype=torch.int64),
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.zeros(1, len(ids), model.hidden_size),
        loss_config=resolve_loss_config("kl_div", "eager"),
        **options,
    )
    handle.remove()
    torch.manual_seed(3)
    return generate_cod_sample_indices(len(ids), loss_mask, **options), seen[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_their_class_gives_our_logits_at_every_depth(tmp_path, target, name):
    model = load_target(target)
    size = model.config.vocab_size
    head = tiny_p_eagle(model, size // 2, **{**SIZES, "mask_token_id": size - 3, **VARIANTS[name]})
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format="speculators", dtype=None, target=target)
    theirs = load(tmp_path / "theirs", target)
    assert torch.equal(theirs.d2t, head.d2t) and torch.equal(theirs.t2d, head.t2d)
    assert theirs.target_layer_ids == list(head.config.aux_layer_ids)
    generator = torch.Generator().manual_seed(2)
    width = len(head.config.aux_layer_ids) * head.config.target_hidden_size
    aux = torch.randn(LENGTH, width, generator=generator)
    ids = torch.randint(0, size - 3, (LENGTH,), generator=generator)
    (row, depth), a = their_logits(theirs, aux, ids)
    b = p_eagle_logits(head, model.embed, aux, ids, row, depth)
    assert depth.bincount().tolist() == [LENGTH - d - (d > 0) for d in range(DEPTHS)]
    assert b.abs().max() > 1
    assert torch.allclose(a, b, atol=1e-4, rtol=1e-4), (a - b).abs().max()


def test_what_their_class_saves_comes_in(tmp_path, target):
    """A checkpoint that speculators itself wrote: ours from there has every bit of it, the mask's too."""
    model = load_target(target)
    size = model.config.vocab_size
    head = tiny_p_eagle(model, size // 2, mask_token_id=size - 3, **SIZES)
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / "theirs", format="speculators", dtype=None, target=target)
    load(tmp_path / "theirs", target).save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw.pop("eagle_kit", None)  # as of another trainer
    (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
    assert import_draft(tmp_path / "saved", tmp_path / "in", target=target).format == "speculators"
    ours = load_draft(tmp_path / "in", target=model)
    for (name, a), (other, b) in zip(head.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name
    assert ours.config.mask_token_id == size - 3
