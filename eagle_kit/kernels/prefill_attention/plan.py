"""Where the keys of prompt chunks lie: described once a forward, shared by its layers.

Legend: B requests, P pages a request, T tokens of all chunks.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillPlan:
    """Prompt chunks of B requests, packed, whose keys lie in a pool of pages already.

    Row j of request b is position ``starts[b] + j``. It sees slots ``first_slot .. starts[b] + j``, at least
    its own.

    Attributes:
        page_tables: int64 ``[B, P]``, page of each run of ``page_size`` slots; a page's slots are the rows
            ``page * page_size`` and following of the store.
        page_size: slots of a page.
        cu_rows: int64 ``[B + 1]``; the rows of request b are ``cu_rows[b] .. cu_rows[b + 1] - 1`` of T.
        starts: int64 ``[B]``, position of each request's first row.
        first_slot: how many of the slots at the front hold nothing and are not attended to.
        max_rows: rows of the longest chunk, or more, known to the host.
    """

    page_tables: torch.Tensor
    page_size: int
    cu_rows: torch.Tensor
    starts: torch.Tensor
    first_slot: int
    max_rows: int
