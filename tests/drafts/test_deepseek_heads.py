"""Folders of heads for DeepSeek: published names and forwards, MTP modules wherever they lie, and what is
wrong with them by name."""

import json
import shutil
import warnings

import pytest
import torch
from kinds_of import algorithm_of
from safetensors.torch import load_file, save_file
from tiny import randomise
from tiny_mixtures import YARN, run, v3
from tiny_mtp import load_modules, save_target
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.drafts.mtp.kind import MTP
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.models.loading.loader import load_target
from eagle_kit.ops.attention.prefill import prefill_attention

ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A target's folder, and its module."""
    folder = tmp_path_factory.mktemp("one") / "target"
    return folder, save_target(folder, vocab_size=131, rope_parameters=ROPE)[0]


def forward(head, target, ids, module: int = 0) -> torch.Tensor:
    """The first step over a text."""
    states, scale = run(target, ids).hidden[:-1], head.config.attention_scale
    positions = torch.arange(len(ids) - 1)

    def attend(layer, q, k, v):
        return prefill_attention(q, k, v, scale)

    return head(states, target.embed(ids[1:]), positions, attend, module)


def edit(folder, out, tensors=lambda t: t, **config):
    """A copy of a folder with its tensors and its config changed."""
    shutil.copytree(folder, out)
    save_file(tensors(load_file(out / "model.safetensors")), out / "model.safetensors")
    raw = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(raw))
    return out


@pytest.mark.parametrize("bottleneck", [28, None])
@torch.no_grad()
def test_an_eagle3_head_with_latent_attention_has_the_published_names_and_forward(tmp_path, bottleneck):
    """Attention by transformers, from the tensors in the file."""
    config = v3(vocab_size=131, rope_parameters=ROPE, q_lora_rank=bottleneck)
    save_target(tmp_path / "t", vocab_size=131, rope_parameters=ROPE, q_lora_rank=bottleneck)
    target = load_target(tmp_path / "t")
    head = randomise(Eagle3Head(Eagle3Config.for_target(target.config, 67, latent=True)), 1, 0.2)
    save_draft(head, tmp_path / "draft", metadata={})
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert raw["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and raw["kv_lora_rank"] == 36
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    attention = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    attention |= {"q_a_proj", "q_a_layernorm", "q_b_proj"} if bottleneck else {"q_proj"}
    rest = {"fc", "norm", "lm_head", "midlayer.hidden_norm", "midlayer.input_layernorm"}
    rest |= {"midlayer.post_attention_layernorm", *(f"midlayer.mlp.{n}_proj" for n in ("gate", "up", "down"))}
    names = {f"{name}.weight" for name in rest | {f"midlayer.self_attn.{name}" for name in attention}}
    assert tensors.keys() == names | {"d2t", "t2d"}
    loaded = load_draft(tmp_path / "draft").eval()
    assert loaded.config == head.config and EAGLE3.read_config(open_draft(tmp_path / "draft")) == head.config

    w = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    inner = DeepseekV3Attention(config, 0)
    for name in ("q_a_proj", "q_proj", "kv_a_proj_with_mqa"):
        if (weight := w.get(f"self_attn.{name}.weight")) is not None:
            setattr(inner, name, torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    inner.load_state_dict(
        {n.removeprefix("self_attn."): t for n, t in w.items() if n.startswith("self_attn.")}
    )

    def rms(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + raw["rms_norm_eps"]).rsqrt() * w[f"{name}.weight"]

    t = 13
    aux, embeds = torch.randn(t, 144), torch.randn(t, 48)
    fused, where = aux @ w["fc.weight"].T, torch.arange(t)[None]
    x = torch.cat((rms(embeds, "input_layernorm"), rms(fused, "hidden_norm")), -1)[None]
    mask = torch.full((t, t), float("-inf")).triu(1)[None, None]
    out = inner(x, DeepseekV3RotaryEmbedding(config)(x, where), mask, position_ids=where)[0][0]
    h = fused + out
    y = rms(h, "post_attention_layernorm")
    gate = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
    h = h + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    scale = head.config.attention_scale
    ours = loaded(
        loaded.fuse(aux), embeds, where[0], lambda layer, q, k, v: prefill_attention(q, k, v, scale)
    )
    torch.testing.assert_close(ours, h, rtol=1e-4, atol=1e-4)
    logits = rms(h, "norm") @ w["lm_head.weight"].T
    torch.testing.assert_close(loaded.logits(ours), logits, rtol=1e-4, atol=1e-4)
    renamed = edit(
        tmp_path / "draft",
        tmp_path / "vllm",
        lambda found: {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()},
    )
    again = load_draft(renamed)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), head.parameters(), strict=True))
    assert not [f for f in validate_draft(renamed, tmp_path / "t") if f.level == "error"]


