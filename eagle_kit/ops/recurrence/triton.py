"""Recurrent layers over windows of nodes, commits of paths, and packed texts. A program has one head and one
tile of its values.

Sums over the size of a key are computed in blocks of channels, so that a program has one block of its
``[K, tile]`` part of the state at a time. The triangular system is solved row by row. In texts the state goes
from chunk to chunk through a buffer in L2. Dots are TF32 in three passes, which is nearly fp32. Products of
keys and decays, which the tiles of a head have in common, are computed by each of them.

Bytes: ``4 K V`` of state a head, read by a window and by a text, read and written by a commit.

Legend: see :mod:`.reference`. In kernels: ``c`` channels of a key, ``d`` values of the tile, ``row`` rows of
the inputs, ``key_row`` their rows of queries and keys, of which several heads share one.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.capability import DeviceFacts, device_facts
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.recurrence.plan import TextPlan
from eagle_kit.ops.recurrence.reference import Inputs, Written

TILE = 32
"""Largest number of values of a program."""
BLOCK = 16
"""Channels of keys that are summed together."""
CHUNK = 32
"""Tokens of a text that are computed together."""
LEAST = 16
"""Least size of a side of a dot."""


@triton.jit
def _products(
    x, k, key_rows, is_node, state, d, in_value,
    KEY: tl.constexpr, VALUE: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Products of the rows ``key_rows`` of ``x`` (queries or keys) with the same rows of ``k``, ``[NODES,
    NODES]``, and with the columns ``d`` of ``state [K, V]``, ``[NODES, TILE]``."""
    pairs = tl.zeros((NODES, NODES), tl.float32)
    read = tl.zeros((NODES, TILE), tl.float32)
    for start in range(0, KEY, BLOCK):
        # Load a block of channels.
        c = start + tl.arange(0, BLOCK)
        key_at = key_rows[:, None] * KEY + c[None, :]
        mask = is_node[:, None] & (c < KEY)[None, :]
        keys = tl.load(k + key_at, mask, 0.0).to(tl.float32)
        rows = tl.load(x + key_at, mask, 0.0).to(tl.float32)
        state_at = state + c[:, None] * VALUE + d[None, :]
        state_part = tl.load(state_at, (c < KEY)[:, None] & in_value[None, :], 0.0)

        # Add its part of the sums.
        pairs = tl.dot(rows, tl.trans(keys), pairs, input_precision="tf32x3")
        read = tl.dot(rows, state_part, read, input_precision="tf32x3")
    return pairs, read


