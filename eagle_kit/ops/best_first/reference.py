"""Best-first search over candidates of depths in torch, the reference of the kernel.

Legend: B requests, S depths, K candidates of a depth, P 1 or K, N nodes of the window with the root.
"""

import torch

from eagle_kit.ops.tree_build import Tree

LOWEST = torch.finfo(torch.float32).min
"""Score of an impossible path: above -inf, the score of what is not in the frontier."""


def best_first(roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, nodes: int) -> Tree:
    """Window of the ``nodes`` N best; ``roots [B]``, ``tokens [B, S, K]``, ``scores [B, S, P, K]``.

    The frontier holds the children of all chosen nodes, K of each, so its index orders equals.
    """
    b, steps, topk = tokens.shape
    device = roots.device
    row = torch.arange(b, device=device)
    child = torch.arange(topk, device=device)
    gains = scores.nan_to_num(nan=LOWEST, posinf=0.0, neginf=LOWEST)
    frontier = scores.new_full((b, nodes * topk), float("-inf"))
    frontier[:, :topk] = gains[:, 0, 0].clamp(max=0.0)
    window = torch.zeros(4, b, nodes, dtype=torch.int64, device=device)
    window[0, :, 0], window[3, :, 0] = roots, 1
    for node in range(1, nodes):
        at = frontier.argmax(1)
        score = frontier.gather(1, at[:, None])
        frontier.scatter_(1, at[:, None], float("-inf"))
        parent = at // topk
        candidate = at % topk
        _, _, depth, ancestors = window[:, row, parent].unbind()
        chosen = tokens[row, depth, candidate], parent, depth + 1, ancestors | (1 << node)
        window[:, :, node] = torch.stack(chosen)
        is_last = (depth + 1 == steps)[:, None]
        given = candidate.clamp(max=scores.shape[2] - 1)
        gain = gains[row, (depth + 1).clamp(max=steps - 1), given]
        children = torch.minimum((score + gain).clamp(min=LOWEST), score)
        frontier[:, node * topk + child] = children.masked_fill(is_last, float("-inf"))
    return Tree(*window.unbind())
