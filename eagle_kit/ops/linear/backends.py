"""Table of backends for linear layers of few rows on a GPU, set by an engine that has measured them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch

LinearBackend = Literal["torch", "triton"]


class Size(NamedTuple):
    """Size of ``[M, K]`` times ``[N, K]`` transposed, with M rounded up to a power of two."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor) -> "Size":
        """Size of a layer; ``x`` has at least one row."""
        outputs, inputs = weight.shape
        return cls(1 << (x.shape[0] - 1).bit_length(), outputs, inputs, x.dtype)


Table = Callable[[Size], LinearBackend | None]
"""Function from a size to its backend, or to None for torch, such as ``dict.get`` of a table."""
_table: ContextVar[Table | None] = ContextVar("linear_backends", default=None)


def backend_of(size: Size) -> LinearBackend:
    """Return the backend of a size by the current table; torch without one."""
    table = _table.get()
    return (None if table is None else table(size)) or "torch"


@contextmanager
def use_backends(table: Table) -> Iterator[None]:
    """Inside the context linear layers of few rows use the backends of ``table`` (half types on a GPU)."""
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)
