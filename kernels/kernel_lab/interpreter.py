"""Triton's interpreter, which runs kernels without a GPU, put right.

It holds bfloat16 as uint16 and multiplies and rounds it wrongly: here conversions between floats go through
torch (round to nearest even; fp8 saturates, as on a GPU), and operands of a dot are widened to fp32 first.
That of Triton 3.6 takes an array of one element for an index, which NumPy refuses since 2.4, and rounds a
product before it adds to it.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch


def repair() -> None:
    """Patch the interpreter of this process; calling it twice does nothing more."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "is_repaired", False):
        return
    stored: dict[Any, tuple[torch.dtype, Any]] = {
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
        tl.float8e5: (torch.float8_e5m2, np.uint8),
    }
    plain_cast, plain_dot = builder.cast_impl, builder.create_dot

    def widen(data: np.ndarray, kind: object) -> np.ndarray:
        if kind not in stored:
            return data
        raw = torch.from_numpy(np.ascontiguousarray(data))
        return raw.view(stored[kind][0]).float().numpy()

    def narrow(data: np.ndarray, kind: object) -> np.ndarray:
        dtype, held = stored[kind]
        value = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        if dtype.itemsize == 1:
            top = torch.finfo(dtype).max
            value = value.clamp(-top, top)
        return value.to(dtype).view(torch.uint8 if held is np.uint8 else torch.uint16).numpy()

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        kind, wanted = src.dtype.scalar, dst_type.scalar
        if kind not in stored and wanted not in stored:
            return plain_cast(self, src, dst_type)
        data = widen(src.data, kind)
        if wanted in stored:
            data = narrow(data, wanted)
        else:
            data = data.astype(interpreter._get_np_dtype(wanted))
        return interpreter.TensorHandle(data.reshape(src.data.shape), wanted)

    def convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return cast(self, src, dst_type)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar not in stored and b.dtype.scalar not in stored:
            return plain_dot(self, a, b, d, *options)
        product = np.matmul(widen(a.data, a.dtype.scalar), widen(b.data, b.dtype.scalar), dtype=np.float32)
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def multiply_add(self: Any, x: Any, y: Any, z: Any) -> Any:
        total = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    builtins: dict[Any, list[str]] = {}

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        # The interpreter's own lists all members of Triton's modules whenever a kernel calls a function. That
        # is a quarter of a launch. Which of them are builtins does not change.
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not where the calling function has patched it
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch
    patch_language = interpreter._patch_lang

    def patch_language_once(function: Any) -> Any:
        # The interpreter's own patches all of the language again for each call of a function by a kernel.
        modules = [tl, tl.core] if _imports(function, tl.core) else [tl]
        if any(tl.core.is_builtin(module.load) for module in modules):  # not patched
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language_once
    plain_dtype = interpreter._get_np_dtype
    numpy_dtypes: dict[Any, np.dtype[Any]] = {}

    def numpy_dtype(kind: Any) -> np.dtype[Any]:
        # The interpreter's own makes a table of all types for each value.
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar not in numpy_dtypes:
            numpy_dtypes[scalar] = plain_dtype(scalar)
        return numpy_dtypes[scalar]

    interpreter._get_np_dtype = numpy_dtype
    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, convert, dot
    builder.create_fma = multiply_add
    builder.is_repaired = True


@cache
def _imports(function: Any, module: Any) -> bool:
    """Return True if a kernel's file has imported a module."""
    return any(value is module for value in function.__globals__.values())
