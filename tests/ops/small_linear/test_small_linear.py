"""Conditions of the Triton kernel."""

import torch

from eagle_kit.ops.backend import use
from eagle_kit.ops.small_linear import small_linear


def test_the_triton_form_runs_where_it_fits(triton_device, monkeypatch):
    from eagle_kit.ops.small_linear import triton

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
