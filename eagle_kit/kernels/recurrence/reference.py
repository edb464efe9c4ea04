"""Recurrent layers over windows of nodes and over packed texts, in torch.

A head keeps a state ``S [K, V]``. A token decays it, writes to it, and reads it:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t,

with ``u_t = b_t (v_t - exp(g_t) S_{t-1}^T k_t)`` in the gated delta rule (arXiv 2412.06464), and ``u_t = b_t
v_t`` in Mamba-2 (arXiv 2405.21060) and lightning attention. Over a window behind a committed state S, whose
nodes come after their parents, with ``G_i`` the sum of g over node i and its ancestors in the window,

    L_ij = b_i exp(G_i - G_j) (k_i . k_j)  for strict ancestors j of i,
    (I + L) U = b (V - exp(G) (K S)),        or U = b V without the delta rule,
    O = exp(G) (Q S) + [exp(G_i - G_j) (q_i . k_j) for i's ancestors j and itself] U.

So a window keeps k, u and G of its nodes, and a path p_1 .. p_m is committed by an update of rank m,
``S <- exp(G_pm) S + sum_j exp(G_pm - G_j) k_j u_j^T``. Nodes that are not on it have never touched the state,
whatever the shape of the tree.

Legend: B requests, N nodes, T packed tokens, H heads, K key size, V value size, C channels, W width of a
convolution.
"""

from typing import NamedTuple

import torch

CHUNK = 64
"""Tokens of a text that are computed together."""


class Written(NamedTuple):
    """What a window's nodes would write: ``k [B, N, H, K]``, ``u [B, N, H, V]``, and the log decay from the
    committed state to each, ``decay [B, N, H]``; fp32."""

    k: torch.Tensor
    u: torch.Tensor
    decay: torch.Tensor


def recurrent_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    delta: bool,
) -> tuple[torch.Tensor, Written]:
    """Outputs of a window's nodes behind their requests' states, which stay as they are.

    Args:
        q, k: ``[B, N, H, K]``.
        v: ``[B, N, H, V]``.
        g: log decays ``[B, N, H]``, <= 0.
        beta: strengths of writing ``[B, N, H]``.
        state: ``[B, H, K, V]``.
        ancestors: int64 ``[B, N]``, bit j set when node j is an ancestor of the node or the node itself.
        delta: the gated delta rule; otherwise a node writes ``beta v``.

    Returns:
        ``[B, N, H, V]`` in the dtype of ``v``, and what :func:`commit_recurrent` needs.
    """
    nodes = torch.arange(q.shape[1], device=q.device)
    seen = ((ancestors[:, :, None] >> nodes) & 1).bool()
    q, k, v32, g, beta, state = (x.float() for x in (q, k, v, g, beta, state))
    decay = torch.einsum("bij,bjh->bih", seen.float(), g)
    factor = decay.exp().transpose(1, 2)[..., None]  # [B, H, N, 1]
    between = decay.transpose(1, 2)[..., None] - decay.transpose(1, 2)[:, :, None]
    between = between.masked_fill(~seen[:, None], float("-inf")).exp()  # masked first: others may overflow
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v32))
    strength = beta.transpose(1, 2)[..., None]
    u = strength * values
    if delta:
        u = strength * (values - factor * (keys @ state))
        lower = strength * between * (keys @ keys.transpose(2, 3))
        lower = lower.tril(-1)  # parents come before their children
        u = torch.linalg.solve_triangular(lower, u, upper=False, unitriangular=True)
    out = factor * (queries @ state) + (between * (queries @ keys.transpose(2, 3))) @ u
    return out.transpose(1, 2).to(v.dtype), Written(k, u.transpose(1, 2), decay)


