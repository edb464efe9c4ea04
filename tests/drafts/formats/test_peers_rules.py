"""Exports held to what the peers' loaders want, key by key, and to the published forward by logits.

The rules were read from the sources of SGLang 0.5.23 (``models/llama_eagle3.py``, ``kimi_k25_eagle3.py``,
``llama_eagle.py``, ``deepseek_nextn.py``), vLLM 0.32.0 (``model_executor/models/llama_eagle3.py``,
``deepseek_eagle3.py``, ``llama_eagle.py``, ``deepseek_mtp.py``) and EAGLE (``model/cnets.py``). Parameters
that are missing in a file stay random there, and tensors without a parameter are dropped (SGLang) or stop the
start (vLLM): so both sets have to be equal.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from published_eagle3 import PublishedEagle3
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_target

from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.ops.attention.prefill import prefill_attention

spec = importlib.util.spec_from_file_location("round_trips", Path(__file__).with_name("test_round_trips.py"))
assert spec is not None and spec.loader is not None
sys.modules["round_trips"] = round_trips = importlib.util.module_from_spec(spec)
spec.loader.exec_module(round_trips)
eagle1, eagle3, latent, modules, saved = (
    getattr(round_trips, name) for name in ("eagle1", "eagle3", "latent", "modules", "saved")
)


def exported(folder: Path, head, peer: str) -> tuple[dict, dict[str, torch.Tensor]]:
    export_draft(saved(folder, head), folder / peer, format=peer, dtype=None)
    config = json.loads((folder / peer / "config.json").read_text())
    return config, load_file(folder / peer / "model.safetensors")


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def llama_layer(config: dict, width: int, biases: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Of a layer whose attention reads ``width`` values; every class of the peers has these."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": size}
    layer = {f"self_attn.{part}.weight": (count, width) for part, count in rows.items()}
    layer["self_attn.o_proj.weight"] = (size, q)
    layer |= {f"self_attn.{part}.bias": (rows[part],) for part in biases}
    layer |= {"mlp.gate_proj.weight": (inner, size), "mlp.up_proj.weight": (inner, size)}
    return layer | {"mlp.down_proj.weight": (size, inner), "post_attention_layernorm.weight": (size,)}


def eagle3_parameters(config: dict, *, has_output_bias: bool) -> dict[str, tuple[int, ...]]:
    """``fc`` over as many states as layer ids are listed, two norms in front of a layer, norm and head."""
    size, states = config["hidden_size"], len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    biases = ("q_proj", "k_proj", "v_proj") if config["attention_bias"] else ()
    biases += ("o_proj",) if biases and has_output_bias else ()
    layer = llama_layer(config, 2 * size, biases)
    layer |= {"input_layernorm.weight": (size,), "hidden_norm.weight": (size,)}
    wanted = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    wanted |= {"model.fc.weight": (size, states * config["target_hidden_size"]), "model.norm.weight": (size,)}
    if config["fc_norm"]:
        wanted |= {f"model.fc_norm.{i}.weight": (config["target_hidden_size"],) for i in range(states)}
    return wanted | {"lm_head.weight": (config["draft_vocab_size"], size)}


@pytest.mark.parametrize("name", ["plain", "EAGLE-3.1", "residual after its norm", "biases", "four layers"])
def test_vllm_finds_a_tensor_for_every_parameter_and_none_beyond(tmp_path, name):
    config, tensors = exported(tmp_path, eagle3(**round_trips.EAGLE3[name]), "vllm")
    assert config["architectures"][0].startswith("Eagle3")  # EAGLEConfig leaves such names as they are
    found = {}
    for key, shape in shapes(tensors).items():
        if key == "t2d":
            continue
        if key == "d2t":
            key = "draft_id_to_target_id"
        elif key != "lm_head.weight":
            key = f"model.{key}".replace("midlayer.", "layers.0.")
        found[key] = shape
    wanted = eagle3_parameters(config, has_output_bias=True)
    assert found == wanted | {"draft_id_to_target_id": (config["draft_vocab_size"],)}
    assert tensors["d2t"].dtype == torch.int64


@pytest.mark.parametrize("name", ["plain", "EAGLE-3.1", "four layers", "all of the vocabulary"])
def test_sglang_finds_a_tensor_for_every_parameter_and_none_beyond(tmp_path, name):
    config, tensors = exported(tmp_path, eagle3(**round_trips.EAGLE3[name]), "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and "bias" not in config
    found = {}
    for key, shape in shapes(tensors).items():
        if "d2t" in key or "t2d" in key:
            continue
        key = key.replace("midlayer", "layers.0")
        found[key if key == "lm_head.weight" else f"model.{key}"] = shape
    assert found == eagle3_parameters(config, has_output_bias=False)


def test_eagles_own_class_finds_its_tensors(tmp_path):
    """``load_state_dict(strict=False)``: its names are the file's; ``embed_tokens`` is the target's."""
    config, tensors = exported(tmp_path, eagle3(), "eagle")
    wanted = eagle3_parameters(config, has_output_bias=False)
    wanted = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): shape for name, shape in wanted.items()
    }
    assert shapes(tensors) == wanted | {"d2t": (67,), "t2d": (131,)}
    assert tensors["t2d"].dtype == torch.bool and config["rope_scaling"] is None


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_a_latent_head_has_the_names_of_deepseeks_attention(tmp_path, peer):
    config, tensors = exported(tmp_path, latent(), peer)
    size, heads = config["hidden_size"], config["num_attention_heads"]
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
    wanted = {
        "q_a_proj.weight": (config["q_lora_rank"], 2 * size),
        "q_a_layernorm.weight": (config["q_lora_rank"],),
        "q_b_proj.weight": (heads * (keys + rope), config["q_lora_rank"]),
        "kv_a_proj_with_mqa.weight": (rank + rope, 2 * size),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (keys + values), rank),
        "o_proj.weight": (size, heads * values),
    }
    # both map layers.0. and midlayer. to one module
    found = {
        name.rpartition("self_attn.")[2]: s for name, s in shapes(tensors).items() if "self_attn" in name
    }
    assert found == wanted
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    # vLLM turns every deepseek_v3 that drafts into DeepSeek's MTP class
    assert config["model_type"] == ("deepseek_v2" if peer == "vllm" else "deepseek_v3")


@pytest.mark.parametrize("biases", [{}, {"fc_bias": False}, {"attention_bias": True, "fc_bias": False}])
def test_eagle1_classes_find_a_tensor_for_every_parameter(tmp_path, biases):
    for peer in ("sglang", "vllm"):
        if peer == "vllm" and biases.get("fc_bias", True):
            continue
        config, tensors = exported(tmp_path / peer, eagle1(**biases), peer)
        parts = ("q_proj", "k_proj", "v_proj")
        if peer == "sglang":  # LlamaAttention(bias=config.attention_bias or config.bias), output too
            has = config["attention_bias"] or config.get("bias", False)
            layer = llama_layer(config, 48, (*parts, "o_proj") if has else ())
            fc = {"fc.weight": (48, 96), "fc.bias": (48,)}
        else:  # qkv_bias decides on queries, keys and values, attention_bias on the output
            layer = llama_layer(config, 48, parts if config["qkv_bias"] else ())
            assert not config["attention_bias"]
            fc = {"fc.weight": (48, 96)}
        assert shapes(tensors) == fc | {f"layers.0.{name}": shape for name, shape in layer.items()}


def test_modules_are_where_the_engines_look_for_them(tmp_path):
    head = modules(tmp_path)
    config, tensors = exported(tmp_path / "a", head, "sglang")
    assert config["num_nextn_predict_layers"] == config["num_hidden_layers"] == 1
    assert all(name.startswith("model.layers.0.") for name in tensors)  # nextn_layer_id of one layer
    config, tensors = exported(tmp_path / "b", head, "vllm")
    start = config["num_hidden_layers"]  # get_spec_layer_idx_from_weight_name
    assert all(name.startswith(f"model.layers.{start}.") for name in tensors)
    assert config["first_k_dense_replace"] == 0 and config["model_type"] == "deepseek_v3"
    for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.gate"):
        assert f"model.layers.{start}.{part}.weight" in tensors


@pytest.mark.parametrize("peer", ["sglang", "vllm", "speculators", "eagle"])
def test_the_published_forward_of_every_export_gives_our_logits(tmp_path, peer):
    """The forward is written from the paper's description, in fp64, one row after another."""
    head = tiny_head(tiny_target(num_layers=12), aux_layer_ids=(2, 6, 9))
    save_draft(head, tmp_path / "ours", metadata={})
    export_draft(tmp_path / "ours", tmp_path / peer, format=peer, dtype=None)
    config = json.loads((tmp_path / peer / "config.json").read_text())
    tensors = load_file(tmp_path / peer / "model.safetensors")
    (tmp_path / "plain").mkdir()
    flat = config.get("transformer_layer_config", {}) | config
    (tmp_path / "plain" / "config.json").write_text(json.dumps(flat))
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    theirs = PublishedEagle3(tmp_path / "plain")
    generator = torch.Generator().manual_seed(11)
    aux = torch.randn(9, 144, generator=generator)
    embeds = torch.randn(9, 48, generator=generator)
    positions = torch.arange(9) + 1

    def attend(layer, q, k, v):
        return prefill_attention(q, k, v, head.config.attention_scale)

    with torch.no_grad():
        ours = head.logits(head(head.fuse(aux), embeds, positions, attend))
    for row in range(9):
        _, logits = theirs.step(theirs.fuse(aux[row].double()), embeds[row].double(), int(positions[row]))
        assert torch.allclose(logits[head.token_map].float(), ours[row], atol=2e-4, rtol=1e-4)
        assert torch.isinf(logits).sum() == 131 - 67


def test_speculators_config_has_what_vllm_reads_of_it(tmp_path):
    """``SpeculatorsConfig.validate_speculators_config`` and ``update_eagle3`` of vLLM."""
    config, _ = exported(tmp_path, eagle3(norm_before_residual=True), "speculators")
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 3  # the steps that the judge decoded with
    assert "name_or_path" in config["speculators_config"]["verifier"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["norm_before_residual"] is True  # silence would be true for vLLM, false for speculators
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
