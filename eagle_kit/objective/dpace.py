"""Weights of steps that follow the draft's own confidence: D-PACE (arXiv 2605.18810).

A round from row i emits S = sum_m prod_{j <= m} q_j tokens in expectation, where q_j is the probability that
the draft gives to the target's token at step j. Its gradient is that of sum_j w_j log q_j with

    w_j = sum_{m >= j} prod_{l <= m} q_l

taken as a constant: the weight of step j is the expected length that is lost if it fails. Early steps weigh
most while the head is weak, and later ones gain weight as it learns. So that steps after a weak one are still
trained, w is computed from (equations 7 and 8 there)

    q~ = (1 - alpha) q + alpha,

and alpha = 1 gives w_j = K - j for any draft. In the paper a round is a drafted block, and the loss is the
cross-entropy with the target's token. Here a round is a row of training-time test with its K steps, the token
is the target's most likely one, and any loss can be weighted. As the paper's author recommends
(sgl-project/SpecForge, issue 828), the sum is divided by rows and K, not by the weights, which would cancel
them.

Legend: K steps, R rows, T positions of a packed sequence, M rows of all steps in a block, L of them that
learn.
"""

from collections.abc import Callable, Sequence

import torch


def position_weights(confidence: torch.Tensor, exists: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weight w of every step of every row, fp32 ``[K, R]``.

    Args:
        confidence: q, fp32 ``[K, R]``.
        exists: bool ``[K, R]``, True for steps that carry loss. The others have the weight 0, and the factor
            1 in the products.
        alpha: alpha, in (0, 1].
    """
    smoothed = ((1.0 - alpha) * confidence + alpha).where(exists, 1.0)
    products = smoothed.cumprod(0) * exists
    return products.flip(0).cumsum(0).flip(0) * exists


def step_factors(
    rows: Sequence[torch.Tensor],
    num_positions: int,
    learned: torch.Tensor,
    in_draft_vocab: torch.Tensor,
    alpha: float,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """:func:`position_weights` as ``factors`` of a :class:`~eagle_kit.ops.soft_cross_entropy.Teacher`.

    Args:
        rows: positions of the rows of each step, K tensors int64; joined they are the M rows of a block.
        num_positions: T.
        learned: rows whose confidence is given to ``factors``, as indices among the M rows, int64 ``[L]``.
        in_draft_vocab: bool ``[M]``, True for rows whose target token is in the draft vocabulary; other
            rows have the confidence 0.
        alpha: see :func:`position_weights`.

    Returns:
        A function from the confidences of the learned rows, fp32 ``[L]``, to their weights, fp32 ``[L]``.
    """
    # Step and position of each of the M rows.
    positions = torch.cat(list(rows))
    steps = torch.cat([torch.full_like(part, k) for k, part in enumerate(rows)])

    def factors(confidence: torch.Tensor) -> torch.Tensor:
        table = confidence.new_zeros(len(rows), num_positions)  # [K, T]
        exists = torch.zeros_like(table, dtype=torch.bool)
        exists[steps, positions] = True
        table[steps[learned], positions[learned]] = confidence * in_draft_vocab[learned]
        return position_weights(table, exists, alpha)[steps[learned], positions[learned]]

    return factors
