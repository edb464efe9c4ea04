"""Accuracy of fp8 weights, and the conditions of the Triton kernel."""

import pytest
import torch

from eagle_kit.kernels.backend import use
from eagle_kit.kernels.small_linear import quantize_fp8, small_linear, small_linear_fp8


def test_an_element_is_off_by_a_sixteenth_or_a_step_at_most():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 512, generator=generator) * torch.logspace(-30, 30, 64)[:, None]
    weight[:, :256] *= torch.logspace(-6, 0, 256)  # some fall under the smallest normal number
    quantized, scales = quantize_fp8(weight)
    assert quantized.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.shape == (64,)
    error = (quantized.double() * scales.double()[:, None] - weight.double()).abs()
    bound = torch.maximum(weight.double().abs() / 16, scales.double()[:, None] / 1024)
    assert (error <= bound * (1 + 1e-5)).all()
    assert (error > bound * 0.9).any(), "the bound is no tighter than it need be"


def test_rows_of_zeros_and_tiny_numbers_and_one_outlier():
    weight = torch.zeros(4, 8)
    weight[1] = 1e-42
    weight[2, 3], weight[3] = 3e38, -448.0
    quantized, scales = quantize_fp8(weight)
    back = quantized.float() * scales[:, None]
    assert back.isfinite().all() and (back[0] == 0).all() and (back[1] <= 1e-40).all()
    torch.testing.assert_close(back[2:], weight[2:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_layer_is_off_by_less_than_three_percent(dtype):
    """As stated by quantize_fp8; the outputs' own rounding is far below."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(16, 1024, generator=generator), torch.randn(512, 1024, generator=generator) / 32
    bias = torch.randn(512, generator=generator)
    x, bias = x.to(dtype), bias.to(dtype)
    exact = x.double() @ weight.double().T
    out = small_linear_fp8(x, *quantize_fp8(weight), bias)
    assert out.dtype == dtype
    off = (out.double() - bias.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.024 < off < 0.029


def test_the_triton_form_runs_where_it_fits(triton_device, monkeypatch):
    from eagle_kit.kernels.small_linear import triton

    calls = []
    monkeypatch.setattr(triton, "small_linear", lambda x, *_: calls.append(x) or x)
    x, weight = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)
    with use("triton"):
        small_linear(x, weight)
        assert len(calls) == 1
        assert small_linear(x.float(), weight.float()).shape == (2, 64)
        assert small_linear(x.repeat(40, 1), weight).shape == (80, 64)
        assert small_linear(x, weight.t().contiguous().t()).shape == (2, 64)
        small_linear(x, weight.clone().requires_grad_()).sum().backward()
        small_linear(x, weight, torch.zeros(64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            assert small_linear(x, weight).shape == (2, 64)
    small_linear(x, weight, backend="reference")
    assert len(calls) == 1
