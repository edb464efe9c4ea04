"""Recurrent layers: windows of nodes, commits of paths, and packed texts, a head and a tile of its values a
program.

Products over the size of a key are summed in blocks, through which the ``[K, tile]`` part of a state passes,
and the triangular system is solved row by row. In texts the state goes from chunk to chunk through a buffer
in L2. Dots are TF32 in three passes, which is nearly fp32. What the tiles of a head have in common, products
of keys and decays, each computes for itself.

Bytes: ``4 K V`` of state a head, read by a window and by a text, read and written by a commit.

Legend: see :mod:`.reference`.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.capability import DeviceFacts, device_facts
from eagle_kit.ops.recurrence.plan import TextPlan
from eagle_kit.ops.recurrence.reference import Inputs, Written

TILE = 32
"""Most values of a program."""
BLOCK = 16
"""Channels of keys that are summed together."""
CHUNK = 32
"""Tokens of a text that are computed together."""
LEAST = 16
"""Least size of a side of a dot."""


@triton.jit
def _products(
    x, k, rows, held, state, d, in_value,
    KEY: tl.constexpr, VALUE: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Products of ``rows`` of ``x``, ``held`` if there, with those of ``k``, and with the columns ``d`` of
    ``state [K, V]``."""
    pairs = tl.zeros((NODES, NODES), tl.float32)
    read = tl.zeros((NODES, TILE), tl.float32)
    for start in range(0, KEY, BLOCK):
        c = start + tl.arange(0, BLOCK)
        at = rows[:, None] * KEY + c[None, :]
        there = held[:, None] & (c < KEY)[None, :]
        keys = tl.load(k + at, there, 0.0).to(tl.float32)
        mine = tl.load(x + at, there, 0.0).to(tl.float32)
        part = tl.load(state + c[:, None] * VALUE + d[None, :], (c < KEY)[:, None] & in_value[None, :], 0.0)
        pairs = tl.dot(mine, tl.trans(keys), pairs, input_precision="tf32x3")
        read = tl.dot(mine, part, read, input_precision="tf32x3")
    return pairs, read


