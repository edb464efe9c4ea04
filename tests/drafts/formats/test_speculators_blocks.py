"""DFlash and DSpark heads exported for speculators in its own model classes: the logits of every row of every
block, and DSpark's corrected ones and their confidences."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_rows import block_logits
from published_dflash import PublishedDFlash
from tiny import tiny_dflash, tiny_dspark
from tiny_run import make_target

from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.models.loading.loader import load_target

speculators = pytest.importorskip(
    "speculators", reason="pip install speculators, in an environment of its own"
)

STARTS, LENGTH, BLOCK, ANCHORS = (0, 17, 44), 61, 6, 9
WINDOW = 11
VARIANTS = {
    "whole": {},
    "next token": {"predicts_next": True},
    "own output": {"draft_vocab_size": 150},
    "one layer, biases": {"num_layers": 1, "attention_bias": True, "attention_out_bias": True},
    "causal blocks": {"sliding_window": LENGTH, "sliding_layers": (0, 1)},
    "sliding both ways": {"sliding_window": LENGTH, "sliding_layers": (0, 1), "sliding_both": True},
}
CORRECTED = {
    "vanilla": {},
    "gated": {"markov_form": "gated", "confidence_reads_token": False},
    "rnn": {"markov_form": "rnn", "num_layers": 1},
    "own output, own row": {"draft_vocab_size": 150, "predicts_next": False, "num_layers": 1},
    "without confidence": {"has_confidence": False, "confidence_reads_token": False, "num_layers": 1},
    "rank 0": {"markov_rank": 0, "confidence_reads_token": False, "num_layers": 1},
}
HEADS = {
    **{name: (tiny_dflash, changes) for name, changes in VARIANTS.items()},
    **{f"dspark, {name}": (tiny_dspark, changes) for name, changes in CORRECTED.items()},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("targets") / "tiny")


def make(folder: Path, target: Path, tiny=tiny_dflash, **changes):
    """A random head, its folder, and that of its export for speculators."""
    model = load_target(target)
    head = tiny(model, mask_token_id=model.config.vocab_size - 3, **changes)
    save_draft(head, folder / "ours", metadata={})
    export_draft(folder / "ours", folder / "theirs", format="speculators", dtype=None, target=target)
    return model, head.eval()


def load(folder: Path, target: Path):
    """Their class with their weights; the verifier is here and not on a hub, and attention a dense one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["speculators_config"]["verifier"]["name_or_path"] = str(target)
    path.write_text(json.dumps(raw))
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    configs, made = (
        (DSparkSpeculatorConfig, DSparkDraftModel)
        if raw["speculators_model_type"] == "dspark"
        else (DFlashSpeculatorConfig, DFlashDraftModel)
    )
    config = configs.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(folder, config=config)
    assert type(model) is made
    return model.eval()


def make_row(vocab_size: int, width: int):
    """Three documents: captured states, ids, and the first token of each token's document."""
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(LENGTH, width, generator=generator)
    ids = torch.randint(0, vocab_size - 3, (LENGTH,), generator=generator)
    starts = torch.tensor(STARTS)
    return aux, ids, starts.repeat_interleave(torch.diff(torch.tensor([*STARTS, LENGTH])))


