"""How near to fp64 a result has to be."""

import torch

from tests.gpu.place import FP8

NORM = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 8e-3, FP8: 4e-2}
"""Of ``|ours - exact| / |exact|``, the whole tensor's: sums in fp32 of up to 32 K terms; for halves about
twice the spacing of neighbours (2^-11, 2^-8), as probabilities and results are each rounded once."""
ELEMENT = 8.0
"""An element may be so many times further off, of its own size and the tensor's root mean square together."""


def assert_near(
    name: str,
    ours: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    slack: float = 1.0,
) -> None:
    """``ours`` of ``dtype``, by default its own; NaN fails, and so does a wrong shape. ``slack``: for results
    that are rounded more often."""
    norm = slack * NORM[dtype or ours.dtype]
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)} instead of {tuple(exact.shape)}"
    ours, exact = ours.double(), exact.double().to(ours.device)
    error = (ours - exact).norm() / exact.norm().clamp(min=1e-30)
    assert error <= norm, f"{name}: {float(error):.2e} off in norm, {norm:.0e} allowed"
    size = exact.abs() + exact.square().mean().sqrt()
    worst = ((ours - exact).abs() / size).nan_to_num(torch.inf).max() if ours.numel() else torch.zeros(())
    assert worst <= ELEMENT * norm, f"{name}: an element is {float(worst):.2e} off"


def assert_same_bits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to the bit, NaN included."""
    ours, theirs = (x.contiguous().view(torch.uint8) for x in (ours, theirs))
    assert torch.equal(ours, theirs), f"{name}: {int((ours != theirs).sum())} bytes differ"
