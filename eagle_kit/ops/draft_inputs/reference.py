"""Input of a draft head's layer in torch, the reference of the kernel."""

import torch
from torch.nn import functional as F

from eagle_kit.ops.norm import rms_norm


def draft_inputs(
    features: torch.Tensor,
    feature_rows: torch.Tensor | None,
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather, norm and join, one operation each."""
    taken = features if feature_rows is None else features[feature_rows]
    parts = (F.embedding(tokens, embedding), taken)
    normed = [rms_norm(part, norm, eps).to(part.dtype) for part, norm in zip(parts, norms, strict=True)]
    return torch.cat(normed, -1), taken
