"""Recurrent layers over windows of nodes and over packed texts, in torch.

A head keeps a state ``S [K, V]``. A token decays it, writes to it, and reads it:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t,

with ``u_t = b_t (v_t - exp(g_t) S_{t-1}^T k_t)`` in the gated delta rule (arXiv 2412.06464), and ``u_t = b_t
v_t`` in Mamba-2 (arXiv 2405.21060) and lightning attention. The decay is one number of a head, or one of each
channel of its keys (Kimi Delta Attention, arXiv 2510.26692). Over a window behind a committed state S, whose
nodes come after their parents, with ``G_i`` the sum of g over node i and its ancestors in the window,

    L_ij = b_i exp(G_i - G_j) (k_i . k_j)  for strict ancestors j of i,
    (I + L) U = b (V - exp(G) (K S)),        or U = b V without the delta rule,
    O = exp(G) (Q S) + [exp(G_i - G_j) (q_i . k_j) for i's ancestors j and itself] U,

the exponentials inside the sums over channels where there are several. So a window keeps k, u and G of its
nodes, and a path p_1 .. p_m is committed by an update of rank m, ``S <- exp(G_pm) S + sum_j exp(G_pm - G_j)
k_j u_j^T``. Nodes that are not on it have never touched the state, whatever the shape of the tree.

Legend: B requests, N nodes, T packed tokens, H heads, Hk heads of queries and keys (H / Hk successive heads
share one), K key size, V value size, C channels, W width of a convolution.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from eagle_kit.ops.recurrence.plan import TextPlan

CHUNK = 64
"""Tokens of a text that are computed together."""
CHANNEL_CHUNK = 16
"""The same where every channel has its own decay, which takes K times as much memory."""


class Inputs(NamedTuple):
    """Inputs of a recurrent layer, with any leading dimensions.

    Attributes:
        q, k: ``[..., Hk, K]``.
        v: ``[..., H, V]``.
        g: log decays, <= 0, ``[..., H]``, or ``[..., H, K]`` by channel.
        beta: strengths of writing ``[..., H]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def at(self, index: slice) -> "Inputs":
        """Those of some rows."""
        return Inputs(*(part[index] for part in self))

    def view(self, *lead: int) -> "Inputs":
        """The same with the first dimension split into ``lead``."""
        return Inputs(*(part.view(*lead, *part.shape[1:]) for part in self))


class Written(NamedTuple):
    """What a window's nodes would write: ``k [B, N, Hk, K]``, ``u [B, N, H, V]``, and the log decay from the
    committed state to each, ``decay [B, N, H]`` or ``[B, N, H, K]``; fp32."""

    k: torch.Tensor
    u: torch.Tensor
    decay: torch.Tensor


def recurrent_window(
    inputs: Inputs, state: torch.Tensor, ancestors: torch.Tensor, *, delta: bool
) -> tuple[torch.Tensor, Written]:
    """Outputs of a window's nodes behind their requests' states, which stay as they are.

    Args:
        inputs: of ``[B, N]``.
        state: ``[B, H, K, V]``.
        ancestors: int64 ``[B, N]``, bit j set when node j is an ancestor of the node or the node itself.
        delta: the gated delta rule; otherwise a node writes ``beta v``.

    Returns:
        ``[B, N, H, V]`` in the dtype of ``v``, and what :func:`commit_recurrent` needs.
    """
    n, heads = inputs.v.shape[1:3]
    nodes = torch.arange(n, device=state.device)
    seen = ((ancestors[:, :, None] >> nodes) & 1).bool()
    q, k, v, g, beta = (part.float() for part in inputs)
    state = state.float()
    decay = torch.einsum("bij,bj...->bi...", seen.float(), g)
    queries, keys = (_by_head(part, heads) for part in (q, k))  # [B, H, N, K]
    values = v.transpose(1, 2)
    strength = beta.transpose(1, 2)[..., None]
    total = decay.transpose(1, 2)  # [B, H, N] or [B, H, N, K]
    factor = total.exp() if total.ndim == 4 else total.exp()[..., None]
    between = total[:, :, :, None] - total[:, :, None]  # [B, H, N, N] or [B, H, N, N, K]
    hidden = ~seen[:, None] if total.ndim == 3 else ~seen[:, None, :, :, None]
    between = between.masked_fill(hidden, float("-inf")).exp()  # masked first: others may overflow

    def scores(rows: torch.Tensor) -> torch.Tensor:
        if total.ndim == 3:
            return between * (rows @ keys.transpose(2, 3))
        return torch.einsum("bhic,bhjc,bhijc->bhij", rows, keys, between)

    u = strength * values
    if delta:
        u = strength * (values - (factor * keys) @ state)
        if n > 1:
            lower = (strength * scores(keys)).tril(-1)  # parents come before their children
            u = torch.linalg.solve_triangular(lower, u, upper=False, unitriangular=True)
    out = (factor * queries) @ state + scores(queries) @ u
    return out.transpose(1, 2).to(inputs.v.dtype), Written(k, u.transpose(1, 2), decay)


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, N, Hk, K]`` -> ``[B, H, N, K]``."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


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
    k = _by_head(k, u.shape[2]).transpose(1, 2)  # [B, m, H, K]
    if decay.ndim == 3:
        decay = decay[..., None]
    last = (num_committed - 1).clamp(min=0)[:, None, None, None]
    total = decay.gather(1, last.expand(-1, 1, *decay.shape[2:]))  # [B, 1, H, K or 1]
    weight = (total - decay).masked_fill(~kept[:, :, None, None], float("-inf")).exp()
    added = torch.einsum("bmhk,bmhv->bhkv", weight * k, u)
    new = total[:, 0, :, :, None].exp() * state.float() + added
    return torch.where((num_committed > 0)[:, None, None, None], new, state.float()).to(state.dtype)


