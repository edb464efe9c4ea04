"""Tiny random models of families of transformers, made from their own config classes."""

import torch

COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 64,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MANY = {key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "head_dim")}
WINDOW = 7
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]

FAMILIES = {
    "llama": COMMON,
    "mistral": {**COMMON, "sliding_window": WINDOW},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": COMMON,
    "qwen2_moe": {**COMMON, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3": COMMON,
    "qwen3_moe": {**COMMON, **EXPERTS, "num_experts": 4},
    "gemma": COMMON,
    "gemma2": {
        **COMMON,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **COMMON,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 12,
        "layer_types": THREE_TO_ONE,
    },
    "gemma3n_text": {
        **COMMON,
        "num_hidden_layers": 6,
        "intermediate_size": [64] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 131,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": {
        **COMMON,
        "sliding_window": WINDOW,
        "layer_types": THREE_TO_ONE,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {
        **COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi3": {**COMMON, "sliding_window": WINDOW},
    "phi": MANY,
    "phimoe": {
        **COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmo": COMMON,
    "olmo2": COMMON,
    "olmo3": {**COMMON, "sliding_window": WINDOW, "layer_types": THREE_TO_ONE},
    "olmoe": {**COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "granite": {**COMMON, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "cohere": {**COMMON, "logit_scale": 0.25},
    "cohere2": {**COMMON, "sliding_window": WINDOW, "layer_types": THREE_TO_ONE, "logit_scale": 0.25},
    "glm": COMMON,
    "glm4": COMMON,
    "glm4_moe": {
        **COMMON,
        **EXPERTS,
        "rms_norm_eps": 0.03,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 6},
    "starcoder2": {**COMMON, "sliding_window": WINDOW},
    "smollm3": COMMON,
    "exaone4": {**COMMON, "sliding_window": WINDOW, "layer_types": THREE_TO_ONE},
    "ernie4_5": COMMON,
    "seed_oss": COMMON,
    "hunyuan_v1_dense": COMMON,
    "hunyuan_v1_moe": {**COMMON, **EXPERTS, "num_experts": 4, "moe_topk": 2},
    "arcee": COMMON,
    "apertus": COMMON,
    "nemotron": COMMON,
    "stablelm": {**COMMON, "head_dim": 16, "hidden_size": 64},
    "ministral": {**COMMON, "sliding_window": WINDOW},
    "gpt_neox": MANY,
    "gpt2": {
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 131,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {**MANY, "ffn_dim": 64, "word_embed_proj_dim": 48},
    "deepseek_v3": {
        **COMMON,
        **EXPERTS,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "dots1": {
        **COMMON,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "llama4_text": {
        **COMMON,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
}
"""Keyword arguments of a small config by type of model."""

HYBRIDS = {
    "qwen3_next": {
        **COMMON,
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**COMMON, **DELTA},
    "qwen3_5_moe_text": {
        **COMMON,
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {**COMMON, **DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        **MANY,
        "num_key_value_heads": 4,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe_intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": DELTA["layer_types"],
    },
    "falcon_h1": {
        **COMMON,
        **MAMBA,
        "mamba_d_ssm": 96,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 1.5,
        "attention_in_multiplier": 0.75,
        "attention_out_multiplier": 1.25,
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.5,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.6],
        "mlp_multipliers": [0.8, 1.3],
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "nemotron_h": {
        **{key: value for key, value in COMMON.items() if key != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "bamba": {**COMMON, **MAMBA, "attn_layer_indices": [1, 3], "head_dim": 12},
    "granitemoehybrid": {
        **COMMON,
        **MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"] * 2,
        "logits_scaling": 3.0,
    },
    "zamba2": {
        **MANY,
        "n_mamba_heads": 6,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "adapter_rank": 8,
    },
    "lfm2": {**COMMON, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        **COMMON,
        "layer_types": ["conv", "full_attention"] * 2,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
    },
    "minimax": {
        **COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}
"""Those with recurrent layers."""
FAMILIES |= HYBRIDS


def family_config(kind: str, **changes):
    """Config of a tiny model; None where the installed transformers does not know its type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**FAMILIES[kind] | changes) if kind in CONFIG_MAPPING else None


def family_model(kind: str, seed: int = 0, std: float = 0.15, **changes):
    """Model with random weights, biases and sinks, in transformers' own classes."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = family_config(kind, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight") and bool((parameter == 1).all())
            parameter.copy_(1 + 0.2 * noise if is_norm else std * noise)
    return model.requires_grad_(False)
