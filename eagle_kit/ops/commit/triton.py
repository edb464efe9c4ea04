"""Commit: copy rows of a key-value store in all layers and heads, one launch for keys and values.

A store is planes (layer and head) of R rows; a program copies its share of one row's bytes, over several
planes, as words of up to 8 bytes, two of which make the 16 bytes that a thread moves at once. So every dtype
is one kernel. The row arithmetic of :func:`commit_path` is the kernel's own: nothing is launched before it.

Bytes: 2 planes * D elements per row and tensor, read and written.

Legend: B requests, P pages of a table, n nodes per request, R rows, D head size. In the kernel: ``j`` a node
of the path, ``i`` words of the row over all planes.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator

BLOCK = 256
"""Words of each tensor that a program copies: 2 KB, one load of 16 bytes per thread at 4 warps. A row of
Llama 3 8B is 32 such pieces: one request's path of five nodes already reaches all 132 multiprocessors of an
H200."""
NUM_WARPS = 4


@triton.jit(do_not_specialize=["node_stride_b", "node_stride_n", "num_nodes"])
def _commit_path(
    k,
    v,
    page_table,
    nodes,
    first_position,
    num_committed,
    table_stride,
    node_stride_b,
    node_stride_n,
    scratch_start,
    scratch_stride,
    num_nodes,
    num_planes,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_V: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Copy a piece of one node's row, if the node is committed. Grid ``(B * n, pieces of all planes)``."""
    request = tl.program_id(0) // num_nodes
    j = tl.program_id(0) % num_nodes
    if j < tl.load(num_committed + request):
        # The rows in scratch and in the page.
        position = tl.load(first_position + request).to(tl.int64) + j
        page = tl.load(page_table + request * table_stride + position // PAGE_SIZE).to(tl.int64)
        node = tl.load(nodes + request * node_stride_b + j * node_stride_n).to(tl.int64)
        source = scratch_start + request * scratch_stride + node
        target = page * PAGE_SIZE + position % PAGE_SIZE

        # Copy the words of this piece.
        i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        inside = i < num_planes * WORDS
        plane = (i // WORDS).to(tl.int64)
        offset = plane * num_rows * WORDS + i % WORDS
        k_piece = tl.load(k + offset + source * WORDS, inside)
        if HAS_V:
            v_piece = tl.load(v + offset + source * WORDS, inside)
            tl.store(v + offset + target * WORDS, v_piece, inside)
        tl.store(k + offset + target * WORDS, k_piece, inside)


def _words(store: torch.Tensor) -> torch.Tensor:
    """View the store as the widest integers that its row size and its address allow."""
    row_bytes = store.shape[-1] * store.element_size()
    start = store.storage_offset() * store.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == start % dtype.itemsize == 0:
            return store.view(dtype)
    return store.view(torch.uint8)


@custom_operator("eagle_kit::commit_path", mutates_args=("k", "v"))
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
    """Copy window nodes in ``k`` and ``v [..., R, D]`` contiguous; ``page_table [B, P]``, ``nodes [B, n]`` of
    any strides."""
    if nodes.numel() == 0 or k.numel() == 0:
        return
    k_words = _words(k)
    num_rows, size = k_words.shape[-2:]
    num_planes = k_words.numel() // (num_rows * size)
    _commit_path[(nodes.numel(), triton.cdiv(num_planes * size, BLOCK))](
        k_words,
        k_words if v is None else _words(v),
        page_table,
        nodes,
        first_position.contiguous(),
        num_committed.contiguous(),
        page_table.stride(0),
        nodes.stride(0),
        nodes.stride(1),
        scratch_start,
        scratch_stride,
        nodes.shape[1],
        num_planes,
        num_rows,
        PAGE_SIZE=page_size,
        WORDS=size,
        HAS_V=v is not None,
        SIZE=BLOCK,
        num_warps=NUM_WARPS,
    )


@commit_path.register_fake
def _(k, v, page_table, page_size, nodes, first_position, num_committed, scratch_start, scratch_stride):
    return None