def recurrent_texts(
    inputs: Inputs, states: torch.Tensor | None, plan: TextPlan, *, delta: bool
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.recurrence.recurrent_texts`."""
    heads = inputs.v.shape[1]
    width = inputs.v.shape[2]
    size = inputs.k.shape[2]
    outs = []
    for text in plan.texts:
        state = inputs.v.new_zeros(heads, size, width, dtype=torch.float32)
        if text.source is not None:
            assert states is not None
            state = states[text.source]
        out, kept = recurrent_text(inputs.at(text.rows), state, text.counts, delta=delta)
        for (_, number), each in zip(text.saves, kept, strict=True):
            assert states is not None
            states[number] = each
        outs.append(out)
    return torch.cat(outs) if len(outs) != 1 else outs[0]


def recurrent_text(
    inputs: Inputs, state: torch.Tensor, counts: tuple[int, ...] = (), *, delta: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs ``[T, H, V]`` of a text behind the state ``[H, K, V]``, and the fp32 states after ``counts`` of
    its tokens. Differentiable."""
    length = len(inputs.v)
    device = inputs.v.device
    size = CHUNK if inputs.g.ndim == 2 else CHANNEL_CHUNK
    cuts = sorted({*range(0, length, size), *(each for each in counts if each < length), length})
    outs = []
    kept = {0: state.float()}
    state = state[None].float()
    for first, stop in pairwise(cuts):
        count = stop - first
        mine = Inputs(*(part[None] for part in inputs.at(slice(first, stop))))
        out, written = recurrent_window(mine, state, _chain(count, device), delta=delta)
        every = torch.arange(count, device=device)[None]
        state = commit_recurrent(state, written, every, torch.full((1,), count, device=device))
        kept[stop] = state[0]
        outs.append(out[0])
    return torch.cat(outs) if outs else inputs.v, [kept[each] for each in counts]


def _chain(count: int, device: torch.device) -> torch.Tensor:
    """Ancestor bits of a chain, ``[1, count]``, at most 64 nodes."""
    ones = torch.ones(count, dtype=torch.int64, device=device) << torch.arange(count, device=device)
    return ones.cumsum(0)[None]


def window_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Causal depthwise convolution of a window's nodes along their paths, behind the last columns of their
    requests.

    Args:
        x: ``[B, N, C]``.
        weight: ``[C, W]``, that of the node itself last.
        bias: ``[C]``.
        tail: ``[B, W - 1, C]``, the committed columns before the root, oldest first.
        columns: int64 ``[B, N, W]``, from :func:`path_columns`.

    Returns:
        ``[B, N, C]``.
    """
    both = torch.cat((tail.to(x.dtype), x), 1)
    taken = both.gather(1, columns.reshape(len(x), -1, 1).expand(-1, -1, x.shape[2]))
    return _weighted(taken.view(*columns.shape, -1).unbind(2), weight, bias)


def _weighted(
    columns: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Sum of W ``columns [..., C]`` by ``weight [C, W]``, one after another, in fp32 or wider."""
    dtype = columns[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # promote_types cannot be recorded
    factors = weight.to(wide)
    out = columns[0] * factors[:, 0]
    for i in range(1, weight.shape[1]):
        out = torch.addcmul(out, columns[i], factors[:, i])
    return (out if bias is None else out + bias.to(wide)).to(dtype)


def path_columns(ancestors: torch.Tensor, width: int) -> torch.Tensor:
    """Columns of tail and window side by side that a convolution of ``width`` reads at each node, oldest
    first: int64 ``[B, N, width]``. The node itself is column ``width - 1 + n``; behind the root lies the
    tail."""
    bits = ancestors
    found = []
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
        bits = torch.where(moves, upper, bits)
        found = torch.where(moves, found + shift, found)
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


class _Gathered(Sequence[torch.Tensor]):
    """Columns of a convolution, gathered when they are asked for: all at once would take W times the
    memory."""

    def __init__(self, columns: torch.Tensor, read: torch.Tensor) -> None:
        self._columns = columns
        self._read = read

    def __len__(self) -> int:
        return self._read.shape[1]

    def __getitem__(self, index: Any) -> Any:
        return self._columns[self._read[:, index]]


def convolved_texts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor | None,
    plan: TextPlan,
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.recurrence.convolved_texts`."""
    width = weight.shape[1]
    before = x.new_zeros(len(plan.texts), width - 1, x.shape[1])
    for i, text in enumerate(plan.texts):
        if text.source is not None:
            assert tails is not None
            before[i] = tails[text.source]
    columns = torch.cat((before.flatten(0, 1), x))
    places = plan.columns(width, x.device)
    out = _weighted(_Gathered(columns, places.read), weight, bias)
    if len(places.saved):
        assert tails is not None
        tails[places.numbers] = columns[places.saved].to(tails.dtype)
    return out
