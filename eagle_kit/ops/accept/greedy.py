"""Most likely tokens, and greedy verification of deterministic drafts by them, in torch and C++.

Legend: B requests, N nodes, S steps.
"""

import torch

from eagle_kit.ops.accept.types import Accepted, MostLikely
from eagle_kit.ops.backend import Backend, uses_cpp, uses_triton


def most_likely(logits: torch.Tensor, *, backend: Backend | None = None) -> MostLikely:
    """Most likely tokens of ``logits [..., V]`` of any float type, the lowest id among equals. A row with a
    NaN has the id and the value of the NaN."""
    if uses_cpp(logits, backend=backend):
        rows = logits.reshape(-1, logits.shape[-1])
        tokens, values = torch.ops.eagle_kit_cpp.most_likely(rows.contiguous())
        shape = logits.shape[:-1]
        return MostLikely(tokens.view(shape), values.view(shape))
    tokens = logits.argmax(-1)
    return MostLikely(tokens, logits.gather(-1, tokens[..., None])[..., 0])


def accept_most_likely(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    steps: int,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """:func:`accept_greedy` with the argmax of ``logits [B, N, V]`` of any float type; the lowest id among
    equals."""
    if uses_triton("accept", logits, backend):
        from eagle_kit.ops.accept import triton

        accepted = triton.accept_most_likely(
            logits.contiguous(), tokens.contiguous(), parents.contiguous(), steps
        )
        return Accepted(*accepted)
    return accept_greedy(most_likely(logits, backend=backend).tokens, tokens, parents, steps)


def accept_greedy(
    predicted: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    steps: int,
) -> Accepted:
    """Follow the target's most likely tokens from the root for as long as they were drafted.

    Args:
        predicted: int64 ``[B, N]``, the target's most likely token after each node.
        tokens, parents: int64 ``[B, N]``, the window.
        steps: S, its depth.
    """
    b, n = tokens.shape
    node = torch.zeros(b, 1, dtype=torch.int64, device=tokens.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    is_drafted = torch.arange(n, device=tokens.device) > 0
    path = [node]
    num_accepted = torch.zeros_like(node)
    for _ in range(steps):
        agrees = (parents == node) & (tokens == predicted.gather(1, node)) & is_drafted
        alive = alive & agrees.any(1, keepdim=True)
        node = torch.where(alive, agrees.to(torch.int8).argmax(1, keepdim=True), node)
        num_accepted = num_accepted + alive
        path.append(node)
    nodes = torch.cat(path, 1)
    return Accepted(nodes, predicted.gather(1, nodes), num_accepted[:, 0])
