"""Checks of a layer's operations: norms, rotations, SwiGLU, linear layers, experts, recurrences."""

from collections.abc import Sequence

import torch

from eagle_kit.doctor.operations.inputs import error_of, largest, normal
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.experts import experts, fp8_experts
from eagle_kit.ops.fp8 import E4M3, FP8Weight, quantize_fp8
from eagle_kit.ops.linear import linear
from eagle_kit.ops.linear.fp8 import fp8_linear
from eagle_kit.ops.norm import add_rms_norm, rms_norm
from eagle_kit.ops.recurrence import (
    Inputs,
    Text,
    TextPlan,
    commit_recurrent,
    recurrent_texts,
    recurrent_window,
)
from eagle_kit.ops.rope import Rotation, WindowRows, rope_store
from eagle_kit.ops.small_linear import small_linear, small_linear_swiglu
from eagle_kit.ops.swiglu import swiglu

EPS = 1e-5
EXPERT_IDS = ([0, 1], [1, 2], [2, 0], [0, 2], [1, 0])
"""Two of three experts for each of five tokens."""
EXPERT_WEIGHTS = (0.75, 0.25)
"""Weights of the first and of the second expert of a token."""


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of ``x [..., H]`` in fp64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def norms(dtype: torch.dtype) -> float:
    """Five rows with and without a residual."""
    x = normal(dtype, 5, 96)
    residual = normal(dtype, 5, 96, seed=1)
    weight = normal(dtype, 96, seed=2)
    got, total = add_rms_norm(x, residual, weight, EPS)
    alone = rms_norm(total, weight, EPS)
    return largest(
        error_of(total, x.double() + residual.double()),
        error_of(got, normed(total, weight)),
        error_of(alone, normed(total, weight)),
    )


def norm_gradients(dtype: torch.dtype) -> float:
    """Gradients of x and of the fp32 weight, with one that flows into the sum."""
    x = normal(dtype, 5, 96).requires_grad_()
    residual = normal(dtype, 5, 96, seed=1)
    weight = normal(torch.float32, 96).requires_grad_()
    upstream = normal(dtype, 5, 96, seed=3), normal(dtype, 5, 96, seed=4)
    got = torch.autograd.grad(add_rms_norm(x, residual, weight, EPS), (x, weight), upstream)
    exact_x = x.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    total = exact_x + residual.double()
    outputs = (normed(total, exact_weight), total)
    wide = [each.double() for each in upstream]
    expected = torch.autograd.grad(outputs, (exact_x, exact_weight), wide)
    return largest(*(error_of(*pair) for pair in zip(got, expected, strict=True)))


