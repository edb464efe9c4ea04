"""Kernels of the draft head against fp64: sums, order, ties, odd sizes, reads out of bounds."""

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.draft_topk import draft_topk


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN and the largest integers, so that elements that are never written are
    noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(rows, vocab, size, dtype, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * 3 / size**0.5
    return x.to(dtype).to(device), weight.to(dtype).to(device)


def expected_logits(x, weight):
    return x.double() @ weight.double().T


def assert_right(x, weight, topk, ids, scores, atol=2e-5):
    """Assert that scores are those of the ids, and that the ids are the best up to rounding."""
    logits = expected_logits(x, weight)
    distributions = logits - logits.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(scores.double(), distributions.gather(1, ids), rtol=1e-5, atol=atol)
    best = distributions.sort(dim=-1, descending=True).values[:, :topk]
    torch.testing.assert_close(scores.double(), best, rtol=1e-5, atol=atol)
    assert all(len(set(row)) == topk for row in ids.tolist())


# Around the tile of 64 and the row blocks of 16, 32 and 64; sizes around one step of the sum.
SHAPES = [
    (1, 1, 1, 1),
    (3, 16, 16, 16),
    (1, 63, 64, 4),
    (2, 64, 65, 1),
    (16, 65, 37, 10),
    (17, 129, 128, 5),
    (33, 257, 130, 6),
    (65, 131, 64, 1),
]


def assert_best(rows, vocab, size, topk, dtype, device):
    x, weight = make(rows, vocab, size, dtype, device)
    ids, scores = draft_topk(x, weight, topk, backend="triton")
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32 and ids.shape == (rows, topk)
    assert_right(x, weight, topk, ids, scores)


@diagonal(("dtype", DTYPES), ("rows, vocab, size, topk", SHAPES))
def test_the_best_and_their_log_probabilities(triton_device, rows, vocab, size, topk, dtype):
    assert_best(rows, vocab, size, topk, dtype, triton_device)


@pytest.mark.nightly
@SWEEP
@given(
    rows=st.integers(1, 70),
    vocab=st.integers(16, 300),
    size=st.integers(1, 150),
    topk=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
)
def test_the_best_of_any_sizes(triton_device, rows, vocab, size, topk, dtype):
    assert_best(rows, vocab, size, topk, dtype, triton_device)


@pytest.mark.parametrize("topk", [1, 4])
def test_a_chain_needs_no_log_probabilities(triton_device, topk):
    x, weight = make(17, 130, 64, torch.bfloat16, triton_device)
    ids, _ = draft_topk(x, weight, topk, backend="triton")
    unranked, zeros = draft_topk(x, weight, topk, normalized=False, backend="triton")
    assert torch.equal(unranked, ids) and torch.equal(zeros, torch.zeros_like(zeros))


def test_tiles_of_a_large_vocabulary(triton_device):
    x, weight = make(2, 25601, 16, torch.float16, triton_device)  # 201 tiles of 128, the last holds one id
    weight[25600] = 10 * x[1]
    ids, scores = draft_topk(x, weight, 6, backend="triton")
    assert_right(x, weight, 6, ids, scores)
    assert ids[1, 0] == 25600


@crossed(("dtype", DTYPES), ("topk", [1, 5, 16]))
def test_equal_logits_come_in_the_order_of_their_ids(triton_device, topk, dtype):
    """Small integers, so that every implementation has exactly the same logits, and many equal ones."""
    generator = torch.Generator().manual_seed(topk)
    x = torch.randint(-1, 2, (4, 16), generator=generator).to(dtype).to(triton_device)
    weight = torch.randint(-1, 2, (203, 16), generator=generator).to(dtype).to(triton_device)
    x[0] = 0
    ids, scores = draft_topk(x, weight, topk, backend="triton")
    logits = expected_logits(x, weight)
    assert torch.equal(ids, logits.sort(dim=1, descending=True, stable=True).indices[:, :topk])
    theirs, their_scores = draft_topk(x, weight, topk, backend="reference")
    assert torch.equal(ids, theirs)
    torch.testing.assert_close(scores, their_scores)


def test_the_best_may_all_lie_in_one_tile(triton_device):
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=triton_device)
    weight = torch.zeros(300, 16, dtype=torch.bfloat16, device=triton_device)
    weight[100:116, 0] = torch.arange(16, device=triton_device)
    ids, _ = draft_topk(x, weight, 16, backend="triton")
    assert ids.tolist() == [[*range(115, 100, -1), 0]]


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e18])
def test_extreme_logits(triton_device, scale):
    x, weight = make(3, 150, 32, torch.float32, triton_device)
    x = x * scale
    ids, scores = draft_topk(x, weight, 4, backend="triton")
    logits = expected_logits(x, weight)
    assert torch.equal(ids, logits.topk(4).indices)
    distributions = (logits - logits.logsumexp(-1, keepdim=True)).gather(1, ids)
    torch.testing.assert_close(scores.double(), distributions, rtol=1e-5, atol=1e-5 * max(1.0, scale))


