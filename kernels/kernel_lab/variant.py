"""One configuration of a kernel that ships, and the GPUs that kernels are compiled for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHIPPED = (80, 89, 90, 100, 120)
"""Capabilities that kernels are compiled for: 8.6 and 8.7 run as 8.0 with their own limits, 10.3 as 10.0."""
WITH_FP8 = tuple(each for each in SHIPPED if each >= 89)
"""Those that convert e4m3."""


@dataclass(frozen=True)
class Variant:
    """One configuration of a kernel that ships.

    Attributes:
        name: of the kernel and what is special, such as ``"window_attention decode bf16 D128 G4"``.
        kernel: the ``triton.jit`` function.
        types: its arguments that are not constants, in their order, by Triton type: ``"*bf16"``, ``"i32"``,
            or tuples of these.
        constants: its ``tl.constexpr`` arguments.
        aligned: integer arguments that are multiples of 16 whenever this configuration runs; pointers are.
        num_warps, num_stages: launch options.
        max_registers: launch option ``maxnreg``; None leaves the number of registers to the assembler.
        wgmma: whether it must use the matrix instructions of groups of warps, on Hopper and B200.
        programs: how many must fit on a multiprocessor at once, by registers, shared memory and warps.
        narrow: why its loops load less than 16 bytes at a time; empty where they must not.
        direct: why its loops that multiply load without ``cp.async`` and TMA; empty where they must not.
        converts: why its pipelined loops change the layout of addresses or of what they load; empty where
            they must not.
        spills: why registers are spilled to the stack; empty where none may be.
        archs: compute capabilities that it ships for.
    """

    name: str
    kernel: Any
    types: Mapping[str, str | tuple[str, ...]]
    constants: Mapping[str, Any]
    aligned: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    wgmma: bool = False
    programs: int = 1
    narrow: str = ""
    direct: str = ""
    converts: str = ""
    spills: str = ""
    archs: Sequence[int] = SHIPPED
