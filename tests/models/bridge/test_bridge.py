"""The bridge beside our own models, what it refuses, and what it pins."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from families import COMMON, FAMILIES, family_config, family_model
from safetensors.torch import load_file, save_file

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.options import without_graphs
from eagle_kit.models.blocks.recurrence import TextRecur
from eagle_kit.models.bridge.attention import AttendHandler
from eagle_kit.models.bridge.config import BridgedConfig, read_bridged_config
from eagle_kit.models.bridge.load import load_bridged
from eagle_kit.models.bridge.model import BridgedModel
from eagle_kit.models.bridge.records import RecordingHandler
from eagle_kit.models.loading.loader import load_target, read_target_config
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.models.targets.target import LogitForm
from eagle_kit.objective.teacher import draft_vocab_mass, draft_vocab_probs
from eagle_kit.ops.attention.variant import NO_LIMITS


def save(model, folder, **changes):
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(target, ids, capture=()):
    out = target(ids, torch.arange(len(ids)), target.causal(), capture)
    return target.logits(out.hidden), out.aux_hidden_states


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_our_own_models_and_bridged_ones_are_the_same(kind, tmp_path):
    model = family_model(kind)
    ours = load_target(save(model, tmp_path / "ours"))
    bridged = load_target(save(model, tmp_path / "bridged", architectures=["AnotherForCausalLM"]))
    assert isinstance(ours, LlamaModel) and isinstance(bridged, BridgedModel)
    ids = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(logits(ours, ids, (1, 3, 4)), logits(bridged, ids, (1, 3, 4)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    names = "hidden_size num_layers num_heads num_kv_heads head_dim intermediate_size vocab_size rms_norm_eps"
    for name in (
        *names.split(),
        "rope_theta",
        "max_position_embeddings",
        "tie_word_embeddings",
        "eos_token_ids",
    ):
        assert getattr(ours.config, name) == getattr(bridged.config, name), name
    assert ours.config.cache == bridged.config.cache


@pytest.mark.parametrize("kind", ["cohere", "granite", "falcon_h1"])
def test_a_factor_of_logits_is_no_part_of_final_states(kind, tmp_path):
    """States that another engine has written are read as they are, and heads read what it gives them."""
    model = family_model(kind)
    target = load_target(save(model, tmp_path))
    ids = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(ids[None], output_hidden_states=True)
    mine = target(ids, torch.arange(40), target.causal(), (target.config.num_layers,))
    assert target.logit_form.scale != 1.0
    torch.testing.assert_close(mine.hidden, theirs.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.final_norm(mine.aux_hidden_states), mine.hidden, rtol=1e-5, atol=1e-5)
    probs = draft_vocab_probs(mine.hidden, target.head_weight, target.logit_form)
    torch.testing.assert_close(probs, theirs.logits[0].softmax(-1), rtol=1e-4, atol=1e-6)
    kept = torch.arange(0, 131, 3)
    mass = draft_vocab_mass(mine.hidden, target.head_weight[kept], target.head_weight, target.logit_form)
    torch.testing.assert_close(mass, theirs.logits[0].softmax(-1)[:, kept].sum(-1), rtol=1e-4, atol=1e-6)


def test_layers_that_keep_their_functions_are_named(tmp_path, monkeypatch):
    """As in older versions of transformers."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    folder, mixer = save(family_model("olmo_hybrid"), tmp_path), modeling_olmo_hybrid.OlmoHybridGatedDeltaNet
    make = mixer.__init__

    def keeping(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.chunk_gated_delta_rule = modeling_olmo_hybrid.torch_chunk_gated_delta_rule

    monkeypatch.setattr(mixer, "__init__", keeping)
    with pytest.raises(UserError, match="keeps chunk_gated_delta_rule for itself") as error:
        load_target(folder)
    assert "Upgrade transformers" in error.value.remedy


def test_a_target_without_its_layers_has_the_same_ends(tmp_path):
    model = family_model("gemma2")
    folder = save(model, tmp_path)
    whole, ends = load_target(folder), load_target(folder, with_layers=False)
    for target in (whole, ends):  # the norm adds one to its weight
        torch.testing.assert_close(target.norm_weight, 1.0 + model.model.norm.weight, rtol=1e-5, atol=1e-5)
    assert not len(ends.layers) and ends.logit_form == whole.logit_form == LogitForm(1.0, 3.0)
    states = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    normed = whole.final_norm(states)
    torch.testing.assert_close(ends.final_norm(states), normed, rtol=0, atol=0)
    torch.testing.assert_close(ends.logits(normed), whole.logits(normed), rtol=0, atol=0)
    ids = torch.arange(9)
    torch.testing.assert_close(ends.embed(ids), whole.embed(ids), rtol=0, atol=0)


def test_the_last_state_and_the_final_norm_make_the_hidden_state(tmp_path):
    for kind in ("granite", "gemma2", "gpt_oss"):
        target = load_target(save(family_model(kind), tmp_path / kind))
        ids = torch.arange(3, 20)
        out = target(ids, torch.arange(17), target.causal(), (4,))
        torch.testing.assert_close(target.final_norm(out.aux_hidden_states), out.hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 131}, "ALiBi"),
        ("no_such_model", {}, "does not know"),
        (None, {}, "does not know"),
        ("mpt", {}, "ALiBi"),
        *((kind, {}, "sparse attention") for kind in ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")),
        *((kind, {}, "Mamba-1 layers") for kind in ("jamba", "zamba", "mamba", "falcon_mamba")),
        ("mamba2", {}, "has no attention"),
        (
            "bert",
            {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            "attends to later tokens",
        ),
        ("deepseek_v3", {**FAMILIES["deepseek_v3"], "v_head_dim": 20}, "values that are wider than its keys"),
        ("gpt_oss", {**COMMON, "num_hidden_layers": "four"}, "cannot be read"),
        ("gpt2", {"architectures": ["GemmaForCausalLM"]}, "and the type gpt2, which has another"),
    ],
)
def test_what_cannot_be_a_target_is_refused_with_its_name(kind, sizes, message):
    config = {"architectures": ["SomeForCausalLM"], **sizes} | ({} if kind is None else {"model_type": kind})
    with pytest.raises(UserError, match=message):
        read_bridged_config(config)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_layers_that_mix_rows_are_found_by_the_check(kind, tmp_path, monkeypatch):
    def over_rows(self, x, weight, bias):
        """What a model does by itself: every row reads those beside it."""
        return TextRecur().convolve(0, x, weight, bias)

    folder = save(family_model(kind), tmp_path, architectures=["AnotherForCausalLM"])
    monkeypatch.setattr(AttendHandler, "convolve", over_rows)
    with pytest.raises(UserError, match="several texts in a forward than alone"):
        load_target(folder)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_long_neighbour_does_not_change_a_short_text(kind, tmp_path):
    from transformers import AutoModelForCausalLM, Olmo2Config, Phi3Config

    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 32}
    torch.manual_seed(0)
    sizes = {key: value for key, value in COMMON.items() if key != "max_position_embeddings"}
    if kind == "longrope":
        sizes |= {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
        raw = Phi3Config(**sizes, rope_parameters=rope)
    else:
        raw = Olmo2Config(**sizes, max_position_embeddings=32, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(raw).eval()
    target = load_target(save(model, tmp_path))
    assert target.config.max_position_embeddings == 32
    short, long = torch.arange(3, 13), torch.arange(3, 103)
    alone = logits(target, short)[0]
    both = target(
        torch.cat((short, long)),
        torch.cat((torch.arange(10), torch.arange(100))),
        target.packed([(0, 10), (10, 110)]),
    )
    torch.testing.assert_close(target.logits(both.hidden[:10]), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    ["deepseek_v3", "gemma3n_text", "gemma4_text", "gpt2", "kimi_linear", "minimax", "opt", "phimoe"],
)
@torch.no_grad()
def test_layers_of_every_sort_compute_what_transformers_computes(kind, tmp_path):
    """Values narrower than keys; several streams; layers of unequal heads; decays of channels; lightning
    attention; a window that the config alone has."""
    if family_config(kind) is None:
        pytest.skip(f"this transformers does not know {kind}")

    # Logits.
    model = family_model(kind)
    target = load_target(save(model, tmp_path, architectures=["AnotherForCausalLM"]))
    ids = torch.randint(3, 131, (23,), generator=torch.Generator().manual_seed(0))
    exact = model(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(target, ids)[0], exact, rtol=1e-4, atol=1e-4)

    # What only some of them have.
    if kind == "gpt2":  # whose norm has a bias too
        weight = model.transformer.ln_f.weight
        torch.testing.assert_close(target.norm_weight, weight, rtol=1e-4, atol=1e-4)
    if kind == "gemma4_text":
        assert target.config.cache.heads == (2, 2, 2, 1)
    if kind in ("gemma4_text", "deepseek_v3"):  # keys and values of other widths than their store
        llm = LLM(target, shape="none", max_batch_size=1, max_context=64, page_size=4)
        (response,) = llm.generate([ids.tolist()], SamplingParams(max_tokens=6, ignore_eos=True))
        text = torch.tensor([*ids.tolist(), *response.token_ids])
        greedy = model(input_ids=text[None], use_cache=False).logits[0].argmax(-1)
        assert greedy[len(ids) - 1 : -1].tolist() == response.token_ids


def change_weights(folder, **changes):
    """Put tensors into a folder's file, or take those out that are None."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A Llama of an architecture that is not written here."""
    return save(
        family_model("llama"), tmp_path_factory.mktemp("another"), architectures=["AnotherForCausalLM"]
    )


@pytest.fixture
def folder(another, tmp_path):
    return shutil.copytree(another, tmp_path / "another")


def test_weights_that_do_not_fit_are_named(folder):
    change_weights(folder, **{"model.layers.2.mlp.up_proj.weight": None})
    with pytest.raises(UserError, match="layers.2.mlp.up_proj.weight are missing"):
        load_target(folder)


def test_weights_that_give_no_numbers_are_found_by_the_check(folder):
    change_weights(folder, **{"model.layers.2.mlp.up_proj.weight": torch.full((64, 48), torch.nan)})
    with pytest.raises(UserError, match="they differ by nan"):
        load_target(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_pass_the_check(folder, dtype):
    assert load_target(folder, dtype).layers[0].mlp.up_proj.weight.dtype == dtype


def test_tensors_of_layers_that_nothing_reads_are_named(folder):
    """And not those of modules behind the layers, of other towers, and frequencies."""
    others = ("model.layers.4.eh_proj.weight", "vision_tower.layers.0.weight", "audio.layers.1.weight")
    others += ("model.visual.blocks.2.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    change_weights(folder, **{name: torch.ones(2, 2) for name in others})
    load_target(folder)
    change_weights(folder, **{"model.layers.1.self_attn.sinks": torch.ones(4)})
    with pytest.raises(UserError, match="config does not name: model.layers.1.self_attn.sinks"):
        load_target(folder)


@pytest.mark.parametrize("inside", [False, True])
def test_other_quantisation_is_refused(folder, inside):
    source = json.loads((folder / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config = replace(
        read_target_config(folder), source=source | ({"text_config": packed} if inside else packed)
    )
    with pytest.raises(UserError, match="is quantised by gptq"):
        load_bridged(folder, config, torch.float32, "cpu")


def test_layers_of_transformers_are_not_cast(folder):
    with pytest.raises(UserError, match="not cast to fp8"):
        load_target(folder, quantization="fp8")


def test_ends_that_are_not_clear_are_refused(folder):
    ends = load_target(folder, torch.bfloat16, with_layers=False)
    whole = load_target(folder, torch.bfloat16)
    assert torch.equal(ends.head_weight, whole.head_weight) and ends.head_weight.dtype == torch.bfloat16
    assert torch.equal(ends.embed_tokens.weight, whole.embed_tokens.weight)
    assert not torch.equal(ends.embed_tokens.weight, ends.head_weight)
    assert [each.limits for each in ends.variants] == [each.limits for each in whole.variants]
    change_weights(folder, **{"model.other.weight": torch.ones(131, 48)})
    with pytest.raises(UserError, match="which are not one embedding and its output layer"):
        load_target(folder, with_layers=False)
    change_weights(folder, **{"model.other.weight": None, "lm_head.weight": None})
    with pytest.raises(UserError, match="which are not one embedding and its output layer"):
        load_target(folder, with_layers=False)
    change_weights(folder, **{"lm_head.weight": torch.ones(131, 48), "model.norm.weight": None})
    with pytest.raises(UserError, match="have 0 tensors norm.weight"):
        load_target(folder, with_layers=False)


def test_a_limit_beyond_the_texts_of_the_gate_is_compared_by_masks(tmp_path, monkeypatch):
    folder = save(family_model("gpt_oss", sliding_window=400), tmp_path)
    load_target(folder)
    monkeypatch.setattr(RecordingHandler, "_limits", lambda self, call: NO_LIMITS)
    with pytest.raises(UserError, match="Layer 0 of GptOssForCausalLM attends to tokens from"):
        load_target(folder)


def test_the_gate_leaves_the_choice_of_experts_to_the_number_of_rows(tmp_path):
    target = load_target(save(family_model("gpt_oss"), tmp_path))
    assert target.has_experts and target.experts is None
    stacks = [p for p in target.layers[0].parameters() if p.ndim == 3]
    assert target.working_bytes == 64 * 2 * sum(p[0].nbytes for p in stacks)


def test_a_copy_of_a_model_attends_with_sinks_of_its_own(tmp_path):
    """They are found again at every forward, in the model that runs."""
    target = load_target(save(family_model("gpt_oss"), tmp_path))
    other = copy.deepcopy(target)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if name.endswith("sinks"):
                weight.fill_(-torch.inf)
    for variant in target.variants:
        assert variant.sinks is not None and variant.sinks.isfinite().all()
    for variant in other.variants:
        assert variant.sinks is not None and variant.sinks.isneginf().all()
    ids = torch.arange(20)
    assert not torch.equal(logits(target, ids)[0], logits(other, ids)[0])


def test_what_a_text_config_says_is_read_from_it():
    inner = {**FAMILIES["llama4_text"], "model_type": "llama4_text", "eos_token_id": [5, 6]}
    outer = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": inner,
    }
    config = read_bridged_config(outer)
    assert (config.hidden_size, config.eos_token_ids) == (48, (5, 6))
    assert read_bridged_config({**outer, "eos_token_id": 7}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("kind", "changes", "field", "value"),
    [
        ("gpt2", {}, "intermediate_size", 192),
        ("gpt2", {"n_inner": 100}, "intermediate_size", 100),
        ("opt", {}, "intermediate_size", 64),
        ("gemma3n_text", {"intermediate_size": [64] * 5 + [128]}, "intermediate_size", 128),
        ("gpt2", {"layer_norm_epsilon": 1e-3}, "rms_norm_eps", 1e-3),
        ("cohere", {"layer_norm_eps": 1e-3}, "rms_norm_eps", 1e-3),
        ("opt", {}, "rms_norm_eps", 1e-6),
        ("gpt2", {}, "max_position_embeddings", 256),
        ("gemma4_text", {}, "head_dim", 12),
        ("gemma4_text", {}, "num_kv_heads", 2),
        ("hunyuan_v1_moe", {}, "num_chosen_experts", 2),
        ("olmoe", {"num_experts_per_tok": 3}, "num_chosen_experts", 3),
        ("llama", {}, "num_chosen_experts", 1),
        ("granite", {"logits_scaling": 4.0}, "logit_scale", 0.25),
        ("cohere", {"logit_scale": 0.5}, "logit_scale", 0.5),
        ("falcon_h1", {}, "logit_scale", 0.5),
        ("llama", {}, "logit_scale", 1.0),
        ("gemma2", {}, "soft_cap", 3.0),
        ("llama", {}, "soft_cap", None),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ("llama", {}, "tie_word_embeddings", False),
    ],
)
def test_a_field_of_a_bridged_config_is_what_its_family_calls_so(kind, changes, field, value):
    if family_config(kind) is None:
        pytest.skip(f"this transformers does not know {kind}")
    raw = family_config(kind, **changes).to_dict() | {"architectures": ["AnotherForCausalLM"]}
    assert getattr(read_bridged_config(raw), field) == value


def test_of_several_rotations_that_of_full_attention_is_the_targets():
    raw = family_config("gemma3_text").to_dict() | {"architectures": ["AnotherForCausalLM"]}
    raw["rope_parameters"]["full_attention"] |= {"rope_theta": 7e5}
    assert read_bridged_config(raw).rope_theta == 7e5


def test_configs_are_read_without_weights(tmp_path):
    folder = save(family_model("gpt_oss"), tmp_path)
    (folder / "model.safetensors").unlink()
    config = read_target_config(folder)
    assert isinstance(config, BridgedConfig) and config.model_type == "gpt_oss"
    assert [record.limits.window for record in config.records] == [7, 0, 7, 0]
    with pytest.raises(UserError, match="no model.safetensors"):
        load_target(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "qwen3_next"])
def test_forwards_of_these_read_nothing_on_the_host(kind, tmp_path):
    target = load_target(save(family_model(kind), tmp_path, architectures=["AnotherForCausalLM"]))
    assert target.host_read() is None


def test_a_model_that_reads_numbers_is_served_without_graphs(tmp_path, caplog, monkeypatch):
    target = load_target(save(family_model("gemma2"), tmp_path))
    layer = target.layers[1]
    plain = layer.forward

    def reads(hidden_states, *args, **kwargs):
        assert float(hidden_states.abs().sum()) >= 0
        return plain(hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", reads)
    assert "aten._local_scalar_dense" in target.host_read()
    assert without_graphs(EngineConfig(), target).graph_mode == "off" and "reads numbers" in caplog.text
    assert without_graphs(EngineConfig(graph_mode="off"), target).graph_mode == "off"
    with pytest.raises(UserError, match="cannot be captured"):
        without_graphs(EngineConfig(graph_mode="cycle"), target)