@pytest.mark.parametrize("changes", [{}, {"modules": 3}, {"n_routed_experts": None}, {"copies": False}])
@torch.no_grad()
def test_modules_in_a_targets_folder_are_the_published_ones(tmp_path, changes):
    published = save_target(tmp_path / "t", vocab_size=131, rope_parameters=ROPE, **changes)
    target = load_target(tmp_path / "t")
    head = load_modules(tmp_path / "t", target=target)
    ids = torch.randint(131, (17,), generator=torch.Generator().manual_seed(1))
    states, embeds = run(target, ids).hidden[:-1], target.embed(ids[1:])
    assert not head.config.own_head and head.config.num_modules == len(published)
    for i, module in enumerate(published):
        want = module(states, embeds)
        torch.testing.assert_close(forward(head, target, ids, i), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head.logits(want), target.logits(want))


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_modules_load_as_they_were(tmp_path, modules, dtype):
    save_target(tmp_path / "t", vocab_size=131, modules=modules, rope_parameters=ROPE)
    target = load_target(tmp_path / "t")
    head = load_modules(tmp_path / "t", dtype, target=target)
    save_draft(head, tmp_path / "draft", metadata={"a": 1}, dtype=dtype)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert {name.split(".")[2] for name in tensors} == {str(i) for i in range(modules)}
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in tensors)
    assert tensors["model.layers.0.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    loaded = load_draft(tmp_path / "draft", dtype, target=target)
    for (name, a), (other, b) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b)
    ours, theirs = loaded.config.layer, head.config.layer
    same = ("mla", "moe", "rope_theta", "rope_scaling", "hidden_size", "num_heads", "intermediate_size")
    for field in (*same, "rms_norm_eps", "attention_bias", "max_position_embeddings", "vocab_size"):
        a, b = getattr(ours, field), getattr(theirs, field)
        if field == "moe":  # which of the target's layers are dense is not the module's business
            a, b = ({**vars(moe), "dense_layers": ()} for moe in (a, b))
        assert a == b, field
    assert algorithm_of(tmp_path / "draft") == "NEXTN"
    levels = {f.subject: f.level for f in validate_draft(tmp_path / "draft", tmp_path / "t")}
    assert levels["weights"] == levels["hidden size"] == levels["rope"] == levels["context"] == "ok"


@torch.no_grad()
def test_a_folder_of_its_own_may_keep_the_targets_numbers(one, tmp_path):
    """As the exporting script of SGLang writes it, and the release for SGLang, which counts from 0."""
    folder, _ = one
    target = load_target(folder)
    module = {"architectures": ["DeepseekV3ForCausalLMNextN"]}

    def only(tensors):
        return {name: t for name, t in tensors.items() if name.startswith("model.layers.4.")}

    def from_zero(tensors):
        return {name.replace("layers.4.", "layers.0."): t for name, t in only(tensors).items()}

    kept = edit(folder, tmp_path / "kept", only, **module)
    moved = edit(folder, tmp_path / "moved", from_zero, **module, num_hidden_layers=1)
    ids = torch.arange(11)
    want = forward(load_modules(folder, target=target), target, ids)
    for place in (kept, moved):
        draft = load_draft_model(place, target, algorithm="EAGLE")
        assert isinstance(draft, HeadDraftModel)
        torch.testing.assert_close(forward(draft.head, target, ids), want)


