"""Attention function that models of transformers call in place of their own.

It is registered once, under a name that ``attn_implementation`` takes. The forward that is running decides
what it does: compute attention by an :class:`~eagle_kit.models.blocks.layers.Attend`, or record the
attention that each layer asks for. No mask function is registered under the name, so models make no masks.

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

ATTENTION_NAME = "eagle_kit"
"""Value of ``attn_implementation``."""
QUERY_SCALE = "_query_scale"
"""Attribute of a module with a function from positions to factors of its queries."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments with which a layer calls its attention function.

    Attributes:
        module: attention module of the layer.
        q: ``[T, Hq, D]``.
        k: ``[T, Hkv, D]``.
        v: ``[T, Hkv, E]``.
        scale: factor of the scores.
        window: sliding window; None if the layer does not pass one.
        soft_cap: soft cap of the scores; None without one.
        sinks: attention sinks; None without them.
    """

    module: torch.nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None


class LayerHandler(Protocol):
    """Attention and recurrence of the layers of a forward, which call it in their order."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention ``[T, Hq, E]``."""

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""

    def recur(self, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.recurrence.Recur`."""


@dataclass
class BridgedForward:
    """A running forward.

    Attributes:
        handler: attention and recurrence of the layers; None if the model computes them itself.
        capture: layers whose inputs are captured.
        captured: captured hidden states ``[T, H]`` by layer, filled while the forward runs.
    """

    handler: LayerHandler | None
    capture: tuple[int, ...] = ()
    captured: dict[int, torch.Tensor] = field(default_factory=dict)


_current: ContextVar[BridgedForward | None] = ContextVar("bridged_forward", default=None)


@contextmanager
def running(forward: BridgedForward) -> Iterator[BridgedForward]:
    """Make ``forward`` the running forward of all bridged models."""
    token = _current.set(forward)
    try:
        yield forward
    finally:
        _current.reset(token)


def current_forward() -> BridgedForward | None:
    """The running forward; None outside of one."""
    return _current.get()


class AttendHandler:
    """Handler that computes by an :class:`~eagle_kit.models.blocks.layers.Attend`.

    Queries, keys and values that are narrower than ``head_dim`` are padded with zeros, and the outputs are
    cut. Neither changes a result.

    Args:
        attend: attention, with recurrence for models with recurrent layers.
        head_dim: largest head size of the layers, which the store has.
        positions: int64 ``[T]``.
    """

    def __init__(self, attend: Attend, head_dim: int, positions: torch.Tensor) -> None:
        self._attend = attend
        self._head_dim = head_dim
        self._positions = positions

        # Numbers of the next attention layer, convolution and recurrence.
        self._layer = 0
        self._convolution = 0
        self._recurrence = 0

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """See :class:`LayerHandler`."""
        q = call.q
        query_scale = getattr(call.module, QUERY_SCALE, None)
        if query_scale is not None:
            q = q * query_scale(self._positions).to(q.dtype)[:, None, None]
        out = self._attend(self._layer, self._padded(q), self._padded(call.k), self._padded(call.v))
        self._layer += 1
        return out[..., : call.v.shape[-1]]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See :class:`LayerHandler`."""
        number = self._convolution
        self._convolution += 1
        return recur_of(self._attend).convolve(number, x, weight, bias)

    def recur(self, inputs: Inputs, *, delta: bool) -> torch.Tensor:
        """See :class:`LayerHandler`."""
        number = self._recurrence
        self._recurrence += 1
        return recur_of(self._attend).recur(number, inputs, delta=delta)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Pad the heads of ``x [T, heads, size]`` with zeros to the largest head size."""
        missing = self._head_dim - x.shape[-1]
        if missing == 0:
            return x
        return pad(x, (0, missing))


def register() -> None:
    """Register the attention function in transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


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
    """Attention function with the signature that transformers asks for.

    Args:
        query: ``[1, Hq, T, D]``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, E]``.

    Returns:
        ``[1, T, Hq, E]``, and None for the weights of attention.
    """
    forward = current_forward()
    assert forward is not None and forward.handler is not None, "a bridged model runs through its target"
    scale = query.shape[-1] ** -0.5
    if scaling is not None:
        scale = float(scaling)
    call = AttentionCall(
        module=module,
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        scale=scale,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return forward.handler(call)[None], None
