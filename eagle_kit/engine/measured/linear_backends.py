"""Choice between cuBLAS (torch) and the Triton kernel for linear layers of few rows: measured, or forced.

An engine measures in its warm-up, at the first call of each size and before any graph is captured. A size is
measured once and kept in a file, so it has the same backend as long as the engine lives, and after a restart.
Sizes that did not occur in the warm-up use torch.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import get_args

import torch

import eagle_kit.ops
from eagle_kit.config.engine import LinearOption
from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.measured.choice_file import ChoiceFile, device_key
from eagle_kit.engine.measured.choices import MeasuredChoices
from eagle_kit.ops.linear import linear
from eagle_kit.ops.linear.backends import LinearBackend, Size, use_backends
from eagle_kit.ops.timing import Timer

TIMED_BYTES = 256 << 20
"""Bytes of weights that one graph reads."""
MAX_COPIES = 16
"""Most copies of a weight in one graph."""
OPS = Path(eagle_kit.ops.__file__).parent
SOURCES = (OPS / "small_linear", OPS / "dependent_launch.py")
"""Sources of the kernel that is measured: another kernel has another file of choices."""
logger = logging.getLogger(__name__)


def time_backend(backend: LinearBackend, size: Size, device: torch.device) -> float:
    """Measure the seconds of one call in a CUDA graph.

    As in a model, no call finds its weight in the L2 cache: the calls of a graph read copies of it, and the
    cache is emptied before.
    """
    bytes_each = size.outputs * size.inputs * size.dtype.itemsize
    copies = max(1, min(MAX_COPIES, TIMED_BYTES // bytes_each))
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.empty(copies, size.outputs, size.inputs, dtype=size.dtype, device=device)
    weights.normal_(generator=generator)
    x = torch.empty(size.rows, size.inputs, dtype=size.dtype, device=device).normal_(generator=generator)

    def run() -> None:
        for weight in weights:
            linear(x, weight, backend=backend)

    return Timer(device, budget_s=0.02).time(run).median / copies


class LinearBackends(MeasuredChoices[Size, LinearBackend]):
    """Table from sizes to backends, filled by measurements.

    Args:
        device: device of the layers.
        timer: measures the seconds of a backend for a size.
        forced: backend of all sizes; None chooses by measurement.
        file, ranks: see :class:`MeasuredChoices`.
    """

    def __init__(
        self,
        device: torch.device,
        timer: Callable[[LinearBackend, Size, torch.device], float] = time_backend,
        *,
        forced: LinearBackend | None = None,
        file: ChoiceFile | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(file, ranks)
        self.device = device
        self.timer = timer
        self.forced = forced

    def using(self) -> AbstractContextManager[None]:
        """Inside the context linear layers use the backends chosen so far."""
        return use_backends(self.backend)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside the context linear layers use these backends, and measure a new size at its first call."""
        with super().measuring(), self.using():
            yield

    def backend(self, size: Size) -> LinearBackend:
        """Return the backend of a size.

        A new size is measured inside :meth:`measuring`, unless a graph is being captured. Elsewhere it uses
        torch for the time being.
        """
        if self.forced is not None:
            return self.forced
        if size not in self._choices:
            if not self._measures or _is_capturing():
                return "torch"
            timers = {}
            for backend in get_args(LinearBackend):
                timers[backend] = partial(self.timer, backend, size, self.device)
            self._measure(size, f"Linear {_name(size)}", timers)
        return self._choices[size].backend

    def report(self) -> list[str]:
        """Describe each size and its choice in a line, for people."""
        found = sorted(self._choices.items(), key=lambda item: (*item[0][:3], str(item[0].dtype)))
        return [f"{_name(size)}: {choice}" for size, choice in found]

    def __str__(self) -> str:
        if self.device.type != "cuda":
            return "torch"
        return self.forced or "torch or triton, as measured in the warm-up"


def open_linear_backends(
    option: LinearOption,
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    has_equal_parts: bool = True,
) -> LinearBackends:
    """Make the backends of an engine's linear layers of few rows.

    Args:
        option: ``"auto"`` measures on a GPU; the others force a backend there.
        ranks: processes that choose together; None for one that chooses alone.
        has_equal_parts: False if weights of ranks differ in shape; with ``"auto"`` all layers then use torch.

    Raises:
        UserError: a backend was forced on a CPU, where there is no choice.
    """
    # A CPU.
    if device.type != "cuda":
        if option != "auto":
            raise UserError(
                f"The linear backend {option} was asked for, and is a choice on GPUs only.",
                "Leave the linear backend at auto.",
            )
        return LinearBackends(device)

    # One backend for all sizes.
    if option != "auto":
        return LinearBackends(device, forced=option)
    if not has_equal_parts:
        logger.warning("Linear layers use torch, since the ranks have parts of different sizes.")
        return LinearBackends(device, forced="torch")

    # The first rank reads and writes the file.
    file = None
    if ranks is None or ranks.is_first:
        file = ChoiceFile("linear", device_key(device, SOURCES))
    return LinearBackends(device, file=file, ranks=ranks)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _name(size: Size) -> str:
    dtype = str(size.dtype).removeprefix("torch.")
    return f"{size.rows} x {size.inputs} -> {size.outputs} {dtype}"
