"""What a recording of operations must know that the operations do not say.

On a CPU a cycle's operations are recorded and replayed without Python (``serve/cpu_graph.py``). Where Python
looks at numbers to choose what to do, the recording holds only as long as the choice is the same: the choice
is made through :func:`guarded_choice`. What is different each time is one operation of :data:`library`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Choice = Callable[[list[int]], tuple[int, ...]]

library = torch.library.Library("eagle_kit_cpu", "FRAGMENT")
"""For operations that are Python inside; kept alive here."""
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
    """``choice`` was made by the numbers in ``tensor``, int64 ``[B]``, when ``position`` operations were
    recorded, and was ``found``."""

    tensor: torch.Tensor
    choice: Choice
    found: tuple[int, ...]
    position: int


@dataclass
class RecordingContext:
    """What was said within :func:`recording_context`: the choices, and what must live as long as the
    recording."""

    position: Callable[[], int]
    choices: list[Guard] = field(default_factory=list)
    held: list[object] = field(default_factory=list)


_current_context: ContextVar[RecordingContext | None] = ContextVar("listener", default=None)


def guarded_choice(tensor: torch.Tensor, choice: Choice) -> tuple[int, ...]:
    """``choice`` of the numbers in ``tensor``, read on the host.

    Args:
        tensor: int64 ``[B]``; in a recording, lengths of requests, or those and a number.
        choice: a function of the numbers alone, the same one at this place of the code each time.
    """
    context = _current_context.get()
    if context is None:
        return choice(tensor.tolist())
    with torch._C.DisableTorchFunction():  # whoever records refuses other looks at numbers
        found = choice(tensor.tolist())
    context.choices.append(Guard(tensor, choice, found, context.position()))
    return found


def keep_alive(thing: object) -> None:
    """An operation knows ``thing`` by a number: it lives as long as the recording."""
    context = _current_context.get()
    if context is not None:
        context.held.append(thing)


@contextmanager
def recording_context(position: Callable[[], int]) -> Iterator[RecordingContext]:
    """What is said within; ``position`` tells how many operations have been recorded."""
    context = RecordingContext(position)
    token = _current_context.set(context)
    try:
        yield context
    finally:
        _current_context.reset(token)


def is_recording() -> bool:
    """Whether operations are being recorded."""
    return _current_context.get() is not None
