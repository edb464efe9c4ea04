"""Best-first search over candidates of depths in torch, the reference of the kernel.

Legend: B requests, S depths, K candidates of a depth, P 1 or K, N nodes of the window with the root.
"""

import torch

from eagle_kit.ops.tree_build import Tree

LOWEST = torch.finfo(torch.float32).min
"""Score of an impossible path: above -inf, the score of what is not in the frontier."""


def best_first(roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, nodes: int) -> Tree:
    """Make the window of the N best nodes; the arguments are described in ``__init__.py``.

    Args:
        roots: int64 ``[B]``.
        tokens: int64 ``[B, S, K]``.
        scores: fp32 ``[B, S, P, K]``.
        nodes: N.
    """
    b, steps, topk = tokens.shape
    device = roots.device
    request = torch.arange(b, device=device)
    child = torch.arange(topk, device=device)
    gains = scores.nan_to_num(nan=LOWEST, posinf=0.0, neginf=LOWEST)

    # The frontier has the K children of every node of the window, by the node's index: so its order is that
    # of equals. At first it has those of the root.
    frontier = scores.new_full((b, nodes * topk), float("-inf"))
    frontier[:, :topk] = gains[:, 0, 0].clamp(max=0.0)

    # The window: tokens, parents, depths and ancestors. At first it has the root.
    window = torch.zeros(4, b, nodes, dtype=torch.int64, device=device)
    window[0, :, 0] = roots
    window[3, :, 0] = 1
    for node in range(1, nodes):
        # Take the best of the frontier.
        best = frontier.argmax(1)
        score = frontier.gather(1, best[:, None])
        frontier.scatter_(1, best[:, None], float("-inf"))

        # Add it to the window. Its depth is its parent's and one.
        parent = best // topk
        candidate = best % topk
        _, _, parent_depth, ancestors = window[:, request, parent].unbind()
        token = tokens[request, parent_depth, candidate]
        depth = parent_depth + 1
        window[:, :, node] = torch.stack((token, parent, depth, ancestors | (1 << node)))

        # Its children enter the frontier, none of them with a higher score than its own.
        before = candidate.clamp(max=scores.shape[2] - 1)
        gain = gains[request, depth.clamp(max=steps - 1), before]
        children = torch.minimum((score + gain).clamp(min=LOWEST), score)
        is_last = (depth == steps)[:, None]
        frontier[:, node * topk + child] = children.masked_fill(is_last, float("-inf"))
    return Tree(*window.unbind())
