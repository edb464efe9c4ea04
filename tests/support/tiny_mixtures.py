"""Tiny models of transformers for every target with latent attention or experts; sizes are odd on purpose."""

import json

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel, TargetOutput
from eagle_kit.ops.attention.prefill import prefill_attention

SIZES = {
    "vocab_size": 271,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MLA = {"kv_lora_rank": 36, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
MIXTURE = {
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LITE_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
GROUPED = SIZES | {"num_key_value_heads": 2}


def v2(**changes) -> DeepseekV2Config:
    return DeepseekV2Config(**SIZES | MLA | MIXTURE | changes)


def v3(**changes) -> DeepseekV3Config:
    return DeepseekV3Config(**SIZES | MLA | MIXTURE | changes)


def deepseek_v3_target(**changes) -> TargetConfig:
    """Config of a tiny DeepSeek-V3, as the loader reads it from a config.json with all keys."""
    config = v3(architectures=["DeepseekV3ForCausalLM"], **changes)
    return TargetConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))


DEEPSEEK = {
    "v2 lite: no query bottleneck, greedy gate, YaRN": v2(q_lora_rank=None, rope_parameters=LITE_YARN),
    "v2: group-limited gate, scaled": v2(
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, rope_parameters=LITE_YARN
    ),
    "v2: unequal magnitudes": v2(rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "v2: biases, all layers experts": v2(
        attention_bias=True, mlp_bias=True, first_k_dense_replace=0, rms_norm_eps=0.03
    ),
    "v3: sigmoid gate with bias, groups": v3(),
    "v3: YaRN": v3(rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "v3: half-split RoPE, no bottleneck": v3(rope_interleave=False, q_lora_rank=None),
    "v3: biases, tied": v3(attention_bias=True, tie_word_embeddings=True),
    "v3: weights not normalised, all groups": v3(norm_topk_prob=False, topk_group=4, rms_norm_eps=0.03),
    "kimi k2: one group": v3(
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        routed_scaling_factor=2.827,
        rope_parameters=YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
}
MIXTURES = {
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **GROUPED,
        num_experts=9,
        num_experts_per_tok=4,
        moe_intermediate_size=20,
        head_dim=12,
        norm_topk_prob=True,
    ),
    "qwen3-moe: dense layers, weights as they are, YaRN": Qwen3MoeConfig(
        **GROUPED,
        num_experts=9,
        num_experts_per_tok=4,
        moe_intermediate_size=20,
        head_dim=12,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        rope_parameters=YARN,
    ),
}


def run(model: LlamaModel, ids: torch.Tensor, capture: tuple[int, ...] = ()) -> TargetOutput:
    """One document through a target."""
    scale = model.config.attention_scale

    def attend(layer, q, k, v):
        return prefill_attention(q, k, v, scale)

    return model(ids, torch.arange(len(ids)), attend, capture=capture)


def untrained(config) -> LlamaModel:
    """A target of ours in the shape of a config of transformers, whose weights mean nothing."""
    name = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "mixtral": "Mixtral"}
    architecture = name.get(config.model_type, "Qwen3Moe") + "ForCausalLM"
    sizes = TargetConfig.from_dict(config.to_dict() | {"architectures": [architecture]})
    return LlamaModel(sizes).eval().requires_grad_(False)


def randomised(config) -> torch.nn.Module:
    """A model of which everything is random: norms, biases, and the gates, which transformers starts at 0."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand_like(tensor))
            elif name.endswith("gate.weight"):
                tensor.normal_(std=0.3)
            elif tensor.ndim == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model
