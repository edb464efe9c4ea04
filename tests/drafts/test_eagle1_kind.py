"""Published EAGLE-1/2 folders: every spelling is loaded, every mistake is named."""

import json
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from kinds_of import algorithm_of
from safetensors.torch import save_file
from tiny import randomise, tiny_head, tiny_target

from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.draft_model import HeadDraftModel, StandaloneDraftModel
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.models.targets.llama import LlamaModel

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "hidden_size": 48, "vocab_size": 131,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 97, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def published(fc_bias=True, qkv_bias=False, out_bias=False) -> dict[str, torch.Tensor]:
    """Random tensors by the names of EAGLE's releases."""
    shapes = {
        "fc.weight": (48, 96),
        "layers.0.self_attn.q_proj.weight": (48, 48),
        "layers.0.self_attn.k_proj.weight": (16, 48),
        "layers.0.self_attn.v_proj.weight": (16, 48),
        "layers.0.self_attn.o_proj.weight": (48, 48),
        "layers.0.mlp.gate_proj.weight": (97, 48),
        "layers.0.mlp.up_proj.weight": (97, 48),
        "layers.0.mlp.down_proj.weight": (48, 97),
        "layers.0.post_attention_layernorm.weight": (48,),
    }
    shapes |= {"fc.bias": (48,)} if fc_bias else {}
    shapes |= (
        {f"layers.0.self_attn.{n}_proj.bias": (r,) for n, r in zip("qkv", (48, 16, 16), strict=True)}
        if (qkv_bias)
        else {}
    )
    shapes |= {"layers.0.self_attn.o_proj.bias": (48,)} if out_bias else {}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def save(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def by_hand(tensors) -> dict[str, torch.Tensor]:
    """What the loaded head's state must be: q, k, v and gate, up on top of each other, in this order."""
    layer = {name.removeprefix("layers.0."): value.float() for name, value in tensors.items()}
    for leaf in ("weight", "bias"):
        if f"self_attn.q_proj.{leaf}" in layer:
            parts = [layer.pop(f"self_attn.{n}_proj.{leaf}") for n in "qkv"]
            layer[f"self_attn.qkv_proj.{leaf}"] = torch.cat(parts)
    parts = [layer.pop(f"mlp.{n}_proj.weight") for n in ("gate", "up")]
    return layer | {"mlp.gate_up_proj.weight": torch.cat(parts)}


def assert_loaded(folder, target, tensors) -> Eagle1Head:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = load_draft(folder, target=target)
    state, wanted = head.state_dict(), by_hand(tensors)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name
    assert head.training and all(p.requires_grad for p in head.parameters())
    return head


@pytest.mark.parametrize(
    "biases",
    [{}, {"fc_bias": False}, {"qkv_bias": True}, {"fc_bias": False, "qkv_bias": True, "out_bias": True}],
    ids=["fc", "none", "qwen2", "attention"],
)
def test_the_tensors_decide_which_biases_there_are(target, tmp_path, biases):
    tensors = published(**biases)
    head = assert_loaded(save(tmp_path / "d", tensors), target, tensors)
    assert head.config.fc_bias == biases.get("fc_bias", True)
    assert head.config.attention_bias == biases.get("qkv_bias", False)


def test_old_and_new_spellings_are_loaded(target, tmp_path):
    tensors = published()
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert_loaded(save(tmp_path / "prefixed", prefixed), target, tensors)
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    assert_loaded(save(tmp_path / "halves", halves), target, halves)
    old = tmp_path / "bin"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(tensors | frequencies, old / "pytorch_model.bin")
    assert algorithm_of(old) == "EAGLE"
    assert_loaded(old, target, tensors)


def test_sizes_and_rope_of_the_config_are_taken(target, tmp_path):
    folder = save(tmp_path / "d", published(), rope_theta=500000.0, rms_norm_eps=1e-3)
    config = load_draft(folder, target=target).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert (config.rope_theta, config.rms_norm_eps, config.intermediate_size) == (500000.0, 1e-3, 97)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_of_the_targets_matrices_is_left_out_without_a_word(target, tmp_path, kind):
    """Releases bring the embedding in half precision; rounding is no difference."""
    tensors = published()
    copies = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.head_weight}
    copies = {name: tensor.detach().clone().to(kind) for name, tensor in copies.items()}
    assert_loaded(save(tmp_path / "d", tensors | copies), target, tensors)


def test_an_output_layer_of_another_target_is_reported(target, tmp_path):
    other = target.head_weight.detach().clone()
    other[130, 47] += 0.1
    folder = save(tmp_path / "d", published() | {"lm_head.weight": other})
    with pytest.warns(UserWarning, match="lm_head.weight in .* is not the target's"):
        load_draft(folder, target=target)


