"""Copies of a target's matrices in a draft."""

import warnings

import torch


def is_copy(copy: torch.Tensor, own: torch.Tensor) -> bool:
    """True for matrices that are the same but for the rounding of half types."""
    return copy.shape == own.shape and not len(other_rows(copy, own))


def other_rows(copy: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Rows, int64 ``[n]``, in which matrices of one shape are not the same but for the rounding of half
    types; compared by blocks, which bounds memory."""
    blocks = zip(copy.split(4096), own.detach().split(4096), strict=True)
    same = [torch.isclose(a.float(), b.cpu().float(), rtol=2**-7, atol=1e-6).all(-1) for a, b in blocks]
    return torch.cat(same).logical_not().nonzero()[:, 0]


def warn_unless_copy(name: str, copy: torch.Tensor | None, own: torch.Tensor, where: str) -> None:
    """Warn about a ``copy`` in the draft ``where`` that is not the target's ``own`` matrix."""
    if copy is not None and not is_copy(copy, own):
        warnings.warn(
            f"The {name} in {where} is not the target's, so the draft was trained for other weights. "
            "The target's is used, and fewer tokens may be accepted.",
            stacklevel=4,
        )
