"""Reference of RMSNorm: its gradient against autograd through the formula, and the tensors it saves."""

import pytest
import torch

from eagle_kit.ops.norm import add_rms_norm, rms_norm

EPS = 1e-3


def case(dtype, weight_dtype, shape=(5, 3, 40)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator).to(weight_dtype).requires_grad_()
    return x, weight, torch.randn(shape, generator=generator)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_the_gradient_is_that_of_the_formula(dtype, weight_dtype):
    x, weight, dy = case(dtype, weight_dtype)
    out = rms_norm(x, weight, EPS)
    assert torch.equal(out, rms_norm(x.detach(), weight.detach(), EPS, backend="reference"))
    got = torch.autograd.grad(out, (x, weight), dy.to(out.dtype))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    normed = exact[0] / (exact[0].square().mean(-1, keepdim=True) + EPS).sqrt()
    wanted = torch.autograd.grad(normed * exact[1], exact, dy.to(out.dtype).double())
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    for ours, theirs, tensor in zip(got, wanted, (x, weight), strict=True):
        assert ours.dtype == tensor.dtype
        torch.testing.assert_close(ours.double(), theirs, **near)


def test_only_what_learns_gets_a_gradient():
    x, weight, dy = case(torch.float32, torch.float32)
    both = torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), dy)
    (dx,) = torch.autograd.grad(rms_norm(x, weight.detach(), EPS), x, dy)
    (dw,) = torch.autograd.grad(rms_norm(x.detach(), weight, EPS), weight, dy)
    assert torch.equal(dx, both[0]) and torch.equal(dw, both[1])


def test_its_input_is_all_that_is_kept():
    x, weight, _ = case(torch.float32, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, total = add_rms_norm(x, x, weight, EPS)
    assert {t.untyped_storage().data_ptr() for t in kept} == {
        t.untyped_storage().data_ptr() for t in (total, weight)
    }
    assert out.requires_grad


def test_the_gradient_is_in_fp32_inside_of_autocast():
    """Its sums are dot products, which autocast would round to bf16."""
    x, weight, dy = case(torch.float32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    normed = exact[0] / (exact[0].square().mean(-1, keepdim=True) + EPS).sqrt()
    wanted = torch.autograd.grad(normed * exact[1], exact, dy.double())
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
