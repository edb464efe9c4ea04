"""Number of weights of a target's layers, from its config alone."""

from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import DeltaConfig, MambaConfig


def layer_weights(config: TargetConfig, *, active: bool) -> int:
    """Number of elements of the matrices of all decoder layers.

    Args:
        active: count only the experts that are chosen for a token.
    """
    if isinstance(config, BridgedConfig):
        if active:
            return config.active_weights
        return config.layer_weights

    total = 0
    for layer in range(config.num_layers):
        if config.delta is not None and layer in config.delta.layers:
            total += _delta(config, config.delta)
        else:
            total += _attention(config)
        if config.mamba is not None:
            total += _mamba(config, config.mamba)
        total += _mlp(config, layer, active)
    return total


def _mamba(config: TargetConfig, mamba: MambaConfig) -> int:
    """Elements of a Mamba-2 layer: projections and convolution."""
    num_outputs = 2 * mamba.intermediate_size + mamba.channels + mamba.num_heads
    return config.hidden_size * num_outputs + mamba.channels * mamba.conv_width


def _delta(config: TargetConfig, delta: DeltaConfig) -> int:
    """Elements of a layer with the gated delta rule: projections and convolution."""
    value_size = delta.num_heads * delta.value_dim
    num_outputs = delta.channels + 2 * value_size + 2 * delta.num_heads
    return config.hidden_size * num_outputs + delta.channels * delta.conv_width


def _attention(config: TargetConfig) -> int:
    """Elements of the projections of attention."""
    hidden_size = config.hidden_size
    query_size = config.num_heads * config.head_dim

    # Grouped-query attention: queries, output and perhaps a gate, then keys and values.
    mla = config.mla
    if mla is None:
        num_query_projections = 2
        if config.gates_attention:
            num_query_projections = 3
        kv_size = 2 * config.num_kv_heads * config.head_dim
        return hidden_size * (num_query_projections * query_size + kv_size)

    # Latent attention.
    queries = hidden_size * query_size
    if mla.q_lora_rank is not None:
        queries = mla.q_lora_rank * (hidden_size + query_size)
    rows = hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expansion = mla.kv_lora_rank * config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    output = hidden_size * config.num_heads * mla.v_head_dim
    return queries + rows + expansion + output


def _mlp(config: TargetConfig, layer: int, active: bool) -> int:
    """Elements of the MLP or the experts of a layer."""
    hidden_size = config.hidden_size
    moe = config.moe
    if moe is None or layer in moe.dense_layers:
        return 3 * hidden_size * config.intermediate_size

    num_experts = moe.num_local_experts
    if active:
        num_experts = moe.num_experts_per_token
    expert_size = num_experts * moe.intermediate_size + moe.shared_intermediate_size
    num_gates = moe.num_experts + moe.gates_shared
    return hidden_size * (3 * expert_size + num_gates)
