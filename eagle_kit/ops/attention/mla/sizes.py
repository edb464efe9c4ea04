"""Sizes of tiles and numbers of runs of absorbed latent attention, from sizes known to the host."""

from functools import cache
from typing import NamedTuple

import triton

from eagle_kit.ops.attention.window.sizes import Parts, longest_part
from eagle_kit.ops.capability import DeviceFacts

MAX_SPLITS = 128


class MLABlocks(NamedTuple):
    """Tile sizes in query rows and keys, whether the operands of the dots are swapped, and launch options."""

    queries: int
    keys: int
    swapped: bool
    num_warps: int
    num_stages: int


VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
HOISTING_VERSIONS = ((3, 6), (3, 7))
"""Versions of Triton that hoist the copy of the queries to shared memory out of the loop, so that 64 query
rows of 576 fit into the registers; 3.9 does not. A version that is not listed takes 32 rows. A test compiles
64 rows with the version that is installed, and fails where this is wrong."""


def fits_64_rows(facts: DeviceFacts) -> bool:
    """True if a program can have 64 query rows of 2 bytes a value. On B200 they spill, even with 32 keys."""
    return VERSION in HOISTING_VERSIONS and not 100 <= facts.capability < 120


def choose_blocks(num_rows: int, itemsize: int, facts: DeviceFacts) -> MLABlocks:
    """Tiles for ``num_rows`` query rows a request and rows of the store of ``itemsize`` bytes a value.

    On an H200 two buffers of 64 x 576 bf16 keys keep 72 KB in flight a multiprocessor, three times what its
    latency needs. A tile arrives in about 4,000 cycles; its dots, which read operands out of shared memory
    at 128 bytes a cycle, take about 1,400 with 16 query rows, 2,200 with 32 and 2,800 with 64. fp8 keys
    pass through registers, and earlier GPUs have no instruction that swapped operands would fill: both take
    the plain one and 32 keys, in as many stages as fit. On B200, Triton 3.6 and 3.7 keep weights and
    operands of a tile in shared memory beside the buffers: 64 keys need 330 to 394 KB of it, 32 keys 56 to
    76. fp32, which no MLA model is served in, spills at their sizes.
    """
    if itemsize == 4:
        return MLABlocks(16, 16, False, 4, 1)
    most = 64 if itemsize == 2 and fits_64_rows(facts) else 32
    queries = min(most, max(16, triton.next_power_of_2(num_rows)))
    if itemsize == 1:
        return MLABlocks(queries, 32, False, 8, 2)
    num_warps = 4 if queries == 16 and not facts.is_small else 8
    if facts.capability >= 100 and facts.multiplies_in_groups:
        return MLABlocks(queries, 32, True, num_warps, 2)
    if facts.multiplies_in_groups:
        return MLABlocks(queries, 64, True, num_warps, 2)
    stages = 2 if queries == 64 else 3
    keys, stages = facts.fit(32, stages, 2 * 576, extra_bytes=4 * queries, fixed_bytes=queries * 2 * 576)
    return MLABlocks(queries, keys, False, num_warps, stages)


@cache
def choose_parts(programs: int, columns: int, processors: int) -> Parts:
    """Parts (runs) to split ``columns`` keys into, for ``programs`` blocks of query rows in the batch.

    One program fits on a multiprocessor. The cost, in tiles of 64 keys, is the number of waves times the
    work of a program: its tiles, and about three tiles' time of startup and output. Lengths may differ: of
    a request with more keys than others, no run is longer than :func:`longest_part`.
    """
    tiles = triton.cdiv(columns, 64)

    def cost(splits: int) -> int:
        waves = triton.cdiv(programs * splits, processors)
        return waves * (triton.cdiv(tiles, splits) + 3)

    most = max(1, min(tiles, MAX_SPLITS))
    usual = min(range(1, most + 1), key=cost)
    longest = longest_part(programs, columns, processors)
    return Parts(usual, max(usual, min(most, triton.cdiv(columns, longest))), longest)