def commit_recurrent(
    state: torch.Tensor, written: Written, path: torch.Tensor, num_committed: torch.Tensor
) -> torch.Tensor:
    """States ``[B, H, K, V]`` after the first ``num_committed [B]`` nodes of ``path [B, m]``, root first;
    unchanged where that is none."""
    steps = torch.arange(path.shape[1], device=path.device)
    kept = steps < num_committed[:, None]

    def along(x: torch.Tensor) -> torch.Tensor:
        index = path.view(*path.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    k, u, decay = (along(x) for x in written)
    last = (num_committed - 1).clamp(min=0)
    total = decay.gather(1, last[:, None, None].expand(-1, 1, decay.shape[2]))  # [B, 1, H]
    weight = (total - decay).masked_fill(~kept[..., None], float("-inf")).exp()
    added = torch.einsum("bmh,bmhk,bmhv->bhkv", weight, k, u)
    new = total[:, 0, :, None, None].exp() * state.float() + added
    return torch.where((num_committed > 0)[:, None, None, None], new, state.float()).to(state.dtype)


def recurrent_prompts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    spans: list[tuple[int, int]],
    states: torch.Tensor | None = None,
    *,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of packed texts, and the states behind them.

    Args:
        q, k: ``[T, H, K]``; ``v [T, H, V]``; ``g`` and ``beta [T, H]``: as in :func:`recurrent_window`.
        spans: (start, stop) of each text, in order.
        states: before the texts, ``[B, H, K, V]``; zeros where None.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``, and fp32 ``[B, H, K, V]``; differentiable.
    """
    heads, size, width = k.shape[1], k.shape[2], v.shape[2]
    outs, ends = [], []
    for number, (start, stop) in enumerate(spans):
        state = v.new_zeros(1, heads, size, width, dtype=torch.float32)
        if states is not None:
            state = states[number : number + 1].float()
        for first in range(start, stop, CHUNK):
            at = slice(first, min(first + CHUNK, stop))
            bits = _chain(at.stop - at.start, q.device)
            mine = q[None, at], k[None, at], v[None, at], g[None, at], beta[None, at]
            out, written = recurrent_window(*mine, state, bits, delta=delta)
            count = torch.tensor([at.stop - at.start], device=q.device)
            state = commit_recurrent(
                state, written, torch.arange(at.stop - at.start, device=q.device)[None], count
            )
            outs.append(out[0])
        ends.append(state)
    return torch.cat(outs) if outs else v, torch.cat(ends) if ends else v.new_zeros(0, heads, size, width)


def _chain(count: int, device: torch.device) -> torch.Tensor:
    """Ancestor bits of a chain, ``[1, count]``, at most 64 nodes."""
    ones = torch.ones(count, dtype=torch.int64, device=device) << torch.arange(count, device=device)
    return ones.cumsum(0)[None]


def window_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    ancestors: torch.Tensor,
) -> torch.Tensor:
    """Causal depthwise convolution of a window's nodes along their paths, behind the last columns of their
    requests.

    Args:
        x: ``[B, N, C]``.
        weight: ``[C, W]``, that of the node itself last.
        bias: ``[C]``.
        tail: ``[B, W - 1, C]``, the committed columns before the root, oldest first.
        ancestors: as in :func:`recurrent_window`.

    Returns:
        ``[B, N, C]``.
    """
    width = weight.shape[1]
    columns, index = torch.cat((tail.to(x.dtype), x), 1), path_columns(ancestors, width)
    taken = columns.gather(1, index.reshape(len(x), -1, 1).expand(-1, -1, x.shape[2]))
    out = torch.einsum("bnwc,cw->bnc", taken.view(*x.shape[:2], width, -1), weight.to(x.dtype))
    return out if bias is None else out + bias.to(x.dtype)


def path_columns(ancestors: torch.Tensor, width: int) -> torch.Tensor:
    """Columns of tail and window side by side that a convolution of ``width`` reads at each node, oldest
    first: int64 ``[B, N, width]``. The node itself is column ``width - 1 + n``; behind the root lies the
    tail."""
    bits, found = ancestors, []
    for _ in range(width):
        inside = bits != 0
        latest = _highest_bit(bits)
        found.append(torch.where(inside, latest, -1))
        bits = torch.where(inside, bits & ~(torch.ones_like(bits) << latest), bits)
    latest_first = torch.stack(found, -1)  # [B, N, width], -1 beyond the root
    beyond = (latest_first < 0).cumsum(-1)  # 1 for the newest column of the tail
    columns = torch.where(latest_first >= 0, latest_first + width - 1, width - 1 - beyond)
    return columns.flip(-1)


def _highest_bit(bits: torch.Tensor) -> torch.Tensor:
    """Number of the highest set bit of int64 words; 0 where there is none."""
    found = torch.zeros_like(bits)
    for shift in (32, 16, 8, 4, 2, 1):
        upper = (bits >> shift) & ((1 << (64 - shift)) - 1)
        moves = upper != 0
        bits, found = torch.where(moves, upper, bits), torch.where(moves, found + shift, found)
    return found


def commit_tail(
    tail: torch.Tensor, x: torch.Tensor, path: torch.Tensor, num_committed: torch.Tensor
) -> torch.Tensor:
    """Last columns ``[B, W - 1, C]`` after the first ``num_committed [B]`` nodes of ``path [B, m]``."""
    kept = tail.shape[1]
    along = x.gather(1, path[..., None].expand(-1, -1, x.shape[2]))
    columns = torch.cat((tail, along.to(tail.dtype)), 1)
    index = num_committed[:, None] + torch.arange(kept, device=x.device)
    return columns.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    spans: list[tuple[int, int]],
    tails: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution ``[T, C]`` of packed texts ``x [T, C]``, and their last columns
    ``[B, W - 1, C]``; ``tails`` lie before them, zeros where None."""
    kept = weight.shape[1] - 1
    outs, ends = [], []
    for number, (start, stop) in enumerate(spans):
        before = x.new_zeros(kept, x.shape[1]) if tails is None else tails[number].to(x.dtype)
        columns = torch.cat((before, x[start:stop]))
        out = torch.einsum("tcw,cw->tc", columns.unfold(0, kept + 1, 1), weight.to(x.dtype))
        outs.append(out if bias is None else out + bias.to(x.dtype))
        ends.append(columns[len(columns) - kept :])
    return torch.cat(outs) if outs else x, torch.stack(ends) if ends else x.new_zeros(0, kept, x.shape[1])
