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
    """Weighted sum over rows of the loss above; differentiable in ``states``.

    Args:
        states: ``[M, H]``, the head's output times ``scale``, the target's factor of logits.
        weight: the target's output layer ``[V, H]``, frozen.
        hidden: ``[P, H]``, the target's final-normed states.
        teacher: its distributions at these P positions, which may be overwritten, and the rows' weights.
    """
    index, row_weights = teacher.index, teacher.row_weights
    mass = _weigh(teacher.probs, config)[index]
    tokens = linear_soft_cross_entropy(states, weight, replace(teacher, row_weights=row_weights * mass))
    own = states.float() / scale
    distance = smooth_l1_loss(own, hidden[index].float(), reduction="none").mean(-1)
    loss = tokens.loss + config.feature_weight * (distance * row_weights).sum()
    rows = mass * tokens.row_losses + config.feature_weight * distance.detach()
    return SoftCrossEntropy(loss, rows, tokens.best, row_weights)


def _weigh(probs: torch.Tensor, config: RegressionConfig) -> torch.Tensor:
    """Turn distributions into normalised teachers, in place; returns the weight of each, fp32 ``[P]``."""
    mass = torch.full_like(probs[:, 0], config.token_weight)
    if config.topk_weight:
        best, tokens = probs.topk(min(config.topk, probs.shape[1]), -1)
        mass = mass + config.topk_weight * best.sum(-1)
        probs.mul_(config.token_weight).scatter_add_(1, tokens, config.topk_weight * best)
        probs.div_(mass[:, None])
    return mass
