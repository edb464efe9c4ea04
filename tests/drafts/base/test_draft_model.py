"""The draft models behind their interface, against the models themselves over a whole text: which state is
the feature, which token belongs to it, which position, whose output layer. How an engine drives them is
tested in test_draft_models.py.

Slots are tokens here: a draft's entry for the token at position p has slot p.
"""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file
from tiny import randomise, tiny_head, tiny_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import (
    DraftModel,
    HeadDraftModel,
    StandaloneDraftModel,
    StepRows,
)
from eagle_kit.drafts.base.drafter import Drafter
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.standalone.kind import STANDALONE
from eagle_kit.ops.attention.prefill import prefill_attention
from eagle_kit.ops.linear import pack_weights

LENGTH, VOCAB = 17, 131
KINDS = ["eagle3", "eagle1", "eagle1 with a map", "small model", "small model with a map"]
HOT = torch.tensor([117, 4, 130, 0, 58, 21, 9])


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB)


@pytest.fixture(scope="module")
def text():
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(4))


def eagle1_head(target) -> Eagle1Head:
    config = Eagle1Config(
        hidden_size=48, num_heads=4, num_kv_heads=1, head_dim=14, intermediate_size=97, vocab_size=VOCAB,
        rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, attention_bias=True,
    )  # fmt: skip
    return randomise(Eagle1Head(config), 3, 0.2).eval().requires_grad_(False)


def make(kind: str, target) -> DraftModel:
    hot = HOT if "map" in kind else None
    if kind == "eagle3":
        head = tiny_head(target, num_heads=4, num_kv_heads=1, head_dim=14)
        return HeadDraftModel(head.eval().requires_grad_(False), target)
    if "eagle1" in kind:
        return HeadDraftModel(eagle1_head(target), target, hot)
    return StandaloneDraftModel(tiny_target(vocab_size=VOCAB, num_layers=2, hidden_size=40, seed=5), hot)


class Store:
    """Attention that keeps all it has seen, per layer, as a cache without pages."""

    def __init__(self) -> None:
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.k[layer] = torch.cat((self.k[layer], k)) if layer in self.k else k
        self.v[layer] = torch.cat((self.v[layer], v)) if layer in self.v else v
        return prefill_attention(q, self.k[layer], self.v[layer], q.shape[-1] ** -0.5)


def run_target(target, text, capture=()):
    return target(text, torch.arange(len(text)), Store(), capture)


