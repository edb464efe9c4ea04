"""Number of weights of a target's layers, from its config alone."""

from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.config import TargetConfig


def layer_weights(config: TargetConfig, *, active: bool) -> int:
    """Number of matrix elements of all decoder layers; with ``active``, only of the experts chosen per
    token."""
    if isinstance(config, BridgedConfig):
        return config.active_weights if active else config.layer_weights
    recurrent = () if config.delta is None else config.delta.layers
    mixers = (_delta(config) if i in recurrent else _attention(config) for i in range(config.num_layers))
    beside = 0 if config.mamba is None else config.num_layers * _mamba(config)
    return beside + sum(mixers) + sum(_mlp(config, i, active) for i in range(config.num_layers))


def _mamba(config: TargetConfig) -> int:
    mamba = config.mamba
    assert mamba is not None
    projections = config.hidden_size * (2 * mamba.intermediate_size + mamba.channels + mamba.num_heads)
    return projections + mamba.channels * mamba.conv_width


def _delta(config: TargetConfig) -> int:
    delta = config.delta
    assert delta is not None
    values = delta.num_heads * delta.value_dim
    projections = config.hidden_size * (delta.channels + 2 * values + 2 * delta.num_heads)
    return projections + delta.channels * delta.conv_width


def _attention(config: TargetConfig) -> int:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    if config.mla is None:
        projections = 3 if config.gates_attention else 2
        return hidden * (projections * queries + 2 * config.num_kv_heads * config.head_dim)
    mla = config.mla
    q = hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries)
    rows = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expansion = mla.kv_lora_rank * config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q + rows + expansion + hidden * config.num_heads * mla.v_head_dim


def _mlp(config: TargetConfig, layer: int, active: bool) -> int:
    hidden, moe = config.hidden_size, config.moe
    if moe is None or layer in moe.dense_layers:
        return 3 * hidden * config.intermediate_size
    count = moe.num_experts_per_token if active else moe.num_local_experts
    routed = moe.num_experts + 3 * (count * moe.intermediate_size + moe.shared_intermediate_size)
    return hidden * (routed + moe.gates_shared)
