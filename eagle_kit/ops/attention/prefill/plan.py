"""Location of the keys of prompt chunks: computed once per forward, shared by its layers.

Legend: B requests, P pages of a request, T tokens of all chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillPlan:
    """Prompt chunks of B requests, packed, whose keys are already stored in a page pool.

    Row j of request b is position ``starts[b] + j``. It attends to positions ``first_position .. starts[b] +
    j``, at least its own. Requests of padding have rows that attend to nothing; their output is 0.

    Attributes:
        page_tables: int64 ``[B, P]``, page of each run of ``page_size`` positions; a page's rows are
            those from ``page * page_size`` of the store.
        page_size: rows per page.
        cu_rows: int64 ``[B + 1]``; the rows of request b are ``cu_rows[b] .. cu_rows[b + 1] - 1`` of T.
        starts: int64 ``[B]``, position of each request's first row; -1 for padding. A CPU's C++ takes none.
        first_position: first position with a key; the ones before it are not attended to.
        max_rows: upper bound on the rows of a chunk, known to the host.
        bounds: first position of each chunk and the one behind its last, known to the host; other libraries
            plan with them.
    """

    page_tables: torch.Tensor
    page_size: int
    cu_rows: torch.Tensor
    starts: torch.Tensor
    first_position: int
    max_rows: int
    bounds: Sequence[tuple[int, int]] | None = None
