"""Published layout of Falcon-H1, put into ours: its names, and its multipliers, which become part of the
weights.

Every multiplier of a layer scales the input or the output of a matrix, whose rows are multiplied in fp32
before they are rounded to the dtype of the run. Those of the embedding and of the logits stay
(``TargetConfig.embedding_scale`` and ``logit_scale``), since heads read plain rows and plain final states.
"""

from typing import Any

import torch

from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.published import take

NAMES = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "final_layernorm.": "norm.",
}


def arrange(
    published: dict[str, torch.Tensor],
    config: TargetConfig,
    raw: dict[str, Any],
    layout: FP8Layout | None,
) -> dict[str, torch.Tensor]:
    """Tensors by our published names.

    Args:
        published: by their names without ``model.``; it is emptied.
        raw: the ``config.json``, which is not needed.
        layout: see :func:`~eagle_kit.models.loading.published.take`.
    """
    found = {}
    for name in list(published):
        if name not in published:
            continue  # a scale, taken with its weight
        ours = name
        for theirs, mine in NAMES.items():
            ours = ours.replace(theirs, mine)
        factor = _factor(ours, config, len(published[name]))
        if factor is None:
            found[ours] = published.pop(name)
        else:
            tensor = take(published, name, torch.float32, layout)
            found[ours] = tensor * factor.view(-1, *[1] * (tensor.ndim - 1))
    return found


def _factor(name: str, config: TargetConfig, rows: int) -> torch.Tensor | None:
    """Factor of each row of a tensor, or one of all; None where it is 1."""
    mamba = config.mamba
    assert mamba is not None
    given = mamba.multipliers
    is_bias = name.endswith(".bias")  # not multiplied with the inputs
    attention_in, ssm_in = (1.0, 1.0) if is_bias else (given.attention_in, given.ssm_in)
    if ".mamba.in_proj." in name:
        shared = mamba.num_groups * mamba.state_dim
        sizes = (mamba.inner, mamba.inner, shared, shared, mamba.num_heads)
        if rows != sum(sizes):
            return None
        return ssm_in * torch.cat(
            [torch.full((size,), factor) for size, factor in zip(sizes, given.sections, strict=True)]
        )
    factors = {
        ".self_attn.q_proj.": attention_in,
        ".self_attn.k_proj.": attention_in * given.key,
        ".self_attn.v_proj.": attention_in,
        ".self_attn.o_proj.": given.attention_out,
        ".mamba.out_proj.": given.ssm_out,
        ".mlp.gate_proj.": given.gate,
        ".mlp.down_proj.": given.down,
    }
    factor = next((factor for part, factor in factors.items() if part in name), 1.0)
    return None if factor == 1.0 else torch.tensor([factor])
