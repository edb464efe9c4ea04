"""Prompts over a pool of latents: several in one launch of the kernel, against each alone in torch."""

import pytest
import torch

from eagle_kit.kv import latents as room
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.kv.store import PoolLayout, Segment
from eagle_kit.models.blocks.mla import Queries
from eagle_kit.models.cache_specs import LatentSpec
from eagle_kit.ops.backend import use

LATENT, ROPE, NOPE, VALUE, HEADS = 12, 4, 8, 6, 3
CHUNKS = ((0, 4, 0), (5, 30, 5), (9, 10, 9), (17, 40, 20))
"""start, stop, write_from of requests: a whole prompt, chunks behind cached tokens, some in shared pages."""


class Heads:
    """Heads of latent attention with random weights."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator).to(device)

    def expand(self, rows):
        made = (rows[:, :LATENT] @ self.weight.T).unflatten(-1, (HEADS, -1))
        k_nope, v = made.split((NOPE, VALUE), -1)
        return torch.cat((k_nope, rows[:, None, LATENT:].expand(-1, HEADS, -1)), -1), v


def attended(device, dtype=None):
    """Attention of the chunks in the second layer, and what the store holds then."""
    generator = torch.Generator().manual_seed(0)
    spec = LatentSpec(2, LATENT, ROPE, 0.3)
    store = PagedLatents(spec, PoolLayout(40, 8, 4, window=8, dtype=dtype), device=device)
    if dtype is None:
        store.rows.copy_(torch.randn(store.rows.shape, generator=generator))
        store.rows[:, store.trash_row] = float("nan")
    tables = torch.randperm(40, generator=generator)[:24].view(4, 6).to(device)
    segments = [Segment(table, *chunk) for table, chunk in zip(tables, CHUNKS, strict=True)]
    count = sum(stop - start for start, stop, _ in CHUNKS)
    q, rows = (
        torch.randn(count, *shape, generator=generator).to(device)
        for shape in ((HEADS, NOPE + ROPE), (LATENT + ROPE,))
    )
    out = store.prefill_attend(segments).latents(1, Queries(*q.split((NOPE, ROPE), -1)), rows, Heads(device))
    return out, store.rows.float().nan_to_num(7.0)


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn], ids=["fp32", "fp8"])
@pytest.mark.parametrize(("most", "launches"), [(8192, 1), (44, 2), (40, 3), (1, 4)])
@torch.inference_mode()
def test_prompts_together_attend_as_each_alone(triton_device, monkeypatch, most, launches, dtype):
    if dtype is not None and triton_device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    expected, held = attended("cpu", dtype)
    calls, attend = [], room.paged_prefill_attention
    monkeypatch.setattr(room, "PACKED_TOKENS", most)
    monkeypatch.setattr(room, "paged_prefill_attention", lambda *args: calls.append(args) or attend(*args))
    with use("triton"):
        out, rows = attended(triton_device, dtype)
    assert len(calls) == launches and out.shape == (len(out), HEADS, VALUE)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(rows.cpu(), held)


def test_rows_are_returned_as_a_pool_of_fp8_holds_them():
    """So a prompt in one chunk attends to what a prompt in several chunks reads from the pool."""
    store = PagedLatents(
        LatentSpec(1, LATENT, ROPE, 0.3),
        PoolLayout(8, 8, 2, window=8, dtype=torch.float8_e4m3fn),
        device="cpu",
    )
    rows = torch.randn(5, LATENT + ROPE, generator=torch.Generator().manual_seed(0))
    at = torch.arange(3, 8)
    taken = store.write_prompt(0, at, rows)
    assert taken.equal(store.rows[0][at].to(rows.dtype).view_as(rows))
    assert not taken.equal(rows)