def test_an_embedding_that_is_not_the_targets_is_the_heads_own(target, tmp_path):
    other = target.embed_tokens.weight.detach().clone()
    head = load_draft(save(tmp_path / "a", published() | {"embed_tokens.weight": other}), target=target)
    assert head.embed_tokens is None
    other[130, 47] += 0.1
    head = load_draft(save(tmp_path / "b", published() | {"embed_tokens.weight": other}), target=target)
    assert head.config.own_embedding and torch.equal(head.embed_tokens.weight, other)
    assert torch.equal(head.embedding(target.embed_tokens.weight), other)


def test_a_cut_output_layer_is_reported_and_a_cut_embedding_refused(target, tmp_path):
    with pytest.warns(UserWarning, match="lm_head.weight"):
        load_draft(
            save(tmp_path / "head", published() | {"lm_head.weight": torch.zeros(60, 48)}), target=target
        )
    folder = save(tmp_path / "embedding", published() | {"embed_tokens.weight": torch.zeros(60, 48)})
    with pytest.raises(UserError, match=r"embed_tokens.weight has shape \[60, 48\]"):
        load_draft(folder, target=target)


def second_layer():
    return {
        name.replace("layers.0.", "layers.1."): tensor
        for name, tensor in published().items()
        if name.startswith("layers.0.")
    }


def without(name):
    return {key: tensor for key, tensor in published().items() if name not in key}


