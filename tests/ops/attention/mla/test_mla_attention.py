"""Reference of MLA window attention against full heads: keys and values expanded from the latent."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits
from eagle_kit.ops.backend import use


def make_plan(prefix, parents, first_position, page_size, num_pages):
    """Plan with pages shuffled over requests; the scratch lies behind the pool, one dummy row behind all."""
    batch, nodes = parents.shape
    table = torch.randperm(num_pages * batch, generator=torch.Generator().manual_seed(5)).view(batch, -1)
    pool = num_pages * batch * page_size
    return WindowPlan(
        page_table=table,
        page_size=page_size,
        prefix_lens=prefix,
        first_position=first_position,
        scratch_start=pool,
        scratch_stride=nodes,
        num_keys=nodes,
        ancestors=ancestor_bits(parents, nodes),
        num_columns=num_pages * page_size + nodes,
        dummy_row=pool + batch * nodes,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_absorbed_heads_equal_full_heads(kind):
    """Scores of ``[W_uk c | k_rope]`` with ``[q_nope | q_rope]``, values ``W_uv c``."""
    generator = torch.Generator().manual_seed(0)
    heads, nope, rope, latent, value = 3, 10, 16, 32, 12
    prefix, parents = torch.tensor([7, 0, 12]), torch.tensor([[0, 0, 1, 1], [0, 0, 0, 2], [0, 0, 1, 2]])
    plan = make_plan(prefix, parents, 1, 3, 4)
    rows = torch.randn(plan.dummy_row + 1, latent + rope, generator=generator).to(kind)
    w_uk = torch.randn(heads, nope, latent, generator=generator, dtype=torch.float64)
    w_uv = torch.randn(heads, value, latent, generator=generator, dtype=torch.float64)
    q_nope = torch.randn(3, 4, heads, nope, generator=generator, dtype=torch.float64)
    q_rope = torch.randn(3, 4, heads, rope, generator=generator, dtype=torch.float64)
    scale, kv_scale = (nope + rope) ** -0.5, 0.5
    absorbed = torch.cat((torch.einsum("bnhd,hdl->bnhl", q_nope, w_uk), q_rope), -1).float()
    out = mla_window_attention(absorbed, rows, plan, scale, kv_scale=kv_scale, latent_dim=latent)
    out = torch.einsum("bnhl,hvl->bnhv", out.double(), w_uv)

    for b in range(3):
        slots = [int(plan.page_table[b, s // 3]) * 3 + s % 3 for s in range(1, int(prefix[b]))]
        for node in range(4):
            seen, walk = {node}, node
            while walk:
                walk = int(parents[b, walk])
                seen.add(walk)
            keys = rows[slots + [plan.scratch_start + 4 * b + j for j in sorted(seen)]].double() * kv_scale
            for head in range(heads):
                key = torch.cat((keys[:, :latent] @ w_uk[head].T, keys[:, latent:]), 1)
                p = (key @ torch.cat((q_nope[b, node, head], q_rope[b, node, head])) * scale).softmax(0)
                expected = p @ (keys[:, :latent] @ w_uv[head].T)
                torch.testing.assert_close(out[b, node, head], expected, atol=1e-4, rtol=1e-4)


def test_half_types_are_rounded_once():
    plan = make_plan(torch.tensor([9]), torch.tensor([[0, 0]]), 0, 4, 4)
    rows = torch.randn(plan.dummy_row + 1, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = torch.randn(1, 2, 5, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = mla_window_attention(q, rows, plan, 0.2, latent_dim=32)
    assert out.dtype == torch.bfloat16 and out.shape == (1, 2, 5, 32)
    assert torch.equal(
        out, mla_window_attention(q.float(), rows.float(), plan, 0.2, latent_dim=32).bfloat16()
    )


class ReadRows(TorchDispatchMode):
    """Counts rows read from ``store``."""

    def __init__(self, store):
        super().__init__()
        self.store, self.count = store.data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(arg, torch.Tensor) and arg.data_ptr() == self.store for arg in args):
            assert func == torch.ops.aten.index_select.default, f"{func} reads the store too"
            self.count += out.shape[:-1].numel()
        return out


@pytest.mark.parametrize(("nodes", "heads"), [(1, 1), (1, 128), (4, 16), (64, 2)])
def test_a_row_is_read_once_a_window(nodes, heads):
    """For any number of nodes and heads that attend to it."""
    prefix = torch.tensor([30, 7, 12])
    plan = make_plan(prefix, torch.zeros(3, nodes, dtype=torch.int64), 0, 4, 8)
    rows = torch.randn(plan.dummy_row + 1, 48)
    q = torch.randn(3, nodes, heads, 48)
    with use("reference"), ReadRows(rows) as read:
        mla_window_attention(q, rows, plan, 0.1, latent_dim=32)
    (group,) = plan.by_length
    assert read.count == group.rows.numel() <= 3 * 192
    for b in range(3):
        used = group.rows[b][group.rows[b] != plan.dummy_row]
        assert len(used) == len(used.unique()) == prefix[b] + nodes
