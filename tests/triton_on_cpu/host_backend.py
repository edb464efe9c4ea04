"""Backend of Triton for host memory: launches of Triton kernels over CPU tensors, without a GPU.

Triton's front end and its pipeline of a launch (specialisation, compilation, cache, launcher) run as for
a GPU of the capability that is asked for. Only the last stage differs: the compiler ends with the
intermediate code, and what is loaded and launched is that code as C++ (:mod:`kernel`).
"""

import random
from collections import Counter
from typing import Any

import torch
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from tests.triton_on_cpu.kernel import Kernel, values_of

launches: Counter[str] = Counter()
"""Launches of each kernel since the start of the process, by module and name: ``norm.triton._rms_norm``."""


def install(capability: int = 90, *, seed: int | None = None, is_checked: bool = True) -> None:
    """Launch all Triton kernels of this process on the CPU from now on.

    Args:
        capability: compute capability, times 10, for which the front end compiles.
        seed: of the order in which the programs of a launch run; None for ascending order.
        is_checked: raise KernelFault for accesses outside of the storages of a launch's tensors. Kernels
            that take addresses as integers need it off.
    """
    backends["nvidia"] = Backend(HostCompiler, HostDriver)
    driver.set_active(HostDriver(capability, seed, is_checked))


class HostCompiler(CUDABackend):
    """The compiler for CUDA up to the intermediate code."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ttir"

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Name the stages of a compilation: one."""
        capability = self._parse_arch(options.arch)

        def make(module: Any, metadata: dict[str, Any]) -> Any:
            metadata["shared"] = 0
            metadata["name"] = module.get_entry_func_name()
            return self.make_ttir(module, metadata, options, capability)

        stages["ttir"] = make

    def hash(self) -> str:
        """A part of the key of Triton's cache: no assembler has a say."""
        return f"host-{self.target.arch}"


class HostDriver(DriverBase):
    """A device on which launches are calls."""

    def __init__(self, capability: int = 90, seed: int | None = None, is_checked: bool = True) -> None:
        super().__init__()
        self.capability = capability
        self.seed = seed
        self.is_checked = is_checked
        self.utils = _Utils()
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        """Triton asks which drivers have a device."""
        return True

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only launchers in C++ ask for it."""
        raise NotImplementedError(ty)

    def get_benchmarker(self) -> Any:
        """Times of a CPU say nothing of a GPU."""
        raise NotImplementedError("benchmarks of Triton kernels on the CPU")


class _Utils:
    """What Triton asks of a device besides launches."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the largest number of threads."""
        kernel = Kernel(code.decode())
        return kernel, kernel, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Libraries stay loaded."""


class _Launcher:
    """Launches of one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = tuple(source.signature.values())
        self.name = kernel_name(source.fn)

    def __call__(self, x: int, y: int, z: int, stream: int, kernel: Kernel, *rest: Any) -> None:
        # Behind the kernel come its metadata and two hooks, then its arguments.
        arguments = rest[4:]
        values = list(values_of(self.signature, arguments))
        launches[self.name] += 1

        # Programs in any order, within the memory of the tensors.
        host = driver.active
        memory = storages(values) if host.is_checked else ()
        order = list(range(x * y * z)) if host.seed is not None else None
        if order is not None:
            random.Random(f"{host.seed} {x} {y} {z}").shuffle(order)
        kernel.launch((x, y, z), values, memory=memory, order=order)()


def kernel_name(function: Any) -> str:
    """Module and name of a kernel; of the project's kernels without the folder of all of them."""
    return f"{function.__module__.removeprefix('eagle_kit.ops.')}.{function.__name__}"


def storages(values: list[Any]) -> list[tuple[int, int]]:
    """Address and size of the memory behind tensors."""
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found.add((storage.data_ptr(), storage.nbytes()))
    return sorted(found)
