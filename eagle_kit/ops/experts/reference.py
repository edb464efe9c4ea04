"""Routed experts in torch: expert by expert, in groups, or every expert over every row. ``ids`` may be E for
experts of other processes.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from eagle_kit.ops.fp8 import FP8Weight
from eagle_kit.ops.linear import linear
from eagle_kit.ops.linear.fp8 import fp8_linear
from eagle_kit.ops.swiglu import swiglu


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor | FP8Weight) -> torch.Tensor:
    """Linear layer over rows ``[n, K]``, with one-row inputs padded to two rows to keep the summation
    order."""
    rows = x if len(x) > 1 else x.expand(2, -1).contiguous()
    out = fp8_linear(rows, weight) if isinstance(weight, FP8Weight) else linear(rows, weight)
    return out[: len(x)]


def by_expert(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[Any] | torch.Tensor,
    down: Sequence[Any] | torch.Tensor,
    multiply: Callable[[torch.Tensor, Any], torch.Tensor] = batch_invariant_linear,
) -> torch.Tensor:
    """Run one expert after another over its rows, reading the routing on the host. Differentiable.

    Args:
        gate_up, down: weights as ``multiply`` takes them after the rows, one per expert.
        multiply: linear layer whose result for a row must not depend on the number of rows, so that a token's
            logits do not depend on the other tokens of its expert.
    """
    # The pairs (token, expert) of this process, sorted by expert.
    experts = ids.flatten().tolist()
    own_pairs = (pair for pair, expert in enumerate(experts) if expert < len(down))
    sorted_pairs = sorted(own_pairs, key=experts.__getitem__)
    if not sorted_pairs:
        return torch.zeros_like(x)
    active = sorted({experts[pair] for pair in sorted_pairs})
    sizes = [experts.count(expert) for expert in active]
    pairs = torch.tensor(sorted_pairs, device=x.device)
    tokens = torch.tensor([pair // ids.shape[1] for pair in sorted_pairs], device=x.device)

    # Each active expert over its rows.
    def apply(inputs: torch.Tensor, networks: Sequence[Any] | torch.Tensor) -> torch.Tensor:
        parts = zip(active, inputs.split_with_sizes(sizes), strict=True)
        return torch.cat([multiply(part, networks[expert]) for expert, part in parts])

    inner = swiglu(apply(x.index_select(0, tokens), gate_up))
    results = apply(inner, down) * weights.reshape(-1, 1).index_select(0, pairs)

    # The sum of each token's experts.
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, tokens, results).to(x.dtype)


def grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    are_all: bool = True,
) -> torch.Tensor:
    """Sort rows by expert, then run two grouped matmuls. Nothing is read on the host of a GPU; bf16 only,
    with rows of a multiple of 16 bytes."""
    # Sort the pairs (token, expert) by expert.
    t, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(down) + 1, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    stops = counts[:-1].cumsum(0, dtype=torch.int32)

    # Multiply the groups.
    inner = swiglu(F.grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=stops))
    sorted_out = F.grouped_mm(inner, down.transpose(1, 2), offs=stops)
    if not are_all:  # rows behind the last group are not written
        sorted_out = sorted_out.masked_fill((flat[order] == len(down))[:, None], 0.0)

    # Put the rows back into the order of tokens, and add them up.
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    return (out.view(t, k, -1) * weights[:, :, None]).sum(1).to(x.dtype)


def dense(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Run every expert over every row, with weight 0 for tokens not routed to it: nothing is read on the
    host; for few tokens or small models."""
    share = _shares(ids, weights, len(down))
    inner = swiglu(torch.matmul(x, gate_up.transpose(1, 2)))  # [E, T, I]
    out = torch.matmul(inner, down.transpose(1, 2))
    return (out * share.t()[:, :, None]).sum(0).to(x.dtype)


def dense_fp8(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: FP8Weight, down: FP8Weight
) -> torch.Tensor:
    """:func:`dense` with weights in fp8, one expert after another, so that one is widened at a time."""
    share = _shares(ids, weights, len(down.values))
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for weight, expert_gate_up, expert_down in zip(
        share.unbind(1), gate_up.unbind(), down.unbind(), strict=True
    ):
        inner = swiglu(fp8_linear(x, expert_gate_up))
        out = out + fp8_linear(inner, expert_down) * weight[:, None]
    return out.to(x.dtype)


def _shares(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Weight of every expert for every token, fp32 ``[T, E]``."""
    share = torch.zeros(len(ids), num_experts + 1, dtype=torch.float32, device=ids.device)
    return share.scatter(1, ids, weights)[:, :-1]
