"""Attention function that models of transformers call in place of their own.

It is registered once, under a name that ``attn_implementation`` takes. What it does is decided by the forward
that is under way: computing attention by an :class:`~eagle_kit.models.blocks.layers.Attend`, or learning how
each layer wants to attend. No mask is registered under the name, so models make none.

Legend: T packed tokens, Hq / Hkv heads, D head size, E size of a value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.recurrence import recur_of
from eagle_kit.ops.recurrence import Inputs

NAME = "eagle_kit"
TUNING = "_query_scale"
"""Name of a module's function from positions to factors of its queries."""


@dataclass(frozen=True)
class Call:
    """What a layer hands to its attention function.

    Attributes:
        module: the layer's attention.
        q, k, v: ``[T, Hq, D]``, ``[T, Hkv, D]``, ``[T, Hkv, E]``.
        scale: of the scores.
        window, soft_cap, sinks: as the layer's keyword arguments say; None where they do not.
    """

    module: torch.nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None


class Handler(Protocol):
    """What a forward does with the calls of its layers, which come in order."""

    def __call__(self, call: Call) -> torch.Tensor:
        """Attend -> ``[T, Hq, E]``."""

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""

    def recur(self, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""


@dataclass
class Forward:
    """A forward under way: the ``handler`` of its layers, None where the model computes them itself, and the
    states ``[T, H]`` that are ``captured`` by layer."""

    handler: Handler | None
    capture: tuple[int, ...] = ()
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


_current: ContextVar[Forward | None] = ContextVar("bridged_forward", default=None)


@contextmanager
def running(forward: Forward) -> Iterator[Forward]:
    """Have attention functions called within serve ``forward``."""
    token = _current.set(forward)
    try:
        yield forward
    finally:
        _current.reset(token)


def current() -> Forward | None:
    """Return the forward under way."""
    return _current.get()


class Attended:
    """Handler that computes by ``attend`` at ``positions [T]``. Queries, keys and values narrower than
    ``head_dim``, the widest of any layer's, are padded with zeros, and the results cut, both exactly."""

    def __init__(self, attend: Attend, head_dim: int, positions: torch.Tensor) -> None:
        self._attend, self._head_dim, self._positions = attend, head_dim, positions
        self._layer = self._convolution = self._recurrence = 0

    def __call__(self, call: Call) -> torch.Tensor:
        """See :class:`Handler`."""
        layer, size = self._layer, call.v.shape[-1]
        self._layer += 1
        q = call.q
        if (tuning := getattr(call.module, TUNING, None)) is not None:
            q = q * tuning(self._positions).to(q.dtype)[:, None, None]
        parts = [self._wide(part) for part in (q, call.k, call.v)]
        return self._attend(layer, *parts)[..., :size]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`Handler`."""
        self._convolution += 1
        return recur_of(self._attend).convolve(self._convolution - 1, x, weight, bias)

    def recur(self, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`Handler`."""
        self._recurrence += 1
        return recur_of(self._attend).recur(self._recurrence - 1, inputs, delta=delta)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        missing = self._head_dim - x.shape[-1]
        return pad(x, (0, missing)) if missing else x


def register() -> None:
    """Make the attention function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query``, ``key`` and ``value [1, heads, T, D]`` -> ``[1, T, Hq, E]``."""
    forward = _current.get()
    assert forward is not None and forward.handler is not None, "a bridged model runs through its target"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = Call(module, q, k, v, scale, sliding_window, softcap, s_aux)
    return forward.handler(call)[None], None
