"""Heads as SpecForge, ModelOpt, speculators, vLLM and EAGLE write them: recognised, imported with nothing
lost, and given back as they came."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_target
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle3.kind import EAGLE3
from eagle_kit.drafts.files.draft import DraftFolder, load_draft
from eagle_kit.drafts.files.export import export_draft, import_draft
from eagle_kit.drafts.files.validate import validate_draft

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "transformers_version": "4.53.1",
}
FLAT = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 67}


def published(**changes) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head's tensors as EAGLE's repository names them; its map is not sorted."""
    head = tiny_head(tiny_target(num_layers=12), aux_layer_ids=(2, 6, 9), **changes)
    return EAGLE3.write(head, torch.float32).tensors


def renamed(tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def specforge() -> tuple[dict, dict]:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}
    return FLAT | {"eagle_config": ids, "_name_or_path": "/home/somebody/head"}, published()


def modelopt() -> tuple[dict, dict]:
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}
    eagle |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    tensors = renamed(published())
    del tensors["t2d"]
    return FLAT | {"eagle_config": eagle, "producer": {"name": "modelopt", "version": "0.40"}}, tensors


def eagle() -> tuple[dict, dict]:
    return FLAT, published()


def vllm() -> tuple[dict, dict]:
    """With biases, for which its class wants one behind attention too; and the map in another type."""
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
    tensors = renamed(published(attention_bias=True))
    tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(48)
    tensors["d2t"] = tensors["d2t"].int()
    config = FLAT | {"architectures": ["Eagle3LlamaForCausalLM"], "attention_bias": True}
    return config | {"eagle_config": ids}, tensors


def speculators() -> tuple[dict, dict]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {"name_or_path": "somebody/model", "architectures": ["LlamaForCausalLM"]}
    tensors = renamed(published(norm_before_residual=True)) | {"embed_tokens.weight": torch.randn(131, 48)}
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": 67,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    }
    return config, tensors


def eagle1() -> tuple[dict, dict]:
    """As EAGLE's releases: a Llama by name, with a copy of the target's embedding."""
    weight = torch.Generator().manual_seed(3)
    layer = {"self_attn.q_proj": (48, 48), "self_attn.k_proj": (16, 48), "self_attn.v_proj": (16, 48)}
    layer |= {"self_attn.o_proj": (48, 48), "mlp.gate_proj": (96, 48), "mlp.up_proj": (96, 48)}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"layers.0.mlp.down_proj.weight": (48, 96), "layers.0.post_attention_layernorm.weight": (48,)}
    shapes |= {"fc.weight": (48, 96), "fc.bias": (48,), "embed_tokens.weight": (131, 48)}
    tensors = {name: 0.2 * torch.randn(shape, generator=weight) for name, shape in shapes.items()}
    config = {key: value for key, value in LLAMA.items() if key != "head_dim"}
    return config | {"architectures": ["LlamaForCausalLM"], "bias": True}, tensors


def save(folder: Path, made: tuple[dict, dict], *, pickled: bool = False) -> Path:
    folder.mkdir()
    config, tensors = made
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Of the heads' sizes, 12 layers; only its config is read."""
    folder = make_target(tmp_path_factory.mktemp("targets") / "tiny")
    raw = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 48, "vocab_size": 131, "num_hidden_layers": 12, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(raw | sizes))
    return folder


SEEN = {
    specforge: ("sglang", "SpecForge or SGLang (midlayer.*, layer ids), output of layer i"),
    modelopt: ("sglang", "ModelOpt (layers.0.*, no t2d), output of layer i"),
    eagle: ("eagle", "EAGLE (midlayer.*, no layer ids)"),
    vllm: ("vllm", "vLLM (layers.0.*), input of layer i"),
    speculators: ("speculators", "speculators 0.1.0.dev42"),
    eagle1: ("eagle", "EAGLE-1, as EAGLE's repository has it (LlamaForCausalLM with an fc)"),
}


