"""Best-first search over candidates of depths in torch, the reference of the kernel.

Legend: B requests, S depths, K candidates of a depth, P 1 or K, N nodes of the window with the root.
"""

import torch

from eagle_kit.ops.tree_build import Tree

LOWEST = torch.finfo(torch.float32).min
"""Score of an impossible path: above -inf, the score of what is not in the frontier."""


def best_first(roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, nodes: int) -> Tree:
    """Make the window of the ``nodes`` N best; ``roots [B]``, ``tokens [B, S, K]``, ``scores [B, S, P, K]``.

    The frontier holds the K children of every node of the window, by the node's index. So among equal scores
    the child of the earlier node is the first.
    """
    # The frontier has the root's children; the window has the root.
    b, steps, topk = tokens.shape
    device = roots.device
    row = torch.arange(b, device=device)
    log_probs = scores.nan_to_num(nan=LOWEST, posinf=0.0, neginf=LOWEST)
    frontier = scores.new_full((b, nodes * topk), float("-inf"))
    frontier[:, :topk] = log_probs[:, 0, 0].clamp(max=0.0)
    zeros = torch.zeros(b, nodes, dtype=torch.int64, device=device)
    window = Tree(tokens=zeros, parents=zeros.clone(), depths=zeros.clone(), ancestors=zeros.clone())
    window.tokens[:, 0] = roots
    window.ancestors[:, 0].fill_(1)
    for node in range(1, nodes):
        # Take the best of the frontier.
        best = frontier.argmax(1)
        score = frontier.gather(1, best[:, None])
        frontier.scatter_(1, best[:, None], float("-inf"))

        # Add it to the window.
        parent = best // topk
        candidate = best % topk
        depth = window.depths[row, parent] + 1
        window.tokens[:, node] = tokens[row, depth - 1, candidate]
        window.parents[:, node] = parent
        window.depths[:, node] = depth
        window.ancestors[:, node] = window.ancestors[row, parent] | (1 << node)

        # Add its children to the frontier, unless it is at the last depth. They are no better than it.
        is_last = (depth == steps)[:, None]
        given = candidate.clamp(max=scores.shape[2] - 1)
        child_log_probs = log_probs[row, depth.clamp(max=steps - 1), given]
        children = torch.minimum((score + child_log_probs).clamp(min=LOWEST), score)
        frontier[:, node * topk : (node + 1) * topk] = children.masked_fill(is_last, float("-inf"))
    return window
