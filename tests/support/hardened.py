"""Triton's interpreter made to fail where a GPU may: order of programs, int32 overflow, races.

Programs of a launch run in an order drawn from a seed. An int32 sum, difference or product that overflows,
and a value that loses bits when it is made an int32, raise where they happen: unsigned numbers, which hashes
need, may wrap around. :mod:`races` finds what programs do to each other's memory.
"""

import sys
from typing import Any, NamedTuple

import numpy as np


class KernelFault(Exception):
    """What would go wrong on a GPU, with the kernel's function, file and line."""


def harden(seed: int) -> None:
    """Harden the interpreter of this process, which :func:`~kernel_lab.interpreter.repair` has put
    right; orders are drawn from ``seed`` and the grid. Calling it again changes the seed."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not hasattr(builder, "seed"):
        _draw_orders(interpreter.InterpreterBuilder)
        _raise_overflow(interpreter)
        _raise_faults_whole(interpreter.GridExecutor)
    builder.seed = seed


def _draw_orders(builder: Any) -> None:
    plain_dim, plain_idx = builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(self: Any, *grid: int) -> None:
        plain_dim(self, *grid)
        self.order = np.random.default_rng((self.seed, *grid)).permutation(int(np.prod(grid)))

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        program = int(self.order[(x * ny + y) * nz + z])
        plain_idx(self, program // (ny * nz), program // nz % ny, program % nz)

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx


def _raise_overflow(interpreter: Any) -> None:
    """Put our check in the place of Triton's, which computes it in tensors and then drops the result."""
    import triton.language as tl

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    builder, plain_cast = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.cast_impl
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max

    def check(lhs: Any, rhs: Any, operation: Any) -> None:
        a, b = lhs.handle.data, rhs.handle.data
        if a.dtype != np.int32:
            return
        exact = operations[operation.__name__](a, b, dtype=np.int64)
        if exact.size and (exact.min() < low or exact.max() > high):
            raise KernelFault(f"int32 overflow of {operation.__name__} in {place()}")

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        data = src.data
        narrows = dst_type.scalar == tl.int32 and data.dtype == np.int64 and data.size
        if narrows and (data.min() < low or data.max() > high):
            raise KernelFault(f"int64 that does not fit int32 in {place()}")
        return plain_cast(self, src, dst_type)

    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check
    builder.cast_impl = cast
    builder.create_int_cast = lambda self, src, dst_type, is_signed: self.cast_impl(src, dst_type)


def _raise_faults_whole(executor: Any) -> None:
    """Make a launch raise the fault itself, which the interpreter wraps once for each function it is in."""
    plain = executor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(self, *args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, KernelFault):
                cause = cause.__cause__
            raise cause or error from None

    executor.__call__ = call


class Place(NamedTuple):
    """Line of a kernel."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def place() -> Place:
    """Line of the kernel that is being interpreted: the innermost frame that is neither ours nor Triton's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/triton/runtime/" not in name and "/triton/language/" not in name:
            break
        frame = frame.f_back
    return Place(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
