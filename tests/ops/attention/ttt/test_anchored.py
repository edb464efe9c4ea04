"""Attention of blocks behind anchors against dense masks in fp64, by every backend, forward and backward."""

import pytest
import torch
from crossed import crossed
from sweep import sweep
from torch.nn import functional as F

from eagle_kit.ops.attention.ttt import plan_queries
from eagle_kit.ops.attention.ttt.anchored import anchored_attention

T, ROWS = 53, [0, 3, 4, 11, 20, 21, 33, 51]
STARTS = torch.tensor([0] * 18 + [18] * 15 + [33] * 20)


def dense(q, k, v, own_k, own_v, rows, window, is_causal):
    """One softmax of every row under a dense mask, in fp64."""
    q, k, v, own_k, own_v = (x.double() for x in (q, k, v, own_k, own_v))
    size, hq = q.shape[1:3]
    key, block = torch.arange(T), torch.arange(size)
    out = []
    for a, row in enumerate(rows.tolist()):
        at = row + 1 + block[:, None]  # positions of the block's rows
        before = ((key <= row) & (key >= STARTS[row])).expand(size, T)
        inside = torch.ones(size, size, dtype=torch.bool)
        if window is not None:
            before = before & (key > at - window)
            inside = block <= block[:, None] if is_causal else inside
        keys, values = (torch.cat(pair).transpose(0, 1) for pair in ((k, own_k[a]), (v, own_v[a])))
        keys, values = (x.repeat_interleave(hq // len(x), 0) for x in (keys, values))
        mask = torch.cat((before, inside), 1)
        mine = q[a].transpose(0, 1)[None]
        out.append(F.scaled_dot_product_attention(mine, keys[None], values[None], mask)[0].transpose(0, 1))
    return torch.stack(out)


@crossed(
    ("window, is_causal", [(None, False), (9, True), (9, False)]), ("heads, size", [((6, 2), 5), ((3, 3), 4)])
)
@pytest.mark.parametrize("backend", sweep([None, "reference", "triton"], fast=[None, "triton"]))
def test_forward_and_backward_equal_dense_masks(backend, window, is_causal, heads, size):
    hq, hkv = heads
    generator = torch.Generator().manual_seed(1)
    shapes = [(len(ROWS), size, hq, 8), *[(T, hkv, 8)] * 2, *[(len(ROWS), size, hkv, 8)] * 2]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    rows = torch.tensor(ROWS)
    plan = plan_queries(rows, STARTS)
    out = anchored_attention(*ours, plan, 8**-0.5, window, is_causal=is_causal, backend=backend)
    expected = dense(*theirs, rows, window, is_causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(out.shape, generator=generator)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_rows_that_reach_further_than_a_window_are_refused():
    plan = plan_queries(torch.tensor(ROWS), STARTS)
    assert plan.with_window(3, 2).reach == 1
    with pytest.raises(AssertionError, match="own keys"):
        plan.with_window(3, 3)
    q = torch.zeros(8, 2, 2, 4)
    k = torch.zeros(T, 2, 4)
    own = torch.zeros(8, 2, 2, 4)
    with pytest.raises(AssertionError):
        anchored_attention(q, k, k, own, own, plan, 0.5, is_causal=True)
