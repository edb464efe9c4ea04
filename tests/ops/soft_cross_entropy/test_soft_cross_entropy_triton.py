"""Soft cross-entropy kernel against fp64: gradient in place, ties, and the fused loss around it."""

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNIT = 2.0**-24
"""Largest relative error of one rounding to fp32."""


def logits_case(rows, vocab, dtype, device, spread=3.0):
    generator = torch.Generator().manual_seed(rows * vocab)
    z = torch.randn(rows, vocab, generator=generator).mul(spread).to(dtype)
    probs = torch.randn(rows + 2, vocab, generator=generator).mul(3).softmax(-1)
    index = torch.randint(0, rows + 2, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    return tuple(x.to(device) for x in (z, probs, index, weights))


def assert_exact_but_for_rounding(z, dz, losses, probs, index, weights):
    """Losses and gradient against fp64, each within the sum of what its roundings can amount to.

    With n logits a lane, x = max z - z and q = softmax(z): exp(-x) is off by 3 x units for its argument and 4
    for exp2 on a GPU; the sum over a row by 2 n for the lane's steps and 11 for the tree besides; the dot
    likewise.
    """
    wide, p, c = z.double().requires_grad_(), probs[index].double(), weights.double()[:, None]
    log_sum = wide.logsumexp(-1)
    wanted = log_sum - (p * wide).sum(-1)
    (gradient,) = torch.autograd.grad((wanted * c[:, 0]).sum(), wide)
    wide, wanted, log_sum = wide.detach(), wanted.detach(), log_sum.detach()
    x, q = wide.max(-1, keepdim=True).values - wide, (wide - log_sum[:, None]).exp()
    n = -(-z.shape[1] // 2048)
    mass = 2 * n + 20 + 3 * (q * x).sum(-1)
    dot = (n + 13) * (p * wide).abs().sum(-1)
    assert ((losses - wanted).abs() <= UNIT * (mass + dot + 2 * log_sum.abs() + 2 * wanted.abs() + 4)).all()
    kind = torch.finfo(z.dtype)
    stored = kind.eps / 2 * gradient.abs() + kind.smallest_normal * kind.eps
    bound = UNIT * (c * q * (3 * x + mass[:, None] + 8) + 3 * gradient.abs()) + stored + 1e-37
    assert ((dz - gradient).abs() <= bound * 1.01).all()


def assert_losses_and_gradient(dtype, rows, vocab, device):
    from eagle_kit.ops.soft_cross_entropy.triton import soft_cross_entropy_

    z, probs, index, weights = logits_case(rows, vocab, dtype, device)
    most = z.float().max(-1, keepdim=True).values
    dz = z.clone()
    losses, best = soft_cross_entropy_(dz, probs, index, weights)
    assert_exact_but_for_rounding(z, dz, losses, probs, index, weights)
    assert torch.equal(z.float().gather(1, best[:, None]), most)


@diagonal(
    ("dtype", DTYPES),
    (
        "rows, vocab",
        [
            (1, 1),
            (3, 2),
            (5, 1271),
            (2, 2047),
            (2, 2048),
            (3, 2049),
            (2, 6001),
            pytest.param(2, 128256, marks=pytest.mark.nightly),
        ],
    ),
)
def test_losses_and_gradient_of_logits(triton_device, dtype, rows, vocab):
    assert_losses_and_gradient(dtype, rows, vocab, triton_device)


@SWEEP
@given(rows=st.integers(1, 6), vocab=st.integers(1, 4200), dtype=st.sampled_from(DTYPES))
def test_losses_and_gradient_of_any_logits(triton_device, rows, vocab, dtype):
    assert_losses_and_gradient(dtype, rows, vocab, triton_device)


@pytest.mark.parametrize(
    "top",
    [
        -1e5,
        pytest.param(-300.0, marks=pytest.mark.nightly),
        0.0,
        pytest.param(300.0, marks=pytest.mark.nightly),
        1e5,
    ],
)
def test_far_away_logits_and_ties_and_hard_teachers(triton_device, top):
    from eagle_kit.ops.soft_cross_entropy.triton import soft_cross_entropy_

    vocab = 4100
    z = torch.full((4, vocab), top)
    z[1, 4099] += 50.0  # what comes last is the maximum
    z[2, 0] += 50.0  # what comes first is
    z[3, [7, 2055, 2056, 4098]] += 60.0  # ties of one lane, of neighbours, of blocks
    probs = torch.zeros(4, vocab)
    probs[0], probs[1, 4099], probs[2, 5], probs[3, 2056] = 1 / vocab, 1.0, 1.0, 1.0
    inputs = [x.to(triton_device) for x in (z, probs, torch.arange(4), torch.tensor([1.0, 2.0, 0.5, 1.0]))]
    dz = inputs[0].clone()
    losses, best = soft_cross_entropy_(dz, *inputs[1:])
    assert best.tolist() == [0, 4099, 0, 7]
    assert_exact_but_for_rounding(inputs[0], dz, losses, *inputs[1:])


def test_a_row_without_weight_has_no_gradient_and_unread_teachers_may_be_anything(triton_device):
    from eagle_kit.ops.soft_cross_entropy.triton import soft_cross_entropy_

    z, probs, index, weights = logits_case(3, 77, torch.float32, triton_device)
    weights[1] = 0.0
    used = torch.zeros(5, dtype=torch.bool, device=triton_device).index_fill(0, index, True)
    probs[~used] = float("nan")
    losses, _ = soft_cross_entropy_(z, probs, index, weights)
    assert torch.isfinite(losses).all() and torch.isfinite(z).all()
    assert (z[1] == 0).all() and (z[0] != 0).any()


@pytest.mark.parametrize("nan", ["one", "all"])
def test_a_broken_row_tells_so_and_still_names_a_token(triton_device, nan):
    from eagle_kit.ops.soft_cross_entropy.triton import soft_cross_entropy_

    z, probs, index, weights = logits_case(2, 130, torch.float32, triton_device)
    z[0, slice(3, 4) if nan == "one" else slice(None)] = float("nan")
    losses, best = soft_cross_entropy_(z, probs, index, weights)
    assert losses.isnan().tolist() == [True, False]
    assert (best >= 0).all() and (best < 130).all()


def fused_case(rows, vocab, size, positions, dtype, device):
    generator = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, size, generator=generator).to(dtype).to(device).requires_grad_()
    w = torch.randn(vocab, size, generator=generator).div(size**0.5).to(dtype).to(device).requires_grad_()
    probs = torch.randn(positions, vocab, generator=generator).mul(3).softmax(-1).to(device)
    index = torch.randint(0, positions, (rows,), generator=generator).to(device)
    weights = torch.rand(rows, generator=generator).to(device)
    return h, w, probs, index, weights


@pytest.mark.parametrize("chunk", [1024, 7, pytest.param(20, marks=pytest.mark.nightly)])
def test_the_fused_loss_equals_autograd_on_whole_logits(triton_device, chunk):
    h, w, probs, index, weights = fused_case(41, 1271, 23, 13, torch.float32, triton_device)
    exact_h, exact_w = (x.detach().double().requires_grad_() for x in (h, w))
    z = exact_h @ exact_w.t()
    row_losses = -(probs[index].double() * z.log_softmax(-1)).sum(-1)
    loss = (row_losses * weights.double()).sum() * 3
    wanted = torch.autograd.grad(loss, (exact_h, exact_w))
    out = linear_soft_cross_entropy(h, w, Teacher(probs, index, weights), group_rows=chunk, backend="triton")
    torch.testing.assert_close(out.loss.double() * 3, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.row_losses.double(), row_losses, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.best, z.argmax(-1))
    assert out.loss.requires_grad and not out.row_losses.requires_grad
    for ours, theirs in zip(torch.autograd.grad(out.loss * 3, (h, w)), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_the_slope_of_the_loss(triton_device):
    h, w, probs, index, weights = fused_case(6, 150, 11, 4, torch.float32, triton_device)

    def loss(h, w):
        return linear_soft_cross_entropy(h, w, Teacher(probs, index, weights), backend="triton").loss

    slopes = torch.autograd.grad(loss(h, w), (h, w))
    generator = torch.Generator().manual_seed(9)
    for which, slope in enumerate(slopes):
        way = torch.randn(slope.shape, generator=generator).to(triton_device)
        step = 1e-2
        with torch.no_grad():
            plus, minus = ([h, w] for _ in range(2))
            plus[which], minus[which] = plus[which] + step * way, minus[which] - step * way
            numeric = (loss(*plus) - loss(*minus)).double() / (2 * step)
        torch.testing.assert_close((slope.double() * way).sum(), numeric, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_and_autocast_follow_the_reference(triton_device, dtype):
    h, w, probs, index, weights = fused_case(23, 300, 64, 9, dtype, triton_device)
    wide = [x.detach().float().requires_grad_() for x in (h, w)]
    cases = [((h, w), False), (tuple(wide), True)]
    for tensors, autocast in cases:
        both = []
        for backend in ("triton", "reference"):
            with torch.autocast(triton_device, dtype, enabled=autocast):
                out = linear_soft_cross_entropy(*tensors, Teacher(probs, index, weights), backend=backend)
            both.append((out, torch.autograd.grad(out.loss, tensors)))
        (ours, our_grads), (theirs, their_grads) = both
        torch.testing.assert_close(ours.row_losses, theirs.row_losses, rtol=1e-3, atol=1e-2)
        for a, b, x in zip(our_grads, their_grads, tensors, strict=True):
            assert a.dtype == x.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_a_frozen_weight_costs_no_gradient_and_a_given_one_grows(triton_device):
    h, w, probs, index, weights = fused_case(23, 300, 16, 9, torch.float32, triton_device)
    out = linear_soft_cross_entropy(h, w.detach(), Teacher(probs, index, weights), backend="triton")
    dh, dw = torch.autograd.grad(
        linear_soft_cross_entropy(h, w, Teacher(probs, index, weights), backend="triton").loss, (h, w)
    )
    assert torch.equal(*torch.autograd.grad(out.loss, h), dh)
    grown = torch.ones_like(w)
    linear_soft_cross_entropy(h, w, Teacher(probs, index, weights), weight_grad=grown, backend="triton")
    torch.testing.assert_close(grown, 1 + dw)


def test_no_row_and_fake_tensors(triton_device):
    w = torch.ones(20, 8, device=triton_device, requires_grad=True)
    h = torch.ones(0, 8, device=triton_device, requires_grad=True)
    probs, index = torch.ones(1, 20, device=triton_device) / 20, torch.zeros(0, dtype=torch.int64)
    out = linear_soft_cross_entropy(
        h, w, Teacher(probs, index.to(triton_device), torch.zeros(0, device=triton_device)), backend="triton"
    )
    dh, dw = torch.autograd.grad(out.loss, (h, w))
    assert out.loss == 0 and dh.shape == (0, 8) and (dw == 0).all()
    with FakeTensorMode():
        h, w = torch.ones(5, 8, requires_grad=True), torch.ones(20, 8, requires_grad=True)
        index = torch.zeros(5, dtype=torch.int64)
        out = linear_soft_cross_entropy(
            h, w, Teacher(torch.ones(1, 20), index, torch.ones(5)), backend="triton"
        )
        assert out.loss.shape == () and out.best.dtype == torch.int64 and out.row_losses.shape == (5,)
        assert [g.shape for g in torch.autograd.grad(out.loss, (h, w))] == [h.shape, w.shape]


def test_the_operations_keep_the_rules_of_custom_operations(triton_device):
    from eagle_kit.ops.soft_cross_entropy import triton

    z, probs, index, weights = logits_case(2, 33, torch.float32, triton_device)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton.soft_cross_entropy_.overload, (z, probs, index, weights), test_utils=utils)
    h, w, probs, index, weights = fused_case(3, 40, 8, 2, torch.float32, triton_device)
    h, w = h.detach(), w.detach()
    for dw in (torch.zeros_like(w), w.new_empty(0)):
        arguments = (h, w, probs, index, weights, dw, torch.float32, 2)
        torch.library.opcheck(triton.linear_soft_cross_entropy_.overload, arguments, test_utils=utils)
