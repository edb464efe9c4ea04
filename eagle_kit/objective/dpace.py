"""Weights of steps that follow the draft's own confidence: D-PACE (arXiv 2605.18810).

A round from row i emits S = sum_m prod_{j <= m} q_j tokens in expectation, where q_j is the probability that
the draft gives to the target's token at step j. Its gradient is that of sum_j w_j log q_j with

    w_j = sum_{m >= j} prod_{l <= m} q_l

taken as a constant: the credit of step j is the length that is lost when it fails. Early steps weigh most
where the head is weak, and the weight moves to later ones as it learns. So that steps after a weak one still
learn, w is made of (equations 7 and 8 there)

    q~ = (1 - alpha) q + alpha,

and alpha = 1 gives w_j = K - j whatever the draft says. The paper has one drafted block for a round and
cross-entropy with the target's token; here a round is a row of training-time test with its K steps, the token
is the target's most likely one, and the weight is that of whatever loss is minimised. As the paper's author
asks (sgl-project/SpecForge, issue 828), the sum is not divided by the weights, which would cancel them: it is
divided by rows and K.

Legend: K steps, R rows, T positions of a packed row.
"""

from collections.abc import Callable, Sequence

import torch


def position_weights(confidence: torch.Tensor, exists: torch.Tensor, alpha: float) -> torch.Tensor:
    """w of every step, fp32 ``[K, R]``.

    Args:
        confidence: q, fp32 ``[K, R]``.
        exists: bool ``[K, R]``, steps that carry loss; others have the weight 0 and break no product.
        alpha: in (0, 1].
    """
    smoothed = ((1.0 - alpha) * confidence + alpha).where(exists, 1.0)
    reached = smoothed.cumprod(0) * exists
    return reached.flip(0).cumsum(0).flip(0) * exists


def step_factors(
    rows: Sequence[torch.Tensor],
    num_positions: int,
    learned: torch.Tensor,
    in_draft_vocab: torch.Tensor,
    alpha: float,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """:func:`position_weights` as ``factors`` of a :class:`~eagle_kit.ops.soft_cross_entropy.Teacher`.

    Args:
        rows: positions of the rows of each step, K tensors int64, end to end the M rows of a block.
        num_positions: T.
        learned: which of the M rows the confidences will be of, int64 ``[L]``.
        in_draft_vocab: bool ``[M]``, True for rows whose target token is in the draft vocabulary; other
            rows have the confidence 0.
    """
    where = torch.cat(list(rows))
    steps = torch.cat([torch.full_like(part, k) for k, part in enumerate(rows)])

    def factors(confidence: torch.Tensor) -> torch.Tensor:
        table = confidence.new_zeros(len(rows), num_positions)
        exists = torch.zeros_like(table, dtype=torch.bool)
        exists[steps, where] = True
        table[steps[learned], where[learned]] = confidence * in_draft_vocab[learned]
        return position_weights(table, exists, alpha)[steps[learned], where[learned]]

    return factors