def rows_of(draft, target, text):
    """Every entry that a text of tokens can have."""
    features = draft.features(draft.target_hidden_states(run_target(target, text, draft.capture)))
    slots = torch.arange(draft.first_position, len(text))
    return StepRows(features[slots - draft.first_position], text[slots], slots - draft.first_position)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_it_names_are_those_of_its_tensors(target, text, kind):
    draft = make(kind, target)
    store = Store()
    rows = rows_of(draft, target, text)
    features, slots = rows.features, rows.rope_positions + draft.first_position
    assert features.shape == (len(slots), draft.feature_size) and features.dtype == draft.dtype
    states, read = draft.step(rows, store)
    assert sorted(store.k) == list(range(draft.cache.num_layers))
    for layer in store.k:
        assert store.k[layer].shape == (len(slots), draft.cache.num_heads, draft.cache.head_dim)
    assert states.dtype == draft.dtype and states.device == draft.device
    assert states[:, : draft.feature_size].shape == (len(slots), draft.feature_size)
    assert draft.logits(read).shape == (len(slots), draft.draft_vocab_size)
    ids = draft.to_target(torch.arange(draft.draft_vocab_size))
    assert ids.dtype == torch.int64 and ids.unique().numel() == draft.draft_vocab_size
    assert ids.min() >= 0 and ids.max() < VOCAB


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_entered_in_chunks_gives_what_one_pass_gives(target, text, kind):
    draft, store = make(kind, target), Store()
    features, tokens, positions, _ = rows_of(draft, target, text)
    whole = draft.step(StepRows(features, tokens, positions), Store())
    parts = zip(features.split(5), tokens.split(5), positions.split(5), strict=True)
    chunks = [draft.step(StepRows(*part), store) for part in parts]
    for part, expected in zip(zip(*chunks, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(part), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_wanted_are_those_of_all_rows(target, text, kind):
    """And the features of each row are those that its index names."""
    draft = make(kind, target)
    rows = rows_of(draft, target, text)
    whole, store = draft.step(rows, Store()), Store()
    wanted, order = torch.tensor([3, 0, 3, 11]), torch.randperm(len(rows.tokens))
    shuffled = rows._replace(features=rows.features[order], feature_rows=order.argsort())
    some = draft.step(shuffled, store, output_rows=wanted)
    for part, expected in zip(some, whole, strict=True):
        torch.testing.assert_close(part, expected[wanted], rtol=1e-4, atol=1e-5)
    assert len(store.k[0]) == len(rows.tokens), "keys are made of all rows"


def test_eagle1_joins_the_normed_state_of_a_row_with_the_token_after_it(target, text):
    """And goes to the target's output layer without another norm."""
    draft = make("eagle1", target)
    hf_states = run_target(target, text, (target.config.num_layers,))
    normed = target.norm(hf_states.aux_hidden_states)
    embeds = target.embed_tokens.weight[text[1:]]
    states = draft.head(normed[:-1], embeds, torch.arange(LENGTH - 1), Store())
    ours, read = draft.step(rows_of(draft, target, text), Store())
    assert torch.equal(ours, states), "to the bit, or the positions are shifted"
    torch.testing.assert_close(draft.logits(read), states @ target.head_weight.T, rtol=1e-4, atol=1e-4)
    raw = draft.head(hf_states.aux_hidden_states[:-1], embeds, torch.arange(LENGTH - 1), Store())
    assert (raw - states).abs().max() > 0.1, "the state before the norm must not pass for the one after it"


def test_eagle3_joins_the_fused_states_of_a_row_with_the_token_after_it(target, text):
    draft = make("eagle3", target)
    aux = run_target(target, text, draft.head.config.aux_layer_ids).aux_hidden_states
    states = draft.head(draft.head.fuse(aux[:-1]), target.embed(text[1:]), torch.arange(LENGTH - 1), Store())
    ours, read = draft.step(rows_of(draft, target, text), Store())
    assert torch.equal(ours, states)
    assert torch.equal(draft.logits(read), draft.head.logits(states))
    ids = torch.tensor([[0, 66], [30, 1]])
    assert torch.equal(draft.to_target(ids), draft.head.token_map[ids])


def test_a_small_model_reads_tokens_only(target, text):
    draft = make("small model", target)
    rows = rows_of(draft, target, text)
    assert (draft.capture, draft.first_position, rows.features.shape) == ((), 0, (LENGTH, 0))
    ours, read = draft.step(rows, Store())
    out = draft.model(text, torch.arange(LENGTH), Store())
    assert torch.equal(ours, out.hidden)
    assert torch.equal(draft.logits(read), draft.model.logits(out.hidden))
    ids = torch.arange(VOCAB)
    assert torch.equal(draft.to_target(ids), ids)


@pytest.mark.parametrize("kind", ["eagle1", "small model"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_map_cuts_the_output_layer_and_keeps_its_order(target, text, kind, packed):
    whole, cut = make(kind, target), make(f"{kind} with a map", target)
    if packed:
        pack_weights(cut.output)
    _, states = whole.step(rows_of(whole, target, text), Store())
    with torch.no_grad():
        for rows in (1, 2, LENGTH - 1):
            logits = cut.logits(states[:rows])
            torch.testing.assert_close(logits, whole.logits(states[:rows])[:, HOT], rtol=1e-5, atol=1e-5)
    best = logits.argmax(-1)
    assert torch.equal(cut.to_target(best), HOT[best])
    assert torch.equal(cut.to_target(best[:, None].expand(-1, 3)), HOT[best][:, None].expand(-1, 3))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_an_entry_depends_on_tokens_up_to_its_slot_only(target, text, kind):
    """What lets two requests share the pages of a common beginning."""
    draft, stores = make(kind, target), (Store(), Store())
    other = text.clone()
    other[9:] = (other[9:] + 1) % VOCAB
    for store, tokens in zip(stores, (text, other), strict=True):
        draft.step(rows_of(draft, target, tokens), store)
    k, changed = (store.k[0] for store in stores)
    shared = 9 - draft.first_position
    torch.testing.assert_close(k[:shared], changed[:shared], rtol=1e-5, atol=1e-6)
    assert (k[shared] - changed[shared]).abs().max() > 1e-2


def save_model(folder, model):
    """A Hugging Face folder of a tied model."""
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names["num_kv_heads"] = "num_key_value_heads"
    config = {names.get(key, key): value for key, value in asdict(model.config).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    tensors, c = {}, model.config
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "qkv_proj" in name:
            kv = c.num_kv_heads * c.head_dim
            pieces = value.split((c.num_heads * c.head_dim, kv, kv))
            parts = {name.replace("qkv", n): p for n, p in zip("qkv", pieces, strict=True)}
        elif "gate_up_proj" in name:
            parts = dict(
                zip((name.replace("gate_up", n) for n in ("gate", "up")), value.chunk(2), strict=True)
            )
        else:
            parts = {name: value}
        tensors |= {f"model.{part}": tensor.clone() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_small_model_is_loaded_from_its_folder(target, text, tmp_path):
    model = tiny_target(vocab_size=VOCAB, num_layers=2, hidden_size=40, seed=5)
    folder = save_model(tmp_path / "small", model)
    loaded = STANDALONE.draft_model(open_draft(folder), target).model
    assert torch.equal(run_target(loaded, text).hidden, run_target(model, text).hidden)
    half = STANDALONE.draft_model(open_draft(folder), tiny_target(vocab_size=VOCAB).bfloat16())
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [VOCAB + 1, VOCAB - 1])
def test_a_model_with_another_number_of_rows_proposes_shared_ids(target, tmp_path, size):
    folder = save_model(tmp_path / "other", tiny_target(vocab_size=size, num_layers=1))
    draft = STANDALONE.draft_model(open_draft(folder), target)
    assert draft.token_map.tolist() == list(range(min(size, VOCAB)))


def test_a_broken_or_missing_model_is_named(target, tmp_path):
    folder = save_model(tmp_path / "small", tiny_target(vocab_size=VOCAB, num_layers=1))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="corrupt or truncated"):
        STANDALONE.draft_model(open_draft(folder), target)


def test_a_chain_keeps_a_second_candidate_only_where_confidences_are_read():
    shapes = [SpecShape(4, 1, 5), SpecShape(2, 1, 3)]
    assert Drafter.candidate_spec(shapes).topk == 1
    assert Drafter.candidate_spec(shapes, needs_confidence=True).topk == 2
