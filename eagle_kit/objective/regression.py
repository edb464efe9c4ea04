"""The loss of EAGLE-1 (arXiv 2401.15077, section 4.2) and of HASS (arXiv 2408.15766, section 3.1).

For a row with the head's output f, the target's state g at the position it predicts, and the target's
distribution p at g:

    loss = w_f mean_h smoothL1(f_h - g_h) - w_t sum_v p_v log q_v - w_k sum over the K best v of p_v log q_v

where q = softmax(W f) with the target's frozen output layer W, and smoothL1(x) = x^2 / 2 below 1, |x| - 1/2
above. EAGLE has w_f = 1, w_t = 0.1, w_k = 0; HASS has w_k = 1 and K = 10. Both cross-entropies are one
against the teacher w_t p + w_k p 1[best K], which does not sum to 1.

Legend: M rows, H hidden, V vocabulary, P teacher positions.
"""

from dataclasses import replace

import torch
from torch.nn.functional import smooth_l1_loss

from eagle_kit.config.training import RegressionConfig
from eagle_kit.ops.soft_cross_entropy import SoftCrossEntropy, Teacher, linear_soft_cross_entropy


def regression_loss(
    states: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    teacher: Teacher,
    config: RegressionConfig,
    scale: float = 1.0,
) -> SoftCrossEntropy:
    """Weighted sum of the rows' losses, see above; differentiable with respect to ``states``.

    Args:
        states: the head's outputs, times ``scale``, ``[M, H]``.
        weight: the target's output layer ``[V, H]``, frozen.
        hidden: final hidden states of the target ``[P, H]``.
        teacher: distributions of the target at these P positions, which are overwritten, and weights of the
            rows.
        config: w_f, w_t, w_k and K.
        scale: factor of the target's logits.
    """
    # Both cross-entropies are one, against teachers that are divided by their sums. The sums weigh the rows.
    index = teacher.index
    row_weights = teacher.row_weights
    mass = _normalise_teachers(teacher.probs, config)[index]  # [M]
    weighted = replace(teacher, row_weights=row_weights * mass)
    tokens = linear_soft_cross_entropy(states, weight, weighted)

    # Distance to the target's states.
    features = states.float() / scale  # [M, H]
    distance = smooth_l1_loss(features, hidden[index].float(), reduction="none").mean(-1)  # [M]

    loss = tokens.loss + config.feature_weight * (distance * row_weights).sum()
    row_losses = mass * tokens.row_losses + config.feature_weight * distance.detach()
    return SoftCrossEntropy(loss, row_losses, tokens.best, row_weights)


def _normalise_teachers(probs: torch.Tensor, config: RegressionConfig) -> torch.Tensor:
    """Replace distributions p by the teachers w_t p + w_k p 1[best K], divided by their sums.

    Args:
        probs: p, fp32 ``[P, V]``; changed in place.

    Returns:
        The sums, fp32 ``[P]``.
    """
    mass = torch.full_like(probs[:, 0], config.token_weight)
    if config.topk_weight:
        best, tokens = probs.topk(min(config.topk, probs.shape[1]), -1)  # [P, K]
        mass = mass + config.topk_weight * best.sum(-1)
        probs.mul_(config.token_weight).scatter_add_(1, tokens, config.topk_weight * best)
        probs.div_(mass[:, None])
    return mass
