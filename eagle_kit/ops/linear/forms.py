"""Table of the forms that linear layers of few rows take on a GPU, set by whoever has measured them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch

Form = Literal["torch", "triton"]


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


Table = Callable[[Size], Form | None]
"""The form of a size, or None for torch's: ``dict.get`` of a plain table, for example."""
_table: ContextVar[Table | None] = ContextVar("linear_forms", default=None)


def form_of(size: Size) -> Form:
    """Form of a size by the current table; torch's without one."""
    table = _table.get()
    return (None if table is None else table(size)) or "torch"


@contextmanager
def use_forms(table: Table) -> Iterator[None]:
    """Within, linear layers of few rows of half types on a GPU take the forms that ``table`` says."""
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)
