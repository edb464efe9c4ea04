"""Published layout of Falcon-H1, put into ours: its names, and its multipliers, which become part of the
weights.

Every multiplier of a layer scales the input or the output of a matrix, whose rows are multiplied in fp32
before they are rounded to the dtype of the run. Those of the embedding and of the logits stay
(``TargetConfig.embedding_scale`` and ``logit_scale``), since heads read plain rows and plain final states.
"""

from collections.abc import Iterator

import torch

from eagle_kit.models.config import TargetConfig

NAMES = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "final_layernorm.": "norm.",
}


def rename(name: str) -> str:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def changes(name: str, config: TargetConfig) -> bool:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    return any(factor != 1.0 for _, factor in _sections(name, config))


def parts(name: str, tensor: torch.Tensor, config: TargetConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    sections = _sections(name, config)
    sizes = [len(tensor) if size is None else size for size, _ in sections]
    if sum(sizes) == len(tensor):
        pieces = zip(tensor.split(sizes), sections, strict=True)
        tensor = torch.cat([piece * factor for piece, (_, factor) in pieces])
    yield name, tensor


def _sections(name: str, config: TargetConfig) -> list[tuple[int | None, float]]:
    """Successive rows of a tensor and their factors; None for all rows."""
    mamba = config.mamba
    assert mamba is not None
    given = mamba.multipliers
    is_bias = name.endswith(".bias")  # not multiplied with the inputs
    attention_in, ssm_in = (1.0, 1.0) if is_bias else (given.attention_in, given.ssm_in)
    if name.endswith((".mamba.in_proj.weight", ".mamba.in_proj.bias")):
        shared = mamba.num_groups * mamba.state_dim
        sizes = (mamba.intermediate_size, mamba.intermediate_size, shared, shared, mamba.num_heads)
        return [(size, ssm_in * factor) for size, factor in zip(sizes, given.sections, strict=True)]
    factors = {
        ".self_attn.q_proj": attention_in,
        ".self_attn.k_proj": attention_in * given.key,
        ".self_attn.v_proj": attention_in,
        ".self_attn.o_proj": given.attention_out,
        ".mamba.out_proj": given.ssm_out,
        ".mlp.gate_proj": given.gate,
        ".mlp.down_proj": given.down,
    }
    part = name.removesuffix(".weight").removesuffix(".bias")
    return [(None, next((factor for each, factor in factors.items() if part.endswith(each)), 1.0))]
