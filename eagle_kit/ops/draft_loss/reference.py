"""Losses between draft and target, any mix of them, fused with the draft's output layer.

For a row with logits z over the draft vocabulary D, q = softmax(z), the target's distribution renormalised
over D, p, and the target's total probability m of D, so that v in D has the target probability m p_v:

    ce           - sum_v p_v log q_v                               dz_v = q_v - p_v
    kl           ce - H(p)                                         dz_v = q_v - p_v
    reverse-kl   sum_v q_v log(q_v / p_v)                          dz_v = q_v (log(q_v / p_v) - loss)
    tv           1 - a,  a = sum_v min(m p_v, q_v)                 dz_v = q_v (s - [q_v < m p_v])
    lk-alpha     -log a                                            dz = that of tv / a
    lk-hybrid    w kl + (1 - w) (1 - a),  w = exp(-eta a)          dz_v = w (q_v - p_v) + (1 - w) that of tv

with s = sum_v q_v [q_v < m p_v], and w taken as a constant. (da / dz_v = sum_u [q_u < m p_u] dq_u / dz_v and
dq_u / dz_v = q_u ([u = v] - q_v).)

**A mix** is the sum of losses times their weights, and its gradient needs one pass whatever is in it: with e
the weight of everything whose gradient is q - p, t of everything whose gradient is tv's (both numbers of the
row) and r that of reverse-kl, whose loss is l,

    dz_v = q_v (e + t s + r (log(q_v / p_v) - l)) - e p_v - t q_v [q_v < m p_v].

Mixes of ``ce`` and ``tv`` are what DSpark trains with (0.1 and 0.9 of its L1 distance, which is 2 (1 - a),
so 1.8 of ``tv``, arXiv 2607.05147).

**Which p.** a is the probability that a token sampled from q is accepted (Leviathan et al., arXiv
2211.17192), and 1 - a is the total variation between q, zero outside D, and the target's distribution over
*all* tokens. Target tokens outside D can never be accepted, so these losses use p at its own scale, m p, as
in section 4.4 of LK losses: with a renormalised p, a row whose target is mostly outside D would count as
fully learnable, and q would appear too small where it is right. The KL divergences need the renormalised p,
because they are infinite where q is zero and p is not.

Sources: total variation for drafts, DistillSpec (arXiv 2310.08461); lk-alpha and lk-hybrid, LK losses (arXiv
2602.23881), where w follows the mean of a over a step's batch; here, as in the speculators project, the row's
own a, so that a row's loss depends on nothing but the row.

Memory is that of the cross-entropy: one chunk of logits, four times; with reverse-kl five times.

Legend: M rows, H hidden, Vd draft vocabulary, P teacher positions.
"""

from collections.abc import Mapping

import torch

from eagle_kit.ops.soft_cross_entropy.reference import RowLoss

NAMES = ("ce", "kl", "reverse-kl", "tv", "lk-alpha", "lk-hybrid")
"""Losses of this module."""
LEAST_PROBABILITY = 1e-30
"""Lower bound of probabilities inside a logarithm."""
LEAST_ACCEPTANCE = 1e-8
"""Lower bound of acceptance rates inside a logarithm and in a denominator."""


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Entropies in nats of distributions ``[rows, Vd]``."""
    return torch.special.entr(p).sum(-1)


def row_loss(mix: Mapping[str, float], eta: float, *, returns_acceptance: bool = False) -> RowLoss:
    """Loss of rows: the sum of the named losses of this module times their weights.

    Args:
        mix: name to weight.
        eta: of ``lk-hybrid``.
        returns_acceptance: return a also where no loss needs it.

    Raises:
        ValueError: a name that is not one of these losses.
    """
    unknown = set(mix) - set(NAMES)
    if unknown:
        raise ValueError(f"unknown losses {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}")
    ce, kl, reverse, tv, alpha, hybrid = (mix.get(name, 0.0) for name in NAMES)
    learns_p = bool(ce or kl or hybrid)
    needs_kl = bool(kl or hybrid)
    learns_rate = bool(tv or alpha or hybrid)

    def rows(
        z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        # The cross-entropy and the KL divergence.
        log_q = z.sub_(torch.logsumexp(z, -1, keepdim=True))
        q = log_q.exp()
        cross = -torch.linalg.vecdot(p, log_q) if learns_p else torch.zeros_like(c)
        divergence = cross - entropy(p) if needs_kl else cross
        losses = ce * cross + kl * divergence

        # Coefficients of the gradient, see the formula above: e, t, q_v [q_v < m p_v], and e + t s.
        e = torch.full_like(c, ce + kl)
        t = None
        q_below = None
        q_factor = e.clone()

        # The acceptance rate a and its losses.
        rate = None
        if learns_rate or returns_acceptance:
            scaled_p = p if mass is None else p * mass[:, None]
            accepted = torch.minimum(scaled_p, q).sum(-1)
            rate = accepted if returns_acceptance else None
        if learns_rate:
            q_below = q * (q < scaled_p)
            w = torch.exp(-eta * accepted)
            bounded = accepted.clamp_min(LEAST_ACCEPTANCE)
            losses += (tv + hybrid * (1.0 - w)) * (1.0 - accepted) - alpha * bounded.log()
            losses += hybrid * w * divergence
            e = e + hybrid * w
            t = tv + alpha / bounded + hybrid * (1.0 - w)
            q_factor = e + t * q_below.sum(-1)

        # The reverse KL divergence, and the terms of the gradient with a factor q_v.
        if reverse:
            log_ratio = log_q.sub_(p.clamp_min(LEAST_PROBABILITY).log_())
            reverse_kl = torch.linalg.vecdot(q, log_ratio)
            losses += reverse * reverse_kl
            gradient = log_ratio.mul_(reverse).add_((q_factor - reverse * reverse_kl)[:, None]).mul_(q)
        else:
            gradient = torch.mul(q, q_factor[:, None], out=q)

        # The other terms.
        if learns_p:
            gradient = torch.addcmul(gradient, p, e[:, None], value=-1.0)
        if q_below is not None and t is not None:
            gradient = gradient.addcmul_(q_below, t[:, None], value=-1.0)
        return losses, gradient.mul_(c[:, None]), rate

    return rows
