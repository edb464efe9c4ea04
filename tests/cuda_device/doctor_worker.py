"""A process of checks of `eagle-kit doctor --gpu` on the device in software, with a fault that is planted.

``python -m tests.cuda_device.doctor_worker FAULT``: FAULT is a function of this module, or ``nothing``.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.cuda_device import device


def nothing() -> None:
    """Plant no fault."""


def replace_kernel(module: Any, name: str, around: Callable[..., Any]) -> None:
    """Let ``around(kernel, *args, **options)`` run in place of an operation's kernel."""
    kernel = getattr(module, name)

    def replaced(*args: Any, **options: Any) -> Any:
        return around(kernel, *args, **options)

    setattr(module, name, replaced)


def wrong_numbers() -> None:
    """The kernel of a norm gives numbers that are 5 % too large."""
    from eagle_kit.ops.norm import triton

    replace_kernel(triton, "rms_norm", lambda kernel, *args, **options: kernel(*args, **options) * 1.05)


def death() -> None:
    """The kernel of commits ends the process by a signal."""
    from eagle_kit.ops.commit import triton

    replace_kernel(triton, "commit_path", lambda *args, **options: os.kill(os.getpid(), signal.SIGSEGV))


def hang() -> None:
    """The kernel of SwiGLU does not end."""
    from eagle_kit.ops.swiglu import triton

    replace_kernel(triton, "swiglu", lambda *args, **options: time.sleep(600))


def failing_capture() -> None:
    """The kernel of commits waits for the device, which no capture allows."""
    from eagle_kit.ops.commit import triton

    def waiting(kernel: Any, *args: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        return kernel(*args, **options)

    replace_kernel(triton, "commit_path", waiting)


def stale_input() -> None:
    """Inputs of a graph are written at its first replay, and never again."""
    from eagle_kit.engine.graphs import cuda_graph

    plain = cuda_graph.write
    written: list[Any] = []

    def write(buffers: Any, values: Any) -> None:
        if any(buffers is each for each in written):
            return
        written.append(buffers)
        plain(buffers, values)

    cuda_graph.write = write


def main() -> int:
    """Plant the fault and answer requests."""
    device.start()
    globals()[sys.argv[1]]()
    from eagle_kit.doctor import check_worker

    return check_worker.main()


if __name__ == "__main__":
    sys.exit(main())
