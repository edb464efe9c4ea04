"""Input of a draft head's layer: a token's embedding and a feature, both normed, side by side, in one launch.
Only the reference is differentiable; heads call the operation in serving alone.

Legend: R rows of features, T rows of the step, H hidden, V vocabulary.
"""

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_triton
from eagle_kit.ops.draft_inputs import reference


def draft_inputs(
    features: torch.Tensor,
    feature_rows: torch.Tensor | None,
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``cat(norm(embedding[tokens]), norm(features[feature_rows]))``.

    Args:
        features: ``[R, H]``.
        feature_rows: int64 ``[T]``; None takes row i for token i.
        tokens: int64 ``[T]``.
        embedding: ``[V, H]``.
        norms: weights ``[H]`` of the RMSNorms of embeddings and of features.

    Returns:
        ``[T, 2 H]``, and the features as they are, ``[T, H]``.
    """
    alike = features.dtype == embedding.dtype and features.is_contiguous()
    if (
        uses_triton("draft_inputs", features, backend)
        and alike
        and not is_differentiated(features, embedding, *norms)
    ):
        from eagle_kit.ops.draft_inputs import triton

        rows = None if feature_rows is None else feature_rows.contiguous()
        x, taken = triton.draft_inputs(features, rows, tokens.contiguous(), embedding, *norms, eps)
        return x, features if rows is None else taken
    return reference.draft_inputs(features, feature_rows, tokens, embedding, norms, eps)
