"""Attention over a paged store at the sizes of real models, against fp64, request by request.

Everything in the store that a request may not read is NaN: other pages, the rest of its last page, slots
before the first one, and other windows.
"""

from typing import Any, NamedTuple

import pytest
import torch

from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from eagle_kit.ops.tree_build.masks import tree_mask
from tests.gpu.near import assert_near
from tests.gpu.place import DEVICE, DTYPES, FP8, HALVES, generator, pick, randn

LLAMA_8B, QWEN3_8B, QWEN3_30B, SMOLLM2 = (32, 8, 128), (32, 8, 128), (32, 4, 128), (9, 3, 64)
PHI, WIDE, GEMMA = (32, 32, 80), (40, 8, 96), (16, 8, 256)
K = 1024


class Case(NamedTuple):
    """``heads``: query heads, key heads, head size. ``lens``: of prefixes, as many as requests; prompts begin
    there. ``nodes`` of ``keys`` window keys are queries, or ``nodes`` rows of a prompt."""

    heads: tuple[int, int, int]
    lens: tuple[int, ...]
    nodes: int = 1
    keys: int = 0
    page: int = 16
    first: int = 0


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Lengths from next to nothing to ``longest``, which comes last."""
    return tuple(1 + (longest - 1) * i // max(1, batch - 1) for i in range(batch))


WINDOWS = pick(
    {
        "decode, 32K": Case(LLAMA_8B, (32 * K,)),
        "decode, batch 64": Case(LLAMA_8B, (K,) * 64, page=64),
        "decode, ragged to 32K": Case(LLAMA_8B, ragged(16, 32 * K), page=64, first=1),
        "chain of 5": Case(LLAMA_8B, ragged(8, 8 * K), 5, page=1),
        "tree of 16, 32K": Case(LLAMA_8B, (32 * K, 5, 16 * K + 7), 16),
        "tree of 32, batch 16": Case(LLAMA_8B, ragged(16, 4 * K), 32, page=64),
        "window of 64": Case(LLAMA_8B, (8 * K + 1, 0), 64),
        "draft step of 8": Case(LLAMA_8B, ragged(8, 4 * K), 4, 20, first=1),
        "group of 8": Case(QWEN3_30B, ragged(8, 32 * K), 8),
        "group of 3": Case(SMOLLM2, ragged(64, 8 * K), 8, page=64),
        "group of 3, page of 1": Case(SMOLLM2, (32 * K, 1), 1, page=1),
        "size 80": Case(PHI, ragged(4, 8 * K), 8),
        "size 96": Case(WIDE, ragged(4, 8 * K), 16, page=64),
        "size 256": Case(GEMMA, ragged(4, 16 * K), 8),
    },
    {
        "decode": Case((4, 2, 16), (40, 1), first=1),
        "tree": Case((3, 1, 16), (33,), 5, 7, page=1),
        "page of 64": Case((2, 2, 24), (70,), 3, page=64),
    },
)


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of one request: ``q [N, Hq, D]``, fp64 ``k`` and ``v [Hkv, C, D]``, ``seen [N, C]``, ``sinks [Hq]``."""
    n, hq, _ = q.shape
    q = q.double().unflatten(1, (k.shape[0], -1)).transpose(0, 1)
    scores = torch.einsum("hngd,hcd->hngc", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill_(~seen[None, :, None], float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(k.shape[0], 1, -1, 1).expand(-1, n, -1, 1)
        scores = torch.cat((scores, extra), -1)
    p = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("hngc,hcd->hngd", p, v).transpose(0, 1).reshape(n, hq, -1)


class Store:
    """Pages in random order, of several requests, in a store ``[heads, R, size]`` of NaN."""

    def __init__(self, case: Case, heads: int, size: int, by: torch.Generator, count: int = 2) -> None:
        self.case, self.by = case, by
        batch, keys = len(case.lens), case.keys or case.nodes
        longest = max(case.lens) + keys
        used = [-(-(length + keys) // case.page) for length in case.lens]
        pages = sum(used) + 3
        order = torch.randperm(pages, generator=by, device=DEVICE)
        self.table = order[-1:].repeat(batch, -(-longest // case.page))
        for b, number in enumerate(used):
            self.table[b, :number], order = order[:number], order[number:]
        self.scratch, self.stride = pages * case.page, keys + 2
        shape = (heads, self.scratch + batch * self.stride + 1, size)
        self.parts = [
            torch.full(shape, float("nan"), device=DEVICE, dtype=torch.float32) for _ in range(count)
        ]

    def rows(self, b: int, start: int, stop: int) -> torch.Tensor:
        """Of slots ``start..stop-1`` of request ``b``."""
        slots, page = torch.arange(start, stop, device=DEVICE), self.case.page
        return self.table[b, slots // page] * page + slots % page

    def window_rows(self, b: int, keys: int) -> torch.Tensor:
        return self.scratch + b * self.stride + torch.arange(keys, device=DEVICE)

    def fill(self, rows: torch.Tensor) -> None:
        for part in self.parts:
            part[:, rows] = randn(part.shape[0], len(rows), part.shape[2], by=self.by)


def window(case: Case, dtype: torch.dtype, heads: int, size: int, by: torch.Generator, count: int = 2) -> Any:
    """A filled store, its plan, and for each request the rows of its columns and ``seen [N, C]``."""
    store, batch, keys = Store(case, heads, size, by, count), len(case.lens), case.keys or case.nodes
    parents = torch.zeros(batch, keys, dtype=torch.int64, device=DEVICE)
    for node in range(1, keys):
        parents[:, node] = torch.randint(0, node, (batch,), generator=by, device=DEVICE)
    bits = ancestor_bits(parents, keys)[:, keys - case.nodes :]
    plan = WindowPlan(
        page_table=store.table,
        page_size=case.page,
        prefix_lens=torch.tensor(case.lens, device=DEVICE),
        first_position=case.first,
        scratch_start=store.scratch,
        scratch_stride=store.stride,
        num_keys=keys,
        ancestors=bits,
        num_columns=-(-(max(case.lens) + keys) // 64) * 64,
        dummy_row=store.scratch + batch * store.stride,
        dtype=dtype,
        arrivals=torch.zeros(batch * 512, dtype=torch.int32, device=DEVICE),
    )
    columns = []
    for b, length in enumerate(case.lens):
        prefix = store.rows(b, min(case.first, length), length)
        rows = torch.cat((prefix, store.window_rows(b, keys)))
        store.fill(rows)
        seen = tree_mask(bits[b : b + 1], "full", [len(prefix)], num_keys=keys)
        columns.append((rows, seen.view(case.nodes, -1)))
    return store, plan, columns


KINDS = [*((dtype, dtype) for dtype in DTYPES), *((dtype, FP8) for dtype in HALVES)]


def kind_name(kind: object) -> str:
    return str(kind).removeprefix("torch.")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("dtype", "stored"), KINDS, ids=kind_name)
@pytest.mark.parametrize("name", WINDOWS)
def test_window_attention(name, dtype, stored):
    case, by = WINDOWS[name], generator(1)
    hq, hkv, size = case.heads
    store, plan, columns = window(case, dtype, hkv, size, by)
    q = randn(len(case.lens), case.nodes, hq, size, dtype=dtype, by=by)
    k, v = (part.to(stored) for part in store.parts)
    k_scale, v_scale = (0.5, 3.0) if stored == FP8 else (1.0, 1.0)
    out = window_attention(q, k, v, plan, size**-0.5, k_scale=k_scale, v_scale=v_scale, backend="triton")
    assert out.dtype == dtype
    for _ in range(20):  # whichever program merges
        assert not plan.arrivals.any()
        again = window_attention(
            q, k, v, plan, size**-0.5, k_scale=k_scale, v_scale=v_scale, backend="triton"
        )
        assert torch.equal(again, out)
    for b, (rows, seen) in enumerate(columns):
        mine = [
            part.view(torch.uint8)[:, rows].view(FP8) if stored == FP8 else part[:, rows] for part in (k, v)
        ]
        keys, values = (part.double() for part in mine)
        right = exact(q[b], keys, values, seen, k_scale * size**-0.5) * v_scale
        assert_near(f"{name}, request {b}", out[b], right)


GPT_OSS, GEMMA_2, LLAMA_4 = (64, 8, 64), (8, 4, 256), (40, 8, 128)
VARIANTS = pick(
    {
        "gpt-oss, decode": (Case(GPT_OSS, ragged(16, 32 * K)), Limits(window=128), None, True),
        "gpt-oss, tree of 16": (Case(GPT_OSS, ragged(8, 16 * K), 16), Limits(window=128), None, True),
        "gpt-oss, full layer": (Case(GPT_OSS, ragged(8, 16 * K), 8), Limits(), None, True),
        "Gemma 2, chain of 5": (Case(GEMMA_2, ragged(8, 16 * K), 5), Limits(window=4096), 50.0, False),
        "Llama 4, chunks": (Case(LLAMA_4, (8 * K - 3, 8 * K, 20 * K), 8), Limits(chunk=8192), None, False),
    },
    {
        "window, cap and sinks": (Case((4, 2, 16), (40, 1, 3), 5), Limits(window=6), 2.0, True),
        "chunks": (Case((4, 2, 16), (30, 32, 70), 5), Limits(chunk=32), None, False),
    },
)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=kind_name)
@pytest.mark.parametrize("name", VARIANTS)
def test_window_attention_of_other_kinds(name, dtype):
    (case, limits, soft_cap, has_sinks), by = VARIANTS[name], generator(5)
    hq, hkv, size = case.heads
    store, plan, columns = window(case, dtype, hkv, size, by)
    q = randn(len(case.lens), case.nodes, hq, size, dtype=dtype, by=by)
    sinks = randn(hq, dtype=dtype, by=by) if has_sinks else None
    k, v = (part.to(dtype) for part in store.parts)
    variant = AttentionVariant(size**-0.5, limits, soft_cap, sinks)
    out = window_attention(q, k, v, plan, variant, backend="triton")
    for b, (rows, seen) in enumerate(columns):
        prefix = torch.arange(len(rows) - plan.num_keys, device=DEVICE)
        num_ancestors = tree_mask(plan.ancestors[b : b + 1], "window", num_keys=plan.num_keys)[0].cumsum(1)
        position = case.lens[b] + num_ancestors[:, -1:] - 1
        places = torch.cat((prefix.expand(case.nodes, -1), case.lens[b] + num_ancestors - 1), 1)
        mine = seen & (places >= limits.firsts(position))
        keys, values = (part[:, rows].double() for part in (k, v))
        right = exact(q[b], keys, values, mine, variant.scale, soft_cap, sinks)
        assert_near(f"{name}, request {b}", out[b], right)


MLA = pick(
    {
        "decode, 16 heads, 32K": Case((16, 1, 576), (32 * K,), page=64),
        "decode, 128 heads, ragged": Case((128, 1, 576), ragged(8, 16 * K), page=64),
        "decode, batch 64": Case((16, 1, 576), ragged(64, 4 * K), page=16),
        "8 nodes, 32 heads": Case((32, 1, 576), ragged(4, 8 * K), 8, page=1),
        "tree of 16, 128 heads": Case((128, 1, 576), (8 * K, 3), 16, page=64, first=1),
    },
    {"tree": Case((3, 1, 80), (37, 4), 3, 5)},
)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("dtype", "stored"), KINDS, ids=kind_name)
@pytest.mark.parametrize("name", MLA)
def test_mla_attention(name, dtype, stored):
    case, by = MLA[name], generator(2)
    heads, _, size = case.heads
    latent, scale = pick(512, 64), 192**-0.5
    kv_scale = 0.5 if stored == FP8 else 1.0
    store, plan, columns = window(case, dtype, 1, size, by, count=1)
    rows_of_store = store.parts[0][0].to(stored)
    q = randn(len(case.lens), case.nodes, heads, size, dtype=dtype, by=by)
    out = mla_window_attention(
        q, rows_of_store, plan, scale, kv_scale=kv_scale, latent_dim=latent, backend="triton"
    )
    assert out.dtype == dtype
    wide = rows_of_store.float()
    for b, (rows, seen) in enumerate(columns):
        keys = wide[rows].double()[None] * kv_scale
        assert_near(f"{name}, request {b}", out[b], exact(q[b], keys, keys[..., :latent], seen, scale))


PROMPTS = pick(
    {
        "a prompt of 8K": Case(LLAMA_8B, (0,), 8 * K),
        "chunks behind up to 30K": Case(LLAMA_8B, (0, 7, 30 * K), 2 * K),
        "short chunks, batch 64": Case(LLAMA_8B, ragged(64, 4 * K), 17, page=64),
        "a draft's chunk": Case(LLAMA_8B, (1, 4 * K), K, first=1),
        "group of 8, page of 1": Case(QWEN3_30B, (0, 4 * K + 3), K, page=1),
        "group of 3": Case(SMOLLM2, ragged(8, 4 * K), 300, page=64),
        "size 80": Case(PHI, (0, K), K),
        "size 96": Case(WIDE, (0, K), K, page=64),
        "size 256": Case(GEMMA, (0, 2 * K), K, page=64),
    },
    {"chunks": Case((4, 2, 16), (0, 21), 9, first=1), "page of 64": Case((3, 1, 24), (65,), 4, page=64)},
)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("dtype", "stored"), KINDS, ids=kind_name)
@pytest.mark.parametrize("name", PROMPTS)
def test_prefill_attention(name, dtype, stored):
    case, by = PROMPTS[name], generator(3)
    hq, hkv, size = case.heads
    store, counts = Store(case, hkv, size, by), []
    for b, start in enumerate(case.lens):
        counts.append(case.nodes - b % case.nodes)
        store.fill(store.rows(b, min(case.first, start), start + counts[b]))
    borders = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    q = randn(sum(counts), hq, size, dtype=dtype, by=by)
    k, v = (part.to(stored) for part in store.parts)
    k_scale, v_scale = (0.5, 3.0) if stored == FP8 else (1.0, 1.0)
    starts = torch.tensor(case.lens, device=DEVICE)
    plan = PrefillPlan(store.table, case.page, borders, starts, case.first, max(counts))
    out = paged_prefill_attention(
        q, k, v, plan, size**-0.5, k_scale=k_scale, v_scale=v_scale, backend="triton"
    )
    assert out.dtype == dtype
    at = 0
    for b, (start, count) in enumerate(zip(case.lens, counts, strict=True)):
        first = min(case.first, start)
        rows = store.rows(b, first, start + count)
        mine = [
            part.view(torch.uint8)[:, rows].view(FP8) if stored == FP8 else part[:, rows] for part in (k, v)
        ]
        keys, values = (part.double() for part in mine)
        for some in torch.arange(count, device=DEVICE).split(256):  # fp64 scores of 256 rows at a time
            slots, row = torch.arange(first, start + count, device=DEVICE), start + some[:, None]
            seen = (slots <= row) & ((slots >= case.first) | (slots == row))
            right = exact(q[at + some], keys, values, seen, k_scale * size**-0.5) * v_scale
            assert_near(f"{name}, request {b}", out[at + some], right)
        at += count
