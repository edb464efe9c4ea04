"""Kernels of Triton as functions of the CPU: translated, compiled by a C++ compiler, and run over a grid.

No GPU and none of CUDA's libraries is needed. Tensors lie in host memory. Memory of the CUDA device in
software is host memory too, so :func:`computation_of` takes a kernel that Triton has compiled for a GPU.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.triton_on_cpu.translation import Translation, translate
from tests.triton_on_cpu.ttir import Type, read_module

OPTIONS = ("-std=c++14", "-O1", "-w", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared")
"""Integers wrap around, and a product is rounded before it is added to something."""
_CTYPES: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
_compiling = threading.Lock()


class KernelFault(Exception):
    """An access outside of the memory of a launch: on a GPU an illegal access, or a wrong value."""


def computation_of(
    compiled: Any, grid: Sequence[int], arguments: Sequence[Any], **options: Any
) -> Callable[[], None]:
    """The computation of a launch of a kernel that Triton has compiled, for whatever GPU.

    Args:
        compiled: what ``kernel.warmup(...)`` or a launch returns.
        grid: numbers of programs along one to three axes.
        arguments: of all parameters in their order, constants and tuples included.
        options: of :meth:`Kernel.launch`.
    """
    if compiled.hash not in _kernels:
        _kernels[compiled.hash] = Kernel(compiled.asm["ttir"])
    values = list(values_of(compiled.src.signature.values(), arguments))
    return _kernels[compiled.hash].launch(grid, values, **options)


_kernels: dict[str, "Kernel"] = {}


def values_of(signature: Iterable[Any], arguments: Iterable[Any]) -> Iterator[Any]:
    """The values that a compiled kernel takes: tuples one by one, and no constants."""
    for kind, argument in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from values_of(kind, argument)
        elif kind != "constexpr":
            yield argument


class _Range(ctypes.Structure):
    _fields_ = [("first", ctypes.c_size_t), ("end", ctypes.c_size_t)]


class _Fault(ctypes.Structure):
    _fields_ = [("place", ctypes.c_int32), ("program", ctypes.c_int32 * 3), ("address", ctypes.c_int64)]


class Kernel:
    """A kernel on the CPU.

    Args:
        ttir: its intermediate code, ``compiled.asm["ttir"]``.

    Raises:
        UnknownOperation: an operation has no translation, or the kernel waits for other programs.
    """

    def __init__(self, ttir: str) -> None:
        self.translation = translate(read_module(ttir))
        self.run = _compiled(self.translation)

    def launch(
        self,
        grid: Sequence[int],
        values: Sequence[Any],
        *,
        memory: Sequence[tuple[int, int]] = (),
        order: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        """The computation of a launch, with the numbers and addresses that it has now.

        Args:
            grid: numbers of programs along one to three axes.
            values: of all parameters, constants excepted: tensors or addresses, and numbers.
            memory: first address and size of what may be accessed; without any, all memory may be.
            order: numbers of the programs in the order in which they run (the first axis varies fastest).

        Returns:
            A function that runs the programs, as often as it is called. It raises KernelFault for an access
            outside of ``memory``.
        """
        parameters = self.translation.parameters
        slots = [_slot(kind, value) for kind, value in zip(parameters, values, strict=True)]
        extents = (ctypes.c_int32 * 3)(*grid, *[1] * (3 - len(grid)))
        ranges = (_Range * len(memory))(*((first, first + size) for first, size in memory))
        numbers = (ctypes.c_int32 * len(order))(*order) if order is not None else None

        def compute() -> None:
            arguments = (ctypes.c_void_p * len(slots))(*map(ctypes.addressof, slots))
            fault = _Fault()
            num_ranges = ctypes.c_int64(len(ranges))
            self.run(extents, arguments, numbers, ranges, num_ranges, ctypes.byref(fault))
            if fault.place:
                raise self._error(fault, memory)

        return compute

    def _error(self, fault: _Fault, memory: Sequence[tuple[int, int]]) -> KernelFault:
        access = self.translation.accesses[fault.place - 1]
        program = ", ".join(map(str, fault.program))
        first, size = min(memory, key=lambda each: _distance(fault.address, *each))
        place = f"{access.operation} of {self.translation.name} at {access.line}, in program ({program})"
        offset = fault.address - first
        return KernelFault(f"{place}: byte {offset} of the nearest memory that was given, of {size} bytes")


def _distance(address: int, first: int, size: int) -> int:
    return max(first - address, address - first - size, 0)


def _slot(kind: Type, value: Any) -> Any:
    """The value of a parameter as C has it."""
    if kind.element.endswith("*"):
        address = value.data_ptr() if hasattr(value, "data_ptr") else value
        return ctypes.c_void_p(address)
    if kind.element not in _CTYPES:
        raise NotImplementedError(f"a parameter of type {kind.element}")
    return _CTYPES[kind.element](value)


def _compiled(translation: Translation) -> Any:
    """The function ``run`` of a translation, from the cache where it is there."""
    key = "\n".join((translation.source, *OPTIONS, *_compiler()))
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    library = cache_folder() / f"{name}.so"
    with _compiling:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            library.with_suffix(".cpp").write_text(translation.source)
            _compile(library)
    return ctypes.CDLL(str(library)).run


def cache_folder() -> Path:
    """Where compiled kernels and their sources are kept: EAGLE_KIT_TRITON_ON_CPU, or in the environment."""
    folder = os.environ.get("EAGLE_KIT_TRITON_ON_CPU")
    return Path(folder) if folder else Path(sys.prefix) / "triton_on_cpu"


def _compile(library: Path) -> None:
    made = library.with_suffix(f".{os.getpid()}")
    command = [*_compiler(), *OPTIONS, "-o", str(made), str(library.with_suffix(".cpp"))]
    # The compiler needs none of the device's libraries.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    made.replace(library)


@cache
def _compiler() -> tuple[str, ...]:
    """CXX, or the first of the usual names."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return tuple(named)
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise RuntimeError("no C++ compiler: set CXX")
    return (found,)
