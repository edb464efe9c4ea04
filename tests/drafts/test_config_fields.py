"""Every field of every architecture, on its own, is written into a config.json and read from it."""

import json
from dataclasses import fields, replace

import pytest
import torch
from tiny import tiny_target
from tiny_mixtures import deepseek_v3_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.dflash.head import DFlashConfig
from eagle_kit.drafts.dspark.head import DSparkConfig
from eagle_kit.drafts.eagle1.head import Eagle1Config
from eagle_kit.drafts.eagle3.head import Eagle3Config
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.mtp.head import MTPConfig
from eagle_kit.drafts.p_eagle.head import PEagleConfig
from eagle_kit.drafts.registry import head_kinds

LLAMA = tiny_target(num_layers=12).config
DEEPSEEK = deepseek_v3_target()
KINDS = {kind.config_class: kind for kind in head_kinds()}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}
ABOUT = {"target": "org/target", "template_hash": "0a1b"}
LAYER = ABOUT | {
    "hidden_size": 60,
    "num_heads": 4,
    "num_kv_heads": 3,
    "head_dim": 10,
    "intermediate_size": 61,
    "vocab_size": 140,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5e5,
    "rope_scaling": ROPE,
    "max_position_embeddings": 77,
    "attention_bias": True,
    "rotary_dim": 4,
}
STATES = LAYER | {"target_hidden_size": 64, "draft_vocab_size": 99, "aux_layer_ids": (0, 12)}
LATENTS = {"mla": DEEPSEEK.mla, "num_kv_heads": 6, "head_dim": DEEPSEEK.head_dim}
FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "norm_before_fc": True}
FLAGS |= {"qk_norm": True, "own_embedding": True}
SLIDING = {"sliding_window": 65, "sliding_layers": (0, 2)}
BLOCK = STATES | {
    "mask_token_id": 3,
    "num_layers": 3,
    "block_size": 9,
    "attention_bias": {"attention_bias": True, "attention_out_bias": True},
    "sliding_layers": SLIDING,
    "sliding_both": SLIDING | {"sliding_both": True},
}
OTHERS = {
    Eagle3Config: STATES | FLAGS | {"mla": LATENTS, "sliding_window": 65},
    PEagleConfig: STATES | FLAGS | {"num_layers": 3, "mask_token_id": 3, "sliding_layers": SLIDING},
    DFlashConfig: BLOCK | {"predicts_next": True},
    DSparkConfig: BLOCK
    | {"predicts_next": False, "markov_rank": 9, "markov_form": "rnn"}
    | {"has_confidence": {"has_confidence": False, "confidence_reads_token": False}}
    | {"confidence_reads_token": False},
    Eagle1Config: LAYER
    | {"attention_out_bias": True, "fc_bias": False, "logit_scale": 0.25}
    | {"own_embedding": True},
}
"""Another value of each field, or of it and those that it needs."""
NEVER = {
    PEagleConfig: {"norm_output", "mla", "sliding_window"},
    DFlashConfig: {"qk_norm", "attention_out_bias", "sliding_window"},
    DSparkConfig: {"qk_norm", "attention_out_bias", "sliding_window"},
}
"""Fields that have one value, or go with another one."""


def base(kind: type):
    if kind is Eagle1Config:
        names = {field.name for field in fields(kind)} - {"target", "template_hash"}
        return kind(**{name: getattr(LLAMA, name) for name in names if hasattr(LLAMA, name)})
    if issubclass(kind, Eagle3Config):
        return kind.for_target(LLAMA, 67)
    return kind.for_target(LLAMA)


def read_again(kind: HeadKind, config):
    """The config that is read from what is written, as another process does."""
    raw = json.loads(json.dumps(kind.write_config(config)))
    tensors = {}
    if kind.name == "eagle1":  # whose tensors say which biases there are
        tensors = kind.write(kind.head_class(config), torch.float32).tensors
    return kind.read_config(DraftFiles(raw, tensors))


CASES = [
    (kind, name) for kind, values in OTHERS.items() for name in values if name not in NEVER.get(kind, ())
]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_a_field_is_written_and_read(kind, name):
    plain = base(kind)
    value = OTHERS[kind][name]
    changes = value if isinstance(value, dict) and name != "rope_scaling" else {name: value}
    config = replace(plain, **changes)
    assert getattr(config, name) != getattr(plain, name)
    assert read_again(KINDS[kind], plain) == plain
    assert read_again(KINDS[kind], config) == config


@pytest.mark.parametrize("kind", OTHERS)
def test_every_field_has_a_case(kind):
    assert {field.name for field in fields(kind)} == OTHERS[kind].keys() | NEVER.get(kind, set())


