"""Keys under which Triton keeps compiled kernels, computed without a GPU as :class:`triton.JITFunction` does.

``JITFunction.run`` looks its arguments up by a key: types, constants, whether integers are 1 or multiples of
16 where the kernel does not forbid it, whether pointers are multiples of 16, and launch options. A key that
was not seen before is a compilation.
"""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from kernel_lab.aot import operation_of
from kernel_lab.launches import LaunchCounter


class _Pointer:
    """Stand-in for a tensor on a GPU, where allocations begin at multiples of 512 bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self._offset = tensor.dtype, tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


class LaunchKeys(LaunchCounter):
    """Mode that collects the keys of Triton's launches over fake tensors, see :class:`LaunchCounter`.

    Attributes:
        keys: ``(kernel, key)`` of every launch.
        integers: ``(kernel, argument, value)`` of every integer that a key depends on.
    """

    def __init__(self, capability: int = 90) -> None:
        super().__init__()
        self.keys: set[tuple[str, str]] = set()
        self.integers: set[tuple[str, str, int]] = set()
        self._backend = make_backend(GPUTarget("cuda", capability, 32))
        self._binders: dict[Any, Any] = {}

    def launched(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note a launch."""
        super().launched(kernel, args, options)
        name = f"{operation_of(kernel.fn.__module__)}.{kernel.fn.__name__}"
        if kernel.fn not in self._binders:
            jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
            bind = create_function_from_signature(jit.signature, jit.params, self._backend)
            self._binders[kernel.fn] = jit.params, bind
        params, bind = self._binders[kernel.fn]
        given = [_Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
        bound, specialization, rest = bind(*given, **options)
        self.keys.add((name, compute_cache_key({}, specialization, rest)))
        self.integers |= {
            (name, param.name, bound[param.name])
            for param in params
            if type(bound[param.name]) is int and not (param.is_constexpr or param.do_not_specialize)
        }
