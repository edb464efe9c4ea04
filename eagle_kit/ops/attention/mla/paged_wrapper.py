"""Adapter: the plan / run contract of FlashInfer's ``BatchMLAPagedAttentionWrapper`` over our operation.

The pages of a request are named by ``kv_indices``. Its queries are the last of its keys, packed over the
batch by ``qo_indptr``. A layer's latents and RoPE parts are two caches. :class:`BatchMLAPagedAttention` has
the arguments of FlashInfer's wrapper, so that either can be used for chains; trees are an addition.
:func:`draft_extend_arrays`, :func:`draft_arrays` and :func:`verify_arrays` make the arrays of EAGLE's phases;
``examples/12_mla_paged_attention.py`` is an example.

Legend: B requests, T packed queries, H heads, L latent size, R RoPE size, P pages of the cache.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.mla.plan import PagedWindowPlan
from eagle_kit.ops.backend import Backend


class PlanArrays(NamedTuple):
    """The first four arguments of ``plan``, int32, and ``causal``.

    The queries of request b are rows ``qo_indptr[b] .. qo_indptr[b + 1] - 1``, its pages are the entries
    ``kv_indptr[b] .. kv_indptr[b + 1] - 1`` of ``kv_indices``, and it has ``kv_len_arr[b]`` keys.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor
    causal: bool


