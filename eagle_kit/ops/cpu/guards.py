"""Support for recording operations on a CPU and replaying them without Python
(``engine/graphs/cpu_graph.py``).

Where Python branches on numbers in a tensor, a recording is valid only as long as the branch is the same:
such branches go through :func:`guarded_choice`. Code whose operations differ between calls is one custom op
of :data:`library`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Choice = Callable[[list[int]], tuple[int, ...]]

library = torch.library.Library("eagle_kit_cpu", "FRAGMENT")
"""Custom ops implemented in Python; the module keeps their registrations alive."""
VIEWED_TYPES = (
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def _bits_as(x: torch.Tensor, kind: int) -> torch.Tensor:
    return x.view(VIEWED_TYPES[kind])


library.define("bits_as(Tensor x, int kind) -> Tensor")
library.impl("bits_as", _bits_as, "CPU")


class Guard(NamedTuple):
    """A recorded branch: ``choice`` of the numbers in ``tensor``, int64 ``[B]``, had the result ``found``
    after ``position`` recorded operations."""

    tensor: torch.Tensor
    choice: Choice
    found: tuple[int, ...]
    position: int


@dataclass
class RecordingContext:
    """Guards and objects collected within :func:`recording_context`; ``held`` objects must live as long as
    the recording."""

    position: Callable[[], int]
    choices: list[Guard] = field(default_factory=list)
    held: list[object] = field(default_factory=list)


_current_context: ContextVar[RecordingContext | None] = ContextVar("recording_context", default=None)


def guarded_choice(tensor: torch.Tensor, choice: Choice) -> tuple[int, ...]:
    """Return ``choice`` of the numbers in ``tensor``, read on the host, and guard it when recording.

    Args:
        tensor: int64 ``[B]``; in a recording, lengths of requests, optionally followed by one more number.
        choice: a function of these numbers alone, the same at every call from this place.
    """
    context = _current_context.get()
    if context is None:
        return choice(tensor.tolist())
    with torch._C.DisableTorchFunction():  # recorders refuse other reads on the host
        found = choice(tensor.tolist())
    context.choices.append(Guard(tensor, choice, found, context.position()))
    return found


def keep_alive(referent: object) -> None:
    """Keep an object that an operation refers to by number alive as long as the recording."""
    context = _current_context.get()
    if context is not None:
        context.held.append(referent)


@contextmanager
def recording_context(position: Callable[[], int]) -> Iterator[RecordingContext]:
    """Collect guards and held objects; ``position`` returns the number of operations recorded so far."""
    context = RecordingContext(position)
    token = _current_context.set(context)
    try:
        yield context
    finally:
        _current_context.reset(token)


def is_recording() -> bool:
    """Return whether operations are being recorded."""
    return _current_context.get() is not None
