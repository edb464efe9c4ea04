"""Attention of prompt chunks against a softmax written out."""

import pytest
import torch

from eagle_kit.ops.attention.prefill import (
    PrefillPlan,
    chunk_attention,
    paged_prefill_attention,
    prefill_attention,
)
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.cpu.summation import round_columns


def expected(q, k, v, scale, start):
    """``softmax(q k^T scale) v`` of every query alone, in fp64."""
    group = q.shape[1] // k.shape[0]
    rows = []
    for t, row in enumerate(q.double()):
        seen = start + t + 1
        keys, values = (x[:, :seen].double().repeat_interleave(group, 0) for x in (k, v))
        scores = torch.einsum("hd,hcd->hc", row, keys) * scale
        rows.append(torch.einsum("hc,hce->he", scores.softmax(-1), values))
    return torch.stack(rows)


@pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 40), (63, 1), (63, 2), (150, 100), (400, 33)])
@pytest.mark.parametrize("value_dim", [16, 24])
def test_a_chunk_attends_to_the_tokens_before_it_and_its_own(start, size, value_dim):
    generator = torch.Generator().manual_seed(start + size)
    columns = round_columns(start + size)
    q = torch.randn(size, 6, 16, generator=generator)
    k = torch.randn(2, columns, 16, generator=generator)
    v = torch.randn(2, columns, value_dim, generator=generator)
    known = start + size
    out = chunk_attention(q, k, v, 0.25, start=start)
    torch.testing.assert_close(out.double(), expected(q, k, v, 0.25, start), rtol=1e-5, atol=1e-6)
    dense = prefill_attention(q, k[:, :known].transpose(0, 1), v[:, :known].transpose(0, 1), 0.25)
    torch.testing.assert_close(dense, out, rtol=1e-5, atol=1e-6)


def test_keys_behind_a_chunk_are_not_attended_to():
    q, k, v = torch.randn(9, 2, 16), torch.randn(2, 64, 16), torch.randn(2, 64, 16)
    out = chunk_attention(q, k, v, 0.25, start=20)
    k[:, 29:], v[:, 29:] = 1e4, -1e4
    assert torch.equal(chunk_attention(q, k, v, 0.25, start=20), out)


def test_chunks_of_positions_are_refused_where_slots_are_unused():
    q = torch.zeros(3, 2, 16)
    rows = torch.zeros(2, 16, 16)
    starts = torch.tensor([1])
    plan = PrefillPlan(torch.tensor([[0, 1]]), 8, torch.tensor([0, 3]), starts, 1, 3)
    with pytest.raises(AssertionError, match="chunks"):
        paged_prefill_attention(q, rows, rows, plan, AttentionVariant(0.25, Limits(chunk=8)))
