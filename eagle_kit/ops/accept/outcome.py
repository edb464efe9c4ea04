"""State of requests after an accepted path: what is committed, the next root, and whether logits were finite.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.ops.accept.types import Accepted
from eagle_kit.ops.backend import Backend, uses_triton


class Outcome(NamedTuple):
    """State of requests after an accepted path.

    Attributes:
        num_emitted: int64 ``[B]``, accepted drafts and the bonus token; 0 for padding.
        is_finite: bool ``[B]``, True if the logits after every node of the path have a distribution.
        roots: int64 ``[B]``, the last emitted token.
        seq_lens: int64 ``[B]``, tokens before the new root.
    """

    num_emitted: torch.Tensor
    is_finite: torch.Tensor
    roots: torch.Tensor
    seq_lens: torch.Tensor


def is_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether each row of ``logits [..., V]`` has a distribution: no NaN, no infinity, and not -inf alone."""
    return logits.amax(-1).isfinite()


def outcome(
    largest_logits: torch.Tensor,
    accepted: Accepted,
    active: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> Outcome:
    """Compute the next roots and lengths from a path.

    Args:
        largest_logits: ``[B, N]``, the target's largest logit after each node; NaN where one of them is NaN.
        accepted: the path.
        active: bool ``[B]``, False for padding.
        seq_lens: int64 ``[B]``, tokens before the window.
    """
    path, tokens, num_accepted = accepted
    if uses_triton("accept", largest_logits, backend):
        from eagle_kit.ops.accept import triton

        num_emitted, finite, roots, new_lens = triton.outcome(
            largest_logits.contiguous(),
            path.contiguous(),
            tokens.contiguous(),
            num_accepted.contiguous(),
            active.contiguous(),
            seq_lens.contiguous(),
        )
        return Outcome(num_emitted, finite, roots, new_lens)
    num_emitted = (num_accepted + 1) * active
    finite = largest_logits.isfinite().gather(1, path).all(1)
    roots = tokens.gather(1, num_accepted[:, None])[:, 0]
    return Outcome(num_emitted, finite, roots, seq_lens + num_emitted)