@pytest.mark.parametrize("maker", SEEN)
def test_a_head_from_elsewhere_is_recognised_imported_and_given_back_as_it_came(tmp_path, target, maker):
    config, tensors = maker()
    theirs = save(tmp_path / "theirs", (config, tensors), pickled=maker in (eagle, eagle1))
    assert DraftFolder.open(theirs).layout[1:] == SEEN[maker]
    layout = next(found for found in validate_draft(theirs, target) if found.subject == "layout")
    assert layout.cause == f"{SEEN[maker][1]}."
    seen = import_draft(theirs, tmp_path / "ours", target=target)
    layout = next(f for f in validate_draft(tmp_path / "ours", target) if f.subject == "layout")
    assert layout.cause == f"ours, converted from {SEEN[maker][1]}."
    assert seen == DraftFolder.open(theirs).layout
    assert DraftFolder.open(tmp_path / "ours").layout.format == "eagle-kit"
    levels = {found.subject: found.level for found in validate_draft(tmp_path / "ours", target)}
    assert "error" not in levels.values() and levels["weights"] == "ok"
    export_draft(tmp_path / "ours", tmp_path / "back", format=seen.format, dtype=None)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == back[name].dtype and torch.equal(tensor, back[name]), name


@pytest.mark.parametrize("maker", [specforge, modelopt, eagle, vllm, speculators])
def test_an_imported_eagle3_head_is_the_head_that_was_written(tmp_path, target, maker):
    save(tmp_path / "theirs", maker())
    import_draft(tmp_path / "theirs", tmp_path / "ours", target=target)
    head = load_draft(tmp_path / "ours")
    assert head.config.aux_layer_ids == (2, 6, 9)
    assert head.config.norm_before_residual == (maker is speculators)
    changes = {vllm: {"attention_bias": True}, speculators: {"norm_before_residual": True}}
    wanted = tiny_head(tiny_target(num_layers=12), aux_layer_ids=(2, 6, 9), **changes.get(maker, {}))
    for (name, a), b in zip(wanted.state_dict().items(), head.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_what_came_from_one_project_goes_to_another_and_still_back(tmp_path, target):
    config, tensors = modelopt()
    save(tmp_path / "theirs", (config, tensors))
    import_draft(tmp_path / "theirs", tmp_path / "ours")
    export_draft(tmp_path / "ours", tmp_path / "vllm", format="vllm", dtype=None)
    raw = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    export_draft(tmp_path / "vllm", tmp_path / "back", format="sglang", dtype=None)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()


def test_other_weights_under_the_same_config_go_back_by_their_names(tmp_path):
    """A head that was trained on is no longer what came, and its config no longer in another type."""
    config, tensors = modelopt()
    save(tmp_path / "theirs", (config, tensors))
    import_draft(tmp_path / "theirs", tmp_path / "ours")
    export_draft(tmp_path / "ours", tmp_path / "half", format="sglang")
    raw = json.loads((tmp_path / "half" / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16" and raw["eagle_kit"]["format"] == "sglang"
    assert load_file(tmp_path / "half" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_layers_that_could_be_numbered_either_way_are_asked_for(tmp_path):
    config, tensors = specforge()
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 5, 8]
    theirs = save(tmp_path / "theirs", (config, tensors))
    with pytest.raises(UserError, match="does not say whether it means inputs or outputs") as error:
        import_draft(theirs, tmp_path / "ours")
    assert "--format sglang" in error.value.remedy and "--format vllm" in error.value.remedy
    for format, ids in (("sglang", (4, 6, 9)), ("vllm", (3, 5, 8))):
        import_draft(theirs, tmp_path / format, format=format)
        assert load_draft(tmp_path / format).config.aux_layer_ids == ids


def test_a_wrong_format_is_refused(tmp_path):
    theirs = save(tmp_path / "theirs", speculators())
    with pytest.raises(UserError, match="not in the format sglang: it was recognised as speculators"):
        import_draft(theirs, tmp_path / "ours", format="sglang")


def test_layers_that_nobody_named_need_the_target(tmp_path, target):
    theirs = save(tmp_path / "theirs", eagle())
    with pytest.raises(UserError, match="does not say which target layers it reads"):
        import_draft(theirs, tmp_path / "ours")
    import_draft(theirs, tmp_path / "ours", target=target)
    assert load_draft(tmp_path / "ours").config.aux_layer_ids == (2, 6, 9)


def test_a_head_that_borrows_its_targets_output_layer_does_so_once_it_is_ours(tmp_path, target):
    model = tiny_target(num_layers=12)
    tensors = published(draft_vocab_size=131)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    config = {**specforge()[0], "draft_vocab_size": None}
    import_draft(save(tmp_path / "theirs", (config, tensors)), tmp_path / "ours", target=target)
    assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    export_draft(tmp_path / "ours", tmp_path / "half", format="sglang", target=target)
    for folder in ("ours", "half"):  # SGLang takes the target's output layer where this is null
        assert json.loads((tmp_path / folder / "config.json").read_text())["draft_vocab_size"] is None
    for folder in ("theirs", "ours"):
        head = load_draft(tmp_path / folder, target=model)
        assert torch.equal(head.lm_head.weight, model.head_weight)
        assert torch.equal(head.fc.weight, tensors["fc.weight"])


def test_modelopts_empty_list_is_the_usual_layers(tmp_path, target):
    config, tensors = modelopt()
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = []
    theirs = save(tmp_path / "theirs", (config, tensors))
    import_draft(theirs, tmp_path / "ours", target=target)
    assert load_draft(tmp_path / "ours").config.aux_layer_ids == (2, 6, 9)


def test_sglangs_older_names_of_norms_are_known(tmp_path):
    config, _ = specforge()
    tensors = published(fc_norm=True)
    for i, name in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        tensors[f"{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    theirs = save(tmp_path / "theirs", (config | {"use_aux_norm": True}, tensors))
    import_draft(theirs, tmp_path / "ours")
    head = load_draft(tmp_path / "ours")
    assert torch.equal(head.fc_norm[1].weight, tensors["aux_norm_mid.weight"])


OTHERS = {
    "norm of all states": ({"eagle_config": {"norm_before_fc": True}}, {}, "input_norm.weight is missing"),
    "its tensor": ({"norm_before_fc": False}, {"input_norm.weight": (144,)}, "says norm_before_fc false"),
    "Qwen3's norms": ({}, {"midlayer.self_attn.q_norm.weight": (8,)}, "k_norm.weight is missing"),
    "no states": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "fc.weight is unexpected"),
    "a bias": ({}, {"midlayer.self_attn.o_proj.bias": (48,)}, "bias after its attention"),
    "two layers": ({}, {"layers.1.mlp.up_proj.weight": (96, 48)}, "has 2 decoder layers"),
    "Medusa": ({"architectures": ["MedusaModel"]}, {}, "is Medusa heads"),
    "Domino": ({"architectures": ["DominoDraftModel"]}, {}, "is a Domino draft"),
    "Domino by its projector": ({"dflash_config": {"projector_type": "domino"}}, {}, "is a Domino draft"),
    "Domino by its tensors": (
        {"architectures": None},
        {"prefix_gru.weight_ih_l0": (3, 3)},
        "is a Domino draft",
    ),
    "DFlash2 by its tensors": ({}, {"candidate_selector.successor_codebook": (3, 3)}, "is a DFlash2 draft"),
    "JetSpec": ({"architectures": ["JetSpecDraftModel"]}, {}, "is a JetSpec draft"),
    "XPress": ({"speculators_model_type": "xpress"}, {}, "is an XPress draft"),
    "NeMo's EAGLE-1": ({"architectures": ["LlamaEagleDraftModel"]}, {}, "is an EAGLE-1 draft of NeMo"),
    "speculators' other kinds": ({"speculators_model_type": "eagle"}, {}, "of the kind 'eagle'"),
    "a newer eagle-kit": ({"eagle_kit": {"format": "tomorrow"}}, {}, "in the format 'tomorrow'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_heads_that_are_not_ours_are_refused_with_the_reason(tmp_path, target, name):
    changes, extra, words = OTHERS[name]
    config, tensors = specforge()
    theirs = save(
        tmp_path / "theirs",
        (config | changes, tensors | {key: torch.ones(shape) for key, shape in extra.items()}),
    )
    with pytest.raises(UserError, match=words) as error:
        import_draft(theirs, tmp_path / "ours", target=target)
    assert error.value.remedy and not (tmp_path / "ours").exists()
    errors = [found.cause for found in validate_draft(theirs, target) if found.level == "error"]
    assert any(words.strip("'") in cause for cause in errors), errors


def test_a_whole_model_is_no_head(tmp_path, target):
    with pytest.raises(UserError, match="a whole model"):
        import_draft(target, tmp_path / "ours")


def test_speculators_silence_about_the_residual_is_not_filled_in(tmp_path):
    config, tensors = speculators()
    del config["norm_before_residual"]
    theirs = save(tmp_path / "theirs", (config, tensors))
    with pytest.raises(UserError, match="speculators then takes for false and vLLM for true"):
        import_draft(theirs, tmp_path / "ours")
