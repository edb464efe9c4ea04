"""Block verification of sampled chains (Sun et al., "Block Verification Accelerates Speculative Decoding",
arXiv 2403.10444, algorithm 2): lossless like rejection sampling, and never accepts fewer tokens on average.

Token-by-token rejection early in the chain discards the rest, even where the block as a whole is more likely
under the target than under the draft. Block verification weighs prefixes instead. Let X_1 .. X_S be the
chain, Q(X^i) the draft's probability of its first i tokens, p and q the two distributions after a prefix, and

    w_0 = 1,    w_i = min(1, w_{i-1} p(X_i | X^{i-1}) / q(X_i | X^{i-1})).

The number of accepted tokens t shall satisfy P(t >= i | X^i) = w_i. For the distributions after X^i, let

    m_i = sum_y min(w_i p(y), q(y)),    r_i = sum_y relu(w_i p(y) - q(y)) = w_i - m_i.

Going backwards: t = S is decided by a uniform random number of its own, with probability h_S = w_S. For i <
S, averaging over X_{i+1} ~ q,

    P(t >= i + 1 | X^i) = sum_y q(y) min(1, w_i p(y) / q(y)) = m_i,

so t = i, tried only when no longer prefix was accepted, must have the probability h_i with
m_i + (1 - m_i) h_i = w_i:

    h_i = (w_i - m_i) / (1 - m_i) = r_i / (r_i + 1 - w_i).

The S uniforms u_i are independent, and t is the largest i with u_i < h_i, or 0. Then y is sampled from p when
t = S, else from norm(relu(w_t p - q)) after X^t. It is lossless, because the token after an accepted prefix
X^i is y with

    P(t > i, X_{i+1} = y) + P(t = i, y sampled) = Q(X^i) [ q(y) w_{i+1}(y) + r_i relu(w_i p(y) - q(y)) / r_i ]
                                              = Q(X^i) [ min(w_i p(y), q(y)) + relu(w_i p(y) - q(y)) ]
                                              = Q(X^i) w_i p(y) = P(t >= i, X^i) p(y):

given that X^i was accepted, the next token follows p, from i = 0 on, where w_0 = 1.

Rejection accepts X^i with probability prod_j min(1, p / q), which is at most w_i factor by factor.

A row of q that is no distribution reads as zeros (``draft_probs``): then w_{i+1} = 0 and m_i = 0, so X^i is
accepted with probability h_i = w_i, and y is sampled from p.

Whether X_1 is accepted depends on the *later* drafts and their uniforms. The uniforms must therefore be new
in every cycle, also for positions whose drafts an earlier cycle rejected: ``window_uniforms``, not
``position_uniforms``.

Legend: B requests, S steps, V vocabulary.
"""

import torch

from eagle_kit.ops.accept.rejection import chain_accepted, draft_probs, node_rows, weights_or
from eagle_kit.ops.accept.types import Accepted
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.sampling import FilteredLogits, distribution_parts, probabilities, sample


def accept_block(
    probs: torch.Tensor | FilteredLogits,
    q: torch.Tensor,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """Verify a chain as one block.

    Args:
        probs: ``[B, S + 1, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        q: ``[B, S, V]``, the draft's distribution for the child of each node, S >= 1.
        tokens: int64 ``[B, S + 1]``, the root and the drafts; each was sampled with q > 0.
        uniforms: ``[B, S]`` in [0, 1), one per draft.
        bonus_uniforms: ``[B]`` in [0, 1), for the token that ends the run.
    """
    if uses_triton("accept", tokens, backend):
        from eagle_kit.ops.accept import triton

        accepted = triton.accept_block(
            distribution_parts(probs),
            q.contiguous(),
            tokens.contiguous(),
            uniforms.contiguous(),
            bonus_uniforms.contiguous(),
        )
        return Accepted(*accepted)

    # Prefix weights w_0 .. w_S.
    probs = probabilities(probs)
    q = draft_probs(q)
    b, steps, _ = q.shape
    drafts = tokens[:, 1:, None]
    p_x = probs[:, :steps].gather(2, drafts)[..., 0]
    q_x = q.gather(2, drafts)[..., 0]
    ratios = torch.where(q_x > 0, p_x.double() / q_x, 0.0)
    weight = torch.ones(b, dtype=torch.float64, device=q.device)
    weights = [weight]
    for i in range(steps):
        weight = (weight * ratios[:, i]).clamp(max=1.0)
        weights.append(weight)
    w = torch.stack(weights, 1)

    # h_1 .. h_S, and the longest prefix whose uniform is below h.
    excess = (w[:, 1:steps, None] * probs[:, 1:steps] - q[:, 1:]).relu().sum(-1)
    slack = excess + 1 - w[:, 1:steps]
    # Without slack a longer prefix is accepted with certainty, and this uniform has no effect.
    h = torch.where(slack > 0, excess / torch.where(slack > 0, slack, 1.0), 1.0)
    passes = uniforms < torch.cat((h, w[:, steps:]), 1)
    num_accepted = (passes * torch.arange(1, steps + 1, device=q.device)).amax(1)

    # The bonus token is sampled from the residual after the last accepted node.
    p_end = node_rows(probs, num_accepted).double()
    q_end = node_rows(q, num_accepted.clamp(max=steps - 1)) * (num_accepted < steps)[:, None]
    residual = (node_rows(w, num_accepted)[:, None] * p_end - q_end).relu()
    bonus = sample(weights_or(residual, p_end), bonus_uniforms, backend="reference")
    return chain_accepted(tokens, num_accepted, bonus)
