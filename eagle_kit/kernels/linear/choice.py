"""Which form a linear layer of few rows takes: cuBLAS through torch, or the Triton kernel where a measurement
on this machine found it faster.

An engine measures while it warms up, at the first call of each size and before any graph is captured. What
was chosen is kept and never measured again, so that a size takes the same form for as long as the process
lives. Sizes that never came up in a warm-up take torch's.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

Form = Literal["torch", "triton"]
FORMS: tuple[Form, ...] = ("torch", "triton")
MARGIN = 0.97
"""Triton is taken where it needs less than this part of torch's time: less than that is noise, and a choice
that follows noise differs from one start to the next."""
TIMED_BYTES, MAX_COPIES = 256 << 20, 16

logger = logging.getLogger(__name__)


class Size(NamedTuple):
    """Of ``[M, K]`` times ``[N, K]`` transposed, with M rounded up to a power of two."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor) -> "Size":
        """The size of a layer; ``x`` has at least one row."""
        outputs, inputs = weight.shape
        return cls(1 << (x.shape[0] - 1).bit_length(), outputs, inputs, x.dtype)


class Choice(NamedTuple):
    """A form, and the seconds of both where they were measured."""

    form: Form
    seconds: Mapping[Form, float]


Timer = Callable[[Form, Size, torch.device], float]
"""Seconds that a form takes for a size on a device."""


def time_form(form: Form, size: Size, device: torch.device) -> float:
    """Seconds of one call in a CUDA graph. As in a model, no call finds its weight in the second-level cache:
    the calls of a graph read copies of it, and the cache is emptied before."""
    from eagle_kit.kernels.linear import linear
    from eagle_kit.kernels.timing import Timer as GpuTimer

    bytes_each = size.outputs * size.inputs * size.dtype.itemsize
    copies = max(1, min(MAX_COPIES, TIMED_BYTES // bytes_each))
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.empty(copies, size.outputs, size.inputs, dtype=size.dtype, device=device)
    weights.normal_(generator=generator)
    x = torch.empty(size.rows, size.inputs, dtype=size.dtype, device=device).normal_(generator=generator)

    def run() -> None:
        for weight in weights:
            linear(x, weight, backend=form)

    return GpuTimer(device, budget_s=0.02).time(run).median / copies


class Choices:
    """A table from sizes to forms.

    Args:
        timer: measures a size that is not in the table.
        choices: forms that are known or wanted; they are not measured.
    """

    def __init__(self, timer: Timer = time_form, choices: Mapping[Size, Form] | None = None) -> None:
        self.timer = timer
        self._choices = {size: Choice(form, {}) for size, form in (choices or {}).items()}
        self._measures = False

    def set(self, size: Size, form: Form) -> None:
        """Override what was or would be measured; graphs that are captured already keep their form."""
        self._choices[size] = Choice(form, {})

    def clear(self) -> None:
        """Forget everything."""
        self._choices.clear()

    @property
    def table(self) -> Mapping[Size, Choice]:
        """What was chosen so far."""
        return dict(self._choices)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, a size that is not in the table is measured when it is asked for."""
        before, self._measures = self._measures, True
        try:
            yield
        finally:
            self._measures = before

    def form(self, size: Size, device: torch.device) -> Form:
        """The form for a size. It is measured first if it is new, within :meth:`measuring` and outside of a
        graph's capture; otherwise a new one is torch's, for now."""
        choice = self._choices.get(size)
        if choice is None:
            if not self._measures or _is_capturing():
                return "torch"
            choice = self._choices[size] = self._measure(size, device)
        return choice.form

    def _measure(self, size: Size, device: torch.device) -> Choice:
        try:
            seconds: dict[Form, float] = {form: self.timer(form, size, device) for form in FORMS}
        except torch.AcceleratorError:
            raise  # the device is lost to this process
        except Exception as error:  # whatever a compiler raises, or there is no memory
            is_memory = isinstance(error, torch.OutOfMemoryError)
            reason = ["no memory"] if is_memory else str(error).strip().splitlines() or [type(error).__name__]
            logger.warning(
                "Linear %s: it cannot be measured, so torch's form runs (%s).", _name(size), reason[0]
            )
            return Choice("torch", {})
        choice = Choice("triton" if seconds["triton"] < MARGIN * seconds["torch"] else "torch", seconds)
        logger.info("Linear %s", _line(size, choice))
        return choice

    def report(self) -> list[str]:
        """A line for each size, for people."""
        found = sorted(self._choices.items(), key=lambda item: (*item[0][:3], str(item[0].dtype)))
        return [_line(size, choice) for size, choice in found]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _name(size: Size) -> str:
    dtype = str(size.dtype).removeprefix("torch.")
    return f"{size.rows} x {size.inputs} -> {size.outputs} {dtype}"


def _line(size: Size, choice: Choice) -> str:
    times = ", ".join(f"{form} {1e6 * seconds:.1f} us" for form, seconds in choice.seconds.items())
    return f"{_name(size)}: {choice.form} ({times or 'not measured'})"


MACHINE = Choices()
"""What was measured in this process: a fact about the machine, which its engines share."""