def turned(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Heads ``[T, H, D]`` turned by a rotation of all their elements, in fp64; the two halves are pairs."""
    angle = (rotation.positions[:, None, None].float() * rotation.inv_freq).double()
    first, second = x.double().chunk(2, -1)
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


def rotated_windows(dtype: torch.dtype, stored: torch.dtype | None = None) -> float:
    """Three query heads and a key head of six tokens, late positions too; keys and values of a window go to
    their rows."""
    # Inputs and store.
    qkv = normal(dtype, 6, 5, 4)
    positions = torch.tensor([0, 7, 131071, 2, 3, 9])
    rotation = Rotation(positions, torch.tensor([1.0, 0.03]))
    k_rows = torch.zeros(1, 12, 4).to(stored or dtype)
    v_rows = k_rows.clone()
    rows = WindowRows(2, 3, 3, 2, qkv.device)
    k_scale = 1.0 if stored is None else 0.5
    v_scale = 1.0 if stored is None else 2.0

    # Turned queries, and turned keys and values in their rows.
    q, _, _ = rope_store(
        qkv,
        rotation,
        num_heads=3,
        k_rows=k_rows,
        v_rows=v_rows,
        rows=rows,
        k_scale=k_scale,
        v_scale=v_scale,
        returns_kv=False,
    )
    written = torch.tensor([2, 3, 5, 6, 8, 9])
    keys = k_rows.float()[0, written] * k_scale
    values = v_rows.float()[0, written] * v_scale
    return largest(
        error_of(q, turned(qkv[:, :3], rotation)),
        error_of(keys, turned(qkv[:, 3:4], rotation)[:, 0]),
        error_of(values, qkv[:, 4]),
    )


def fp8_rotated_windows(dtype: torch.dtype) -> float:
    """The same with a store in e4m3."""
    return rotated_windows(dtype, stored=E4M3)


def rotation_gradients(dtype: torch.dtype) -> float:
    """The gradient is rotated by the negative angles: behind the rotation it is what it was."""
    qkv = normal(dtype, 3, 4, 4).requires_grad_()
    rotation = Rotation(torch.tensor([1, 7, 2]), torch.tensor([1.0, 0.3]))
    got = torch.cat(rope_store(qkv, rotation, num_heads=2), 1)
    (gradient,) = torch.autograd.grad(got, qkv, got.detach())
    return error_of(gradient, qkv.detach())


def swiglu_values(dtype: torch.dtype) -> float:
    """Values of five rows."""
    x = normal(dtype, 5, 24)
    gate, up = x.double().chunk(2, -1)
    return error_of(swiglu(x), gate / (1 + (-gate).exp()) * up)


def swiglu_gradients(dtype: torch.dtype) -> float:
    """Gradients of five rows."""
    x = normal(dtype, 5, 24).requires_grad_()
    upstream = normal(dtype, 5, 12, seed=1)
    (gradient,) = torch.autograd.grad(swiglu(x), x, upstream)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.double())
    return error_of(gradient, expected_gradient)


def linears(dtype: torch.dtype, backend: str = "torch") -> float:
    """37 rows of 96 numbers to 65."""
    x = normal(dtype, 37, 96)
    weight = normal(dtype, 65, 96, seed=1)
    return error_of(linear(x, weight, backend=backend), x.double() @ weight.double().t())


def fp8_linears(dtype: torch.dtype) -> float:
    """300 rows by a weight in e4m3: with scales of outputs, which rounds x to e4m3 too, and of blocks."""
    x = normal(dtype, 300, 160)
    held = quantize_fp8(normal(torch.float32, 48, 160, seed=1))
    blocks = FP8Weight(held.values, normal(torch.float32, 1, 2, seed=2).exp() / 448, (128, 128))
    errors = []
    for weight in (held, blocks):
        expected = x.double() @ weight.dense(torch.float64).t()
        errors.append(error_of(fp8_linear(x, weight), expected))
    return largest(*errors)


def small_linears(dtype: torch.dtype) -> float:
    """Five rows of signs, whose sums are exact in a half dtype; with gate and up, which are rounded to it."""
    x = normal(dtype, 5, 64).sign()
    weight = normal(dtype, 24, 64, seed=1).sign()
    product = x.double() @ weight.double().t()
    gate, up = product.chunk(2, -1)
    silu = (gate / (1 + torch.exp(-gate))).to(dtype).double()
    return largest(
        error_of(small_linear(x, weight), product),
        error_of(small_linear_swiglu(x, weight), (silu * up).to(dtype)),
    )


def fp8_small_linears(dtype: torch.dtype) -> float:
    """Five rows by weights in e4m3, with scales of outputs and of blocks, and a bias."""
    x = normal(dtype, 5, 160)
    bias = normal(dtype, 48, seed=3)
    held = quantize_fp8(normal(torch.float32, 48, 160, seed=1))
    blocks = FP8Weight(held.values, normal(torch.float32, 1, 2, seed=2).exp() / 448, (128, 128))
    errors = []
    for weight in (held, blocks):
        expected = x.double() @ weight.dense(torch.float64).t() + bias.double()
        errors.append(error_of(small_linear(x, weight, bias), expected))
    return largest(*errors)


def _experts(x: torch.Tensor, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> torch.Tensor:
    """Outputs of the experts of :data:`EXPERT_IDS` in fp64, token by token."""
    rows = []
    for token, chosen in zip(x.double(), EXPERT_IDS, strict=True):
        total = torch.zeros(len(down[0]), dtype=torch.float64)
        for expert, weight in zip(chosen, EXPERT_WEIGHTS, strict=True):
            gate, up = (gate_up[expert].double() @ token).chunk(2)
            total += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
        rows.append(total)
    return torch.stack(rows)


def routed_experts(dtype: torch.dtype, hidden_size: int = 9) -> float:
    """Five tokens, two of three experts each; sizes that no grouped product of torch takes."""
    x = normal(dtype, 5, hidden_size)
    gate_up = normal(dtype, 3, 12, hidden_size, seed=1)
    down = normal(dtype, 3, hidden_size, 6, seed=2)
    weights = torch.tensor(EXPERT_WEIGHTS).expand(5, 2)
    got = experts(x, torch.tensor(EXPERT_IDS), weights, gate_up, down)
    return error_of(got, _experts(x, list(gate_up), list(down)))


def grouped_experts(dtype: torch.dtype) -> float:
    """The same with sizes that torch multiplies in groups on some GPUs."""
    x = normal(dtype, 5, 16)
    gate_up = normal(dtype, 3, 48, 16, seed=1) * 0.25
    down = normal(dtype, 3, 16, 24, seed=2) * 0.25
    weights = torch.tensor(EXPERT_WEIGHTS).expand(5, 2)
    got = experts(x, torch.tensor(EXPERT_IDS), weights, gate_up, down)
    return error_of(got, _experts(x, list(gate_up), list(down)))


def fp8_routed_experts(dtype: torch.dtype) -> float:
    """The same with weights in e4m3, with scales of outputs."""
    x = normal(dtype, 5, 48)
    gate_up = quantize_fp8(normal(torch.float32, 3, 80, 48, seed=1) * 0.2)
    down = quantize_fp8(normal(torch.float32, 3, 48, 40, seed=2) * 0.2)
    weights = torch.tensor(EXPERT_WEIGHTS).expand(5, 2)
    got = fp8_experts(x, torch.tensor(EXPERT_IDS), weights, gate_up, down)
    wide = [[each.dense(torch.float64) for each in held.unbind()] for held in (gate_up, down)]
    return error_of(got, _experts(x, *wide))


def recurrence(dtype: torch.dtype, *, delta: bool) -> float:
    """Five nodes of three requests, two of them siblings: the path to the last is read token by token, and
    committed."""
    # Inputs, and states in another order than the requests.
    num_requests = 3
    num_nodes = 5
    heads = 3
    size = 4
    width = 3
    lead = (num_requests, num_nodes, heads)
    q = normal(dtype, *lead, size)
    k = normal(dtype, *lead, size, seed=1) * 0.5
    v = normal(dtype, *lead, width, seed=2)
    g = -normal(torch.float32, *lead, seed=3).abs()
    beta = normal(torch.float32, *lead, seed=4).sigmoid()
    states = normal(torch.float32, num_requests, heads, size, width, seed=5)
    slots = torch.tensor([2, 0, 1])
    bits = ancestor_bits(torch.tensor([[0, 0, 0, 1, 3]] * num_requests), 3)
    out, written = recurrent_window(Inputs(q, k, v, g, beta), states, slots, bits, delta=delta)

    # The path, a token at a time.
    path = [0, 1, 3, 4]
    errors = []
    ends = states.clone().double()
    for request, slot in enumerate(slots.tolist()):
        state = ends[slot]
        for node in path:
            state = state * g[request, node].double().exp()[:, None, None]
            key = k[request, node].double()
            read = torch.einsum("hkv,hk->hv", state, key) if delta else 0.0
            new = beta[request, node].double()[:, None] * (v[request, node].double() - read)
            state = state + key[:, :, None] * new[:, None]
        ends[slot] = state
        last = torch.einsum("hkv,hk->hv", state, q[request, path[-1]].double())
        errors.append(error_of(out[request, path[-1]], last))

    # Commit it.
    committed = states.clone()
    paths = torch.tensor([path] * num_requests)
    commit_recurrent(committed, slots, written, paths, torch.full((num_requests,), len(path)))
    return largest(error_of(committed, ends), *errors)


def delta_rule(dtype: torch.dtype) -> float:
    """The gated delta rule over trees."""
    return recurrence(dtype, delta=True)


def decayed_sums(dtype: torch.dtype) -> float:
    """Decayed sums over trees, as Mamba-2 has them."""
    return recurrence(dtype, delta=False)


def recurrence_of_texts(dtype: torch.dtype) -> float:
    """Two texts, the second behind a state; the end of the first is saved."""
    heads = 3
    size = 4
    lengths = (40, 3)
    total = sum(lengths)
    q = normal(dtype, total, heads, size) * 0.5
    k = normal(dtype, total, heads, size, seed=1) * 0.5
    v = normal(dtype, total, heads, 3, seed=2)
    g = -normal(torch.float32, total, heads, seed=3).abs()
    beta = normal(torch.float32, total, heads, seed=4).sigmoid()
    states = normal(torch.float32, 3, heads, size, 3, seed=5)

    # Token by token.
    expected = []
    ends = []
    for source, start, length in ((None, 0, lengths[0]), (1, lengths[0], lengths[1])):
        state = torch.zeros_like(states[0]).double() if source is None else states[source].double()
        for t in range(start, start + length):
            state = state * g[t].double().exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, k[t].double())
            new = beta[t].double()[:, None] * (v[t].double() - read)
            state = state + k[t].double()[:, :, None] * new[:, None]
            expected.append(torch.einsum("hkv,hk->hv", state, q[t].double()))
        ends.append(state)

    # The operation.
    plan = TextPlan([Text(0, lengths[0], None, ((lengths[0], 2),)), Text(lengths[0], total, 1)])
    out = recurrent_texts(Inputs(q, k, v, g, beta), states, plan, delta=True)
    return largest(error_of(out, torch.stack(expected)), error_of(states[2], ends[0]))