@triton.jit
def _outputs(
    q, k, key_rows, is_node, state, d, in_value, values, beta, decay, seen, count,
    KEY: tl.constexpr, VALUE: tl.constexpr, DELTA: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Outputs O of ``count`` nodes behind a state, and U, what they write, both ``[NODES, TILE]``. ``seen
    [NODES, NODES]`` are ancestors, the nodes included; ``decay`` is G, the sum of log decays over them."""
    # U without the triangular system.
    node = tl.arange(0, NODES)
    factor = tl.exp(decay)
    between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
    u = beta[:, None] * values
    if DELTA:
        # Subtract what the state holds for each key; then solve (I + L) U = U row by row.
        pairs, known = _products(
            k, k, key_rows, is_node, state, d, in_value, KEY, VALUE, NODES, BLOCK, TILE
        )  # fmt: skip
        u -= (beta * factor)[:, None] * known
        lower = tl.where(node[:, None] > node[None, :], beta[:, None] * between * pairs, 0.0)
        for i in range(1, count):
            row = tl.sum(tl.where(node[:, None] == i, lower, 0.0), 0)
            earlier = tl.sum(row[:, None] * u, 0)
            u = tl.where(node[:, None] == i, u - earlier[None, :], u)

    # What queries read of the state, and of the writes of ancestors.
    scores, read = _products(q, k, key_rows, is_node, state, d, in_value, KEY, VALUE, NODES, BLOCK, TILE)
    return tl.dot(between * scores, u, factor[:, None] * read, input_precision="tf32x3"), u


@triton.jit(do_not_specialize=["num_nodes"])
def _window(
    q, k, v, g, beta, states, slots, ancestors, out, written, decays, num_nodes,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Outputs and writes of the window of one request. Grid ``(B, H, tiles of V)``; ``NODES``, ``BLOCK`` and
    ``TILE`` are powers of 2."""
    # Ancestors of the nodes, and the sums of log decays over them.
    request = tl.program_id(0)
    head = tl.program_id(1)
    node = tl.arange(0, NODES)
    d = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_node = node < num_nodes
    in_value = d < VALUE
    row = request.to(tl.int64) * num_nodes + node
    bits = tl.load(ancestors + row, is_node, 0)
    seen = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
    head_row = row * HEADS + head
    log_decay = tl.load(g + head_row, is_node, 0.0).to(tl.float32)
    decay = tl.sum(tl.where(seen, log_decay[None, :], 0.0), 1)

    # Load values and strengths; find the state, and the rows of the key head.
    v_at = head_row[:, None] * VALUE + d[None, :]
    mask = is_node[:, None] & in_value[None, :]
    values = tl.load(v + v_at, mask, 0.0).to(tl.float32)
    strength = tl.load(beta + head_row, is_node, 0.0).to(tl.float32)
    state = states + (tl.load(slots + request).to(tl.int64) * HEADS + head) * KEY * VALUE
    key_rows = row * KEY_HEADS + head // (HEADS // KEY_HEADS)

    # Compute and store.
    result, u = _outputs(
        q, k, key_rows, is_node, state, d, in_value, values, strength, decay, seen, num_nodes,
        KEY, VALUE, DELTA, NODES, BLOCK, TILE,
    )  # fmt: skip
    tl.store(out + v_at, result.to(out.dtype.element_ty), mask)
    tl.store(written + v_at, u, mask)
    if tl.program_id(2) == 0:
        tl.store(decays + head_row, decay, is_node)


@triton.jit(do_not_specialize=["num_nodes", "length"])
def _commit(
    states, slots, k, written, decays, path, num_committed, num_nodes, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply a path to the state of one request, if it has nodes. Grid ``(B, H, tiles of V)``."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(num_committed + request)
    if count > 0:
        # The state, and the log decay of the whole path.
        d = tl.program_id(2) * TILE + tl.arange(0, TILE)
        slot = tl.load(slots + request).to(tl.int64)
        state = states + (slot * HEADS + head) * KEY * VALUE
        first = request.to(tl.int64) * num_nodes
        last = first + tl.load(path + request * length + count - 1)
        total = tl.load(decays + last * HEADS + head)
        for start in range(0, KEY, BLOCK):
            # A block of channels of the state, decayed.
            c = start + tl.arange(0, BLOCK)
            state_at = c[:, None] * VALUE + d[None, :]
            mask = (c < KEY)[:, None] & (d < VALUE)[None, :]
            new = tl.load(state + state_at, mask, 0.0) * tl.exp(total)

            # Add the write of each node, decayed from there on.
            for j in range(count):
                row = first + tl.load(path + request * length + j)
                weight = tl.exp(total - tl.load(decays + row * HEADS + head))
                key_at = (row * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + c
                key = tl.load(k + key_at, c < KEY, 0.0).to(tl.float32) * weight
                value = tl.load(written + (row * HEADS + head) * VALUE + d, d < VALUE, 0.0)
                new += key[:, None] * value[None, :]
            tl.store(state + state_at, new, mask)


@triton.jit
def _copy(
    source, target, d, in_value, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    FILLS: tl.constexpr,
):  # fmt: skip
    """Copy the columns ``d`` of the state ``source`` to ``target``, or fill them with zeros if FILLS."""
    for start in range(0, KEY, BLOCK):
        c = start + tl.arange(0, BLOCK)
        state_at = c[:, None] * VALUE + d[None, :]
        mask = (c < KEY)[:, None] & in_value[None, :]
        part = tl.zeros(state_at.shape, tl.float32)
        if not FILLS:
            part = tl.load(source + state_at, mask, 0.0)
        tl.store(target + state_at, part, mask)


@triton.jit(do_not_specialize=["saves"])
def _texts(
    q, k, v, g, beta, states, passing, out, sources, firsts, starts, counts, numbers, saves,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Outputs of one text, chunk by chunk. Grid ``(texts, H, tiles of V)``.

    A chunk has ``counts`` tokens from ``starts`` on. Between chunks the state is in ``passing``; behind a
    chunk it is copied to the states ``numbers``. Barriers let the threads of a program see each other's parts
    of it.
    """
    # The state before the text, or zeros.
    text = tl.program_id(0)
    head = tl.program_id(1)
    node = tl.arange(0, NODES)
    d = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_value = d < VALUE
    source = tl.load(sources + text).to(tl.int64)
    state = passing + (text.to(tl.int64) * HEADS + head) * KEY * VALUE
    if source >= 0:
        _copy(states + (source * HEADS + head) * KEY * VALUE, state, d, in_value, KEY, VALUE, BLOCK, False)
    else:
        _copy(states, state, d, in_value, KEY, VALUE, BLOCK, True)
    tl.debug_barrier()
    seen = node[:, None] >= node[None, :]
    for chunk in range(tl.load(firsts + text), tl.load(firsts + text + 1)):
        # Load the chunk's decays, values and strengths.
        count = tl.load(counts + chunk)
        is_node = node < count
        row = tl.load(starts + chunk).to(tl.int64) + node
        head_row = row * HEADS + head
        log_decay = tl.load(g + head_row, is_node, 0.0).to(tl.float32)
        decay = tl.sum(tl.where(seen, log_decay[None, :], 0.0), 1)
        total = tl.sum(log_decay, 0)
        v_at = head_row[:, None] * VALUE + d[None, :]
        mask = is_node[:, None] & in_value[None, :]
        values = tl.load(v + v_at, mask, 0.0).to(tl.float32)
        strength = tl.load(beta + head_row, is_node, 0.0).to(tl.float32)
        key_rows = row * KEY_HEADS + head // (HEADS // KEY_HEADS)

        # Outputs, as of a window that is a chain.
        result, u = _outputs(
            q, k, key_rows, is_node, state, d, in_value, values, strength, decay, seen, count,
            KEY, VALUE, DELTA, NODES, BLOCK, TILE,
        )  # fmt: skip
        tl.store(out + v_at, result.to(out.dtype.element_ty), mask)

        # The state behind the chunk, a block of channels at a time.
        weight = tl.exp(total - decay)
        tl.debug_barrier()
        for start in range(0, KEY, BLOCK):
            c = start + tl.arange(0, BLOCK)
            key_at = c[:, None] + key_rows[None, :] * KEY
            keys = tl.load(k + key_at, (c < KEY)[:, None] & is_node[None, :], 0.0).to(tl.float32)
            state_at = c[:, None] * VALUE + d[None, :]
            state_mask = (c < KEY)[:, None] & in_value[None, :]
            before = tl.load(state + state_at, state_mask, 0.0) * tl.exp(total)
            after = tl.dot(keys * weight[None, :], u, before, input_precision="tf32x3")
            tl.store(state + state_at, after, state_mask)
        tl.debug_barrier()

        # Save it.
        for i in range(saves):
            number = tl.load(numbers + chunk * saves + i).to(tl.int64)
            if number >= 0:
                target = states + (number * HEADS + head) * KEY * VALUE
                _copy(state, target, d, in_value, KEY, VALUE, BLOCK, False)


def _sizes(heads: int, key_heads: int, key: int, value: int) -> dict[str, int]:
    """Sizes of a layer, and of the blocks of its programs."""
    return {
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "KEY": key,
        "VALUE": value,
        "BLOCK": min(BLOCK, max(LEAST, triton.next_power_of_2(key))),
        "TILE": min(TILE, max(LEAST, triton.next_power_of_2(value))),
    }


def _nodes(count: int) -> int:
    """NODES for ``count`` nodes."""
    return max(LEAST, triton.next_power_of_2(count))


def _num_warps(nodes: int, delta: bool, facts: DeviceFacts) -> int:
    """Warps for a window: 8 from 32 nodes on, except for 64 with the delta rule on 10.x, which spill."""
    spills = delta and nodes > 32 and facts.capability // 10 == 10
    return 4 if nodes <= 16 or spills else 8


def _of_window(sizes: dict[str, int], nodes: int, facts: DeviceFacts) -> dict[str, int]:
    """Sizes for a window: with 64 nodes the registers hold half a tile of values only, except on Hopper."""
    if nodes <= 32 or facts.capability // 10 == 9:
        return sizes
    return {**sizes, "TILE": max(LEAST, sizes["TILE"] // 2)}


@custom_operator("eagle_kit::recurrent_window")
def _run_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, n, heads, value = v.shape
    key_heads, key = k.shape[2:]
    out = torch.empty_like(v)
    written = v.new_empty(v.shape, dtype=torch.float32)
    decays = v.new_empty(b, n, heads, dtype=torch.float32)
    nodes = _nodes(n)
    facts = device_facts(v.device)
    sizes = _of_window(_sizes(heads, key_heads, key, value), nodes, facts)
    _window[(b, heads, triton.cdiv(value, sizes["TILE"]))](
        q, k, v, g, beta, states, slots, ancestors, out, written, decays, n,
        DELTA=delta, NODES=nodes, **sizes, num_warps=_num_warps(nodes, delta, facts),
    )  # fmt: skip
    return out, written, decays


@_run_window.register_fake
def _(q, k, v, g, beta, states, slots, ancestors, delta):
    written = v.new_empty(v.shape, dtype=torch.float32)
    return torch.empty_like(v), written, v.new_empty(v.shape[:3], dtype=torch.float32)


def recurrent_window(
    inputs: Inputs, states: torch.Tensor, slots: torch.Tensor, ancestors: torch.Tensor, *, delta: bool
) -> tuple[torch.Tensor, Written]:
    """See :func:`eagle_kit.ops.recurrence.recurrent_window`."""
    assert states.is_contiguous() and states.dtype == torch.float32
    q, k, v, g, beta = (part.contiguous() for part in inputs)
    out, written, decays = _run_window(
        q, k, v, g, beta, states, slots.contiguous(), ancestors.contiguous(), delta
    )
    return out, Written(k, written, decays)


@custom_operator("eagle_kit::commit_recurrent", mutates_args=("states",))
def _run_commit(
    states: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    written: torch.Tensor,
    decays: torch.Tensor,
    path: torch.Tensor,
    num_committed: torch.Tensor,
) -> None:
    b, n, heads, value = written.shape
    key_heads, key = k.shape[2:]
    sizes = _sizes(heads, key_heads, key, value)
    _commit[(b, heads, triton.cdiv(value, sizes["TILE"]))](
        states, slots, k, written, decays, path, num_committed, n, path.shape[1], **sizes, num_warps=4
    )


@_run_commit.register_fake
def _(states, slots, k, written, decays, path, num_committed):
    return None


def commit_recurrent(
    states: torch.Tensor,
    slots: torch.Tensor,
    written: Written,
    path: torch.Tensor,
    num_committed: torch.Tensor,
) -> None:
    """See :func:`eagle_kit.ops.recurrence.commit_recurrent`."""
    assert states.is_contiguous() and states.dtype == torch.float32
    _run_commit(
        states,
        slots.contiguous(),
        written.k.contiguous(),
        written.u.contiguous(),
        written.decay.contiguous(),
        path.contiguous(),
        num_committed.contiguous(),
    )


@custom_operator("eagle_kit::recurrent_texts", mutates_args=("states",))
def _run_texts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    chunks: list[torch.Tensor],
    delta: bool,
) -> torch.Tensor:
    _, heads, value = v.shape
    key_heads, key = k.shape[1:]
    sources = chunks[0]
    numbers = chunks[-1]
    out = torch.empty_like(v)
    sizes = _sizes(heads, key_heads, key, value)
    passing = states.new_empty(len(sources), heads, key, value)
    _texts[(len(sources), heads, triton.cdiv(value, sizes["TILE"]))](
        q, k, v, g, beta, states, passing, out, *chunks, numbers.shape[1],
        DELTA=delta, NODES=CHUNK, **sizes, num_warps=8,
    )  # fmt: skip
    return out


@_run_texts.register_fake
def _(q, k, v, g, beta, states, chunks, delta):
    return torch.empty_like(v)


def recurrent_texts(
    inputs: Inputs, states: torch.Tensor | None, plan: TextPlan, *, delta: bool
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.recurrence.recurrent_texts`."""
    q, k, v, g, beta = (part.contiguous() for part in inputs)
    if states is None:
        states = v.new_empty(0, dtype=torch.float32)
    assert states.is_contiguous() and states.dtype == torch.float32
    return _run_texts(q, k, v, g, beta, states, list(plan.chunks(CHUNK, states.device)), delta)
