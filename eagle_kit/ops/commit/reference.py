"""Commit in torch, the reference of the kernel.

Legend: B requests, n rows per request.
"""

import torch


def commit_path(
    k: torch.Tensor,
    v: torch.Tensor | None,
    page_table: torch.Tensor,
    page_size: int,
    nodes: torch.Tensor,
    first_position: torch.Tensor,
    num_committed: torch.Tensor,
    scratch_start: int,
    scratch_stride: int,
) -> None:
    """Copy the first ``num_committed [B]`` of ``nodes [B, n]``; the others copy a scratch row onto itself."""
    # Rows of the scratch, and rows of the pages that they are copied to.
    b, n = nodes.shape
    offset = torch.arange(n, device=nodes.device)
    is_committed = offset < num_committed[:, None]
    scratch = scratch_start + torch.arange(b, device=nodes.device)[:, None] * scratch_stride
    source = (scratch + torch.where(is_committed, nodes, 0)).view(-1)
    position = first_position[:, None] + offset
    page = torch.where(is_committed, position // page_size, 0)
    row = page_table.gather(1, page) * page_size + position % page_size
    target = torch.where(is_committed.view(-1), row.view(-1), source)

    for store in (k, v):
        if store is not None:
            rows = store.view(torch.uint8) if store.element_size() == 1 else store  # torch cannot index fp8
            rows.index_copy_(-2, target, rows.index_select(-2, source))
