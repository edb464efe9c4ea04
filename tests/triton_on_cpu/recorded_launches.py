"""Record what each Triton launch of the self-check leaves in its tensors, under the interpreter or as C++.

``python -m tests.triton_on_cpu.recorded_launches FILE OPERATION...``: the interpreter runs the kernels
if TRITON_INTERPRET is 1. Operations are folders of eagle_kit/ops; without any, all are checked.
"""

import os
import sys
import warnings
from typing import Any

import torch


def record(operations: list[str]) -> list[tuple[str, list[torch.Tensor]]]:
    """Run checks; returns name and tensors of each launch, as they are behind it."""
    from triton.runtime.jit import KernelInterface

    found: list[tuple[str, list[torch.Tensor]]] = []
    plain = KernelInterface.__getitem__

    def recorded(kernel: Any, grid: Any) -> Any:
        launch = plain(kernel, grid)

        def call(*args: Any, **options: Any) -> None:
            launch(*args, **options)
            found.append((kernel.fn.__name__, list(_tensors((args, list(options.values()))))))

        return call

    KernelInterface.__getitem__ = recorded
    from eagle_kit.ops.backend import use
    from kernel_lab.selfcheck import triton_runs

    with use("triton"):
        for run in triton_runs(in_one_dtype=True):
            if not operations or run.case.operation in operations:
                run.error(torch.device("cpu"))
    return found


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.clone()
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def main() -> None:
    """Write what was recorded to a file."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from kernel_lab.interpreter import repair

        repair()
        warnings.filterwarnings("ignore", "invalid value encountered in cast", RuntimeWarning)
    else:
        from tests.triton_on_cpu import host_backend

        host_backend.install()
    # What a kernel leaves unwritten is the same in both, NaN or the largest integer.
    torch.use_deterministic_algorithms(True, warn_only=True)
    file, *operations = sys.argv[1:]
    torch.save(record(operations), file)


if __name__ == "__main__":
    main()