MOE = {
    "num_experts": 12,
    "num_experts_per_token": 3,
    "intermediate_size": 17,
    "shared_intermediate_size": 3 * DEEPSEEK.moe.intermediate_size,
    "scoring": "softmax",
    "has_bias": False,
    "normalises": not DEEPSEEK.moe.normalises,
    "scale": 3.5,
    "num_groups": 1,
    "num_topk_groups": 1,
}
"""Another value of each field of a mixture."""
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 10,
    "v_head_dim": 6,
}
MLA |= {"interleaved": False}


@pytest.mark.parametrize(("part", "name"), [("moe", name) for name in MOE] + [("mla", name) for name in MLA])
def test_a_field_of_a_modules_experts_and_latents_is_written_and_read(part, name):
    value = {"moe": MOE, "mla": MLA}[part][name]
    owner = getattr(DEEPSEEK, part)
    changes = {"num_groups": 1, "num_topk_groups": 1} if name == "num_groups" else {name: value}
    layer = replace(DEEPSEEK, **{part: replace(owner, **changes)})
    read = read_again(KINDS[MTPConfig], MTPConfig(layer)).layer
    assert getattr(getattr(read, part), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rms_norm_eps", 1e-3),
        ("rope_theta", 5e5),
        ("max_position_embeddings", 77),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("vocab_size", 140),
        ("hidden_size", 60),
        ("intermediate_size", 61),
    ],
)
def test_a_field_of_a_modules_layer_is_written_and_read(name, value):
    layer = replace(DEEPSEEK, **{name: value})
    read = read_again(KINDS[MTPConfig], MTPConfig(layer, 2, own_head=True, **ABOUT))
    assert getattr(read.layer, name) == value
    assert (read.num_modules, read.own_head, read.target, read.template_hash) == (2, True, *ABOUT.values())


