"""Reference of commit against row-by-row copies."""

import pytest
import torch

from eagle_kit.ops.commit import commit_path


def test_a_path_lands_in_its_pages_and_nothing_else_is_touched():
    k, v = torch.randn(2, 2, 3, 32, 5, generator=torch.Generator().manual_seed(1))
    expected = [store.clone() for store in (k, v)]
    # pages of 2 slots; the scratch has 4 rows a request and starts at 20
    for store in expected:
        for source, target in ((20 + 0, 14), (20 + 3, 15), (20 + 1, 4), (24 + 2, 9)):
            store[:, :, target] = store[:, :, source]
    table = torch.tensor([[7, 2], [0, 4], [1, 3]])
    nodes = torch.tensor([[0, 3, 1], [2, 0, 0], [3, 2, 1]])
    first, count = torch.tensor([0, 3, 3]), torch.tensor([3, 1, 0])  # the rejected lie beyond the tables
    commit_path(k, v, table, 2, nodes, first, count, 20, 4, backend="reference")
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


def test_fp8_and_a_single_latent_store():
    store = torch.arange(60.0).view(2, 6, 5).to(torch.float8_e4m3fn)
    before = store.float()
    zeros = torch.zeros(2, dtype=torch.int64)
    table, nodes = torch.tensor([[0], [2]]), torch.tensor([[5], [4]])
    commit_path(store, None, table, 1, nodes, zeros, zeros + 1, 0, 0, backend="reference")
    before[:, [0, 2]] = before[:, [5, 4]]
    assert torch.equal(store.float(), before)


def test_stores_that_do_not_fit_are_refused():
    k, one = torch.zeros(2, 3, 4, 5), torch.ones(1, dtype=torch.int64)
    path = (one[:, None], 1, one[:, None], 0 * one, one, 0, 0)
    with pytest.raises(AssertionError, match="dtype of k"):
        commit_path(k, k[..., :4].contiguous(), *path)
    with pytest.raises(AssertionError, match="contiguous"):
        commit_path(k.transpose(0, 1), None, *path)
