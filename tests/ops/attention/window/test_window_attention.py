"""Window attention against dense attention request by request."""

import pytest
import torch

from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, chain_bits, window_attention


def dense(q, k, v, visible):
    """Dense attention in fp64: q [N, Hq, D], k and v [C, Hkv, D], visible bool [N, C] -> [N, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        scores = q[:, head].double() @ keys.t() / q.shape[2] ** 0.5
        out[:, head] = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values
    return out


@pytest.mark.parametrize(
    ("batch", "nodes", "page_size"), [(1, 1, 16), (3, 7, 1), (3, 16, 16), (2, 64, 64), (1, 5, 3)]
)
@pytest.mark.parametrize("first_position", [0, 1])
def test_equals_dense_attention(batch, nodes, page_size, first_position):
    generator = torch.Generator().manual_seed(batch * 100 + nodes)
    prefix = torch.tensor([5, 41, 130][:batch])
    pages_each = -(-200 // page_size)
    kv = PagedKV(
        2,
        2,
        8,
        PoolLayout(pages_each * batch, page_size, 3),
        first_position=first_position,
    )
    kv.k.normal_(generator=generator)
    kv.v.normal_(generator=generator)
    table = torch.randperm(pages_each * batch, generator=generator).view(batch, pages_each)
    parents = torch.zeros(batch, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (batch,), generator=generator)
    bits = ancestor_bits(parents, nodes)
    q = torch.randn(batch * nodes, 6, 8, generator=generator)
    k, v = torch.randn(2, batch * nodes, 2, 8, generator=generator)
    pool_rows = kv.rows_of(table, torch.arange(200).expand(batch, 200))
    pool_k, pool_v = kv.k[1].clone(), kv.v[1].clone()
    out = kv.window_attend(table, prefix, bits, nodes, 256)(1, q, k, v).view(batch, nodes, 6, 8)

    for b in range(batch):
        seen = torch.zeros(nodes, nodes, dtype=torch.bool)
        for node in range(nodes):
            walk = node
            while True:
                seen[node, walk] = True
                if walk == 0:
                    break
                walk = int(parents[b, walk])
        rows = pool_rows[b, first_position : prefix[b]]
        mine = slice(b * nodes, (b + 1) * nodes)
        expected = dense(
            q[mine],
            torch.cat((pool_k[:, rows].transpose(0, 1), k[mine])),
            torch.cat((pool_v[:, rows].transpose(0, 1), v[mine])),
            torch.cat((torch.ones(nodes, len(rows), dtype=torch.bool), seen), 1),
        )
        torch.testing.assert_close(out[b].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(kv.k[1][:, : kv.scratch_start], pool_k[:, : kv.scratch_start]), (
        "a window must not touch the pool"
    )
    assert kv.k[0].std() > 0 and not torch.equal(kv.k[1], pool_k), (
        "the window's keys go to the scratch of its layer"
    )


@torch.no_grad()
def test_a_chain_window_equals_single_tokens_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    kv = PagedKV(1, 3, 64, PoolLayout(8, 16, 1, window=64))
    kv.k.normal_(generator=generator)
    kv.v.normal_(generator=generator)
    table, start = torch.arange(8)[None], 57
    q = torch.randn(5, 9, 64, generator=generator)
    k, v = torch.randn(2, 5, 3, 64, generator=generator)
    together = kv.window_attend(table, torch.tensor([start]), chain_bits(5, q.device)[None], 5, 128)(
        0, q, k, v
    )
    for i in range(5):
        lens, one = torch.tensor([start + i]), torch.ones(1, 1, dtype=torch.int64)
        alone = kv.window_attend(table, lens, one, 1, 64)(0, q[i : i + 1], k[i : i + 1], v[i : i + 1])
        assert torch.equal(alone[0], together[i]), f"node {i}"
        kv.commit_window(table, torch.zeros(1, 1, dtype=torch.int64), lens, torch.ones(1, dtype=torch.int64))


def test_commit_copies_the_accepted_nodes_and_nothing_else():
    kv = PagedKV(2, 1, 4, PoolLayout(4, 4, 2, window=8))
    kv.k.copy_(torch.arange(kv.k.numel()).view_as(kv.k))
    before = kv.k.clone()
    table = torch.tensor([[2, 0], [1, 3]])
    nodes = torch.tensor([[0, 3, 3], [0, 1, 2]])
    kv.commit_window(table, nodes, torch.tensor([3, 1]), torch.tensor([2, 3]))
    scratch = kv.scratch_start  # 4 pages of 4, and the dummy page
    assert scratch == 20
    moved = {11: scratch, 0: scratch + 3, 5: scratch + 8, 6: scratch + 9, 7: scratch + 10}
    for row in range(kv.dummy_row):
        assert torch.equal(kv.k[:, :, row], before[:, :, moved.get(row, row)]), f"row {row}"


def test_requests_of_like_length_go_together_and_company_changes_no_bit():
    generator = torch.Generator().manual_seed(3)
    lens = torch.tensor([700, 3, 130, 3, 129, 500])
    kv = PagedKV(1, 2, 16, PoolLayout(300, 16, 6, window=64))
    kv.k.normal_(generator=generator)
    kv.v.normal_(generator=generator)
    table = torch.randperm(300, generator=generator)[: 6 * 48].view(6, 48)
    q = torch.randn(6, 5, 4, 16, generator=generator)

    def plan(requests, columns):
        return WindowPlan(
            page_table=table[requests],
            page_size=16,
            prefix_lens=lens[requests],
            first_position=0,
            scratch_start=kv.scratch_start,
            scratch_stride=0,
            num_keys=5,
            ancestors=chain_bits(5, q.device).expand(len(requests), 5),
            num_columns=columns,
            dummy_row=kv.dummy_row,
            dtype=q.dtype,
        )

    everybody = list(range(6))
    whole = plan(everybody, 768)
    assert [group.rows.shape[1] for group in whole.by_length] == [768, 128, 384, 640]
    out = window_attention(q, kv.k[0], kv.v[0], whole, 0.25)
    expected = window_attention(q, kv.k[0], kv.v[0], whole, 0.25, backend="reference")
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    for request in everybody:
        alone = window_attention(q[[request]], kv.k[0], kv.v[0], plan([request], 1024), 0.25)
        assert torch.equal(alone[0], out[request])
