"""Configs of Hugging Face models, in all supported spellings."""

import json

import pytest
import torch
from hostile import with_one_other_value

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.dflash.head import DFlashConfig
from eagle_kit.drafts.dspark.head import DSparkConfig
from eagle_kit.drafts.eagle3.head import Eagle3Config
from eagle_kit.drafts.p_eagle.head import PEagleConfig
from eagle_kit.models.blocks.layers import rope_frequencies
from eagle_kit.models.config import TargetConfig, read_rope
from eagle_kit.models.loading.loader import read_target_config
from eagle_kit.models.targets.llama import LlamaModel

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def read(**changes) -> TargetConfig:
    return TargetConfig.from_dict({**BASE, **changes})


def test_sizes_that_are_absent_follow_from_the_others():
    config = read()
    assert (config.head_dim, config.num_kv_heads) == (8, 2)
    assert read(num_key_value_heads=None).num_kv_heads == 8
    assert read(head_dim=20).head_dim == 20
    assert not config.tie_word_embeddings and config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("name", "asked", "qkv", "out", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False, False, False),
        ("LlamaForCausalLM", True, True, True, False),
        ("MistralForCausalLM", False, False, False, False),
        ("Qwen2ForCausalLM", False, True, False, False),
        ("Qwen3ForCausalLM", False, False, False, True),
        ("Qwen3ForCausalLM", True, True, True, True),
    ],
)
def test_every_family_has_its_own_biases_and_norms(name, asked, qkv, out, qk_norm):
    config = read(architectures=[name], attention_bias=asked)
    assert (config.attention_bias, config.attention_out_bias, config.qk_norm) == (qkv, out, qk_norm)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_an_unknown_architecture_names_the_known_ones(architectures):
    with pytest.raises(UserError, match="architecture .* is not supported") as error:
        read(architectures=architectures)
    assert "Qwen3ForCausalLM" in error.value.remedy


@pytest.mark.parametrize(
    ("eos", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7)), (0, (0,))], ids=["none", "one", "two", "zero"]
)
def test_end_tokens_become_a_tuple(eos, ids):
    assert read(eos_token_id=eos).eos_token_ids == ids


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 1.0, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
    ids=["old", "new", "both"],
)
def test_both_spellings_of_rope_say_the_same(config):
    assert read_rope(config) == (5e5, LLAMA3)


@pytest.mark.parametrize(
    "config", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}]
)
def test_plain_rope_has_no_scaling(config):
    assert read_rope(config) == (10000.0, None)


def test_the_oldest_spelling_of_linear_rope_is_understood():
    assert read_rope({"rope_scaling": {"type": "linear", "factor": 2.0}}) == (
        10000.0,
        {"rope_type": "linear", "factor": 2.0},
    )


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' of this config is not supported"),
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' of this config has no original_max_position_emb"),
        ({"rope_type": "linear"}, "'linear' of this config has no factor"),
        ({key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}, "no low_freq_factor"),
        ({**LLAMA3, "factor": None}, "has no factor"),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused(scaling, words):
    with pytest.raises(UserError, match=words):
        read(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, 100),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 512),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": False}, 512),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True}, 100),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 100, **MIXTRAL}, 100),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1000}, 512),
        ({"sliding_window": 100}, 512),
    ],
)
def test_a_sliding_window_bounds_the_context_where_it_is_used(changes, context):
    assert read(**changes).max_position_embeddings == context


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": True}
YARN |= dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), 1.0)
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MLA = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
DEEPSEEK = {**MLA, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
DEEPSEEK |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
DEEPSEEK |= {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "attention_bias": False}
COMMON |= {"mlp_bias": False, "eos_token_id": 2, "bos_token_id": 1, "hidden_act": "silu", "head_dim": 8}
COMMON |= {"use_sliding_window": False, "sliding_window": 32, "quantization_config": None}
FAMILIES = {
    "LlamaForCausalLM": {"rope_scaling": LLAMA3},
    "Qwen3ForCausalLM": {"rope_parameters": {**YARN, "rope_theta": 1e4}},
    "MixtralForCausalLM": {"num_local_experts": 4, **EXPERTS},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "mlp_only_layers": [0], "decoder_sparse_step": 1, **EXPERTS},
    "DeepseekV3ForCausalLM": {**DEEPSEEK, "num_nextn_predict_layers": 1, "rope_scaling": YARN},
}


