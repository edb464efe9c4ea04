"""Results of the verification kernels, and the tolerance that torch and Triton share.

Legend: B requests, S draft steps.
"""

from typing import NamedTuple

import torch

SUM_TOLERANCE = 1e-3
"""Distance of a sum of probabilities from 1 that is attributed to rounding."""


class Accepted(NamedTuple):
    """The accepted path of each request.

    Attributes:
        path: int64 ``[B, S + 1]``, window indices, the root first; beyond ``num_accepted`` the entries repeat
            the last node.
        tokens: int64 ``[B, S + 1]``, the emitted tokens: accepted drafts, then the bonus token; entries
            beyond ``num_accepted`` are meaningless.
        num_accepted: int64 ``[B]``, accepted drafts, without the bonus token, 0..S.
    """

    path: torch.Tensor
    tokens: torch.Tensor
    num_accepted: torch.Tensor


class MostLikely(NamedTuple):
    """The most likely tokens of rows of logits, int64 ``[...]``, and ``values``, their logits."""

    tokens: torch.Tensor
    values: torch.Tensor
