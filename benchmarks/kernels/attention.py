"""Cases of attention while decoding and while reading prompts.

Legend: B requests, N query nodes, M window keys, C columns (prefix and window), Hq / Hkv heads, G = Hq / Hkv,
D head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.kernels.inputs import Cases, KernelCase, PreparedCase, RandomInputs, Sizes, case
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from eagle_kit.ops.backend import Backend

SCRATCH = 64
FP8 = torch.float8_e4m3fn


class Window(NamedTuple):
    """A load on window attention: B requests of C columns, the last M of them the window, N query nodes."""

    kind: str
    b: int
    n: int
    m: int
    c: int
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """For people."""
        nodes = "" if self.kind.startswith("decode") else f" {self.n} nodes"
        fp8 = ", fp8 store" if self.dtype is not None else ""
        return f"{self.kind}{nodes}, batch {self.b}, context {self.c}{fp8}"

    @property
    def values(self) -> dict[str, Any]:
        """For plots and targets."""
        of_store = {"fp8": self.dtype is not None}
        return {"kind": self.kind, "batch": self.b, "nodes": self.n, "context": self.c, **of_store}


def _windows(sizes: Sizes) -> list[Window]:
    """Every load: plain decoding, verification, the last draft step of a tree of 4 candidates and 5 steps."""
    largest = sizes.decode[-2]
    return [
        *(Window("decode", b, 1, 1, c) for b, c in sizes.decode),
        *(Window("decode", b, 1, 1, c, FP8) for b, c in (largest,)),
        *(Window("verify", b, n, n, c) for n in sizes.windows for b, c in sizes.verify),
        *(Window("draft step", b, 4, 16, c) for b, c in sizes.drafts),
    ]


def window_cases(sizes: Sizes) -> list[KernelCase]:
    """Window attention; the context counts the window's keys too."""
    return [case(w.name, _make_window, sizes, w, **w.values) for w in _windows(sizes)]


