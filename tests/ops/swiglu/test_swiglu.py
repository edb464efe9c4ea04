"""Reference of SwiGLU against the expression in models."""

import torch
from torch.nn import functional as F

from eagle_kit.ops.swiglu import swiglu


def test_it_is_what_the_mlp_does():
    gate_up = torch.randn(2, 3, 14, generator=torch.Generator().manual_seed(1))
    for x in (gate_up, gate_up.bfloat16()):
        expected = F.silu(x[..., :7]) * x[..., 7:]
        assert torch.equal(swiglu(x, backend="reference"), expected)
    double = gate_up.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu(x, backend="reference"), double)
