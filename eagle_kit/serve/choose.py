"""The target's next token after every node of a window.

A node's token is drawn with the coin of its position, so all nodes of one depth share a coin; only one of
them is on the path. The draft is then followed as far as it agrees. Whatever was drafted, the text is the one
that plain decoding draws with the same seed.

Legend: B requests, N window nodes, V vocabulary.
"""

import torch

from eagle_kit.kernels.sampling import (
    TARGET_COINS,
    SamplingBatch,
    adjust_logits,
    sample,
    target_probs,
    uniforms,
)
from eagle_kit.kernels.tree_build import Tree


def choose(
    logits: torch.Tensor,
    tree: Tree,
    seq_lens: torch.Tensor,
    sampling: SamplingBatch | None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """``logits [B, N, V]`` -> the chosen tokens int64 ``[B, N]``.

    Args:
        tree: the window; a token's penalties depend on the path to its node.
        seq_lens: int64 ``[B]``, position of the root.
        sampling: None takes the most likely token everywhere.
        allowed: bool ``[B, N, V]``, what a grammar allows; every node must allow something.
    """
    if sampling is not None:
        logits = adjust_logits(logits.float(), sampling, tree.tokens, tree.ancestors)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    if sampling is None:
        return logits.argmax(-1)
    positions = seq_lens[:, None] + 1 + tree.depths
    return sample(target_probs(logits, sampling), uniforms(sampling.seeds, positions, TARGET_COINS))
