"""EAGLE-1 heads and whole small models as drafts: forwards restated, slots of the store, token maps."""

import json

import pytest
import torch
from kinds_of import algorithm_of
from safetensors.torch import save_file
from tiny import randomise, tiny_target
from tiny_engine import PROMPTS, record_proposals, resolved, serve

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel, StandaloneDraftModel
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle1.static_tree import StaticDrafter
from eagle_kit.drafts.files.token_map import load_token_map
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.request import Request


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=11)


def eagle1(target, **changes) -> Eagle1Head:
    config = target.config
    sizes = {
        "hidden_size": config.hidden_size,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 96,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    return randomise(Eagle1Head(Eagle1Config(**{**sizes, **changes})), 3, 0.2).eval().requires_grad_(False)


def decode(target, draft, shape, batch=1, **options) -> list[Request]:
    engine = Engine(target, draft, resolved(batch, 256, kv_tokens=batch * 400, page_size=4, **options))
    engine.use_shape(SpecShape.parse(shape))
    requests = [Request(i, list(p), SamplingParams(max_tokens=40)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    return requests


def restated_layer(head: Eagle1Head, hidden, embeds) -> torch.Tensor:
    """The published forward over a whole sequence, written without any of our layers."""
    state = head.state_dict()
    x = torch.cat((embeds, hidden), -1) @ state["fc.weight"].T + state["fc.bias"]
    t, (hq, hkv, d) = len(x), (6, 2, 8)
    qkv = x @ state["self_attn.qkv_proj.weight"].T
    q, k, v = (part.view(t, -1, d) for part in qkv.split((hq * d, hkv * d, hkv * d), -1))
    angle = torch.arange(t)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    cos, sin = (f(torch.cat((angle, angle), -1))[:, None] for f in (torch.cos, torch.sin))

    def rotated(y):
        return y * cos + torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1) * sin

    q, k = rotated(q), rotated(k).repeat_interleave(3, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(3, 1)).flatten(1)
    h = x + out @ state["self_attn.o_proj.weight"].T
    normed = (
        h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * state["post_attention_layernorm.weight"]
    )
    gate, up = (normed @ state["mlp.gate_up_proj.weight"].T).chunk(2, -1)
    return h + (torch.nn.functional.silu(gate) * up) @ state["mlp.down_proj.weight"].T


@torch.no_grad()
def test_a_proposed_eagle1_chain_is_that_of_the_published_forward(target):
    """After every verify the draft is computed anew, over the whole text, and must be the engine's."""
    head = eagle1(target)
    engine = Engine(target, HeadDraftModel(head, target), resolved(1, 128, kv_tokens=300, page_size=4))
    engine.use_shape(SpecShape(4, 1, 5))
    proposals = record_proposals(engine)
    request = Request(0, list(PROMPTS[1]), SamplingParams(max_tokens=30))
    serve(engine, [request])
    text = torch.tensor(request.prompt_ids + request.token_ids)
    from eagle_kit.ops.attention.prefill import prefill_attention

    scale = 8**-0.5
    out = target(text, torch.arange(len(text)), lambda layer, q, k, v: prefill_attention(q, k, v, scale))
    assert len(proposals) > 5
    for length, draft in proposals:
        hidden, tokens = out.hidden[:length], text[1 : length + 1]
        drafted = []
        for _ in range(4):
            states = restated_layer(head, hidden, target.embed(tokens))
            drafted.append(int(target.logits(states[-1:]).argmax()))
            hidden, tokens = torch.cat((hidden, states[-1:])), torch.cat((tokens, torch.tensor(drafted[-1:])))
        assert draft.tree.tokens[0, 1:].tolist() == drafted


@torch.no_grad()
@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["eagle1", "small model"])
def test_every_node_of_a_tree_is_that_of_the_published_forward(target, kind, tree):
    """The children of every inner node are the most likely tokens behind its own path."""
    # An engine that drafts trees.
    head = eagle1(target)
    small = tiny_target(vocab_size=11, num_layers=2, seed=5)
    draft = HeadDraftModel(head, target) if kind == "eagle1" else StandaloneDraftModel(small)
    engine = Engine(target, draft, resolved(1, 128, kv_tokens=300, page_size=4, tree=tree))
    topology = StaticDrafter.topology
    engine.use_shape(topology.shape if tree == "static" else SpecShape(4, 2, 12))
    proposals = record_proposals(engine)
    request = Request(0, list(PROMPTS[1]), SamplingParams(max_tokens=20))
    serve(engine, [request])
    text = torch.tensor(request.prompt_ids + request.token_ids)
    states = target(text, torch.arange(len(text)), target.causal()).hidden

    # The draft's forward, and its tree node by node.
    def following(hidden, tokens):
        """State and ranked tokens behind the last one."""
        if kind == "eagle1":
            out = restated_layer(head, hidden, target.embed(tokens))
            return out[-1:], target.logits(out[-1:])[0].argsort(descending=True)
        tokens = torch.cat((text[:1], tokens))
        out = small(tokens, torch.arange(len(tokens)), small.causal()).hidden
        return states[:1], small.logits(out[-1:])[0].argsort(descending=True)

    for length, draft in proposals:
        drafted = draft.tree.tokens[0]
        parents = draft.tree.parents[0].tolist()
        behind = {0: (states[:length], text[1 : length + 1])}
        for node in range(len(parents)):
            if node:
                hidden, tokens = behind[parents[node]]
                behind[node] = hidden, torch.cat((tokens, drafted[node : node + 1]))
            children = [child for child in range(1, len(parents)) if parents[child] == node]
            if not children:
                continue
            hidden, tokens = behind[node]
            state, ranked = following(hidden, tokens)
            if tree == "static":
                assert children == topology.children(node)
                ranks = [topology.ranks[child] for child in children]
                assert drafted[children].tolist() == ranked[ranks].tolist()
            else:
                assert sorted(drafted[children].tolist()) == sorted(ranked[: len(children)].tolist())
            behind[node] = torch.cat((hidden, state)), tokens
    assert len(proposals) > 2


@pytest.fixture(scope="module")
def plain(target):
    """Responses of plain decoding."""
    return [r.token_ids for r in decode(target, None, None)]


@pytest.mark.parametrize(("kind", "shape"), [("eagle1", "5,4,16"), ("small model", "3,1,4")])
def test_a_token_map_changes_no_text(target, plain, kind, shape):
    hot = torch.tensor([4, 2, 9, 0, 7])
    if kind == "eagle1":
        draft = HeadDraftModel(eagle1(target), target, hot)
    else:
        draft = StandaloneDraftModel(tiny_target(vocab_size=11, num_layers=2, seed=5), hot)
    drafted = decode(target, draft, shape, batch=3, prefill_tokens=7)
    assert [r.token_ids for r in drafted] == plain
    assert sum(r.stats.spec.num_emitted_tokens - r.stats.spec.num_verifies for r in drafted) > 0


@pytest.mark.parametrize("shape", ["1,1,2", "4,1,5", "7,1,8"])
def test_a_draft_that_is_the_target_is_always_right(target, shape):
    """Every position and slot of a whole model's store must be right for this."""
    steps = SpecShape.parse(shape).steps
    for request in decode(target, StandaloneDraftModel(target), shape, batch=2, prefill_tokens=5):
        full = (len(request.token_ids) - 1) // (steps + 1)
        assert request.stats.spec.histogram[-1] >= full and request.stats.spec.num_verifies <= full + 1


def of_size(target, vocab_size):
    """The target with another number of rows; those that it lacks make the largest logits."""
    model = tiny_target(vocab_size=vocab_size)
    state = target.state_dict()
    for name, value in model.state_dict().items():
        if value.shape == state[name].shape:
            value.copy_(state[name])
        else:
            shared = min(len(value), len(state[name]))
            value[:shared] = state[name][:shared]
            value[shared:] = 50.0
    return model


@pytest.mark.parametrize("vocab_size", [8, 14])
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ("4,1,5", {}),
        ("3,3,8", {"temperature": 1.0, "seed": 1}),
        ("4,1,5", {"temperature": 1.0, "seed": 1, "sampled_drafts": True}),
    ],
    ids=str,
)
def test_a_draft_with_another_number_of_rows_proposes_what_both_have(target, vocab_size, shape, params):
    """Tokens of the target that the draft lacks are emitted, and read by it."""
    options = {"sampled_drafts": True} if "sampled_drafts" in params else {}
    sampling = {name: value for name, value in params.items() if name != "sampled_drafts"}

    def responses(draft, shape):
        sizes = resolved(2, 256, kv_tokens=800, page_size=4, **options)
        engine = Engine(target, draft, sizes)
        engine.use_shape(SpecShape.parse(shape))
        given = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
        requests = [Request(i, list(prompt), given) for i, prompt in enumerate(PROMPTS)]
        serve(engine, requests)
        return requests

    draft = StandaloneDraftModel(of_size(target, vocab_size), None, target.config.vocab_size)
    drafted = responses(draft, shape)
    if not options:  # sampled drafts keep the distribution and not the text
        assert [r.token_ids for r in drafted] == [r.token_ids for r in responses(None, None)]
    assert draft.draft_vocab_size == min(vocab_size, 11)
    if vocab_size > 11 and not params:
        own = responses(StandaloneDraftModel(target), shape)
        assert [r.stats.spec.histogram for r in drafted] == [r.stats.spec.histogram for r in own]
    if vocab_size < 11:
        emitted = {token for r in drafted for token in r.token_ids} | {t for p in PROMPTS for t in p}
        assert max(emitted) >= vocab_size
    assert sum(r.stats.spec.num_emitted_tokens - r.stats.spec.num_verifies for r in drafted) > 0


