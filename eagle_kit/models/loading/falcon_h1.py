"""Conversion of Falcon-H1's published tensors: their names, and the model's multipliers, which become part
of the weights.

Every multiplier of a layer scales the input or the output of a matrix. The rows of the matrix are
multiplied in fp32, before they are rounded to the dtype of the run. The multipliers of the embedding and of
the logits are not (``TargetConfig.embedding_scale`` and ``logit_scale``), because draft heads read unscaled
embeddings and hidden states.
"""

from collections.abc import Iterator

import torch

from eagle_kit.models.config import TargetConfig

SUBSTITUTIONS = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "final_layernorm.": "norm.",
}


def rename(name: str) -> str:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    for published, ours in SUBSTITUTIONS.items():
        name = name.replace(published, ours)
    return name


def changes(name: str, config: TargetConfig) -> bool:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    return any(factor != 1.0 for _, factor in _sections(name, config))


def parts(name: str, tensor: torch.Tensor, config: TargetConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    num_rows = len(tensor)
    sizes: list[int] = []
    factors: list[float] = []
    for size, factor in _sections(name, config):
        sizes.append(num_rows if size is None else size)
        factors.append(factor)
    if sum(sizes) == num_rows:
        sections = zip(tensor.split(sizes), factors, strict=True)
        tensor = torch.cat([section * factor for section, factor in sections])
    yield name, tensor


def _sections(name: str, config: TargetConfig) -> list[tuple[int | None, float]]:
    """Sizes of successive sections of a tensor's rows and their factors; a size of None is all rows."""
    mamba = config.mamba
    assert mamba is not None
    multipliers = mamba.multipliers

    # Factors of inputs do not scale biases.
    attention_in = multipliers.attention_in
    ssm_in = multipliers.ssm_in
    if name.endswith(".bias"):
        attention_in = 1.0
        ssm_in = 1.0

    # Gates, values, keys, queries and steps of Mamba.
    if name.endswith((".mamba.in_proj.weight", ".mamba.in_proj.bias")):
        value_size = mamba.intermediate_size
        key_size = mamba.num_groups * mamba.state_dim
        sizes = (value_size, value_size, key_size, key_size, mamba.num_heads)
        sections = zip(sizes, multipliers.sections, strict=True)
        return [(size, ssm_in * factor) for size, factor in sections]

    # Matrices with one factor.
    factors = {
        ".self_attn.q_proj": attention_in,
        ".self_attn.k_proj": attention_in * multipliers.key,
        ".self_attn.v_proj": attention_in,
        ".self_attn.o_proj": multipliers.attention_out,
        ".mamba.out_proj": multipliers.ssm_out,
        ".mlp.gate_proj": multipliers.gate,
        ".mlp.down_proj": multipliers.down,
    }
    module = name.removesuffix(".weight").removesuffix(".bias")
    for suffix, factor in factors.items():
        if module.endswith(suffix):
            return [(None, factor)]
    return [(None, 1.0)]
