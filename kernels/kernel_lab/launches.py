"""Count of what a function would launch on a GPU, by running it over fake tensors.

Counted are Triton's launches, and torch's operations that compute or move something (a matmul, a copy, a
fill, a cast). Views and allocations launch nothing. A custom operator counts as what its own body launches:
the body is run over the fake tensors too, so no table has to be kept true. torch's operations count as one
each; a sort or a split matmul of cuBLAS is more on a GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SILENT = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"),
        *("_unsafe_view", "_reshape_alias", "lift_fresh"),
    )
)
"""Operations that launch nothing though their schema does not say that they are views."""


class LaunchCounter(TorchDispatchMode):
    """Mode that counts launches by phase, over fake tensors and with the Triton kernels chosen::

        with FakeTensorMode(), use("triton"), LaunchCounter() as counter:
            with counter.phase("verify"):
                target(...)

    Attributes:
        phases: launches of each phase by name: of torch's operation, or of the kernel and its operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Counter[str]] = {}
        self._phase, self._operator = "", ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count within as the phase ``name``."""
        before, self._phase = self._phase, name
        self.phases.setdefault(name, Counter())
        try:
            yield
        finally:
            self._phase = before

    @property
    def total(self) -> int:
        """Launches of all phases."""
        return sum(counts.total() for counts in self.phases.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        body = torch._library.custom_ops.OPDEFS.get(name)
        if body is not None:
            self._run_body(name, body._init_fn, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if name.startswith("aten::") and not func.is_view and name not in _SILENT and _numel(out, args):
            self._count(name.removeprefix("aten::"))
        return out

    def _run_body(self, name: str, body: Any, args: Any, kwargs: Any) -> None:
        before, self._operator = self._operator, name.removeprefix("eagle_kit::")
        try:
            with _launches(self.launched), self:
                body(*args, **kwargs)
        finally:
            self._operator = before

    def launched(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Count a launch of a Triton kernel."""
        self._count(kernel.fn.__name__.lstrip("_"))

    def _count(self, name: str) -> None:
        counts = self.phases.setdefault(self._phase, Counter())
        counts[f"{self._operator}: {name}" if self._operator else name] += 1


@contextmanager
def _launches(launched: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Tell ``launched`` of Triton's kernels that are launched within and their arguments, and launch none."""
    from triton.runtime.jit import KernelInterface

    plain = KernelInterface.__getitem__

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *args, **options: launched(kernel, args, options)

    KernelInterface.__getitem__ = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        KernelInterface.__getitem__ = plain  # type: ignore[method-assign]


def _numel(out: Any, args: Any) -> int:
    """Elements that an operation makes, or changes in its first argument."""
    made = out if isinstance(out, (tuple, list)) else (out,)
    found = [each.numel() for each in made if isinstance(each, torch.Tensor)]
    return sum(found) if found else sum(a.numel() for a in args[:1] if isinstance(a, torch.Tensor))
