"""Published layout of Falcon-H1, put into ours: its names, and its multipliers, which become part of the
weights.

Every multiplier of its config scales the input or the output of a matrix, or of the last norm, whose rows are
multiplied in fp32 before they are rounded to the dtype of the run; that of the embedding stays
(``TargetConfig.embedding_scale``), since heads read plain rows.
"""

from typing import Any

import torch

from eagle_kit.models.config import TargetConfig
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
    block: tuple[int, int] | None,
) -> dict[str, torch.Tensor]:
    """Tensors by our published names.

    Args:
        published: by their names without ``model.``; it is emptied.
        raw: the ``config.json``.
        block: see :func:`~eagle_kit.models.loading.published.take`.
    """
    found = {}
    for name in list(published):
        if name not in published:
            continue  # a scale, taken with its weight
        ours = name
        for theirs, mine in NAMES.items():
            ours = ours.replace(theirs, mine)
        factor = _factor(ours, config, raw, len(published[name]))
        if factor is None:
            found[ours] = published.pop(name)
        else:
            tensor = take(published, name, torch.float32, block)
            found[ours] = tensor * factor.view(-1, *[1] * (tensor.ndim - 1))
    return found


def _factor(name: str, config: TargetConfig, raw: dict[str, Any], rows: int) -> torch.Tensor | None:
    """Factor of each row of a tensor, or one of all; None where it is 1."""
    mamba = config.mamba
    assert mamba is not None
    scales_inputs = not name.endswith(".bias")
    attention_in, ssm_in = (_number(raw, key) if scales_inputs else 1.0 for key in INPUTS)
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    if ".mamba.in_proj." in name:
        sections = raw.get("ssm_multipliers") or [1.0] * 5
        shared = mamba.num_groups * mamba.state_dim
        sizes = (mamba.inner, mamba.inner, shared, shared, mamba.num_heads)
        if rows != sum(sizes):
            return None
        return ssm_in * torch.cat(
            [torch.full((size,), float(factor)) for size, factor in zip(sizes, sections, strict=True)]
        )
    factors = {
        ".self_attn.q_proj.": attention_in,
        ".self_attn.k_proj.": attention_in * _number(raw, "key_multiplier"),
        ".self_attn.v_proj.": attention_in,
        ".self_attn.o_proj.": _number(raw, "attention_out_multiplier"),
        ".mamba.out_proj.": _number(raw, "ssm_out_multiplier"),
        ".mlp.gate_proj.": float(gate),
        ".mlp.down_proj.": float(down),
    }
    if name == "norm.weight":
        return torch.tensor([_number(raw, "lm_head_multiplier")])
    factor = next((factor for part, factor in factors.items() if part in name), 1.0)
    return None if factor == 1.0 else torch.tensor([factor])


INPUTS = "attention_in_multiplier", "ssm_in_multiplier"


def _number(raw: dict[str, Any], key: str) -> float:
    value = raw.get(key)
    return 1.0 if value is None else float(value)