@triton.jit
def _outputs(
    q, k, rows, held, state, d, in_value, values, beta, decay, seen, count,
    KEY: tl.constexpr, VALUE: tl.constexpr, DELTA: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Outputs of nodes behind a state, and what they write. ``rows`` are those of ``q`` and ``k``, ``held``
    if there; ``seen`` are ancestors, the nodes included."""
    node = tl.arange(0, NODES)
    factor = tl.exp(decay)
    between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
    written = beta[:, None] * values
    if DELTA:
        pairs, known = _products(
            k, k, rows, held, state, d, in_value, KEY, VALUE, NODES, BLOCK, TILE
        )  # fmt: skip
        written -= (beta * factor)[:, None] * known
        lower = tl.where(node[:, None] > node[None, :], beta[:, None] * between * pairs, 0.0)
        for i in range(1, count):
            row = tl.sum(tl.where(node[:, None] == i, lower, 0.0), 0)
            less = tl.sum(row[:, None] * written, 0)
            written = tl.where(node[:, None] == i, written - less[None, :], written)
    scores, read = _products(q, k, rows, held, state, d, in_value, KEY, VALUE, NODES, BLOCK, TILE)
    return tl.dot(between * scores, written, factor[:, None] * read, input_precision="tf32x3"), written


@triton.jit(do_not_specialize=["num_nodes"])
def _window(
    q, k, v, g, beta, states, slots, ancestors, out, written, decays, num_nodes,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A window of one request. ``NODES``, ``BLOCK`` and ``TILE`` are powers of 2."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    node = tl.arange(0, NODES)
    d = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = node < num_nodes
    in_value = d < VALUE
    row = request.to(tl.int64) * num_nodes + node
    bits = tl.load(ancestors + row, inside, 0)
    seen = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
    own = row * HEADS + head
    log = tl.load(g + own, inside, 0.0).to(tl.float32)
    decay = tl.sum(tl.where(seen, log[None, :], 0.0), 1)
    at = own[:, None] * VALUE + d[None, :]
    there = inside[:, None] & in_value[None, :]
    values = tl.load(v + at, there, 0.0).to(tl.float32)
    strength = tl.load(beta + own, inside, 0.0).to(tl.float32)
    state = states + (tl.load(slots + request).to(tl.int64) * HEADS + head) * KEY * VALUE
    shared = row * KEY_HEADS + head // (HEADS // KEY_HEADS)
    result, u = _outputs(
        q, k, shared, inside, state, d, in_value, values, strength, decay, seen, num_nodes,
        KEY, VALUE, DELTA, NODES, BLOCK, TILE,
    )  # fmt: skip
    tl.store(out + at, result.to(out.dtype.element_ty), there)
    tl.store(written + at, u, there)
    if tl.program_id(2) == 0:
        tl.store(decays + own, decay, inside)


@triton.jit(do_not_specialize=["num_nodes", "length"])
def _commit(
    states, slots, k, written, decays, path, num_committed, num_nodes, length,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply a path to the state of one request, where it has nodes."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(num_committed + request)
    if count > 0:
        d = tl.program_id(2) * TILE + tl.arange(0, TILE)
        slot = tl.load(slots + request).to(tl.int64)
        state = states + (slot * HEADS + head) * KEY * VALUE
        first = request.to(tl.int64) * num_nodes
        last = first + tl.load(path + request * length + count - 1)
        total = tl.load(decays + last * HEADS + head)
        for start in range(0, KEY, BLOCK):
            c = start + tl.arange(0, BLOCK)
            place = c[:, None] * VALUE + d[None, :]
            inside = (c < KEY)[:, None] & (d < VALUE)[None, :]
            new = tl.load(state + place, inside, 0.0) * tl.exp(total)
            for j in range(count):
                row = first + tl.load(path + request * length + j)
                weight = tl.exp(total - tl.load(decays + row * HEADS + head))
                key_at = (row * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + c
                key = tl.load(k + key_at, c < KEY, 0.0).to(tl.float32) * weight
                value = tl.load(written + (row * HEADS + head) * VALUE + d, d < VALUE, 0.0)
                new += key[:, None] * value[None, :]
            tl.store(state + place, new, inside)


@triton.jit
def _copy(
    source, target, d, in_value, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    FILLS: tl.constexpr,
):  # fmt: skip
    """Copy the columns ``d`` of a state, or fill them with zeros."""
    for start in range(0, KEY, BLOCK):
        c = start + tl.arange(0, BLOCK)
        at = c[:, None] * VALUE + d[None, :]
        there = (c < KEY)[:, None] & in_value[None, :]
        part = tl.zeros(at.shape, tl.float32)
        if not FILLS:
            part = tl.load(source + at, there, 0.0)
        tl.store(target + at, part, there)


@triton.jit(do_not_specialize=["saves"])
def _texts(
    q, k, v, g, beta, states, passing, out, sources, firsts, starts, counts, numbers, saves,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A text, chunk by chunk: ``counts`` tokens from ``starts`` on, then its state, which is in ``passing``,
    goes to ``numbers``. Barriers let the threads of a program see each other's parts of it."""
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
        count = tl.load(counts + chunk)
        inside = node < count
        row = tl.load(starts + chunk).to(tl.int64) + node
        own = row * HEADS + head
        log = tl.load(g + own, inside, 0.0).to(tl.float32)
        decay = tl.sum(tl.where(seen, log[None, :], 0.0), 1)
        total = tl.sum(log, 0)
        at = own[:, None] * VALUE + d[None, :]
        there = inside[:, None] & in_value[None, :]
        values = tl.load(v + at, there, 0.0).to(tl.float32)
        strength = tl.load(beta + own, inside, 0.0).to(tl.float32)
        shared = row * KEY_HEADS + head // (HEADS // KEY_HEADS)
        result, u = _outputs(
            q, k, shared, inside, state, d, in_value, values, strength, decay, seen, count,
            KEY, VALUE, DELTA, NODES, BLOCK, TILE,
        )  # fmt: skip
        tl.store(out + at, result.to(out.dtype.element_ty), there)
        weight = tl.exp(total - decay)
        tl.debug_barrier()
        for start in range(0, KEY, BLOCK):
            c = start + tl.arange(0, BLOCK)
            key_at = c[:, None] + shared[None, :] * KEY
            keys = tl.load(k + key_at, (c < KEY)[:, None] & inside[None, :], 0.0).to(tl.float32)
            place = c[:, None] * VALUE + d[None, :]
            part = (c < KEY)[:, None] & in_value[None, :]
            before = tl.load(state + place, part, 0.0) * tl.exp(total)
            after = tl.dot(keys * weight[None, :], u, before, input_precision="tf32x3")
            tl.store(state + place, after, part)
        tl.debug_barrier()
        for i in range(saves):
            number = tl.load(numbers + chunk * saves + i).to(tl.int64)
            if number >= 0:
                target = states + (number * HEADS + head) * KEY * VALUE
                _copy(state, target, d, in_value, KEY, VALUE, BLOCK, False)


def _sizes(heads: int, key_heads: int, key: int, value: int) -> dict[str, int]:
    """Sizes of a layer, and of the blocks of its programs."""
    blocks = {
        "BLOCK": min(BLOCK, max(LEAST, triton.next_power_of_2(key))),
        "TILE": min(TILE, max(LEAST, triton.next_power_of_2(value))),
    }
    return {"HEADS": heads, "KEY_HEADS": key_heads, "KEY": key, "VALUE": value, **blocks}


def _nodes(count: int) -> int:
    return max(LEAST, triton.next_power_of_2(count))


def _num_warps(nodes: int, delta: bool, facts: DeviceFacts) -> int:
    """Warps for a window: 8 from 32 nodes on, but for 64 of the delta rule on 10.x, which would spill."""
    spills = delta and nodes > 32 and facts.capability // 10 == 10
    return 4 if nodes <= 16 or spills else 8


def _of_window(sizes: dict[str, int], nodes: int, facts: DeviceFacts) -> dict[str, int]:
    """Sizes for a window: 64 nodes leave room for half a tile of values in the registers, but on Hopper."""
    if nodes <= 32 or facts.capability // 10 == 9:
        return sizes
    return {**sizes, "TILE": max(LEAST, sizes["TILE"] // 2)}


@torch.library.custom_op("eagle_kit::recurrent_window", mutates_args=())
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


@torch.library.custom_op("eagle_kit::commit_recurrent", mutates_args=("states",))
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
    parts = (part.contiguous() for part in (*written, path, num_committed))
    _run_commit(states, slots.contiguous(), *parts)


@torch.library.custom_op("eagle_kit::recurrent_texts", mutates_args=("states",))
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
    parts = [part.contiguous() for part in inputs]
    held = parts[2].new_empty(0, dtype=torch.float32) if states is None else states
    assert held.is_contiguous() and held.dtype == torch.float32
    return _run_texts(*parts, held, list(plan.chunks(CHUNK, held.device)), delta)
