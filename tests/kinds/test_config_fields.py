"""Every field of every architecture, on its own, is written into a config.json and read from it."""

import json
from dataclasses import fields, replace

import pytest
import torch
from tiny import tiny_target
from tiny_mixtures import v3

from eagle_kit.core.errors import UserError
from eagle_kit.kinds.kind import HeadKind
from eagle_kit.kinds.registry import head_kinds
from eagle_kit.kinds.support.files import DraftFiles
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.heads.dflash import DFlashConfig
from eagle_kit.models.heads.dspark import DSparkConfig
from eagle_kit.models.heads.eagle1 import Eagle1Config
from eagle_kit.models.heads.eagle3 import Eagle3Config
from eagle_kit.models.heads.mtp import MTPConfig
from eagle_kit.models.heads.p_eagle import PEagleConfig

LLAMA = tiny_target(num_layers=12).config
DEEPSEEK = TargetConfig.from_dict(
    json.loads(v3(architectures=["DeepseekV3ForCausalLM"]).to_json_string(use_diff=False))
)
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
}
STATES = LAYER | {"target_hidden_size": 64, "draft_vocab_size": 99, "aux_layer_ids": (0, 12)}
LATENTS = {"mla": DEEPSEEK.mla, "num_kv_heads": 6, "head_dim": DEEPSEEK.head_dim}
FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
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
    PEagleConfig: STATES | FLAGS | {"num_layers": 3, "mask_token_id": 3},
    DFlashConfig: BLOCK | {"predicts_next": True},
    DSparkConfig: BLOCK
    | {"predicts_next": False, "markov_rank": 9, "markov_form": "rnn"}
    | {"has_confidence": {"has_confidence": False, "confidence_reads_token": False}}
    | {"confidence_reads_token": False},
    Eagle1Config: LAYER | {"attention_out_bias": True, "fc_bias": False, "logit_scale": 0.25},
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
    # Of EAGLE-1 the tensors tell which biases there are.
    tensors = kind.write(kind.head_class(config), torch.float32).tensors if kind.name == "eagle1" else {}
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
    "num_kept_groups": 1,
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
    changes = {"num_groups": 1, "num_kept_groups": 1} if name == "num_groups" else {name: value}
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