V3 = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]}
V2 = {**MLA, **EXPERTS, "n_routed_experts": 4, "architectures": ["DeepseekV2ForCausalLM"]}
QWEN_MOE = {**EXPERTS, "num_experts": 4, "architectures": ["Qwen3MoeForCausalLM"]}
GLM = {**EXPERTS, "head_dim": 16, "architectures": ["Glm4MoeForCausalLM"]}
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 16,
    "num_experts": 4,
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    **EXPERTS,
}
MAMBA = {"architectures": ["FalconH1ForCausalLM"]}
SEES = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**BASE, **HYBRID}}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        # What a config leaves out.
        ({}, "rms_norm_eps", 1e-6),
        ({"max_position_embeddings": None}, "max_position_embeddings", 2048),
        (HYBRID, "rotary_dim", 4),
        (GLM, "rotary_dim", 8),
        ({**GLM, "partial_rotary_factor": 0.25}, "rotary_dim", 4),
        (
            {**GLM, "partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.75}},
            "rotary_dim",
            12,
        ),
        (HYBRID, "delta.layers", (0, 1, 2, 4, 5, 6, 8, 9, 10)),
        ({**HYBRID, "full_attention_interval": 3}, "delta.layers", (0, 1, 3, 4, 6, 7, 9, 10)),
        (HYBRID, "delta.conv_width", 4),
        ({**HYBRID, "linear_conv_kernel_dim": 3}, "delta.conv_width", 3),
        (HYBRID, "moe.normalises", True),
        ({**HYBRID, "norm_topk_prob": False}, "moe.normalises", False),
        (QWEN_MOE, "moe.normalises", False),
        (V2, "moe.normalises", False),
        ({**QWEN_MOE, "num_experts": ..., "num_local_experts": 6}, "moe.num_experts", 6),
        (QWEN_MOE, "moe.dense_layers", ()),
        (
            {**QWEN_MOE, "decoder_sparse_step": 4, "mlp_only_layers": [3]},
            "moe.dense_layers",
            (0, 1, 2, 3, 4, 5, 6, 8, 9, 10),
        ),
        (
            {**V3, "moe_layer_freq": 4, "first_k_dense_replace": 2},
            "moe.dense_layers",
            (0, 1, 2, 3, 5, 6, 7, 9, 10, 11),
        ),
        ({**V3, "scoring_func": None, "topk_method": None}, "moe.scoring", "sigmoid"),
        ({**V3, "scoring_func": None, "topk_method": None}, "moe.has_bias", True),
        ({**V3, "topk_method": "group_limited_greedy"}, "moe.num_groups", 2),
        ({**V3, "topk_method": "group_limited_greedy"}, "moe.has_bias", False),
        (V2, "moe.scoring", "softmax"),
        (V2, "moe.scale", 1.0),
        ({**V2, "n_routed_experts": None}, "moe", None),
        ({**V2, "n_group": 2, "topk_group": 1}, "moe.num_groups", 1),
        ({**V2, "n_shared_experts": 3}, "moe.shared_intermediate_size", 48),
        ({**V2, "q_lora_rank": None}, "mla.q_lora_rank", None),
        ({**V2, "rope_interleave": None}, "mla.interleaved", True),
        ({**V2, "num_key_value_heads": 2}, "num_kv_heads", 8),
        ({"num_nextn_predict_layers": 2}, "num_mtp_layers", 2),
        ({"num_nextn_predict_layers": 2, "mtp_num_hidden_layers": 3}, "num_mtp_layers", 3),
        (MAMBA, "mamba.intermediate_size", 128),
        ({**MAMBA, "mamba_expand": 4}, "mamba.intermediate_size", 256),
        ({**MAMBA, "mamba_d_ssm": 384, "mamba_expand": 4}, "mamba.head_dim", 3),
        (MAMBA, "mamba.num_heads", 128),
        (MAMBA, "mamba.num_groups", 1),
        (MAMBA, "mamba.state_dim", 256),
        (MAMBA, "mamba.conv_width", 4),
        (MAMBA, "mamba.conv_bias", True),
        (MAMBA, "mamba.norm_before_gate", True),
        (MAMBA, "mamba.has_norm", False),
        (MAMBA, "mamba.time_step_limit", (0.0, float("inf"))),
        (MAMBA, "mamba.multipliers.sections", (1.0,) * 5),
        (MAMBA, "embedding_scale", 1.0),
        (MAMBA, "logit_scale", 1.0),
        # What stands beside the config of a text model, and in it.
        ({**SEES, "eos_token_id": [5, 6]}, "eos_token_ids", (5, 6)),
        ({**SEES, "text_config": {**SEES["text_config"], "eos_token_id": 7}}, "eos_token_ids", (7,)),
        ({**SEES, "tie_word_embeddings": True}, "tie_word_embeddings", True),
        (
            {**SEES, "text_config": {**SEES["text_config"], "tie_word_embeddings": True}},
            "tie_word_embeddings",
            True,
        ),
    ],
)
def test_a_field_is_what_its_family_means(config, field, value):
    found = TargetConfig.from_dict({key: each for key, each in {**BASE, **config}.items() if each is not ...})
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize("key", ["routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"])
def test_what_deepseek_v3_has_no_usual_value_for_is_not_guessed(key):
    with pytest.raises(UserError, match=f"lacks {key}"):
        read(**{**V3, key: None})