def _make_plan(rng: RandomInputs, w: Window, page_size: int, dtype: torch.dtype) -> tuple[WindowPlan, int]:
    """Pages in random order, a random tree, lengths all C - M -> the plan and the rows of the store."""
    per_request = -(-w.c // page_size)
    pages = rng.permutation(w.b * per_request).view(w.b, per_request)
    start = (w.b * per_request + 1) * page_size
    dummy = start + w.b * SCRATCH
    if w.kind == "draft step":
        own = torch.arange(w.m - w.n, w.m, device=rng.device)
        below = rng.integers(1 << (w.m - w.n), w.b, w.n)
        bits = below | (torch.ones_like(own) << own)
    else:
        bits = ancestor_bits(rng.parents(w.b, w.n), w.n)
    plan = WindowPlan(
        page_table=pages,
        page_size=page_size,
        prefix_lens=torch.full((w.b,), w.c - w.m, device=rng.device),
        first_position=0,
        scratch_start=start,
        scratch_stride=SCRATCH,
        num_keys=w.m,
        ancestors=bits,
        num_columns=w.c,
        dummy_row=dummy,
        dtype=dtype,
    )
    return plan, dummy + 2


def _make_window(sizes: Sizes, w: Window, rng: RandomInputs) -> PreparedCase:
    hq, hkv, d = sizes.model.num_heads, sizes.model.num_kv_heads, sizes.model.head_dim
    plan, num_rows = _make_plan(rng, w, sizes.page_size, rng.dtype)
    q = rng.normal(w.b, w.n, hq, d)
    k, v = (rng.normal(hkv, num_rows, d, dtype=w.dtype) for _ in range(2))
    rivals: dict[str, Callable[[], Callable[[], Any]]] = {}
    if w.dtype is None:
        rivals["sdpa"] = partial(_sdpa, q, k, v, plan)
    used = (q, k[:, : w.b * w.c], v[:, : w.b * w.c])
    return PreparedCase(
        lambda backend: window_attention(q, k, v, plan, d**-0.5, backend=backend),
        4 * w.b * w.n * hq * w.c * d,
        used,
        rivals=rivals,
    )


def _dense(store: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
    """The columns of each request side by side, ``[B, Hkv, C, D]``: what a cache without pages holds."""
    rows, _ = plan.layout
    b, c = rows.shape
    return store[:, rows.reshape(-1)].unflatten(1, (b, c)).transpose(0, 1).contiguous()


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: WindowPlan) -> Callable[[], Any]:
    """torch's own attention over a dense cache; the G heads of a key head are rows of one matrix, so that
    keys are read once."""
    (b, n, hq, d), hkv = q.shape, k.shape[0]
    folded = q.unflatten(2, (hkv, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
    keys, values = _dense(k, plan), _dense(v, plan)
    mask = None
    if n > 1:
        rows = plan.layout[1].repeat_interleave(hq // hkv, 1)
        mask = rows[:, None].expand(b, hkv, *rows.shape[1:])
    return partial(F.scaled_dot_product_attention, folded, keys, values, attn_mask=mask, scale=d**-0.5)


def mla_cases(sizes: Sizes) -> list[KernelCase]:
    """Latent attention, decoding and a window of four nodes, at the heads of several targets."""
    b, c = sizes.verify[-1]
    loads = [Window("decode", batch, 1, 1, context) for batch, context in sizes.verify[1:]]
    loads.append(Window("verify", b, 4, 4, c))
    return [
        case(f"{heads} heads, {w.name}", _make_mla, sizes, w, heads, **w.values, heads=heads)
        for heads in sizes.latent_heads
        for w in loads
    ]


def _make_mla(sizes: Sizes, w: Window, heads: int, rng: RandomInputs) -> PreparedCase:
    latent, rope = sizes.latent
    plan, num_rows = _make_plan(rng, w, sizes.page_size, rng.dtype)
    q, rows = rng.normal(w.b, w.n, heads, latent + rope), rng.normal(num_rows, latent + rope)
    scale = (128 + rope) ** -0.5

    def op(backend: Backend) -> torch.Tensor:
        return mla_window_attention(q, rows, plan, scale, latent_dim=latent, backend=backend)

    return PreparedCase(op, 2 * w.b * w.n * w.c * heads * (2 * latent + rope), (q, rows[: w.b * w.c]))


def prefill_cases(sizes: Sizes) -> list[KernelCase]:
    """Prompt chunks over what is cached before them."""
    return [
        case(f"batch {b}, {rows} rows behind {prefix}", _make_prefill, sizes, b, prefix, rows)
        for b, prefix, rows in sizes.prompts
    ]


def _make_prefill(sizes: Sizes, b: int, prefix: int, rows: int, rng: RandomInputs) -> PreparedCase:
    hq, hkv, d = sizes.model.num_heads, sizes.model.num_kv_heads, sizes.model.head_dim
    total, size = prefix + rows, sizes.page_size
    per_request = -(-total // size)
    pages = rng.permutation(b * per_request).view(b, per_request)
    plan = PrefillPlan(
        page_tables=pages,
        page_size=size,
        cu_rows=torch.arange(b + 1, device=rng.device) * rows,
        starts=torch.full((b,), prefix, device=rng.device),
        first_position=0,
        max_rows=rows,
    )
    q = rng.normal(b * rows, hq, d)
    k, v = (rng.normal(hkv, b * per_request * size, d) for _ in range(2))
    pairs = rows * prefix + rows * (rows + 1) // 2  # row i sees prefix + i + 1 keys
    return PreparedCase(
        lambda backend: paged_prefill_attention(q, k, v, plan, d**-0.5, backend=backend),
        4 * b * hq * d * pairs,
        (q, k[:, : b * total], v[:, : b * total]),
        rivals={"sdpa": partial(_sdpa_prefill, q, k, v, plan, total)},
        eager=("reference",),
    )


def _sdpa_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, total: int
) -> Callable[[], Any]:
    """torch's flash attention over dense keys of every query head, causal to the lower right."""
    from torch.nn.attention.bias import causal_lower_right

    b, d = len(plan.page_tables), q.shape[-1]
    column = torch.arange(total, device=q.device).expand(b, total)
    rows = plan.page_tables.gather(1, column // plan.page_size) * plan.page_size + column % plan.page_size
    group = q.shape[1] // k.shape[0]
    keys, values = (
        x[:, rows.reshape(-1)].unflatten(1, (b, total)).transpose(0, 1).repeat_interleave(group, 1)
        for x in (k, v)
    )
    queries = q.unflatten(0, (b, -1)).transpose(1, 2).contiguous()
    mask = causal_lower_right(plan.max_rows, total)
    return partial(F.scaled_dot_product_attention, queries, keys, values, attn_mask=mask, scale=d**-0.5)


CASES: Cases = {
    "window_attention": window_cases,
    "prefill_attention": prefill_cases,
    "mla_attention": mla_cases,
}
