"""Loading a target: sharded or not, with every tensor checked and errors named."""

import io
import json
import os
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.models.loading import loader
from eagle_kit.models.loading.loader import load_target, read_target_config, target_fingerprint
from eagle_kit.models.loading.published import take

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    """Tiny untied Llama as a Hugging Face folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_loaded_target_is_frozen_and_in_the_asked_type(folder):
    model = load_target(folder, dtype=torch.bfloat16)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())


def test_a_load_that_takes_long_shows_a_bar_on_a_terminal(folder, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    load_target(folder)
    assert terminal.getvalue() == ""

    def take_slowly(*given):
        time.sleep(0.02)
        return take(*given)

    monkeypatch.setattr(loader, "take", take_slowly)
    monkeypatch.setattr(loader, "SHOW_AFTER_S", 0.01)
    load_target(folder)
    assert "loading" in terminal.getvalue()


def test_projections_are_fused_in_their_order(folder):
    published = load_file(folder / "model.safetensors")
    attention = load_target(folder).layers[1].self_attn
    parts = [published[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(attention.qkv_proj.weight, torch.cat(parts))


def test_shards_give_the_same_weights_as_one_file(folder, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(
        sharded, max_shard_size="20KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load_target(folder).state_dict(), load_target(sharded).state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_what_other_tools_leave_beside_the_weights_is_not_needed(folder):
    """Frequencies of older transformers, and scales of activations, keys and values."""
    attention = "model.layers.1.self_attn"
    left = ("rotary_emb.inv_freq", "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale")
    left += ("q_proj.input_scale", "k_proj.output_scale")
    before = load_target(folder).state_dict()
    change_weights(
        folder, lambda tensors: tensors.update({f"{attention}.{name}": torch.ones(4) for name in left})
    )
    after = load_target(folder).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_the_names_of_silu_are_known(folder, activation):
    change_config(folder, hidden_act=activation)
    assert read_target_config(folder).num_layers == 3


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00001-of-00002.safetensors is missing"):
        load_target(folder)


def test_shards_without_their_index_are_named(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    for read in (load_target, lambda folder: open_draft(folder).tensors["model.norm.weight"]):
        with pytest.raises(UserError, match="has shards, such as model-00001-of-00002.safetensors") as error:
            read(folder)
        assert error.value.remedy == "Copy the index of the same repository to them."


OUTSIDE = ["../other/a.safetensors", "/tmp/a.safetensors", "sub/a.safetensors", "..", "", "a\\b", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_an_index_that_leaves_its_folder_is_refused(folder, tmp_path_factory, name, kind):
    """Also where transformers reads the weights. The tensors of another folder were loaded."""
    if kind == "olmo2":
        change_config(folder, model_type="olmo2", architectures=["Olmo2ForCausalLM"])
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="not a name of a file"):
        load_target(folder)


def test_a_pipe_in_place_of_weights_is_not_waited_for(folder):
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(UserError, match="is not a file"):
        load_target(folder)


def test_a_link_to_nothing_beside_the_weights_is_named_by_the_fingerprint(folder):
    whole = target_fingerprint(folder)
    (folder / "other.safetensors").symlink_to("nowhere")
    assert load_target(folder)
    with pytest.raises(UserError, match=r"other\.safetensors is missing"):
        target_fingerprint(folder)
    (folder / "other.safetensors").unlink()
    assert target_fingerprint(folder) == whole


def test_a_pipe_in_place_of_the_config_is_not_waited_for_by_the_fingerprint(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(UserError, match="is a pipe"):
        target_fingerprint(folder)


def test_an_index_without_shards_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="names no shards"):
        load_target(folder)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(folder):
    def spoil(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(32, 32)

    change_weights(folder, spoil)
    with pytest.raises(UserError) as error:
        load_target(folder)
    assert "layers.2.mlp.up_proj.weight is missing" in error.value.cause
    assert "layers.0.self_attn.sinks is unexpected" in error.value.cause
    assert "layers.1.self_attn.k_proj.weight has shape [32, 32] instead of [16, 32]" in error.value.cause


def test_an_untied_target_without_head_is_refused(folder):
    change_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match="lm_head.weight is missing"):
        load_target(folder)


def test_integer_weights_are_refused_instead_of_cast(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(32, 40, dtype=torch.int8)}))
    with pytest.raises(UserError, match="layers.0.mlp.down_proj.weight holds int8"):
        load_target(folder)


def test_biases_that_the_family_has_must_be_there(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.bias"))
    with pytest.raises(UserError, match="layers.1.self_attn.v_proj.bias is missing"):
        load_target(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 2000, -1])
def test_a_truncated_file_is_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="corrupt or truncated"):
        load_target(folder)


def test_a_corrupt_header_is_refused(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[12:20] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(UserError, match="corrupt or truncated"):
        load_target(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "'yarn'"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(folder, values, words):
    change_config(folder, **values)
    with pytest.raises(UserError, match=words):
        load_target(folder)


def test_a_config_without_a_size_or_that_is_no_json_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="intermediate_size"):
        load_target(folder)
    (folder / "config.json").write_text('{"hidden_size": 32')
    with pytest.raises(UserError, match="is not JSON"):
        load_target(folder)


def test_end_tokens_come_from_the_generation_config_first(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    change_config(folder, eos_token_id=3)
    assert read_target_config(folder).eos_token_ids == (0, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert read_target_config(folder).eos_token_ids == (0,)
    (folder / "generation_config.json").unlink()
    assert read_target_config(folder).eos_token_ids == (3,)


def test_rope_frequencies_survive_a_half_type(folder):
    model = load_target(folder)
    exact = model.rope.inv_freq.clone()
    assert torch.equal(load_target(folder, dtype=torch.bfloat16).rope.inv_freq, exact)
    head = Eagle3Head(Eagle3Config.for_target(model.config, 17))
    assert torch.equal(head.to(torch.bfloat16).rope.inv_freq, exact)
    assert head.lm_head.weight.dtype == torch.bfloat16


def test_a_target_without_its_layers_has_the_rest_and_does_not_run(folder):
    whole, part = load_target(folder), load_target(folder, with_layers=False)
    assert len(part.layers) == 0
    assert torch.equal(part.embed_tokens.weight, whole.embed_tokens.weight)
    assert torch.equal(part.head_weight, whole.head_weight)
    assert torch.equal(part.norm.weight, whole.norm.weight)
    with pytest.raises(AssertionError, match="without its layers"):
        part(torch.tensor([1]), torch.tensor([0]), lambda layer, q, k, v: v)
