"""Divergences between draft and target other than cross-entropy, fused with the draft's output layer.

For a row with logits z over the draft vocabulary D, q = softmax(z), the target's distribution renormalised
over D, p, and the target's total probability m of D, so that v in D has the target probability m p_v:

    reverse-kl   sum_v q_v log(q_v / p_v)                          dz_v = q_v (log(q_v / p_v) - loss)
    tv           1 - a,  a = sum_v min(m p_v, q_v)                 dz_v = q_v (s - [q_v < m p_v])
    lk-alpha     -log a                                            dz = that of tv / a
    lk-hybrid    w KL(p || q) + (1 - w) (1 - a),  w = exp(-eta a)  dz_v = w (q_v - p_v) + (1 - w) that of tv

with s = sum_v q_v [q_v < m p_v], and w taken as a constant. (da / dz_v = sum_u [q_u < m p_u] dq_u / dz_v and
dq_u / dz_v = q_u ([u = v] - q_v).)

**Which p.** a is the probability that a token sampled from q is accepted (Leviathan et al., arXiv
2211.17192), and 1 - a is the total variation between q, zero outside D, and the target's distribution over
*all* tokens. Target tokens outside D can never be accepted, so these losses use p at its own scale, m p, as
in section 4.4 of LK losses: with a renormalised p, a row whose target is mostly outside D would count as
fully learnable, and q would appear too small where it is right. The KL divergences need the renormalised p,
because they are infinite where q is zero and p is not.

Sources: total variation for drafts, DistillSpec (arXiv 2310.08461); lk-alpha and lk-hybrid, LK losses (arXiv
2602.23881), where w follows the mean of a over a step's batch; here, as in the speculators project, the row's
own a, so that a row's loss depends on nothing but the row.

Memory is that of the cross-entropy: one chunk of logits, four times.

Legend: M rows, H hidden, Vd draft vocabulary, P teacher positions.
"""

import torch

from eagle_kit.kernels.soft_cross_entropy.reference import RowLoss

LEAST_PROBABILITY = 1e-30
"""Lower bound of probabilities inside a logarithm."""
LEAST_ACCEPTANCE = 1e-8
"""Lower bound of acceptance rates inside a logarithm and in a denominator."""


def _softmax(z: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Softmax of ``z`` in place; ``top`` is its row-wise maximum."""
    z = z.sub_(top[:, None]).exp_()
    return z.div_(z.sum(-1, keepdim=True))


def _overlap(
    q: torch.Tensor, p: torch.Tensor, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Acceptance rate a ``[rows]``, and the gradient of 1 - a with respect to the logits."""
    if mass is not None:
        p = p * mass[:, None]
    accepted = torch.minimum(p, q).sum(-1)
    below = q * (q < p)
    return accepted, torch.addcmul(-below, q, below.sum(-1, keepdim=True))


def _reverse_kl(
    z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    log_q = z.sub_(torch.logsumexp(z, -1, keepdim=True))
    q = log_q.exp()
    ratio = log_q.sub_(p.clamp_min(LEAST_PROBABILITY).log_())
    losses = torch.linalg.vecdot(q, ratio)
    return losses, ratio.sub_(losses[:, None]).mul_(q).mul_(c[:, None])


def _tv(
    z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    accepted, gradient = _overlap(_softmax(z, top), p, mass)
    return 1.0 - accepted, gradient.mul_(c[:, None])


def _lk_alpha(
    z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    accepted, gradient = _overlap(_softmax(z, top), p, mass)
    accepted = accepted.clamp_min_(LEAST_ACCEPTANCE)
    return -accepted.log(), gradient.mul_((c / accepted)[:, None])


def _lk_hybrid(eta: float) -> RowLoss:
    def rows(
        z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dot = torch.linalg.vecdot(p, z)
        log_total = torch.logsumexp(z, -1)
        q = _softmax(z, top)
        accepted, gradient = _overlap(q, p, mass)
        share = torch.exp(-eta * accepted)
        kl = log_total - dot - entropy(p)
        gradient = gradient.mul_((c * (1.0 - share))[:, None])
        gradient = gradient.addcmul_(q.sub_(p), (c * share)[:, None])
        return share * kl + (1.0 - share) * (1.0 - accepted), gradient

    return rows


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Entropies in nats of distributions ``[rows, Vd]``."""
    return torch.special.entr(p).sum(-1)


def row_loss(loss: str, eta: float) -> RowLoss:
    """Loss function of rows by name: one of the four losses of this module."""
    if loss == "lk-hybrid":
        return _lk_hybrid(eta)
    return {"reverse-kl": _reverse_kl, "tv": _tv, "lk-alpha": _lk_alpha}[loss]
