"""Measured choice between cuBLAS (torch) and the Triton kernel for linear layers of few rows.

An engine measures while it warms up, at the first call of each size and before any graph is captured. A
choice is kept and never measured again, so that a size takes the same form as long as the engine lives. Sizes
that never came up in a warm-up take torch's form.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import get_args

import torch

from eagle_kit.engine.measured.choice import MeasuredChoices
from eagle_kit.ops.linear import linear
from eagle_kit.ops.linear.forms import Form, Size, use_forms
from eagle_kit.ops.timing import Timer

TIMED_BYTES, MAX_COPIES = 256 << 20, 16


def time_form(form: Form, size: Size, device: torch.device) -> float:
    """Seconds of one call in a CUDA graph. As in a model, no call finds its weight in the second-level cache:
    the calls of a graph read copies of it, and the cache is emptied before."""
    bytes_each = size.outputs * size.inputs * size.dtype.itemsize
    copies = max(1, min(MAX_COPIES, TIMED_BYTES // bytes_each))
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.empty(copies, size.outputs, size.inputs, dtype=size.dtype, device=device)
    weights.normal_(generator=generator)
    x = torch.empty(size.rows, size.inputs, dtype=size.dtype, device=device).normal_(generator=generator)

    def run() -> None:
        for weight in weights:
            linear(x, weight, backend=form)

    return Timer(device, budget_s=0.02).time(run).median / copies


class LinearForms(MeasuredChoices[Size, Form]):
    """Table from sizes to forms, filled by measurements.

    Args:
        device: of the layers.
        timer: measures the seconds of a form for a size.
    """

    def __init__(
        self, device: torch.device, timer: Callable[[Form, Size, torch.device], float] = time_form
    ) -> None:
        super().__init__()
        self.device, self.timer = device, timer

    def using(self) -> AbstractContextManager[None]:
        """Within, linear layers take the forms chosen so far."""
        return use_forms(self.form)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, linear layers take these forms, and a size that is new is measured at its first call."""
        with super().measuring(), self.using():
            yield

    def form(self, size: Size) -> Form:
        """Form of a size. A new one is measured within :meth:`measuring` and outside of a graph's capture;
        otherwise it is torch's, for now."""
        if size not in self._choices:
            if not self._measures or _is_capturing():
                return "torch"
            timers = {form: partial(self.timer, form, size, self.device) for form in get_args(Form)}
            self._measure(size, f"Linear {_name(size)}", timers)
        return self._choices[size].form

    def report(self) -> list[str]:
        """One line for each size, for people."""
        found = sorted(self._choices.items(), key=lambda item: (*item[0][:3], str(item[0].dtype)))
        return [f"{_name(size)}: {choice}" for size, choice in found]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _name(size: Size) -> str:
    dtype = str(size.dtype).removeprefix("torch.")
    return f"{size.rows} x {size.inputs} -> {size.outputs} {dtype}"
