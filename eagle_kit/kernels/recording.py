"""What a recording of operations must know that the operations do not say.

On a CPU a cycle's operations are recorded and replayed without Python (``serve/cpu_graph.py``). Where Python
looks at numbers to choose what to do, the recording holds only as long as the choice is the same: the choice
is made through :func:`choose_by`. What is different each time is one operation of :data:`library`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

Choice = Callable[[list[int]], tuple[int, ...]]

library = torch.library.Library("eagle_kit", "FRAGMENT")
"""For operations that are Python inside; kept alive here."""
VIEWED_TYPES = (
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)


def _bits_as(x: torch.Tensor, kind: int) -> torch.Tensor:
    return x.view(VIEWED_TYPES[kind])


library.define("bits_as(Tensor x, int kind) -> Tensor")
library.impl("bits_as", _bits_as, "CPU")


class Chosen(NamedTuple):
    """``choice`` was made by the numbers in ``tensor``, int64 ``[B]``, and was ``found``."""

    tensor: torch.Tensor
    choice: Choice
    found: tuple[int, ...]


_listener: ContextVar[list[Chosen] | None] = ContextVar("listener", default=None)


def choose_by(tensor: torch.Tensor, choice: Choice) -> tuple[int, ...]:
    """``choice`` of the numbers in ``tensor``, read on the host.

    Args:
        tensor: int64 ``[B]``; in a recording, lengths of requests, or those and a number.
        choice: a function of the numbers alone.
    """
    heard = _listener.get()
    if heard is None:
        return choice(tensor.tolist())
    with torch._C.DisableTorchFunction():  # whoever records refuses other looks at numbers
        found = choice(tensor.tolist())
    heard.append(Chosen(tensor, choice, found))
    return found


@contextmanager
def hearing_choices() -> Iterator[list[Chosen]]:
    """The choices that are made within."""
    heard: list[Chosen] = []
    token = _listener.set(heard)
    try:
        yield heard
    finally:
        _listener.reset(token)


def is_recording() -> bool:
    """Whether operations are being recorded."""
    return _listener.get() is not None