def test_kept_groups_hold_the_experts_of_a_token():
    assert read(**V3).moe.num_experts_per_token == 2  # all of the one group that is kept
    with pytest.raises(UserError, match="keeps 1 of 2 groups of its 4 experts, and sends a token to 3"):
        read(**{**V3, "num_experts_per_tok": 3})
    with pytest.raises(UserError, match="1 of 1 groups of its 4 experts, and sends a token to 5"):
        read(**{**QWEN_MOE, "num_experts_per_tok": 5})


@pytest.mark.parametrize("theta", [1.0, 0.5])
def test_a_base_of_rope_that_turns_nothing_is_refused(theta):
    with pytest.raises(UserError, match="base above 1"):
        read(rope_theta=theta)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hostile_value_of_any_field_is_refused_or_makes_a_model(family, tmp_path):
    whole = {**BASE, **COMMON, "num_hidden_layers": 2, **FAMILIES[family], "architectures": [family]}
    num_refused = num_made = 0
    for key, value, config in with_one_other_value(whole):
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            made = read_target_config(tmp_path)
        except UserError as error:
            num_refused += 1
            assert "\n" not in error.cause and len(error.cause) < 500, (key, value)
            continue
        num_made += 1
        with torch.device("meta"):
            LlamaModel(made)
        if key.startswith("rope"):
            assert bool(rope_frequencies(made.rope_dim, made.rope_theta, made.rope_scaling).isfinite().all())
    assert num_refused > 200 and num_made > 50


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": -5}, "says hidden_size -5 instead of a whole number from 1 to 16777216"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers 1000000000 instead of"),
        ({"num_key_value_heads": 3}, "shares 3 key-value heads among 8"),
        ({"head_dim": 7}, "says head_dim 7 instead of an even number"),
        ({"rms_norm_eps": float("nan")}, "says rms_norm_eps nan instead of a number"),
        ({"tie_word_embeddings": "false"}, "says tie_word_embeddings 'false' instead of true or false"),
        ({"eos_token_id": [2, "x"]}, "says eos_token_id .2, 'x'. instead of whole numbers"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "factors that ascend"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes, words):
    with pytest.raises(UserError, match=words):
        read(**changes)


@pytest.mark.parametrize(
    ("layers", "ids"), [(30, (2, 15, 27)), (12, (2, 6, 9)), (2, (2, 1, 0)), (1, (1, 0, 0))]
)
def test_the_usual_captured_layers_exist_however_few_there_are(layers, ids):
    assert read(num_hidden_layers=layers).default_aux_layer_ids == ids
    assert all(0 <= layer <= layers for layer in ids)


def test_a_draft_takes_its_targets_sizes_unless_told_otherwise():
    target = read(rope_scaling=LLAMA3, rope_theta=5e5)
    draft = Eagle3Config.for_target(target, 67, intermediate_size=50, fc_norm=True)
    assert (draft.hidden_size, draft.target_hidden_size, draft.vocab_size) == (64, 64, 300)
    assert (draft.draft_vocab_size, draft.intermediate_size, draft.fc_norm) == (67, 50, True)
    assert (draft.rope_theta, draft.rope_scaling, draft.aux_layer_ids) == (5e5, LLAMA3, (2, 6, 9))


LIKE_THE_TARGET = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
LIKE_THE_TARGET += ("rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings")


@pytest.mark.parametrize("kind", [Eagle3Config, PEagleConfig, DFlashConfig, DSparkConfig])
def test_a_new_head_is_a_layer_of_its_target(kind):
    target = read(rope_scaling=LLAMA3, rope_theta=5e5, rms_norm_eps=1e-3, head_dim=10)
    drafted = (67,) if issubclass(kind, Eagle3Config) else ()
    draft = kind.for_target(target, *drafted)
    for field in LIKE_THE_TARGET:
        assert getattr(draft, field) == getattr(target, field), field
    assert draft.target_hidden_size == target.hidden_size and not draft.attention_bias
    assert draft.draft_vocab_size == (67 if drafted else 300)
    if not drafted:
        assert (draft.mask_token_id, draft.num_layers, draft.qk_norm) == (299, 5, True)
        is_dspark = kind is DSparkConfig
        assert draft.most_steps == (7 if is_dspark else 15)
        assert draft.predicts_next == is_dspark
    changed = kind.for_target(target, *drafted, intermediate_size=50, aux_layer_ids=(1, 3))
    assert (changed.intermediate_size, changed.aux_layer_ids) == (50, (1, 3))
