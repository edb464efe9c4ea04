"""Masks of grammars: made on the host as bits, which a cycle unpacks on the device.

Legend: B requests, N window nodes, V vocabulary, W words of 32 tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from eagle_kit.engine.grammar.protocols import Match
from eagle_kit.ops.tree_build import Tree


def num_bytes(vocab_size: int) -> int:
    """Bytes of the bits of a vocabulary, in whole words."""
    return 4 * -(-vocab_size // 32)


def allowed_bits(matches: Sequence[Match | None], tree: Tree, vocab_size: int) -> torch.Tensor:
    """Tokens allowed after each node, the lowest bit first, uint8 ``[B, N, 4 W]`` of the host. None allows
    everything. The tree is read by the host."""
    tokens = tree.tokens.cpu()
    parents = tree.parents.cpu().numpy()
    b, n = tokens.shape
    words = num_bytes(vocab_size) // 4
    bitmask = torch.full((b, n, words), -1, dtype=torch.int32)
    tail = np.full(words, -1, dtype=np.int32)
    if vocab_size % 32:
        tail[-1] = (1 << vocab_size % 32) - 1
    for i, match in enumerate(matches):
        if match is not None:
            match.fill(parents[i], tokens[i], bitmask[i])
            # Behind the end of a grammar nothing is allowed. What is chosen there is dropped, but must be a
            # number.
            rows = bitmask[i].numpy()
            rows[~(rows & tail).any(-1)] = -1
    return bitmask.view(torch.uint8)


def unpacked(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bits of :func:`allowed_bits`, on any device -> bool ``[B, N, V]``."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)[..., :vocab_size]
