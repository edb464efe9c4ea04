"""Which form of an operation runs: the torch reference or the Triton kernel."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch

from eagle_kit.core.errors import UserError

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton has always done; 3.9 warns without it

Backend = Literal["reference", "triton"]
_chosen: ContextVar[Backend | None] = ContextVar("backend", default=None)


@cache
def triton_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor, backend: Backend | None = None) -> bool:
    """Whether the Triton form of an operation over ``tensor`` is to run.

    What ``backend`` or else :func:`use` says; without either, Triton where the tensor is on a GPU.

    Raises:
        UserError: an unknown backend, or Triton was asked for and is not installed.
    """
    backend = backend or _chosen.get()
    if backend is None:
        return tensor.is_cuda and triton_available()
    if backend not in get_args(Backend):
        raise UserError(f"There is no backend {backend!r}.", f"Use one of {', '.join(get_args(Backend))}.")
    if backend == "triton" and not triton_available():
        raise UserError("Triton is not installed.", "Install it with pip install 'triton>=3.6'.")
    return backend == "triton"


def is_differentiated(*tensors: torch.Tensor) -> bool:
    """Whether an operation over ``tensors`` is recorded for a backward pass, which forms without one must not
    take part in."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Within, every operation that is not told otherwise takes this form."""
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


class DeviceFacts(NamedTuple):
    """What sizes of tiles and grids depend on: multiprocessors, and the compute capability, 90 for 9.0."""

    multiprocessors: int
    capability: int


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Those of ``device``; an H200's where kernels are interpreted."""
    if device.type != "cuda":
        return DeviceFacts(132, 90)
    facts = torch.cuda.get_device_properties(device)
    return DeviceFacts(facts.multi_processor_count, 10 * facts.major + facts.minor)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch kernels on ``device``: Triton takes the current CUDA device, not that of its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