def test_a_token_map_of_a_smaller_draft_keeps_the_ids_that_it_has(target):
    small = of_size(target, 8)
    assert StandaloneDraftModel(small, torch.tensor([9, 3, 7]), 11).token_map.tolist() == [3, 7]
    with pytest.raises(UserError, match="names no token"):
        StandaloneDraftModel(small, torch.tensor([9, 10]), 11)


def save(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def published(head: Eagle1Head) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in head.state_dict().items() if "rope" not in name}
    q, k, v = state.pop("self_attn.qkv_proj.weight").split((48, 16, 16))
    gate, up = state.pop("mlp.gate_up_proj.weight").chunk(2)
    parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
    parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up}
    state |= {f"{name}.weight": tensor.clone() for name, tensor in parts.items()}
    return {name if name.startswith("fc") else f"layers.0.{name}": tensor for name, tensor in state.items()}


CONFIG = {
    "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "hidden_size": 48, "vocab_size": 11,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", "LlamaForCausalLM"])
def test_a_published_eagle1_head_is_known_and_loaded(target, tmp_path, architecture):
    head = eagle1(target)
    folder = save(tmp_path / "draft", CONFIG | {"architectures": [architecture]}, published(head))
    assert algorithm_of(folder) == "EAGLE"
    draft = load_draft_model(folder, target)
    assert isinstance(draft, HeadDraftModel)
    for name, tensor in head.state_dict().items():
        assert torch.equal(draft.head.state_dict()[name], tensor)


