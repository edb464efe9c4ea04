"""Sizes of tiles and numbers of parts of window attention, from sizes known to the host."""

from typing import NamedTuple

import triton

from eagle_kit.ops.capability import DeviceFacts

MIN_KEYS = 128
"""Minimum number of keys of a part: fewer are read no faster."""
MAX_SPLITS = 128


class WindowBlocks(NamedTuple):
    """Query rows (m) and keys (n) of a program, warps, pipeline stages, number of programs that fit on a
    multiprocessor, and a bound on the registers of a thread.

    Without a bound the assembler may spill a few bytes, so that one program more could fit; with a high one
    it uses more registers, and fewer programs fit."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    resident: int
    max_registers: int | None = None


def block_d(size: int) -> int:
    """Head size rounded up to the size of a tile."""
    return triton.next_power_of_2(max(size, 16))


def choose_blocks(
    rows: int, size: int, query_bytes: int, store_bytes: int, facts: DeviceFacts
) -> WindowBlocks:
    """Block sizes for ``rows`` query rows of a key head.

    A block of keys is 16 KB, and as much of values: two blocks in flight are 64 KB per program, twice what
    4.8 TB/s at 1 us of latency require of each of 132 multiprocessors, so two programs fit and either may
    wait. From 64 rows on, Hopper's matrix instructions take 64 rows per warp group; elsewhere more warps
    share the registers. Padded head sizes (80, 96) and fp8 take smaller blocks, and one more in flight. fp32
    is multiplied without tensor cores (TF32 would lose 13 bits): small tiles. Where less shared memory is
    there (A100's 163 KB, 99 KB of Ada and the small Blackwells, whose bandwidth asks for a quarter of the
    bytes in flight), as many stages, and then keys, as fit.
    """
    blocks = _choose_blocks(rows, size, query_bytes, store_bytes, facts)
    bytes_per_key = 2 * block_d(size) * store_bytes  # with its value
    bytes_per_query = block_d(size) * query_bytes
    weight_bytes = 0 if facts.multiplies_in_groups else blocks.m * query_bytes
    n, stages = facts.fit(
        blocks.n,
        blocks.num_stages,
        bytes_per_key,
        extra_bytes=weight_bytes,
        fixed_bytes=blocks.m * bytes_per_query,
        programs=blocks.resident,
    )
    return blocks._replace(n=n, num_stages=stages)


def _choose_blocks(
    rows: int, size: int, query_bytes: int, store_bytes: int, facts: DeviceFacts
) -> WindowBlocks:
    """Block sizes before they are fitted to shared memory."""
    if query_bytes == 4:
        return WindowBlocks(16, 32 if size <= 64 else 16, 4, 2, 2)
    m = min(128, max(16, triton.next_power_of_2(rows)))
    n = min(128, max(32, 16384 // (block_d(size) * store_bytes)))

    # Registers of three programs for the fewest rows, and of two, or all that there are, for more.
    registers = 168 if m == 16 else 255

    # Few rows: keys in flight count.
    if m < 64 and (store_bytes == 1 or size < block_d(size)):
        n = n // 4 if facts.is_small and store_bytes == 1 else n // 2
        return WindowBlocks(m, n, 4, 4, 2, registers)
    if m < 64:
        return WindowBlocks(m, n, 4, 3, 2, registers)

    # Many rows: the matrix instructions count.
    if not facts.multiplies_in_groups or size > 128:
        return WindowBlocks(64, 64 if size <= 128 else 32, 8, 3, 1, registers)
    if facts.capability >= 100 and (store_bytes == 1 or size <= 64):  # ptxas spills the others there
        return WindowBlocks(64, 64, 8 if store_bytes == 1 else 4, 3, 1, registers)
    if m == 128:
        return WindowBlocks(m, 64, 8, 3, 1, registers)
    return WindowBlocks(m, 64, 4, 3, 2, registers)


def values_per_element(blocks: WindowBlocks, query_bytes: int, store_bytes: int) -> int:
    """Number of values that are read as one element: fp8 pairs where tensor cores multiply out of
    registers."""
    return 2 if store_bytes == 1 and query_bytes == 2 and blocks.m < 64 else 1


class Parts(NamedTuple):
    """Parts that the columns of a request are split into, from sizes known to the host.

    A request of up to ``usual * longest`` columns has ``usual`` parts, or fewer that are not shorter than
    :data:`MIN_KEYS`. A longer one has parts of ``longest`` columns.

    Attributes:
        usual: parts that give the multiprocessors enough programs, for the batch.
        most: parts of a request of as many columns as there may be, at least ``usual``. The grid has as many.
        longest: columns of a part of a long request.
    """

    usual: int
    most: int
    longest: int

    @classmethod
    def even(cls, splits: int) -> "Parts":
        """``splits`` parts of a request of any length."""
        return cls(splits, splits, 1 << 30)


def choose_parts(
    batch: int, kv_heads: int, columns: int, rows: int, blocks: WindowBlocks, sms: int = 132
) -> Parts:
    """Choose the parts of the requests of a batch.

    One round of programs should fill the ``sms`` multiprocessors; then up to four times as many parts, until
    the rounds are 80 % full. A part's partial results (8 rows bytes for each element of a head) never exceed
    its keys. Lengths may differ: of a request with more columns than others, no part is longer than
    :func:`longest_part`.

    Batch invariance: results are bit-identical for equal parts, that is for equal ``batch``, ``columns`` (a
    bound, best a bucket) and number of rows, whatever the other requests hold. Where the parts differ, sums
    are grouped differently and agree to fp32 rounding only.
    """
    programs = batch * kv_heads * triton.cdiv(rows, blocks.m)
    slots = sms * blocks.resident
    limit = min(MAX_SPLITS, max(1, columns // max(MIN_KEYS, 2 * min(rows, blocks.m))))

    # Parts that fill the machine.
    fewest = min(limit, max(1, slots // max(programs, 1)))
    usual = fewest
    for splits in range(fewest, min(limit, 4 * fewest) + 1):
        rounds = triton.cdiv(programs * splits, slots)
        if programs * splits >= 0.8 * rounds * slots:
            usual = splits
            break

    # Parts of a long request.
    longest = longest_part(programs, columns, slots)
    return Parts(usual, max(usual, min(limit, triton.cdiv(columns, longest))), longest)


LONGEST_PART = 4096
"""Most columns of a part, where the batch is not large. Longer ones keep the other programs waiting."""
MOST_ROUNDS = 16
"""Rounds of programs that a grid may have for the sake of long requests. In most batches nearly all of them
find no columns, and such a round takes about half a microsecond, by estimate."""


def longest_part(programs: int, columns: int, slots: int) -> int:
    """Most columns of a part of a long request: :data:`LONGEST_PART`, or up to four times as many while the
    grid has more than :data:`MOST_ROUNDS` rounds.

    Args:
        programs: tiles of the batch.
        columns: bound on the columns of a request.
        slots: programs that the device runs at a time.
    """
    longest = LONGEST_PART
    while longest < 4 * LONGEST_PART and programs * triton.cdiv(columns, longest) > MOST_ROUNDS * slots:
        longest *= 2
    return longest


MERGED_NUMBERS = 4 * 8192
"""Most partial results of ``usual`` parts that the last program of a tile merges, 128 KB. Reading them out
of the second-level cache takes a program some 3 microseconds, about as long as a launch, whose programs
share the work."""
MERGED_OF_LONG = 8 * MERGED_NUMBERS
"""The same of the ``most`` parts of a long request, 1 MB. A part of 4,096 columns takes longer to read."""


def are_merged(parts: Parts, numbers: int) -> bool:
    """True if the last program of a tile merges its parts, of ``numbers`` partial results each."""
    return parts.usual * numbers <= MERGED_NUMBERS and parts.most * numbers <= MERGED_OF_LONG


def merged_rows(rows: int, size: int, blocks: WindowBlocks) -> tuple[int, int]:
    """Rows and parts that the last program of a tile merges at a time.

    It takes 32 KB of partial results at a time for the few rows of a plain step, and 16 KB for more: as much
    as the registers hold on every GPU.
    """
    tile = min(rows, blocks.m)
    merged = 2
    numbers = 4096
    if tile <= 4:
        merged = min(4, triton.next_power_of_2(tile))
        numbers = 8192
    return merged, max(1, numbers // (merged * block_d(size)))


def few_enough(parts: Parts, programs: int, columns: int, numbers: int, sms: int = 132) -> Parts:
    """``parts`` for ``programs`` tiles, with at most as many usual ones as the last program merges, if these
    still give each multiprocessor a program: two blocks in flight use its share of the bandwidth.

    Args:
        columns: bound on the columns of a request.
        numbers: partial results of a part.
    """
    merged = MERGED_NUMBERS // numbers
    if parts.usual <= merged or programs * merged < 0.8 * sms:
        return parts
    most = min(parts.most, triton.cdiv(columns, parts.longest))
    return parts._replace(usual=merged, most=max(merged, most))
