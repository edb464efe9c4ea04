"""Values of Triton's launches on the device, by the kernels' intermediate code as C++ over the same bytes.

Each launch runs as on a GPU: Triton specialises and compiles for the device's capability, and its launcher
calls the driver, with the runtime covered. Then the computation is enqueued. It may access the storages of
the launch's tensors; an access elsewhere is a KernelFault with the kernel's line.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tests.cuda_device.values.work import BelowAutograd, Covered, HostViews, enqueue
from tests.triton_on_cpu.kernel import computation_of

num_launches: Counter[str] = Counter()
"""Launches of each kernel that were enqueued, by its name."""


def install() -> None:
    """Compute every launch of a Triton kernel from now on."""
    from triton.runtime.jit import JITFunction

    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with Covered():
            compiled = plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        if warmup:
            return compiled

        # All parameters in their order; other options are for the compiler.
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = self.signature.bind(*args, **given)
        bound.apply_defaults()
        arguments = bound.arguments
        _refuse_host_tensors(tuple(arguments.values()))
        extents = tuple(map(int, grid(arguments) if callable(grid) else grid))

        # Over the same bytes, with the numbers that the launch has now.
        with BelowAutograd():
            views = HostViews(torch.cuda.is_current_stream_capturing())
            here = [views.of(value) for value in arguments.values()]
        name = self.fn.__name__
        num_launches[name] += 1
        memory = sorted(set(_storages(here)))
        enqueue(name, computation_of(compiled, extents, here, memory=memory), views.storages)
        return compiled

    JITFunction.run = run  # type: ignore[method-assign]


def _storages(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """First addresses and sizes of the memory behind tensors, those in tuples included."""
    for value in values:
        if isinstance(value, tuple):
            yield from _storages(value)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes():
                yield storage.data_ptr(), storage.nbytes()


def _refuse_host_tensors(values: tuple[Any, ...]) -> None:
    """Raise as Triton's launcher does on hardware: a kernel reads only pinned memory of the host."""
    for value in values:
        if isinstance(value, tuple):
            _refuse_host_tensors(value)
        elif (
            isinstance(value, torch.Tensor) and value.numel() and not value.is_cuda and not value.is_pinned()
        ):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
