"""Rotations and rows of a store that all layers of a forward share: computed once, or in each kernel.

Legend: T tokens, B requests, N window nodes, E rotated elements of a head.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of T tokens.

    Attributes:
        positions: int64 ``[T]``.
        inv_freq: fp32 ``[E / 2]``; a pair turns by the angle ``position * inv_freq``, rounded to fp32.
        magnitude: factor of cosines and sines.
    """

    positions: torch.Tensor
    inv_freq: torch.Tensor
    magnitude: float = 1.0

    @cached_property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines ``(c, c)`` and signed sines ``(-s, s)``, two halves each, fp32 ``[T, 1, E]``, for the
        reference: the kernel computes its own."""
        angle = self.positions.to(torch.float32)[:, None] * self.inv_freq
        cos = angle.cos()
        sin = angle.sin()
        if self.magnitude != 1.0:
            cos = cos * self.magnitude
            sin = sin * self.magnitude
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    @cached_property
    def compiled_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """:attr:`table` computed in C++ (:mod:`eagle_kit.ops.cpu.cpp`), equal up to a rounding error."""
        cosines, sines = torch.ops.eagle_kit_cpp.rotation_table(
            self.positions.long().contiguous(), self.inv_freq.contiguous(), self.magnitude
        )
        return cosines, sines

    def to(self, device: torch.device) -> "Rotation":
        """The same positions on ``device``."""
        if self.positions.device == device == self.inv_freq.device:
            return self
        return Rotation(self.positions.to(device), self.inv_freq.to(device), self.magnitude)


@dataclass(frozen=True)
class WindowRows:
    """Rows of B windows of N nodes in a scratch: node j of request b is row ``first + b * stride + j``."""

    first: int
    stride: int
    batch: int
    nodes: int
    device: torch.device

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The rows, int64 ``[B * N]``, for implementations that do not compute them."""
        request = torch.arange(self.batch, device=self.device)[:, None] * self.stride
        return (self.first + request + torch.arange(self.nodes, device=self.device)).reshape(-1)


Rows = torch.Tensor | WindowRows
"""Rows int64 ``[T]`` of a store, or the rule that a kernel follows."""


def rows_tensor(rows: Rows) -> torch.Tensor:
    """Rows as a tensor."""
    return rows.tensor if isinstance(rows, WindowRows) else rows
