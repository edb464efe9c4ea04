"""Choice between the forms of an operation."""

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.ops import backend
from eagle_kit.ops.backend import use, uses_cpp, uses_triton
from eagle_kit.ops.norm import rms_norm

X = torch.ones(2, 3)


def test_the_chosen_backend_holds_within_and_no_longer(monkeypatch):
    monkeypatch.setattr(backend, "triton_available", lambda: True)
    monkeypatch.setattr(backend.cpp, "available", lambda: True)
    assert not uses_triton("norm", X)
    assert uses_cpp(X)
    with pytest.raises(ZeroDivisionError), use("triton"):
        with use("reference"):
            assert not uses_triton("norm", X)
            assert uses_triton("norm", X, "triton"), "an argument comes before what was chosen"
        assert uses_triton("norm", X)
        assert not uses_cpp(X)
        raise ZeroDivisionError
    assert not uses_triton("norm", X)
    assert uses_cpp(X)


def test_a_backend_that_there_is_not_is_refused(monkeypatch):
    with pytest.raises(UserError, match="'cuda'"):
        rms_norm(X, X[0], 1e-5, backend="cuda")
    monkeypatch.setattr(backend, "triton_available", lambda: False)
    with pytest.raises(UserError, match="Triton is not installed"):
        rms_norm(X, X[0], 1e-5, backend="triton")


@pytest.mark.parametrize(
    "x",
    [X.bfloat16(), X.double(), X.to("meta"), X.clone().requires_grad_()],
    ids=["half", "double", "elsewhere", "with gradients"],
)
def test_cpp_takes_plain_fp32_on_a_cpu_alone(monkeypatch, x):
    monkeypatch.setattr(backend.cpp, "available", lambda: True)
    assert not uses_cpp(x)
    assert not uses_cpp(X, x)
    assert uses_cpp(X, None)