def draft_extend_arrays(
    accept_lens: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> PlanArrays:
    """After a verification the draft reads the ``accept_lens [B]`` tokens that it emitted, the last of
    ``seq_lens [B]``."""
    return _arrays(accept_lens, seq_lens, page_table, page_size, causal=True)


def draft_arrays(
    seq_lens: torch.Tensor, step: int, page_table: torch.Tensor, page_size: int, topk: int = 1
) -> PlanArrays:
    """Decode step ``step`` (from 0) of a draft: one query for each of the ``topk`` branches of a request,
    behind the branch's tokens of the steps before and with its own. ``page_table [B * topk, P]``."""
    lens = seq_lens.repeat_interleave(topk) + step + 1
    return _arrays(torch.ones_like(lens), lens, page_table, page_size, causal=False)


def verify_arrays(
    num_draft_tokens: int, seq_lens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> PlanArrays:
    """The target reads a window of ``num_draft_tokens`` behind each of the ``seq_lens [B]``."""
    counts = torch.full_like(seq_lens, num_draft_tokens)
    return _arrays(counts, seq_lens + num_draft_tokens, page_table, page_size, causal=True)


def _arrays(
    counts: torch.Tensor, lens: torch.Tensor, page_table: torch.Tensor, page_size: int, *, causal: bool
) -> PlanArrays:
    num_pages = -(-lens // page_size)
    used = torch.arange(page_table.shape[1], device=lens.device) < num_pages[:, None]
    return PlanArrays(
        _indptr(counts), _indptr(num_pages), page_table[used].to(torch.int32), lens.to(torch.int32), causal
    )


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


class _Windows(NamedTuple):
    """A batch cut into W windows of N queries, at most 64.

    ``shape`` is (W, N). ``queries`` int64 ``[W, N]`` are the packed rows of each window, the last one
    repeated where there are fewer. ``place`` int64 ``[T]`` is the entry of ``queries`` of each packed row.
    """

    shape: tuple[int, int]
    queries: torch.Tensor
    place: torch.Tensor


class BatchMLAPagedAttention:
    """MLA attention of packed queries over paged caches.

    ``run`` reads nothing on the host and can be captured in a CUDA graph, which keeps the plan it was
    captured with; ``plan``, like FlashInfer's, reads its arrays on the host. Rows are read in place if the
    two caches are views of one ``[P, page_size, L + R]``, latents first; otherwise ``run`` first copies the
    pages in use into such a tensor.

    Args:
        backend: of the operation; None takes Triton on a GPU.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype | None = None,
        *,
        ancestors: torch.Tensor | None = None,
    ) -> None:
        """Lay the windows out.

        Args:
            qo_indptr, kv_indptr: ``[B + 1]``, where the queries and the pages of each request begin.
            kv_indices: pages of the requests, one after the other.
            kv_len_arr: ``[B]``, keys of each request, those of its queries included.
            causal: a query sees the keys up to its own; otherwise all of its request.
            sm_scale: of the scores, that of the full heads.
            kv_data_type: of the caches, that of the queries or fp8; the default is that of the queries.
            ancestors: in place of ``causal`` for trees: int64 ``[T]``, bit j set where a query sees key j of
                its request's window; it sees all keys before the window. At most 64 queries a request.

        Raises:
            UserError: arrays that contradict each other.
        """
        # Check the arrays.
        starts = qo_indptr.tolist()
        pages = kv_indptr.tolist()
        lens = kv_len_arr.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        if starts[0]:
            raise UserError(f"qo_indptr begins with {starts[0]}.", "Let it begin with 0.")
        _check(counts, pages, lens, kv_indices, page_size, causal or ancestors is not None)
        if ancestors is not None and max(counts, default=0) > MAX_WINDOW:
            raise UserError(
                f"A tree has {max(counts)} nodes.", f"Give a request at most {MAX_WINDOW} queries."
            )
        device = kv_indices.device
        self._shape = (starts[-1], num_heads, head_dim_ckv, head_dim_kpe)
        self._scale = sm_scale
        self._dtypes = (q_data_type, kv_data_type or q_data_type)

        # Cut the queries of each request into windows: (request, first query, number of queries, number of
        # keys that the last query sees).
        windows = []
        for b, count in enumerate(counts):
            for first in range(0, count, MAX_WINDOW):
                size = min(MAX_WINDOW, count - first)
                num_seen = lens[b] - count + first + size if causal else lens[b]
                windows.append((b, starts[b] + first, size, num_seen))
        width = max((size for _, _, size, _ in windows), default=0)
        columns = torch.tensor(windows, dtype=torch.int64).view(-1, 4).to(device)
        request, first_query, sizes, ends = columns.unbind(1)
        node = torch.arange(width, device=device)
        queries = first_query[:, None] + torch.minimum(node, sizes[:, None] - 1)
        used = node < sizes[:, None]
        shape = (len(windows), width)
        self._windows = _Windows(shape, queries, used.flatten().nonzero().squeeze(1))

        # Ancestor bits over the last ``width`` keys of each window. The first of these keys may lie before
        # the window's own: every query sees them.
        prefix = (ends - width).clamp(min=0)
        num_before = ends - sizes - prefix
        if ancestors is not None:
            bits = (ancestors.to(device)[queries] << num_before[:, None]) | _ones(num_before)[:, None]
        elif causal:
            bits = _ones(num_before[:, None] + node + 1)
        else:
            bits = torch.full_like(queries, -1)

        # Page tables: of the caches as they are, and of the pages in use, numbered from 0.
        most_pages = max((end - start for start, end in pairwise(pages)), default=0)
        indptr = kv_indptr.to(device).long()
        entry = indptr[:-1, None] + torch.arange(most_pages, device=device)
        entry = torch.minimum(entry, indptr[1:, None] - 1)
        self._pages, compact = kv_indices.long().unique(return_inverse=True)
        self._plans = [
            PagedWindowPlan(
                page_table=indices[entry.clamp(min=0)][request],
                page_size=page_size,
                prefix_lens=prefix,
                first_position=0,
                scratch_start=0,
                scratch_stride=0,
                num_keys=width,
                ancestors=bits,
                num_columns=max((end for _, _, _, end in windows), default=0),
                dummy_row=int(indices[pages[windows[0][0]]]) * page_size if windows else 0,
                dtype=torch.float32,
                kv_lens=ends,
            )
            for indices in (kv_indices.long(), compact)
        ]

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            q_nope: ``[T, H, L]``, absorbed: in the space of the latents.
            q_pe: ``[T, H, R]``.
            ckv_cache: ``[P, page_size, L]``.
            kpe_cache: ``[P, page_size, R]``.
            out: where the result goes, if not into a new tensor.

        Returns:
            ``[T, H, L]``; W_UV makes the value heads of it.
        """
        tokens, heads, latent, rope = self._shape
        _check_shape("q_nope", q_nope, (tokens, heads, latent), self._dtypes[0])
        _check_shape("q_pe", q_pe, (tokens, heads, rope), self._dtypes[0])
        _check_shape(
            "ckv_cache", ckv_cache, (*ckv_cache.shape[:1], self._plans[0].page_size, latent), self._dtypes[1]
        )
        _check_shape("kpe_cache", kpe_cache, (*ckv_cache.shape[:2], rope), self._dtypes[1])
        if tokens == 0:
            return q_nope if out is None else out

        # One store of rows: the caches in place, or a copy of the pages in use.
        plan = self._plans[0]
        rows = _as_one(ckv_cache, kpe_cache)
        if rows is None:
            plan = self._plans[1]
            rows = torch.cat((ckv_cache[self._pages], kpe_cache[self._pages]), -1).flatten(0, 1)

        # Packed queries to windows and back.
        q = torch.cat((q_nope, q_pe), -1)
        shape, queries, place = self._windows
        are_full = shape[0] * shape[1] == tokens
        q = q.unflatten(0, shape) if are_full else q[queries]
        result = mla_window_attention(q, rows, plan, self._scale, latent_dim=latent, backend=self.backend)
        result = result.flatten(0, 1)
        if not are_full:
            result = result[place]
        return result if out is None else out.copy_(result)


def _ones(count: torch.Tensor) -> torch.Tensor:
    """int64 with the ``count`` lowest bits set, 0 to 64."""
    full = torch.full_like(count, -1)
    return torch.where(count >= 64, full, (torch.ones_like(count) << count.clamp(max=63)) - 1)


def _as_one(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor | None:
    """Rows ``[P * page_size, L + R]`` without a copy, if both are views of such."""
    pages, size, latent = ckv.shape
    row = ckv.stride(1)
    together = (
        ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr()
        and kpe.storage_offset() == ckv.storage_offset() + latent
        and ckv.stride() == kpe.stride() == (row * size, row, 1)
    )
    if not together:
        return None
    return ckv.as_strided((pages * size, latent + kpe.shape[2]), (row, 1))


def _check(
    counts: list[int], pages: list[int], lens: list[int], indices: torch.Tensor, page_size: int, causal: bool
) -> None:
    """Raise UserError for arrays that contradict each other."""
    if not len(counts) == len(pages) - 1 == len(lens):
        raise UserError(
            f"The arrays are for {len(counts)}, {len(pages) - 1} and {len(lens)} requests.",
            "Give qo_indptr and kv_indptr one entry more than kv_len_arr.",
        )
    if len(indices) < pages[-1]:
        raise UserError(
            f"kv_indptr ends at {pages[-1]}, and kv_indices has {len(indices)} pages.", "Give all pages."
        )
    for b, (count, length) in enumerate(zip(counts, lens, strict=True)):
        num_pages = pages[b + 1] - pages[b]
        least = 0
        if count:
            least = count if causal else 1
        if count < 0 or not least <= length <= num_pages * page_size:
            raise UserError(
                f"Request {b} has {count} queries, {num_pages} pages of {page_size} and {length} keys.",
                "Let the arrays ascend, count the queries' own keys, and give pages for all keys.",
            )


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise UserError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, {dtype} {shape} was planned.", "Plan again."
        )
