"""Operations that the blocks of all models share."""

import pytest
import torch

from eagle_kit.models.blocks.layers import sigmoid


def test_the_gradient_of_a_closed_gate_is_finite() -> None:
    x = torch.tensor([-1e4, -100.0, -80.0, -3.0, 0.0, 3.0, 100.0], requires_grad=True)
    gate = sigmoid(x)
    gate.sum().backward()
    assert torch.equal(gate[3:].detach(), (1.0 / (1.0 + torch.exp(-x[3:]))).detach())
    assert gate.tolist() == pytest.approx(torch.sigmoid(x.double()).tolist(), rel=1e-6, abs=1e-30)
    assert x.grad is not None and x.grad.isfinite().all()
    assert x.grad[3:].tolist() == pytest.approx([s * (1 - s) for s in gate[3:].tolist()], rel=1e-5)
