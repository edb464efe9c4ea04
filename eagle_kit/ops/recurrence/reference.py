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
k_j u_j^T``. Nodes that are not on the path never change the state, whatever the shape of the tree.

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
        """Inputs of some rows."""
        return Inputs._make(part[index] for part in self)

    def view(self, *lead: int) -> "Inputs":
        """The same inputs with the first dimension split into ``lead``."""
        return Inputs._make(part.view(*lead, *part.shape[1:]) for part in self)


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
    # Inputs in fp32, heads first, and G: the sum of log decays over a node and its ancestors.
    n, heads = inputs.v.shape[1:3]
    nodes = torch.arange(n, device=state.device)
    seen = ((ancestors[:, :, None] >> nodes) & 1).bool()
    q, k, v, g, beta = (part.float() for part in inputs)
    state = state.float()
    queries = _by_head(q, heads)  # [B, H, N, K]
    keys = _by_head(k, heads)
    values = v.transpose(1, 2)
    strength = beta.transpose(1, 2)[..., None]
    decay = torch.einsum("bij,bj...->bi...", seen.float(), g)
    total = decay.transpose(1, 2)  # [B, H, N] or [B, H, N, K]
    is_by_channel = total.ndim == 4

    # Decays from the state to each node, and between nodes. Masked before exp: pairs of nodes that do not see
    # each other may overflow.
    factor = total.exp() if is_by_channel else total.exp()[..., None]
    between = total[:, :, :, None] - total[:, :, None]  # [B, H, N, N] or [B, H, N, N, K]
    hidden = ~seen[:, None, :, :, None] if is_by_channel else ~seen[:, None]
    between = between.masked_fill(hidden, float("-inf")).exp()

    def scores(rows: torch.Tensor) -> torch.Tensor:
        if is_by_channel:
            return torch.einsum("bhic,bhjc,bhijc->bhij", rows, keys, between)
        return between * (rows @ keys.transpose(2, 3))

    # U, and the outputs.
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
    is_committed = steps < num_committed[:, None]

    # What the nodes of the path write.
    def along(x: torch.Tensor) -> torch.Tensor:
        ones = [1] * (x.ndim - 2)
        index = path.view(*path.shape, *ones).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    k, u, decay = (along(x) for x in written)
    k = _by_head(k, u.shape[2]).transpose(1, 2)  # [B, m, H, K]
    if decay.ndim == 3:
        decay = decay[..., None]

    # The state, decayed over the path, and each write, decayed from its node on.
    last = (num_committed - 1).clamp(min=0)[:, None, None, None]
    total = decay.gather(1, last.expand(-1, 1, *decay.shape[2:]))  # [B, 1, H, K or 1]
    weight = (total - decay).masked_fill(~is_committed[:, :, None, None], float("-inf")).exp()
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
        out, saved_states = recurrent_text(inputs.at(text.rows), state, text.counts, delta=delta)
        for (_, number), saved in zip(text.saves, saved_states, strict=True):
            assert states is not None
            states[number] = saved
        outs.append(out)
    return torch.cat(outs) if len(outs) != 1 else outs[0]


def recurrent_text(
    inputs: Inputs, state: torch.Tensor, counts: tuple[int, ...] = (), *, delta: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs ``[T, H, V]`` of a text behind the state ``[H, K, V]``, and the fp32 states after ``counts`` of
    its tokens. Differentiable."""
    # Chunks end where a state is asked for.
    length = len(inputs.v)
    device = inputs.v.device
    size = CHUNK if inputs.g.ndim == 2 else CHANNEL_CHUNK
    bounds = {*range(0, length, size), length}
    bounds.update(count for count in counts if count < length)

    # A chunk is a window that is a chain, all of which is committed.
    outs = []
    states = {0: state.float()}
    state = state[None].float()
    for first, stop in pairwise(sorted(bounds)):
        count = stop - first
        chunk = inputs.at(slice(first, stop)).view(1, count)
        out, written = recurrent_window(chunk, state, _chain(count, device), delta=delta)
        every = torch.arange(count, device=device)[None]
        state = commit_recurrent(state, written, every, torch.full((1,), count, device=device))
        states[stop] = state[0]
        outs.append(out[0])
    return torch.cat(outs) if outs else inputs.v, [states[count] for count in counts]


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
    tail_and_window = torch.cat((tail.to(x.dtype), x), 1)
    index = columns.reshape(len(x), -1, 1).expand(-1, -1, x.shape[2])
    taken = tail_and_window.gather(1, index).view(*columns.shape, -1)
    return _weighted(taken.unbind(2), weight, bias)


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
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(dtype)


def path_columns(ancestors: torch.Tensor, width: int) -> torch.Tensor:
    """Columns that a convolution of ``width`` reads at each node, oldest first: int64 ``[B, N, width]``. They
    are those of the tail, ``0 .. width - 2``, and of the window, node n at ``width - 1 + n``."""
    # The node and its latest ancestors, one after another.
    bits = ancestors
    nodes = []
    for _ in range(width):
        is_node = bits != 0
        latest = _highest_bit(bits)
        nodes.append(torch.where(is_node, latest, -1))
        bits = torch.where(is_node, bits & ~(torch.ones_like(bits) << latest), bits)

    # Before the root come the columns of the tail.
    latest_first = torch.stack(nodes, -1)  # [B, N, width], -1 beyond the root
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
    along = x.gather(1, path[..., None].expand(-1, -1, x.shape[2]))
    columns = torch.cat((tail, along.to(tail.dtype)), 1)
    index = num_committed[:, None] + torch.arange(tail.shape[1], device=x.device)
    return columns.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


class _Gathered(Sequence[torch.Tensor]):
    """Columns of a convolution, gathered when they are read: all at once would take W times the memory."""

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
    # Columns before each text, then those of all tokens.
    width = weight.shape[1]
    before = x.new_zeros(len(plan.texts), width - 1, x.shape[1])
    for i, text in enumerate(plan.texts):
        if text.source is not None:
            assert tails is not None
            before[i] = tails[text.source]
    columns = torch.cat((before.flatten(0, 1), x))

    # Convolve, and save the tails that the plan names.
    indices = plan.columns(width, x.device)
    out = _weighted(_Gathered(columns, indices.read), weight, bias)
    if len(indices.saved):
        assert tails is not None
        tails[indices.numbers] = columns[indices.saved].to(tails.dtype)
    return out