MISTAKES = {
    "another hidden size": ({"hidden_size": 40}, published, "do not fit their config"),
    "another vocabulary": ({"vocab_size": 130}, published, "vocabulary 130, the target has 48 and 131"),
    "two layers": ({}, lambda: published() | second_layer(), "has 2 decoder layers"),
    "another activation": ({"hidden_act": "gelu"}, published, "gelu"),
    "no heads": ({"num_attention_heads": 0}, published, "says num_attention_heads 0"),
    "a size in words": ({"vocab_size": "131"}, published, "says vocab_size '131'"),
    "a size that is absent": ({"intermediate_size": None}, published, "has no 'intermediate_size'"),
    "heads that do not divide": ({"num_key_value_heads": 4}, published, "shares 4 key-value heads among 6"),
    "a promised bias": ({"bias": True}, lambda: without("fc.bias"), "says bias, but fc.bias is missing"),
    "promised biases": ({"qkv_bias": True}, published, "says qkv_bias, but layers.0.self_attn.q_proj.bias"),
    "half the biases": (
        {}, lambda: without("fc.bias") | {"layers.0.self_attn.q_proj.bias": torch.zeros(48)},
        "k_proj.bias is missing",
    ),
    "a missing tensor": ({}, lambda: without("down_proj"), "layers.0.mlp.down_proj.weight is missing"),
    "a norm too many": (
        {}, lambda: published() | {"layers.0.input_layernorm.weight": torch.ones(48)},
        "layers.0.input_layernorm.weight is unexpected",
    ),
    "whole numbers": (
        {}, lambda: without("fc.weight") | {"fc.weight": torch.ones(48, 96, dtype=torch.int64)},
        "fc.weight holds int64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(target, tmp_path, mistake):
    config, tensors, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        load_draft(save(tmp_path / "d", tensors(), **config), target=target)


def test_a_head_of_another_hidden_size_is_refused(target, tmp_path):
    """The folder is whole and fits its own config, only not this target."""
    other = tiny_target(hidden_size=40, num_heads=5, num_kv_heads=1)
    with pytest.raises(UserError, match="hidden size 48 and vocabulary 131, the target has 40 and 131"):
        load_draft(save(tmp_path / "d", published()), target=other)


def test_broken_files_are_named(target, tmp_path):
    folder = save(tmp_path / "d", published())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model.safetensors is corrupt or truncated"):
        load_draft(folder, target=target)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(UserError, match="pytorch_model.bin is corrupt or truncated"):
        load_draft(folder, target=target)
    torch.save([torch.ones(3)], folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin is not a table of tensors"):
        load_draft(folder, target=target)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="is missing"):
        load_draft(folder, target=target)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_draft(folder, target=target)
    with pytest.raises(UserError, match="neither a folder here"):
        load_draft(tmp_path / "nothing", target=target)


def test_the_algorithm_of_a_folder_is_known(target, tmp_path):
    assert algorithm_of(save(tmp_path / "eagle", published())) == "EAGLE"
    plain = save(tmp_path / "plain", published(), architectures=["LlamaForCausalLM"])
    assert algorithm_of(plain) == "EAGLE"
    whole = save(tmp_path / "whole", without("fc."), architectures=["LlamaForCausalLM"])
    assert algorithm_of(whole) == "STANDALONE"
    save_draft(tiny_head(target), tmp_path / "eagle3", metadata={})
    assert algorithm_of(tmp_path / "eagle3") == "EAGLE3"


@pytest.fixture
def target_folder(target, tmp_path):
    """A target's folder without weights: a check reads none."""
    config = asdict(target.config)
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names["num_kv_heads"] = "num_key_value_heads"
    config = {names.get(key, key): value for key, value in config.items()}
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    return folder


def levels(findings) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


def test_a_head_that_fits_passes(tmp_path, target_folder):
    findings = validate_draft(save(tmp_path / "d", published()), target_folder)
    subjects = {"layout", "hidden size", "vocabulary", "context", "rope", "weights"}
    unsaid = dict.fromkeys(("chat template", "target"), "warning")
    assert levels(findings) == dict.fromkeys(subjects, "ok") | unsaid
    brought = published() | {"embed_tokens.weight": torch.zeros(131, 48)}
    findings = validate_draft(save(tmp_path / "copy", brought, rope_theta=5e5), target_folder)
    causes = {finding.subject: finding.cause for finding in findings}
    assert "It brings embed_tokens.weight" in causes["weights"]
    assert causes["rope"] == "base 500000, other than the target's."


def test_what_does_not_fit_is_found(tmp_path, target_folder):
    target_config = json.loads((target_folder / "config.json").read_text())
    target_config |= {"hidden_size": 60, "vocab_size": 140, "max_position_embeddings": 4096}
    (target_folder / "config.json").write_text(json.dumps(target_config))
    found = levels(validate_draft(save(tmp_path / "d", published()), target_folder))
    assert (found["hidden size"], found["vocabulary"], found["context"]) == ("error", "error", "warning")
    silent = save(tmp_path / "silent", published(), max_position_embeddings=None)
    causes = [finding.cause for finding in validate_draft(silent, target_folder)]
    assert "the draft does not say how many positions it knows, the target 4096." in causes


def test_an_unreadable_draft_is_a_finding_and_an_unknown_target_an_error(tmp_path, target_folder):
    broken = save(tmp_path / "broken", without("fc.weight"))
    (finding,) = (f for f in validate_draft(broken, target_folder) if f.level == "error")
    assert finding.subject == "weights"
    assert "fc.weight is missing" in finding.cause and finding.remedy
    (finding,) = validate_draft(tmp_path / "nothing", target_folder)
    assert "neither a folder here" in finding.cause
    with pytest.raises(UserError, match="neither a folder"):
        validate_draft(broken, tmp_path / "no target")


def test_a_head_of_ours_survives_the_published_names(target, tmp_path):
    """Cut into published tensors and loaded again, a head gives the same numbers."""
    keys = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    sizes = {key: CONFIG[key] for key in keys}
    config = Eagle1Config(num_heads=6, num_kv_heads=2, head_dim=8, rope_theta=1e4, rope_scaling=None, **sizes)
    head = randomise(Eagle1Head(config), 5, 0.2).eval().requires_grad_(False)
    state = dict(head.state_dict())
    q, k, v = state.pop("self_attn.qkv_proj.weight").split((48, 16, 16))
    gate, up = state.pop("mlp.gate_up_proj.weight").chunk(2)
    state |= {f"self_attn.{n}_proj.weight": t for n, t in zip("qkv", (q, k, v), strict=True)}
    state |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    names = {name: name if name.startswith("fc.") else f"layers.0.{name}" for name in state}
    folder = save(tmp_path / "d", {names[name]: tensor.clone() for name, tensor in state.items()})
    loaded = load_draft(folder, target=target)
    assert loaded.config == config
    hidden, embeds = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1)).unbind()
    with torch.no_grad():
        outs = [m(hidden, embeds, torch.arange(7), lambda layer, q, k, v: q) for m in (head, loaded)]
    assert torch.equal(*outs)


def test_a_factor_of_the_targets_logits_is_the_heads_too(tmp_path):
    """vLLM reads it from the draft's config."""
    scaled = replace(tiny_target().config, logit_scale=0.25)
    target = LlamaModel(scaled).eval()
    config = EAGLE1.new_config(Eagle1HeadConfig(intermediate_size=97), scaled)
    head = randomise(Eagle1Head(config), 3, 0.2).bind(target.lm_head)
    states = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    read = head.norm_for_lm_head(states)  # as a step returns them
    for drafted, given in (
        (head, states),
        (HeadDraftModel(head, target), read),
        (StandaloneDraftModel(target), states),
    ):
        torch.testing.assert_close(drafted.logits(given), target.logits(states))
        if drafted is not head:  # for kernels that multiply and rank at once
            last = drafted.lm_head_operands(given)
            torch.testing.assert_close(last.x @ last.weight.T, target.logits(states))
    save_draft(head, tmp_path / "draft", metadata={})
    assert json.loads((tmp_path / "draft/config.json").read_text())["logit_scale"] == 0.25
    assert load_draft(tmp_path / "draft").config.logit_scale == 0.25
