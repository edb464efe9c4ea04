"""Input of a draft head's layer in one launch: a program norms one row, of the embedding or of the features,
and writes it to its half of the result; where features are gathered, it also writes the row as it is.

Bytes: 2 T H elements read and 3 T H written. Rounded as ``norm/triton.py`` rounds.

Legend: R rows of features, T rows of the step, H hidden, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.dependent_launch import launch_options, wait_for_launch


@triton.jit
def _draft_inputs(features, feature_rows, tokens, embedding, token_norm, feature_norm, out, taken, eps, size,
                  GATHERS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Norm one row of the embedding or of the features. Grid ``(T, 2)``."""
    # Load the row, and the weight of its norm.
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_feature = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < size
    if is_feature == 1:
        source = row
        if GATHERS:
            source = tl.load(feature_rows + row)
        value = tl.load(features + source * size + i, inside, 0.0)
        weight = tl.load(feature_norm + i, inside, 0.0)
        if GATHERS:
            tl.store(taken + row * size + i, value, inside)
    else:
        value = tl.load(embedding + tl.load(tokens + row) * size + i, inside, 0.0)
        weight = tl.load(token_norm + i, inside, 0.0)

    # Norm it, into its half of the result.
    kind: tl.constexpr = features.dtype.element_ty
    wide = value.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / size + eps))
    if feature_norm.dtype.element_ty != tl.float32:
        normed = normed.to(kind).to(tl.float32)
    normed *= weight.to(tl.float32)
    tl.store(out + (row * 2 + is_feature) * size + i, normed.to(kind), inside)


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def _outputs(
    features: torch.Tensor, feature_rows: torch.Tensor | None, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised results."""
    count = len(tokens)
    size = features.shape[1]
    taken = features.new_empty(0 if feature_rows is None else count, size)
    return features.new_empty(count, 2 * size), taken


@custom_operator("eagle_kit::draft_inputs")
def draft_inputs(
    features: torch.Tensor,
    feature_rows: torch.Tensor | None,
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    token_norm: torch.Tensor,
    feature_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input ``[T, 2 H]``, and the gathered features ``[T, H]``, or none where there are no
    ``feature_rows``; all contiguous."""
    out, taken = _outputs(features, feature_rows, tokens)
    assert token_norm.dtype == feature_norm.dtype, "the norms have different dtypes"
    size = features.shape[1]
    if len(tokens):
        block = triton.next_power_of_2(size)
        _draft_inputs[(len(tokens), 2)](
            features, tokens if feature_rows is None else feature_rows, tokens, embedding, token_norm,
            feature_norm, out, taken, eps, size, GATHERS=feature_rows is not None, BLOCK=block,
            num_warps=_num_warps(block), **launch_options(features.device),
        )  # fmt: skip
    return out, taken


@draft_inputs.register_fake
def _(features, feature_rows, tokens, embedding, token_norm, feature_norm, eps):
    return _outputs(features, feature_rows, tokens)
