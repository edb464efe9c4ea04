"""Choice of the library that multiplies: oneDNN, Triton or torch."""

import torch

from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.linear import onednn, padded, reference
from eagle_kit.ops.linear.backends import Size, backend_of
from eagle_kit.ops.small_linear import fits_triton, small_linear


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """``x [T, K]`` times ``weight [N, K]`` transposed, plus ``bias [N]`` -> ``[T, N]``; differentiable.

    Args:
        backend: ``"auto"`` takes oneDNN for fp32 on a CPU, :mod:`~eagle_kit.ops.linear.padded` rows for
            half types there, the backend of the current table
            (:func:`~eagle_kit.ops.linear.backends.use_backends`) for few rows of half types on a GPU, and
            torch otherwise; ``"torch"``, ``"onednn"``, ``"padded"`` and ``"triton"`` force one.
    """
    if backend == "auto":
        backend = choose(x, weight, bias)
    if backend == "onednn":
        return onednn.linear(x, weight, bias)
    if backend == "padded":
        return padded.linear(x, weight, bias)
    if backend == "triton":
        return small_linear(x, weight, bias, backend="triton")
    return reference.linear(x, weight, bias)


def choose(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Backend of :func:`linear` for these inputs."""
    if _fits_onednn(x, weight):
        return "onednn"
    if padded.fits(x):
        return "padded"
    if x.shape[0] and uses_triton("small_linear", x) and fits_triton(x, weight, bias):
        return backend_of(Size.of(x, weight))
    return "torch"


def _fits_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.ndim == 2
        and x.shape[0] > 0
        and not isinstance(x, torch._subclasses.FakeTensor)
        and not torch.is_autocast_enabled("cpu")
        and onednn.available()
    )
