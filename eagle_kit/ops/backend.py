"""Choice between the torch reference, the Triton kernel and the C++ implementation of an operation."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn

from eagle_kit.core.errors import UserError
from eagle_kit.core.switches import is_disabled, of_operation
from eagle_kit.ops.cpu import cpp

# Triton's long-standing behaviour; 3.9 warns when it is not requested.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

Backend = Literal["reference", "triton", "cpp"]
_chosen: ContextVar[Backend | None] = ContextVar("backend", default=None)


@cache
def triton_available() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(operation: str, tensor: torch.Tensor, backend: Backend | None = None) -> bool:
    """Return whether to run the Triton kernel of an operation over ``tensor``.

    ``backend`` decides, or else the enclosing :func:`use`. Without either, Triton runs for tensors on a GPU,
    unless the switch of the operation is off (:mod:`eagle_kit.core.switches`).

    Args:
        operation: folder of the operation in ``eagle_kit/ops``, such as ``"attention/window"``.

    Raises:
        UserError: an unknown backend, or Triton was asked for and is not installed.
    """
    backend = backend or _chosen.get()
    if backend is None:
        return tensor.is_cuda and triton_available() and not is_disabled(of_operation(operation))
    if backend not in get_args(Backend):
        raise UserError(f"There is no backend {backend!r}.", f"Use one of {', '.join(get_args(Backend))}.")
    if backend == "triton" and not triton_available():
        raise UserError("Triton is not installed.", "Install it with pip install 'triton>=3.6'.")
    return backend == "triton"


def uses_cpp(*tensors: torch.Tensor | None, backend: Backend | None = None) -> bool:
    """Return whether to run the C++ implementation of an operation over ``tensors``; None is ignored.

    It runs for plain fp32 tensors on a CPU that need no gradients, if the operations in C++ are available,
    unless ``backend`` or the enclosing :func:`use` name another backend.

    Raises:
        UserError: C++ was asked for and is not available.
    """
    backend = backend or _chosen.get()
    if backend not in (None, "cpp"):
        return False
    if not all(tensor is None or _is_plain_fp32(tensor) for tensor in tensors):
        return False
    if is_differentiated(*tensors):
        return False
    if backend == "cpp":
        _need_cpp()
    return cpp.available()


def copies_in_cpp(*tensors: torch.Tensor, backend: Backend | None = None) -> bool:
    """Return whether to copy rows of tensors of any dtype in C++.

    As :func:`uses_cpp`, but nothing is compiled for it unless C++ is asked for, since torch's copies have the
    same bits.

    Raises:
        UserError: C++ was asked for and is not available.
    """
    backend = backend or _chosen.get()
    if backend not in (None, "cpp"):
        return False
    if not all(_is_plain(tensor) for tensor in tensors) or is_differentiated(*tensors):
        return False
    if backend == "cpp":
        _need_cpp()
    return cpp.is_loaded()


def _need_cpp() -> None:
    if not cpp.available():
        raise cpp.problem() or UserError("The operations in C++ are not available.", cpp.ANOTHER_COMPILER)


def _is_plain_fp32(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True for tensors on a CPU; False for fake ones, and those of several processes."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"


def is_differentiated(*tensors: torch.Tensor | None) -> bool:
    """Return whether an operation over ``tensors`` needs a backward pass, so that implementations without one
    must not run; None is ignored."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Context manager: set the default backend of all operations called within."""
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: launch kernels on ``device``, since Triton uses the current CUDA device and not that
    of its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
