"""Routed experts in torch, in three orders of the same work.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

import torch
from torch.nn import functional as F

from eagle_kit.kernels.linear import linear
from eagle_kit.kernels.swiglu import swiglu


def by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One expert after another over its rows; their counts are read on the host. Differentiable.

    A lone row is multiplied beside a copy of itself: it would be summed in another order than one among
    others, and a token's logits are not to depend on who shares its expert.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order = ids.flatten().argsort(stable=True)
    rows, scale = order // ids.shape[1], weights.flatten()[order, None]
    start = 0
    for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=len(down)).tolist()):
        if count:
            mine = rows[start : start + count]
            given = x[mine] if count > 1 else x[mine].expand(2, -1).contiguous()
            added = linear(swiglu(linear(given, gate_up[expert])), down[expert])[:count]
            out.index_add_(0, mine, added * scale[start : start + count])
            start += count
    return out.to(x.dtype)


def grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Rows sorted by expert, then two grouped matmuls. On a GPU nothing is read on the host; they need bf16
    and rows of a multiple of 16 bytes."""
    t, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(down), dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    stops = counts.cumsum(0, dtype=torch.int32)
    inner = swiglu(F.grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=stops))
    sorted_out = F.grouped_mm(inner, down.transpose(1, 2), offs=stops)
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    return (out.view(t, k, -1) * weights[:, :, None]).sum(1).to(x.dtype)


def dense(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Every expert over every row, weighted by 0 where a token is not sent: reads nothing on the host, for
    few tokens or small models."""
    share = torch.zeros(len(x), len(down), dtype=torch.float32, device=x.device)
    share = share.scatter(1, ids, weights)
    inner = swiglu(torch.matmul(x, gate_up.transpose(1, 2)))  # [E, T, I]
    out = torch.matmul(inner, down.transpose(1, 2))
    return (out * share.t()[:, :, None]).sum(0).to(x.dtype)