def test_ids_go_through_the_map(triton_device):
    x, weight = make(5, 90, 32, torch.bfloat16, triton_device)
    token_map = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:90].to(triton_device)
    ids, scores = draft_topk(x, weight, 3, backend="triton")
    mapped, same = draft_topk(x, weight, 3, token_map=token_map, backend="triton")
    assert torch.equal(mapped, token_map[ids]) and torch.equal(scores, same)


def test_a_row_does_not_depend_on_its_company(triton_device):
    x, weight = make(33, 60, 130, torch.bfloat16, triton_device)
    ids, scores = draft_topk(x, weight, 4, backend="triton")
    for rows in (slice(0, 1), slice(3, 20)):
        alone, alone_scores = draft_topk(x[rows], weight, 4, backend="triton")
        assert torch.equal(alone, ids[rows])
        torch.testing.assert_close(alone_scores, scores[rows], rtol=1e-6, atol=1e-6)


def test_memory_behind_the_tensors_does_not_count(triton_device):
    rows, vocab, size = 3, 70, 21
    x, weight = make(rows, vocab, size, torch.bfloat16, triton_device)
    held_x, held_weight = (torch.full((t.numel() + 9000,), float("nan"), dtype=t.dtype) for t in (x, weight))
    held_x, held_weight = held_x.to(triton_device), held_weight.to(triton_device)
    held_x[: x.numel()], held_weight[: weight.numel()] = x.view(-1), weight.view(-1)
    inside_x, inside_weight = held_x[: x.numel()].view_as(x), held_weight[: weight.numel()].view_as(weight)
    ids, scores = draft_topk(inside_x, inside_weight, 5, backend="triton")
    assert_right(x, weight, 5, ids, scores)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_yields_ids_of_the_vocabulary(triton_device):
    x, weight = make(2, 70, 16, torch.float32, triton_device)
    x[1] = float("nan")
    ids, scores = draft_topk(x, weight, 4, backend="triton")
    assert_right(x[:1], weight, 4, ids[:1], scores[:1])
    assert ((ids >= 0) & (ids < 70)).all()


def test_no_row_and_strided_rows(triton_device):
    x, weight = make(6, 40, 32, torch.bfloat16, triton_device)
    ids, scores = draft_topk(x[:0], weight, 2, backend="triton")
    assert ids.shape == scores.shape == (0, 2)
    ids, scores = draft_topk(x[::2], weight, 2, backend="triton")
    assert_right(x[::2], weight, 2, ids, scores)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x, weight = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(50, 8, dtype=torch.bfloat16)
        ids, scores = draft_topk(x, weight, 4, backend="triton")
        assert ids.shape == scores.shape == (3, 4)
        assert ids.dtype == torch.int64 and scores.dtype == torch.float32


def test_the_operator_is_well_formed(triton_device):
    from eagle_kit.ops.draft_topk import triton

    x, weight = make(2, 40, 16, torch.float32, triton_device)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton.draft_topk.overload, (x, weight, 2, True, None), test_utils=tests)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_ids_are_tokens_whatever_the_logits_hold(triton_device, backend, value):
    device = triton_device if backend == "triton" else "cpu"
    x, weight = make(3, 70, 32, torch.float32, device)
    x[1], weight[5:8, 0] = value, value
    token_map = 1000 + torch.arange(70, device=device)
    ids, _ = draft_topk(x, weight, 4, token_map=token_map, backend=backend)
    assert ((ids >= 1000) & (ids < 1070)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