@torch.no_grad()
def test_weights_in_blocks_of_fp8_are_multiplied_out(one, tmp_path):
    folder, _ = one
    block = 16

    def quantised(tensors):
        out = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "layers.4." in name and "proj" in name and "eh_proj" not in name:
                rows, columns = (-(-size // block) for size in tensor.shape)
                scale = torch.rand(rows, columns) * 0.01 + 0.001
                grown = scale.repeat_interleave(block, 0)[: tensor.shape[0]]
                grown = grown.repeat_interleave(block, 1)[:, : tensor.shape[1]]
                out[name] = (tensor / grown).clamp(-448, 448).to(torch.float8_e4m3fn)
                out[f"{name}_scale_inv"] = scale
            else:
                out[name] = tensor
        return out

    quantisation = {"quant_method": "fp8", "weight_block_size": [block, block]}
    small = edit(folder, tmp_path / "fp8", quantised, quantization_config=quantisation)
    exact, rounded = load_modules(folder), load_modules(small)
    stored = load_file(small / "model.safetensors")
    name = "model.layers.4.self_attn.o_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(block, 0)[:48].repeat_interleave(block, 1)[:, :60]
    assert torch.equal(rounded.layers[0].self_attn.o_proj.weight, stored[name].float() * scale)
    assert torch.equal(rounded.layers[0].eh_proj.weight, exact.layers[0].eh_proj.weight)


@torch.no_grad()
def test_an_output_layer_of_its_own_is_used_and_kept(one, tmp_path):
    folder, _ = one
    name = "model.layers.4.shared_head.head.weight"
    own = torch.randn(131, 48)
    other = edit(folder, tmp_path / "own", lambda tensors: {**tensors, name: own.clone()})
    target = load_target(folder)
    head = load_modules(other, target=target)
    assert head.config.own_head and torch.equal(head.output.weight, own)
    save_draft(head, tmp_path / "draft", metadata={})
    loaded = load_draft(tmp_path / "draft", target=target)
    assert torch.equal(loaded.output.weight, own) and not load_modules(folder, target=target).config.own_head
    broken = edit(
        tmp_path / "draft",
        tmp_path / "broken",
        lambda tensors: {n: t for n, t in tensors.items() if "shared_head.head" not in n},
    )
    with pytest.raises(UserError, match=r"shared_head\.head\.weight is missing"):
        load_draft(broken, target=target)


def test_a_foreign_embedding_is_reported(one, tmp_path):
    folder, _ = one
    name = "model.layers.4.embed_tokens.weight"
    other = edit(folder, tmp_path / "other", lambda tensors: {**tensors, name: torch.randn(131, 48)})
    target = load_target(folder)
    with pytest.warns(UserWarning, match="trained for other weights"):
        load_modules(other, target=target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_modules(folder, target=target)


def test_modules_that_do_not_share_a_matrix_are_refused(tmp_path):
    save_target(tmp_path / "two", vocab_size=131, modules=2, rope_parameters=ROPE)
    name = "model.layers.5.embed_tokens.weight"
    other = edit(tmp_path / "two", tmp_path / "other", lambda found: {**found, name: torch.randn(131, 48)})
    with pytest.raises(UserError, match="do not share one embed_tokens.weight"):
        load_modules(other, target=load_target(tmp_path / "two"))


def test_what_is_wrong_is_named(one, tmp_path):
    folder, _ = one
    target = load_target(folder)
    gone = edit(
        folder,
        tmp_path / "gone",
        lambda tensors: {n: t for n, t in tensors.items() if "layers.4.eh_proj" not in n},
    )
    with pytest.raises(UserError, match=r"layers\.0\.eh_proj\.weight is missing"):
        load_modules(gone, target=target)
    without = edit(folder, tmp_path / "without", num_nextn_predict_layers=0)
    with pytest.raises(UserError, match="no MTP module"):
        load_draft_model(without, target, algorithm="NEXTN")
    with pytest.raises(UserError, match="does not exist"):
        MTP.read_config(open_draft(tmp_path / "nowhere"))
    save_draft(load_modules(folder, target=target), tmp_path / "draft", metadata={})
    save_target(tmp_path / "larger", vocab_size=137)
    with pytest.raises(UserError, match="vocabulary 131"):
        load_draft_model(tmp_path / "draft", load_target(tmp_path / "larger"))
    findings = {f.subject: f for f in validate_draft(tmp_path / "draft", tmp_path / "larger")}
    assert findings["vocabulary"].level == "error" and findings["hidden size"].level == "ok"
    with pytest.raises(UserError, match="is for the algorithm NEXTN, and EAGLE3"):
        load_draft_model(tmp_path / "draft", target, algorithm="EAGLE3")