@torch.no_grad()
def their_logits(model, aux: torch.Tensor, ids: torch.Tensor, doc_start: torch.Tensor):
    """Their training forward, which returns a loss: logits ``[A, B, Vd]`` are what leaves its last matmul,
    with the bias of a Markov head, the teacher's rows ``[A, B, H]``, which are their own numbers, what enters
    the target's norm, and the anchors that it drew are drawn again. Also logits of confidence ``[A, B]``."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.utils import select_anchors

    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.lm_head.register_forward_hook(lambda module, args, out: seen.update(logits=out[0].clone())),
        model.verifier_norm.register_forward_hook(lambda module, args, out: seen.update(rows=args[0][0])),
    ]
    parts = {"confidence_head": "sure"} if getattr(model, "confidence_head", None) is not None else {}
    for part, key in parts.items():
        module = getattr(model, part)
        handles.append(module.register_forward_hook(lambda _, args, out, key=key: seen.update({key: out})))
    if getattr(model, "markov_head", None) is not None:
        whole = model.markov_head.block_bias
        model.markov_head.block_bias = lambda **given: seen.setdefault("bias", whole(**given))
    numbers = torch.arange(LENGTH)
    loss_mask = torch.ones(1, LENGTH)
    loss_mask[0, list(STARTS)] = 0  # no state is before the first token
    torch.manual_seed(3)
    model(
        hidden_states=aux[None],
        input_ids=ids[None],
        loss_mask=loss_mask,
        verifier_last_hidden_states=numbers[None, :, None].expand(1, -1, model.hidden_size).float(),
        document_ids=torch.searchsorted(torch.tensor(STARTS), doc_start)[None],
        position_ids=(numbers - doc_start)[None],
        loss_config=resolve_loss_config("kl_div", "eager"),
        max_anchors=ANCHORS,
    )
    for handle in handles:
        handle.remove()
    torch.manual_seed(3)
    anchors, valid = select_anchors(loss_mask, ANCHORS, BLOCK)
    assert valid.all()
    logits, rows = (seen[name].unflatten(0, (-1, BLOCK)) for name in ("logits", "rows"))
    return anchors, logits + seen.get("bias", 0), rows, seen.get("sure")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_their_class_gives_our_logits_of_every_row(tmp_path, target, name):
    """Also those of the published forward, which has the anchors' rows, that draft nothing, too."""
    tiny, changes = HEADS[name]
    model, head = make(tmp_path, target, tiny, **changes)
    theirs = load(tmp_path / "theirs", target)
    assert theirs.target_layer_ids == list(head.config.aux_layer_ids)
    aux, ids, doc_start = make_row(model.config.vocab_size, head.fc.weight.shape[1])
    anchors, a, teacher, their_sure = their_logits(theirs, aux, ids, doc_start)
    assert len(set(doc_start[anchors].tolist())) == len(STARTS)
    first = head.config.first_drafted
    c, sure = block_logits(head, model.embed, aux, ids, doc_start, anchors)
    assert close(a[:, first:], c), (a[:, first:] - c).abs().max()
    assert (sure is None) == (their_sure is None)
    assert sure is None or close(their_sure.view(-1, BLOCK)[:, first:], sure)
    if head.markov is None:  # corrected rows are held to the published forward where they are trained
        published = PublishedDFlash(tmp_path / "ours", model.embed_tokens.weight, model.head_weight)
        b = published(aux, ids, doc_start, anchors)
        assert b.abs().max() > 1
        assert close(a, b), (a - b).abs().max()
    drafted = anchors[:, None] + torch.arange(
        head.config.most_steps
    )  # our step s has the teacher's row a + s
    assert torch.equal(teacher[:, first:, 0].long(), drafted)


def test_a_sliding_window_ends_at_the_row_for_us_and_at_the_anchor_for_them(tmp_path, target):
    """They show every row of a block as many tokens before the anchor as the window has. Ours counts back
    from the row, itself included, as servers' attention does: row k sees k + 1 fewer. With one layer, whose
    keys of the block are embeddings, it is therefore theirs of a smaller window."""
    changes = {"num_layers": 1, "sliding_window": WINDOW, "sliding_layers": (0,)}
    model, head = make(tmp_path, target, **changes)
    theirs = load(tmp_path / "theirs", target)
    assert theirs.sliding_window == WINDOW and theirs.sliding_window_indices == [0]
    aux, ids, doc_start = make_row(model.config.vocab_size, head.fc.weight.shape[1])
    anchors, wide, *_ = their_logits(theirs, aux, ids, doc_start)
    before = anchors - doc_start[anchors]
    c, _ = block_logits(head, model.embed, aux, ids, doc_start, anchors)
    for k in range(1, BLOCK):
        fits = before <= WINDOW - 1 - k
        assert fits.any() and not fits.all()
        assert [close(x[k], y[k - 1]) for x, y in zip(wide, c, strict=True)] == fits.tolist()
        theirs.sliding_window = WINDOW - 1 - k
        assert close(their_logits(theirs, aux, ids, doc_start)[1][:, k], c[:, k - 1])


@pytest.mark.parametrize("name", HEADS)
def test_what_their_class_saves_comes_in(tmp_path, target, name):
    """A checkpoint that speculators itself wrote: ours from there has every bit of it, and its config."""
    tiny, changes = HEADS[name]
    model, head = make(tmp_path, target, tiny, **changes)
    load(tmp_path / "theirs", target).save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw.pop("eagle_kit", None)  # as of another trainer
    (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
    assert import_draft(tmp_path / "saved", tmp_path / "in", target=target).format == "speculators"
    ours = load_draft(tmp_path / "in", target=model)
    for (key, a), (other, b) in zip(head.named_parameters(), ours.named_parameters(), strict=True):
        assert key == other and torch.equal(a, b), key
    assert torch.equal(ours.d2t, head.d2t) and torch.equal(ours.t2d, head.t2d)
    told = {"target": "", "template_hash": ""}
    assert replace(ours.config, **told) == replace(head.config, **told)
