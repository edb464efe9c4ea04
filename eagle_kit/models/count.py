"""How many weights a target's layers have and how much arithmetic they need, from its config alone."""

from eagle_kit.models.config import TargetConfig


def layer_weights(config: TargetConfig, *, active: bool) -> int:
    """Matrix elements of all decoder layers; ``active`` counts only the experts that one token is sent to."""
    return sum(_attention(config) + _mlp(config, i, active) for i in range(config.num_layers))


def attention_flops(config: TargetConfig) -> float:
    """Operations of all layers for a query and a key that meet, in expanded form with latent attention."""
    value = config.mla.v_head_dim if config.mla else config.head_dim
    return 2.0 * config.num_layers * config.num_heads * (config.head_dim + value)


def _attention(config: TargetConfig) -> int:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    if config.mla is None:
        return hidden * (2 * queries + 2 * config.num_kv_heads * config.head_dim)
    mla = config.mla
    q = hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries)
    rows = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expansion = mla.kv_lora_rank * config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q + rows + expansion + hidden * config.num_heads * mla.v_head_dim


def _mlp(config: TargetConfig, layer: int, active: bool) -> int:
    hidden, moe = config.hidden_size, config.moe
    if moe is None or layer in moe.dense_layers:
        return 3 * hidden * config.intermediate_size
    count = moe.num_experts_per_token if active else moe.num_experts
    return hidden * (moe.num_experts + 3 * (count * moe.intermediate_size + moe.shared_intermediate_size))
