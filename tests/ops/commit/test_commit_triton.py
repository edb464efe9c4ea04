"""Commit kernel against plain loops, byte for byte."""

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensor, FakeTensorMode

from eagle_kit.ops.commit import commit_path

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def random_store(shape, dtype, device, seed):
    """Random bytes, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.to(device).view(dtype).view(shape)


def stores(shape, dtype, device):
    return random_store(shape, dtype, device, 1), random_store(shape, dtype, device, 2)


def as_bytes(store):
    return store.view(torch.uint8).cpu().clone()


def copy_rows(k, v, source, target):
    """Commit one node per request, in pages of one slot: row ``source[b]`` goes to ``target[b]``."""
    zeros = torch.zeros_like(source)
    commit_path(k, v, target[:, None], 1, source[:, None], zeros, zeros + 1, 0, 0, backend="triton")


def copied(store, pairs):
    """Bytes of ``store`` after rows of all planes are copied one by one."""
    held = as_bytes(store)
    for source, target in pairs:
        held[..., target, :] = held[..., source, :]
    return held


@diagonal(
    ("dtype", DTYPES), ("shape", [(1, 1, 5, 1), (3, 2, 7, 5), (2, 3, 9, 80), (5, 2, 8, 64), (3, 8, 288)])
)
def test_rows_are_copied_in_all_planes_and_nothing_else_changes(triton_device, dtype, shape):
    k, v = stores(shape, dtype, triton_device)
    last = shape[-2] - 1
    pairs = [(last, 0), (last - 1, 2), (last, 1)]
    expected = [copied(store, pairs) for store in (k, v)]
    source, target = torch.tensor(pairs, device=triton_device).T
    copy_rows(k, v, source, target)
    assert torch.equal(as_bytes(k), expected[0]) and torch.equal(as_bytes(v), expected[1])


def test_a_single_store_and_no_row(triton_device):
    latent = random_store((2, 6, 36), torch.bfloat16, triton_device, 1)
    rows = torch.tensor([5, 0], device=triton_device)
    expected = copied(latent, [(5, 0)])
    copy_rows(latent, None, rows[:1], rows[1:])
    assert torch.equal(as_bytes(latent), expected)
    copy_rows(latent, None, rows[:0], rows[:0])
    assert torch.equal(as_bytes(latent), expected)


def test_a_store_that_starts_at_an_odd_place(triton_device):
    whole = random_store((1 + 2 * 4 * 8,), torch.float16, triton_device, 1)
    k = whole[1:].view(2, 4, 8)
    expected = copied(k, [(3, 0)])
    rows = torch.tensor([3, 0], device=triton_device)
    copy_rows(k, None, rows[:1], rows[1:])
    assert torch.equal(as_bytes(k), expected)


def test_many_trash_rows_leave_the_others_right(triton_device):
    k, v = stores((2, 1, 8, 16), torch.float16, triton_device)
    pairs = [(6, 7), (5, 7), (4, 1), (5, 7), (6, 0)]
    expected = [copied(store, pairs)[..., :7, :] for store in (k, v)]
    source, target = torch.tensor(pairs, device=triton_device).T
    copy_rows(k, v, source, target)
    assert torch.equal(as_bytes(k)[..., :7, :], expected[0])
    assert torch.equal(as_bytes(v)[..., :7, :], expected[1])


WINDOW = 9


def path_inputs(page_size, device, b=3, n=5):
    """Shuffled pages of ``b`` requests, then a scratch; nodes that are not committed are poisoned."""
    generator = torch.Generator().manual_seed(page_size)
    pages = 28 // page_size + 1
    table = torch.randperm(b * pages, generator=generator).view(b, pages)
    nodes = torch.stack([torch.randperm(WINDOW, generator=generator)[:n] for _ in range(b)])
    count = torch.tensor([n, 0, 2, 1, 3])[:b]
    first = torch.tensor([13, 10**12, 0, 19, 7])[:b]
    nodes = torch.where(torch.arange(n) < count[:, None], nodes, 10**12)
    scratch_start = b * pages * page_size
    pairs = []
    for request in range(b):
        for j in range(int(count[request])):
            p = int(first[request]) + j
            row = int(table[request, p // page_size]) * page_size + p % page_size
            pairs.append((scratch_start + request * WINDOW + int(nodes[request, j]), row))
    rest = (
        table.to(device),
        page_size,
        nodes.T.contiguous().T.to(device),
        first.to(device),
        count.to(device),
    )
    return scratch_start + b * WINDOW + 2, pairs, (*rest, scratch_start, WINDOW)


def assert_committed(planes, size, page_size, dtype, device, **path_sizes):
    num_rows, pairs, path = path_inputs(page_size, device, **path_sizes)
    k, v = stores((*planes, num_rows, size), dtype, device)
    expected = [copied(store, pairs) for store in (k, v)]
    commit_path(k, v, *path, backend="triton")
    assert torch.equal(as_bytes(k), expected[0]) and torch.equal(as_bytes(v), expected[1])


@diagonal(("dtype", DTYPES), ("page_size", [1, 3, 16, 64]))
def test_a_path_lands_in_its_pages_and_what_is_rejected_is_not_even_read(triton_device, dtype, page_size):
    assert_committed((2, 2), 20, page_size, dtype, triton_device)


@SWEEP
@given(
    planes=st.sampled_from(((1,), (3,), (1, 1), (2, 3), (5, 2))),
    size=st.integers(1, 90),
    page_size=st.integers(1, 65),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 5),
    nodes=st.integers(3, WINDOW),
)
def test_paths_of_any_sizes_land_in_their_pages(triton_device, planes, size, page_size, dtype, batch, nodes):
    assert_committed(planes, size, page_size, dtype, triton_device, b=batch, n=nodes)


def test_a_latent_path_of_expanded_nodes_and_a_sliced_table_equals_the_reference(triton_device):
    num_rows, _, path = path_inputs(4, triton_device, b=5, n=3)
    table, page_size, _, _, count, *scratch = path
    nodes = torch.arange(3, device=triton_device).expand(5, 3)
    first = torch.tensor([0, 3, 6, 9, 15], device=triton_device)
    table = torch.cat((table, torch.full_like(table, 10**9)), 1)[:, : table.shape[1]]
    made = []
    for backend in ("triton", "reference"):
        latent = random_store((3, num_rows, 36), torch.bfloat16, triton_device, 1)
        commit_path(latent, None, table, page_size, nodes, first, count, *scratch, backend=backend)
        made.append(as_bytes(latent))
    assert torch.equal(*made)
    assert not torch.equal(made[0], as_bytes(random_store((3, num_rows, 36), torch.bfloat16, "cpu", 1)))


def test_no_request(triton_device):
    num_rows, _, path = path_inputs(4, triton_device)
    k, v = stores((2, num_rows, 8), torch.float16, triton_device)
    expected = as_bytes(k)
    table, page_size, nodes, first, count, *scratch = path
    commit_path(k, v, table[:0], page_size, nodes[:0], first[:0], count[:0], *scratch, backend="triton")
    assert torch.equal(as_bytes(k), expected)


def test_rows_beyond_two_to_the_31_words(triton_device):
    num_rows = 2**30 + 5  # of one byte each; most of the store is never touched, so it costs no memory
    store = torch.empty(3, num_rows, 1, dtype=torch.uint8, device=triton_device)
    store[:, -3:, 0] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    rows = torch.tensor([num_rows - 1, num_rows - 3], device=triton_device)
    copy_rows(store, None, rows[:1], rows[1:])
    assert store[:, -3:, 0].tolist() == [[9, 8, 9]] * 3
    one = torch.ones(1, dtype=torch.int64, device=triton_device)
    table = torch.tensor([[num_rows - 5]], device=triton_device)
    commit_path(store, None, table, 1, one[None], 0 * one, one, num_rows - 3, 1, backend="triton")
    assert (store[:, -5] == 8).all()


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        k = torch.ones(2, 3, 9, 4)
        rows = torch.ones(2, dtype=torch.int64)
        commit_path(k, None, rows[:, None], 2, rows[:, None], rows, rows, 5, 2, backend="triton")
    assert isinstance(k, FakeTensor) and k.shape == (2, 3, 9, 4)


def test_the_operators_declare_what_they_do(triton_device):
    from eagle_kit.ops.commit import triton

    k, v = torch.rand(2, 2, 3, 9, 4, device=triton_device)
    rows = torch.tensor([[8], [0]], device=triton_device)
    checks = ("test_schema", "test_faketensor")
    path = (rows[1:], 1, rows[1:], rows[1], 1 + rows[1], 7, 1)
    for values in (v, None):
        torch.library.opcheck(triton.commit_path.overload, (k, values, *path), test_utils=checks)
