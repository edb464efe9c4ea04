"""Rejection sampling of sampled drafts: accept a token with probability min(1, p / q).

Chains (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). The draft drew x from q, the
target's distribution is p. Keep x with probability min(1, p(x) / q(x)), else draw from norm(relu(p - q)).
Token y then comes out with probability

    q(y) min(1, p(y) / q(y)) + P(rejected) relu(p(y) - q(y)) / sum relu(p - q)
        = min(p(y), q(y)) + relu(p(y) - q(y)) = p(y),

because P(rejected) = 1 - sum min(p, q) = sum relu(p - q). So the distribution is the target's whatever q is,
as long as x was really sampled from q: a softmax put in the place of q for a top-k draft would emit another
distribution.

Trees (SpecInfer, arXiv 2305.09781; EAGLE-1). A node's children were sampled one after another from q without
replacement, and are tried in that order. After a rejection the residual norm(relu(p - q)) takes the place of
p, by the identity above, and q without the rejected token, renormalised, takes the place of q: the next child
was sampled from it. When all children are rejected, the token is sampled from the residual of p. The topology
must not depend on the values that were sampled.

A token whose row of q is no distribution (as of a draft with NaN logits) counts as not drafted, because the
probability with which it was sampled is unknown: :func:`draft_probs`.

A token is accepted when ``u * q(x) < p(x)``, in fp64, with a uniform random number u in [0, 1). The
inequality is strict, so that u = 0 never accepts a token of target probability zero; p = q accepts
everything.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

import torch

from eagle_kit.ops.accept.types import SUM_TOLERANCE, Accepted
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.sampling import FilteredLogits, distribution_parts, probabilities, sample


def accept_rejection_chain(
    probs: torch.Tensor | FilteredLogits,
    q: torch.Tensor,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """Verify a chain token by token.

    A token with q = 0 cannot have been sampled: it and the tokens after it are treated as not drafted.

    Args:
        probs: ``[B, S + 1, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        q: ``[B, S, V]``, the draft's distribution for the child of each node, S >= 1.
        tokens: int64 ``[B, S + 1]``, the root and the drafts.
        uniforms: ``[B, S]`` in [0, 1), one per draft.
        bonus_uniforms: ``[B]`` in [0, 1), for the bonus token.
    """
    steps = q.shape[1]
    if uses_triton("accept", tokens, backend):
        # A tree without branches; the root has no uniform.
        parents = torch.arange(-1, steps, device=tokens.device).clamp(min=0).expand_as(tokens)
        padded = torch.cat((uniforms[:, :1], uniforms), 1)
        return accept_rejection_tree(
            probs, q, tokens, parents, padded, bonus_uniforms, steps, backend=backend
        )

    # The chain is accepted up to the first token that is not.
    probs = probabilities(probs)
    q = draft_probs(q)
    drafts = tokens[:, 1:, None]
    p_x = probs[:, :steps].gather(2, drafts)[..., 0]
    q_x = q.gather(2, drafts)[..., 0]
    is_accepted = (uniforms.double() * q_x < p_x) & (q_x > 0)
    num_accepted = is_accepted.to(torch.int64).cumprod(1).sum(1)

    # The bonus token is sampled from the residual after the last accepted node.
    p_end = node_rows(probs, num_accepted)
    q_end = node_rows(q, num_accepted.clamp(max=steps - 1))
    # After the last draft nothing was rejected, nor where q = 0: that token was not drafted.
    is_rejected = (num_accepted < steps) & (node_rows(q_x, num_accepted.clamp(max=steps - 1)) > 0)
    residual = (p_end - torch.where(is_rejected[:, None], q_end, 0.0)).relu()
    bonus = sample(weights_or(residual, p_end), bonus_uniforms, backend="reference")
    return chain_accepted(tokens, num_accepted, bonus)


def accept_rejection_tree(
    probs: torch.Tensor | FilteredLogits,
    q: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    steps: int,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """Verify a tree whose siblings were sampled without replacement and lie in the window in that order.

    One pass over the window: as parents come before children, the children of an accepted node are still
    ahead when it is accepted. A child with q = 0, which cannot have been sampled (padding, a repeated
    sibling, or a filler once q had no token left), is skipped. Siblings sampled *with* replacement are
    therefore verified exactly too: without their repetitions they are a sample without replacement.

    Args:
        probs: ``[B, N, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        q: ``[B, Q, V]``, Q <= N, the draft's distribution for the children of each of the first Q nodes;
            later nodes have no children.
        tokens, parents: int64 ``[B, N]``, the window; a token of -1 is an unused node.
        uniforms: ``[B, N]`` in [0, 1), one per node; the root's is not used.
        bonus_uniforms: ``[B]`` in [0, 1), for the bonus token.
        steps: S, depth of the window.
    """
    if uses_triton("accept", tokens, backend):
        from eagle_kit.ops.accept import triton

        accepted = triton.accept_stochastic(
            distribution_parts(probs),
            q.contiguous(),
            tokens.contiguous(),
            parents.contiguous(),
            uniforms.contiguous(),
            bonus_uniforms.contiguous(),
            steps,
            1.0,
            1.0,
        )
        return Accepted(*accepted)
    probs = probabilities(probs)
    node = torch.zeros_like(parents[:, :1])
    path = node.expand(-1, steps + 1)
    num_accepted = node
    p = probs[:, 0].double()  # at the current node, residuals after its rejections
    q_left = draft_probs(q[:, 0]).double()  # for the current node's children that were not tried yet
    for j in range(1, tokens.shape[1]):
        # Node j is tried if it is a child of the current node.
        token = tokens[:, j : j + 1]
        id = token.clamp(min=0)
        p_x = p.gather(1, id)
        q_x = q_left.gather(1, id)
        is_tried = (parents[:, j : j + 1] == node) & (token >= 0) & (q_x > 0)
        is_accepted = is_tried & (uniforms[:, j : j + 1].double() * q_x < p_x)
        is_rejected = is_tried & ~is_accepted

        # After a rejection the residuals take the place of p and q, after an acceptance those of node j do.
        residual = _normalised(weights_or((p - q_left).relu(), p))
        p = torch.where(is_rejected, residual, p)
        p = torch.where(is_accepted, probs[:, j], p)
        q_left = torch.where(is_rejected, _normalised(q_left.scatter(1, id, 0.0)), q_left)
        if j < q.shape[1]:
            q_left = torch.where(is_accepted, draft_probs(q[:, j]), q_left)
        node, num_accepted, path = step_to(j, is_accepted, node, num_accepted, path)
    return tree_accepted(tokens, path, num_accepted[:, 0], sample(p, bonus_uniforms, backend="reference"))


def draft_probs(q: torch.Tensor) -> torch.Tensor:
    """``q [..., V]`` as verifiers read it: 0 where it is no probability (NaN, infinity, below 0), and 0 in
    rows that do not sum to 1 then."""
    q = q.nan_to_num(0.0, 0.0, 0.0).clamp_(min=0.0)
    return q.mul_((q.sum(-1, keepdim=True) - 1).abs() < SUM_TOLERANCE)


def weights_or(weights: torch.Tensor, distribution: torch.Tensor) -> torch.Tensor:
    """``weights [B, V]``, or ``distribution [B, V]`` in rows where all weights are zero: subtracting two
    distributions that differ by rounding alone may leave nothing."""
    return torch.where(weights.amax(-1, keepdim=True) > 0, weights, distribution)


def node_rows(x: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """``x [B, N, ...]`` at ``nodes`` int64 ``[B]`` -> ``[B, ...]``."""
    return x[torch.arange(x.shape[0], device=x.device), nodes]


def chain_accepted(tokens: torch.Tensor, num_accepted: torch.Tensor, bonus: torch.Tensor) -> Accepted:
    """Result for a chain ``tokens [B, S + 1]``: its first ``num_accepted [B]`` drafts, then ``bonus [B]``."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    path = torch.minimum(place, num_accepted[:, None])
    return tree_accepted(tokens, path, num_accepted, bonus)


def tree_accepted(
    tokens: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor, bonus: torch.Tensor
) -> Accepted:
    """Result of following ``path [B, S + 1]`` through the window ``tokens [B, N]``."""
    place = torch.arange(path.shape[1], device=path.device)
    drafts = tokens.gather(1, path).roll(-1, 1)
    emitted = torch.where(place == num_accepted[:, None], bonus[:, None], drafts)
    return Accepted(path, emitted, num_accepted)


def step_to(
    j: int, is_accepted: torch.Tensor, node: torch.Tensor, num_accepted: torch.Tensor, path: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move to window node ``j`` where ``is_accepted`` bool ``[B, 1]``; returns new ``node`` and
    ``num_accepted`` int64 ``[B, 1]`` and ``path`` int64 ``[B, S + 1]``."""
    num_accepted = num_accepted + is_accepted
    place = torch.arange(path.shape[1], device=path.device)
    path = torch.where(is_accepted & (place >= num_accepted), j, path)
    return torch.where(is_accepted, j, node), num_accepted, path


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Weights ``[B, V]`` scaled to a sum of 1; rows of zeros are returned unchanged."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