def test_drafts_that_do_not_fit_are_refused_by_name(target, tmp_path):
    tensors = published(eagle1(target))
    short = {name: t for name, t in tensors.items() if "down_proj" not in name}
    with pytest.raises(UserError, match=r"mlp\.down_proj\.weight is missing"):
        load_draft_model(save(tmp_path / "short", CONFIG, short), target)
    with pytest.raises(UserError, match="vocabulary 13"):
        load_draft_model(save(tmp_path / "other", CONFIG | {"vocab_size": 13}, tensors), target)
    with pytest.raises(UserError, match="is for the algorithm EAGLE, and EAGLE3"):
        load_draft_model(save(tmp_path / "kind", CONFIG, tensors), target, algorithm="EAGLE3")
    with pytest.raises(UserError, match="neither a folder here"):
        load_draft_model(tmp_path / "nothing", target)


def test_a_token_map_is_read_and_checked(tmp_path):
    torch.save([5, 3, 1], tmp_path / "list.pt")
    torch.save(torch.tensor([5, 3, 1]), tmp_path / "tensor.pt")
    (tmp_path / "list.json").write_text("[5, 3, 1]")
    for name in ("list.pt", "tensor.pt", "list.json"):
        assert load_token_map(tmp_path / name, 6).tolist() == [5, 3, 1]
    with pytest.raises(UserError, match="has the id 5"):
        load_token_map(tmp_path / "list.pt", 5)
    for text, cause in (("[1, 1]", "1 twice"), ("[]", "not a list"), ("[true]", "not a list"), ("{", "read")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=cause):
            load_token_map(tmp_path / "bad.json", 6)
