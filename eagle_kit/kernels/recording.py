"""What a recording of operations must know that the operations do not say.

On a CPU a cycle's operations are recorded and replayed without Python (``serve/cpu_graph.py``). Where Python
looks at numbers to choose what to do, the recording holds only as long as the choice is the same: the choice
is made through :func:`choose_by`. What is different each time is one operation of :data:`library`.
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


class Chosen(NamedTuple):
    """``choice`` was made by the numbers in ``tensor``, int64 ``[B]``, when ``position`` operations were
    recorded, and was ``found``."""

    tensor: torch.Tensor
    choice: Choice
    found: tuple[int, ...]
    position: int


@dataclass
class Heard:
    """What was said within :func:`hearing`: the choices, and what must live as long as the recording."""

    position: Callable[[], int]
    choices: list[Chosen] = field(default_factory=list)
    held: list[object] = field(default_factory=list)


_listener: ContextVar[Heard | None] = ContextVar("listener", default=None)


def choose_by(tensor: torch.Tensor, choice: Choice) -> tuple[int, ...]:
    """``choice`` of the numbers in ``tensor``, read on the host.

    Args:
        tensor: int64 ``[B]``; in a recording, lengths of requests, or those and a number.
        choice: a function of the numbers alone, the same one at this place of the code each time.
    """
    heard = _listener.get()
    if heard is None:
        return choice(tensor.tolist())
    with torch._C.DisableTorchFunction():  # whoever records refuses other looks at numbers
        found = choice(tensor.tolist())
    heard.choices.append(Chosen(tensor, choice, found, heard.position()))
    return found


def hold(thing: object) -> None:
    """An operation knows ``thing`` by a number: it lives as long as the recording."""
    heard = _listener.get()
    if heard is not None:
        heard.held.append(thing)


@contextmanager
def hearing(position: Callable[[], int]) -> Iterator[Heard]:
    """What is said within; ``position`` tells how many operations have been recorded."""
    heard = Heard(position)
    token = _listener.set(heard)
    try:
        yield heard
    finally:
        _listener.reset(token)


def is_recording() -> bool:
    """Whether operations are being recorded."""
    return _listener.get() is not None
