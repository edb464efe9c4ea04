"""The reference of commit: what the paged store does today, and nothing that it must not touch."""

import pytest
import torch

from eagle_kit.kernels.commit import commit, commit_path
from eagle_kit.speculation.paged_kv import PagedKV

B, N, WINDOW, PAGE_SIZE, NUM_PAGES = 3, 4, 6, 2, 11


def paged_store(dtype=torch.float32):
    kv = PagedKV(
        2, 3, 5, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_batch_size=B, window=WINDOW, dtype=dtype
    )
    generator = torch.Generator().manual_seed(1)
    for store in (kv.k, kv.v):
        store.copy_(torch.randn(store.shape, generator=generator))
    return kv


def test_commit_copies_rows_in_every_layer():
    ours, theirs = paged_store(), paged_store()
    source, target = torch.tensor([30, 25, 27]), torch.tensor([4, theirs.trash_row, 11])
    commit(ours.k, ours.v, source, target, backend="reference")
    theirs.commit(source, target)
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)


def test_a_path_goes_where_the_paged_store_puts_it():
    ours, theirs = paged_store(), paged_store()
    generator = torch.Generator().manual_seed(2)
    table = torch.randperm(NUM_PAGES, generator=generator)[:9].view(B, 3)
    nodes = torch.stack([torch.randperm(WINDOW, generator=generator)[:N] for _ in range(B)])
    first, count = torch.tensor([0, 3, 2]), torch.tensor([4, 1, 0])
    path = (ours.k, ours.v, table, PAGE_SIZE, nodes, first, count, ours.num_slots, WINDOW)
    commit_path(*path, backend="reference")
    before = paged_store()
    theirs.commit_window(table, nodes, first, count)
    for mine, right, old in ((ours.k, theirs.k, before.k), (ours.v, theirs.v, before.v)):
        assert torch.equal(mine[:, :, : ours.trash_row], right[:, :, : ours.trash_row])
        assert torch.equal(mine[:, :, ours.trash_row], old[:, :, ours.trash_row])
        assert not torch.equal(mine, old)


def test_fp8_and_a_single_latent_store():
    store = torch.arange(60.0).view(2, 6, 5).to(torch.float8_e4m3fn)
    before = store.float()
    commit(store, None, torch.tensor([5, 4]), torch.tensor([0, 2]), backend="reference")
    before[:, [0, 2]] = before[:, [5, 4]]
    assert torch.equal(store.float(), before)


def test_stores_that_do_not_fit_are_refused():
    k, rows = torch.zeros(2, 3, 4, 5), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="like k"):
        commit(k, k[..., :4].contiguous(), rows, rows)
    with pytest.raises(AssertionError, match="contiguous"):
        commit(k.transpose(0, 1), None, rows, rows)