def test_other_engines_find_windows_and_rotations_where_they_look():
    raw = KINDS[DFlashConfig].write_config(replace(base(DFlashConfig), num_layers=3, **SLIDING))
    assert raw["use_sliding_window"] is True and raw["sliding_window"] == 65
    assert raw["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    whole = KINDS[DFlashConfig].write_config(base(DFlashConfig))
    assert whole["use_sliding_window"] is False and set(whole["layer_types"]) == {"full_attention"}
    for kind in OTHERS:
        plain = KINDS[kind].write_config(base(kind))
        assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
        assert (plain["rope_theta"], plain["rope_scaling"]) == (1e4, None)
        scaled = KINDS[kind].write_config(replace(base(kind), rope_scaling=ROPE, rope_theta=5e5))
        assert scaled["rope_parameters"] == ROPE | {"rope_theta": 5e5} and scaled["rope_scaling"] == ROPE


NAMES_SLIDING = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 65}
NARROW = {"sliding_window": 16, "sliding_window_non_causal": False}
WINDOW = {"use_sliding_window": True, "sliding_window": 65}
TWO_ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
MIXED = ["full_attention", "sliding_attention"] * 2
REFUSED = [
    (DFlashConfig, {"layer_types": ["full_attention"]}, "says layer_types"),
    (DFlashConfig, {"layer_types": ["other"] * 5}, "says layer_types"),
    (DFlashConfig, NAMES_SLIDING | NARROW, "says sliding_window 16"),
    (DFlashConfig, NAMES_SLIDING, "whether layers with a sliding window are causal"),
    (DFlashConfig, {"dflash_config": {"mask_token_id": 1, "causal": True}}, "full attention that are causal"),
    (DFlashConfig, {"dflash_config": {}}, "which token is its mask"),
    (DFlashConfig, {"dflash_config": {"mask_token_id": 131}}, "says mask_token_id 131"),
    (DSparkConfig, {"markov_rank": -1}, "says markov_rank"),
    (DSparkConfig, {"markov_head_type": "lstm"}, "says markov_head_type"),
    (DSparkConfig, {"markov_rank": 0}, "no Markov head whose embedding"),
    (DSparkConfig, {"markov_head_type": "rnn", "sample_from_anchor": False}, "rnn and rows that predict"),
    (PEagleConfig, {"architectures": ["Eagle3DeepseekV3ForCausalLM"], **MLA}, "has latent attention"),
    (PEagleConfig, {"layer_types": ["full_attention"]}, "says layer_types"),
    (PEagleConfig, {"eagle_config": {"use_aux_hidden_state": False}}, "reads no captured states"),
    (PEagleConfig, {"ptd_token_id": None}, "which token is its mask"),
    (PEagleConfig, {"ptd_token_id": 131}, "says ptd_token_id 131"),
    (PEagleConfig, {"mask_token_id": 3}, "says mask_token_id 3"),
    (
        Eagle3Config,
        {"architectures": ["Eagle3DeepseekV3ForCausalLM"], "use_sliding_window": True} | MLA,
        "latent attention with a sliding window",
    ),
    (
        Eagle3Config,
        {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}},
        "says that it reads none",
    ),
    (
        Eagle3Config,
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}} | WINDOW,
        "sliding_attention",
    ),
    (PEagleConfig, {"rope_parameters": TWO_ROPES, "layer_types": MIXED} | WINDOW, "rotate differently"),
    (Eagle3Config, {"partial_rotary_factor": 0.4}, "says partial_rotary_factor"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_what_a_head_of_ours_has_not_is_refused(kind, changes, message):
    raw = KINDS[kind].write_config(base(kind)) | changes
    with pytest.raises(UserError, match=message):
        KINDS[kind].read_config(DraftFiles(raw, {}), LLAMA)


def test_windows_of_another_project_are_causal_unless_they_say_otherwise():
    raw = KINDS[DFlashConfig].write_config(base(DFlashConfig)) | NAMES_SLIDING
    read = KINDS[DFlashConfig].read_config(DraftFiles(raw | {"speculators_model_type": "dflash"}, {}), LLAMA)
    assert read.sliding_both is False and read.sliding_layers == (0, 1, 2, 3, 4)
    told = raw["dflash_config"] | {"causal": False, "swa_window_size": 40}
    read = KINDS[DFlashConfig].read_config(DraftFiles(raw | {"dflash_config": told}, {}), LLAMA)
    assert read.sliding_both is True and read.sliding_window == 40
    told = told | {"use_swa": True}
    raw = raw | {"dflash_config": told, "layer_types": None}
    assert KINDS[DFlashConfig].read_config(DraftFiles(raw, {}), LLAMA).sliding_layers == (0, 1, 2, 3, 4)


def test_layers_that_a_target_has_not_and_ids_that_are_one_off_are_found():
    kind = KINDS[DFlashConfig]
    plain = base(DFlashConfig)

    def found(ids):
        config = replace(plain, aux_layer_ids=ids)
        findings = kind.check(DraftFiles(kind.write_config(config), {}), config, LLAMA)
        return next(finding for finding in findings if finding.subject == "layer ids")

    assert found((2, 13)).level == found((-1, 2)).level == "error"
    usual = plain.aux_layer_ids
    assert found(usual).level == "ok" and found((0, 12)).level == "ok"
    for shift in (1, -1):
        finding = found(tuple(layer + shift for layer in usual))
        assert finding.level == "warning" and f"in its config.json by {-shift}." in finding.remedy


@pytest.mark.parametrize("kind", [Eagle3Config, DFlashConfig])
def test_a_map_that_another_head_was_saved_with_is_refused(kind):
    config = replace(base(kind), draft_vocab_size=60)
    files = KINDS[kind].write(KINDS[kind].head_class(config), torch.float32)
    head = KINDS[kind].read(files)
    assert head.config == config
    shifted = dict(files.tensors) | {"d2t": files.tensors["d2t"] + 1}
    del shifted["t2d"]
    with pytest.raises(UserError, match="is not the one it was saved with"):
        KINDS[kind].read(replace(files, tensors=shifted))


def test_one_tensor_under_two_names_is_refused():
    for kind in (Eagle3Config, DFlashConfig):
        files = KINDS[kind].write(KINDS[kind].head_class(base(kind)), torch.float32)
        twice = dict(files.tensors) | {"model.fc.weight": files.tensors["fc.weight"]}
        with pytest.raises(UserError, match="has fc.weight twice"):
            KINDS[kind].read(replace(files, tensors=twice))


@pytest.mark.parametrize("is_targets", [True, False])
def test_an_output_layer_over_all_tokens_is_a_copy_of_the_targets(is_targets, recwarn):
    target = tiny_target(num_layers=12)
    kind = KINDS[DFlashConfig]
    files = kind.write(kind.head_class(base(DFlashConfig)), torch.float32)
    copy = target.head_weight.detach().clone()
    copy[3] += 0.0 if is_targets else 0.5
    brought = dict(files.tensors) | {"lm_head.weight": copy}
    head = kind.read(replace(files, tensors=brought), target)
    assert torch.equal(head.output.weight, target.head_weight)
    warnings = [str(each.message) for each in recwarn]
    if is_targets:
        assert not warnings
    else:
        (warning,) = warnings
        assert "lm_head.weight" in warning


def test_layers_that_read_two_inputs_side_by_side_are_known():
    configs = [base(Eagle3Config), replace(base(Eagle3Config), **LATENTS), base(Eagle1Config)]
    configs += [MTPConfig(DEEPSEEK, 2)]
    for config in configs:
        kind = KINDS[type(config)]
        head = kind.head_class(config)
        names = kind.joint_layers(head)
        width = 2 * config.hidden_size
        assert names and all(head.get_submodule(name).weight.shape[1] == width for name in names)
