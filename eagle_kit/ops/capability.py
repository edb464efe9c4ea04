"""Resources of GPUs by compute capability (shared memory, warps, matrix instructions), and tiles that fit.

They are known for the device of this process and for those that kernels are compiled for ahead of time.
Figures: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from functools import cache
from typing import NamedTuple

import torch

RESERVED_BYTES = 1024
"""Shared memory that every program takes beside its own."""


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor: bytes of shared memory of one program and of all, warps, programs."""

    program_bytes: int
    total_bytes: int
    warps: int
    programs: int


_LARGE = Multiprocessor(227 << 10, 228 << 10, 64, 32)
_SMALL = Multiprocessor(99 << 10, 100 << 10, 48, 24)
_MULTIPROCESSORS = {
    80: Multiprocessor(163 << 10, 164 << 10, 64, 32),  # A100
    86: _SMALL._replace(programs=16),  # A10, RTX 30
    87: Multiprocessor(163 << 10, 164 << 10, 48, 16),  # Orin
    89: _SMALL,  # L4, L40S, RTX 40
    90: _LARGE,  # H100, H200
    100: _LARGE,  # B200
    103: _LARGE,  # B300
    120: _SMALL,  # RTX 50, RTX PRO
    121: _SMALL,  # GB10
}


def multiprocessor(capability: int) -> Multiprocessor:
    """Limits of a capability times 10; the smallest known ones for an unknown capability."""
    return _MULTIPROCESSORS.get(capability, _SMALL._replace(programs=16))


class DeviceFacts(NamedTuple):
    """Device properties that sizes of tiles and grids depend on: number of multiprocessors, compute
    capability times 10 (90 for 9.0), and bytes of shared memory of one program."""

    multiprocessors: int
    capability: int
    shared_bytes: int

    @property
    def multiplies_in_groups(self) -> bool:
        """True if four warps multiply 64 rows together: wgmma of Hopper, tcgen05 of B200. Ada and the small
        Blackwells multiply as Ampere does."""
        return 90 <= self.capability < 120

    @property
    def converts_fp8(self) -> bool:
        """True if the GPU has instructions that convert e4m3, so that Triton compiles the type."""
        return self.capability >= 89

    @property
    def starts_early(self) -> bool:
        """True if programs can start before the launch before them has ended
        (:mod:`~eagle_kit.ops.dependent_launch`)."""
        return self.capability >= 90

    @property
    def is_small(self) -> bool:
        """True if a program has 99 KB of shared memory: it then holds as many stages of half the tile."""
        return self.shared_bytes < 128 << 10

    def room(self, programs: int = 1) -> int:
        """Bytes of shared memory for each of ``programs`` on a multiprocessor."""
        total = multiprocessor(self.capability).total_bytes
        return min(self.shared_bytes, total // programs - RESERVED_BYTES)

    def fit(
        self,
        block: int,
        stages: int,
        stage_bytes: int,
        *,
        extra_bytes: int = 0,
        fixed_bytes: int = 0,
        programs: int = 1,
    ) -> tuple[int, int]:
        """Block size and number of pipeline stages whose buffers fit: stages are lowered to 2, then the block
        is halved down to 16.

        Triton has a buffer for every stage where groups of warps read them, and one less elsewhere, where the
        last is in registers.

        Args:
            block, stages: the preferred ones.
            stage_bytes: shared memory of one row or column of the block in a buffer.
            extra_bytes: shared memory of one row or column of the block beside the buffers.
            fixed_bytes: shared memory of a program beside both.
            programs: number of programs that must fit on a multiprocessor.
        """
        num_in_registers = 0 if self.multiplies_in_groups else 1

        def total_bytes() -> int:
            buffers = (stages - num_in_registers) * stage_bytes
            return fixed_bytes + block * (buffers + extra_bytes)

        while total_bytes() > self.room(programs):
            if stages > 2:
                stages -= 1
            elif block > 16:
                block //= 2
            else:
                break
        return block, stages


def facts_of(capability: int) -> DeviceFacts:
    """Properties of a GPU of ``capability``, with an H200's number of multiprocessors."""
    return DeviceFacts(132, capability, multiprocessor(capability).program_bytes)


def device_facts(device: torch.device) -> DeviceFacts:
    """Properties of ``device``; those of an H200 where kernels are interpreted."""
    if device.type != "cuda":
        return facts_of(90)
    return _facts(device)


@cache
def _facts(device: torch.device) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    default_bytes = multiprocessor(capability).program_bytes
    return DeviceFacts(
        properties.multi_processor_count,
        capability,
        getattr(properties, "shared_memory_per_block_optin", default_bytes),
    )
