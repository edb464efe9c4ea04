"""Count of the kernels that Triton compiles, for the report of a warm-up and for a server's metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from eagle_kit.ops.backend import triton_available


class Compilations:
    """Kernels that Triton compiled, or read from its cache on the disk.

    Args:
        on_end: called after each of them, in the thread that launches it.

    Attributes:
        count: number of kernels.
        seconds: time that they took.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self.seconds = 0.0
        self._on_end = on_end
        self._begun = time.perf_counter()

    def begin(self, **_: Any) -> None:
        """Note the time before a compilation. The answer None lets Triton compile."""
        self._begun = time.perf_counter()

    def end(self, **_: Any) -> None:
        """Count a kernel."""
        self.count += 1
        self.seconds += time.perf_counter() - self._begun
        self._on_end()


@contextmanager
def count_compilations(on_end: Callable[[], None] = lambda: None) -> Iterator[Compilations]:
    """Context manager: count the kernels that Triton compiles within, in any thread.

    Args:
        on_end: called after each of them.
    """
    counted = Compilations(on_end)
    if not triton_available():
        yield counted
        return
    from triton import knobs

    runtime = knobs.runtime
    before = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = counted.begin
    runtime.jit_post_compile_hook = counted.end
    try:
        yield counted
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = before
