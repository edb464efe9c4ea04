"""Attention and commits over pools of more than 2^31 elements, of which few pages are really there: results
equal those over the same keys in a small pool, and no address overflows."""

import mmap

import pytest
import torch

pytest.importorskip("triton")

from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention
from eagle_kit.ops.attention.window import WindowPlan, chain_bits, window_attention
from eagle_kit.ops.commit import commit_path

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")

PAGE, NUM_PAGES, WINDOW = 16, 6, 4
FAR = 4_000_000
"""First far page: 64 M rows before it, 4 G elements of heads of 64."""


def sparse(*shape: int) -> torch.Tensor:
    """fp16 zeros of which only the pages that are used take memory."""
    size = 2 * torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.float16).view(*shape)


def pools(*shape: int, size: int) -> list[tuple[torch.Tensor, int]]:
    """A small pool ``[*shape, rows, size]`` and a sparse one with the same pages FAR pages further."""
    rows = NUM_PAGES * PAGE
    near = torch.randn(*shape, rows, size, generator=torch.Generator().manual_seed(1)).half()
    far = sparse(*shape, FAR * PAGE + rows, size)
    assert far.numel() > 2**32
    far[..., -rows:, :] = near
    return [(near, 0), (far, FAR)]


def window_plan(first: int) -> WindowPlan:
    """A chain of four behind 37 slots of pages 3, 1 and 4, in rows of page 5."""
    start, bits = (first + 5) * PAGE, chain_bits(WINDOW, torch.device("cpu"))
    table, lens = torch.tensor([[3, 1, 4]]) + first, torch.tensor([37])
    return WindowPlan(
        table, PAGE, lens, 0, start, WINDOW, WINDOW, bits.view(1, WINDOW), 48, start, torch.float16
    )


def test_windows(triton_device):
    q, results = torch.randn(1, WINDOW, 4, 64).half(), []
    for (k, first), (v, _) in zip(pools(2, size=64), pools(2, size=64), strict=True):
        results.append(window_attention(q, k, v, window_plan(first), 0.125, backend="triton"))
    assert torch.equal(*results) and results[0].abs().max() > 0.1


def test_latents(triton_device):
    q, results = torch.randn(1, WINDOW, 4, 80).half(), []
    for rows, first in pools(size=80):
        results.append(
            mla_window_attention(q, rows, window_plan(first), 0.1, latent_dim=64, backend="triton")
        )
    assert torch.equal(*results) and results[0].abs().max() > 0.1


def test_prompts(triton_device):
    q, results = torch.randn(9, 4, 64).half(), []
    for k, first in pools(2, size=64):
        tables = torch.tensor([[3, 1, 4]]) + first
        plan = PrefillPlan(tables, PAGE, torch.tensor([0, 9]), torch.tensor([28]), 0, 9)
        results.append(paged_prefill_attention(q, k, k, plan, 0.125, backend="triton"))
    assert torch.equal(*results) and results[0].abs().max() > 0.1


def test_commits(triton_device):
    results = []
    for k, first in pools(1, 2, size=64):
        table, start = torch.tensor([[3, 1, 4]]) + first, (first + 5) * PAGE
        path, one = torch.tensor([[0, 2, 3]]), torch.tensor([1])
        v = k.clone() if first == 0 else k
        commit_path(k, v, table, PAGE, path, 37 * one, 2 * one, start, WINDOW, backend="triton")
        results.append(k[:, :, first * PAGE :].clone())
    assert torch.equal(*results)
    assert torch.equal(results[1][:, :, 4 * PAGE + 5 : 4 * PAGE + 7], results[1][:, :, [80, 82]])
