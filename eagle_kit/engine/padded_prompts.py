"""Prompt steps of a few fixed shapes, which a GPU replays as CUDA graphs.

Below some hundred rows the host launches a prompt's operations more slowly than the device runs them. The
chunks of such a step are packed into the smallest shape that holds them, and padded. Everything that the
operations depend on besides the shape is one int64 tensor, so a graph of a shape serves all steps.

Legend: T rows, R requests, P pages of a request.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.core.switches import is_disabled
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.choose_drafter import drafter_class
from eagle_kit.engine.scheduler import Chunk
from eagle_kit.kv.store import PaddedSegments
from eagle_kit.models.cache_specs import LatentSpec
from eagle_kit.models.config import TargetConfig

ROWS = (32, 64, 128, 256, 384, 512)
"""Rows of the shapes. Up to some 250 rows reading the weights takes longer than the arithmetic, so that
padding to twice the rows costs little."""
REQUESTS = (8, 64)
"""Requests of the shapes. A request without rows costs attention a few programs that return at once."""
LEAST_ROWS_OF_MANY = 256
"""Least rows of a shape with more than the fewest requests."""
ALIGNMENT = 2
"""Numbers that the size of a section is a multiple of: kernels are compiled for pointers to multiples of 16
bytes."""


class PromptShape(NamedTuple):
    """Shape of a prompt step.

    Attributes:
        rows: T, padding included.
        requests: R, the most requests.
    """

    rows: int
    requests: int


def prompt_shapes(config: ResolvedConfig) -> list[PromptShape]:
    """List the shapes of prompt steps, the smallest first; none has more rows or requests than a step."""
    most_rows = min(config.prefill_tokens, ROWS[-1])
    all_rows = sorted({min(rows, most_rows) for rows in ROWS})
    all_requests = sorted({min(requests, config.max_batch_size) for requests in REQUESTS})
    shapes = []
    for rows in all_rows:
        for requests in all_requests:
            if requests == all_requests[0] or rows >= min(LEAST_ROWS_OF_MANY, most_rows):
                shapes.append(PromptShape(rows, requests))
    return shapes


def can_replay_prompts(target: TargetConfig, draft: DraftModel | None, config: ResolvedConfig) -> bool:
    """Return whether the prompts of a target and a draft can be replayed as graphs on a GPU."""
    # Options.
    if config.graph_mode == "off" or is_disabled("prompt-graphs"):
        return False
    if config.prefill_backend not in ("auto", "triton"):
        return False  # the library plans its attention on the host

    # The target: keys and values of all requests are on each rank, in every layer.
    if target.states is not None or isinstance(target.cache, LatentSpec) or config.data_parallel_attention:
        return False

    # The draft. Each MTP module has other rows, so its drafter has no padded prefill.
    if draft is None:
        return True
    return not isinstance(draft.cache, LatentSpec) and drafter_class(draft, config).has_padded_prefill


class PromptNumbers(NamedTuple):
    """All numbers that a padded prompt step reads, as views of one tensor.

    Segment R is that of padding.

    Attributes:
        ids: int64 ``[T]``, token of each row.
        next_ids: int64 ``[T + 1]``, token after each row, 0 where the model has to choose it; the last entry
            is written by requests whose next token is known.
        positions: int64 ``[T]``, position of each row.
        segments: int64 ``[T]``, request of each row, R for padding.
        is_stored: int64 ``[T]``, 1 for rows whose keys are stored.
        cu_rows: int64 ``[R + 2]``, bounds of the rows of each segment.
        starts: int64 ``[R + 1]``, position of the first row; -1 for padding.
        page_slots: int64 ``[R + 1]``, slot whose page table a segment has.
        join_slots: int64 ``[R]``, slot of a request whose prompt ends; the dummy slot for others.
        seq_lens: int64 ``[R]``, tokens of a request whose prompt ends; 0 for others.
        stops: int64 ``[R]``, position behind the last row; 0 for padding.
        roots: int64 ``[R]``, token after the last row; -1 where the model has to choose it.
        last_rows: int64 ``[R]``, last row of each request; 0 for padding.
        root_rows: int64 ``[R]``, entry of ``next_ids`` that takes the root of a prompt that ends; T for
            others.
        last_positions: int64 ``[R]``, position of the last token of a prompt that ends.
        num_emitted: int64 ``[R]``, 1 where a prompt ends without a token yet.
    """

    ids: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    is_stored: torch.Tensor
    cu_rows: torch.Tensor
    starts: torch.Tensor
    page_slots: torch.Tensor
    join_slots: torch.Tensor
    seq_lens: torch.Tensor
    stops: torch.Tensor
    roots: torch.Tensor
    last_rows: torch.Tensor
    root_rows: torch.Tensor
    last_positions: torch.Tensor
    num_emitted: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, shape: PromptShape) -> "PromptNumbers":
        """Views of ``numbers``, an int64 tensor that :func:`pack_prompts` has laid out."""
        sections = _sections(shape)
        return cls(*(numbers[section] for section in sections.values()))

    def padded_segments(self, page_tables: torch.Tensor) -> PaddedSegments:
        """Segments of the step under the page tables ``[M, P]`` of all slots."""
        return PaddedSegments(
            page_tables=page_tables[self.page_slots],
            starts=self.starts,
            cu_rows=self.cu_rows,
            segments=self.segments,
            positions=self.positions,
            is_stored=self.is_stored != 0,
        )


def pack_prompts(chunks: Sequence[Chunk], shape: PromptShape, dummy_slot: int) -> list[int]:
    """Lay out the numbers of a prompt step.

    Args:
        chunks: at most R chunks of at most T tokens together.
        dummy_slot: slot of padding.

    Returns:
        The numbers that :class:`PromptNumbers` reads.
    """
    ids: list[int] = []
    next_ids: list[int] = []
    positions: list[int] = []
    is_stored: list[int] = []
    sizes: list[int] = []
    join_slots: list[int] = []
    seq_lens: list[int] = []
    roots: list[int] = []
    last_rows: list[int] = []
    root_rows: list[int] = []
    last_positions: list[int] = []
    num_emitted: list[int] = []
    for request, start, stop, _ in chunks:
        # The tokens of the chunk, and the token after each. The last one may not be known yet.
        size = stop - start
        following = request.tokens(start + 1, stop + 1)
        root = following[-1] if len(following) == size else -1
        ids += request.tokens(start, stop)
        next_ids += following
        next_ids += [0] * (size - len(following))
        positions += range(start, stop)
        sizes.append(size)
        roots.append(root)
        last_rows.append(len(ids) - 1)

        # Tokens of shared pages are in the pool already.
        num_shared = min(max(request.sequence.num_shared_tokens - start, 0), size)
        is_stored += [0] * num_shared
        is_stored += [1] * (size - num_shared)

        # Requests whose prompts end join the slots.
        if stop == request.num_to_compute:
            join_slots.append(request.sequence.slot)
            seq_lens.append(stop)
            root_rows.append(len(ids) - 1)
            last_positions.append(stop - 1)
            num_emitted.append(0 if request.token_ids else 1)
        else:
            join_slots.append(dummy_slot)
            seq_lens.append(0)
            root_rows.append(shape.rows)
            last_positions.append(0)
            num_emitted.append(0)

    # Padding: rows of a segment behind all requests, and requests without rows.
    num_missing = shape.requests - len(chunks)
    assert num_missing >= 0 and len(ids) <= shape.rows, "the shape is too small"
    sections = (
        _padded(ids, shape.rows, 0),
        _padded(next_ids, shape.rows + 1, 0),
        _padded(positions, shape.rows, 0),
        _padded(_repeated(sizes), shape.rows, shape.requests),
        _padded(is_stored, shape.rows, 0),
        [0, *accumulate(sizes), *[len(ids)] * num_missing, shape.rows],
        [*(chunk.start for chunk in chunks), *[-1] * (num_missing + 1)],
        [*(chunk.request.sequence.slot for chunk in chunks), *[dummy_slot] * (num_missing + 1)],
        _padded(join_slots, shape.requests, dummy_slot),
        _padded(seq_lens, shape.requests, 0),
        _padded([chunk.stop for chunk in chunks], shape.requests, 0),
        _padded(roots, shape.requests, 0),
        _padded(last_rows, shape.requests, 0),
        _padded(root_rows, shape.requests, shape.rows),
        _padded(last_positions, shape.requests, 0),
        _padded(num_emitted, shape.requests, 0),
    )
    numbers: list[int] = []
    for section in sections:
        numbers += section
        numbers += [0] * (_aligned(len(section)) - len(section))
    return numbers


def first_numbers(numbers: torch.Tensor, shape: PromptShape, name: str, count: int) -> torch.Tensor:
    """View of the first ``count`` numbers of a field of :class:`PromptNumbers`."""
    start = _sections(shape)[name].start
    return numbers[start : start + count]


@cache
def _sections(shape: PromptShape) -> dict[str, slice]:
    """Places of the fields of :class:`PromptNumbers`, in their order."""
    rows, requests = shape
    of_rows = [rows, rows + 1, rows, rows, rows]
    sizes = [*of_rows, requests + 2, requests + 1, requests + 1, *[requests] * 8]
    sections = {}
    start = 0
    for name, size in zip(PromptNumbers._fields, sizes, strict=True):
        sections[name] = slice(start, start + size)
        start += _aligned(size)
    return sections


def _aligned(size: int) -> int:
    """Numbers of a section with its padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(numbers: list[int], size: int, value: int) -> list[int]:
    """Numbers with ``value`` behind them, ``size`` in all."""
    return numbers + [value] * (size - len(numbers))


def _repeated(sizes: Iterable[int]) -> list[int]:
    """Index of each of ``sizes``, repeated as often as it says."""
    return list(chain.from_iterable([i] * size for i, size in enumerate(sizes)))
