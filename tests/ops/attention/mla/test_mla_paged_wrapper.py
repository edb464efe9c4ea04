"""MLA attention by plan and run: the arrays of EAGLE's phases, and what comes out against fp64."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.core.errors import UserError
from eagle_kit.ops.attention.mla.paged_wrapper import (
    BatchMLAPagedAttention,
    draft_arrays,
    draft_extend_arrays,
    verify_arrays,
)

LATENT, ROPE = 64, 16


def tensors(*lists):
    return [torch.tensor(values) for values in lists]


def table(batch, pages=64):
    """Page table in which request b has pages 64 b and following."""
    return torch.arange(batch * pages).view(batch, pages)


def pages_of(lens, pages=64):
    return [b * pages + i for b, length in enumerate(lens) for i in range(length)]


def test_plans_of_draft_extend_have_the_accepted_tokens_as_queries():
    accepted, lens = tensors([4, 2], [14, 10])
    arrays = draft_extend_arrays(accepted, lens, table(2), 1)
    assert arrays.qo_indptr.tolist() == [0, 4, 6]
    assert arrays.kv_indptr.tolist() == [0, 14, 24]
    assert arrays.kv_indices.tolist() == pages_of([14, 10])
    assert arrays.kv_len_arr.tolist() == [14, 10]
    assert arrays.causal
    assert all(part.dtype == torch.int32 for part in arrays[:4])


@pytest.mark.parametrize(("steps", "topk"), [(4, 1), (5, 4)])
def test_plans_of_draft_steps_have_one_key_more_from_one_to_the_next(steps, topk):
    """num_steps - 1 decodes of batch * topk queries each."""
    seq_lens = torch.tensor([10, 8])
    for step in range(steps - 1):
        arrays = draft_arrays(seq_lens, step, table(2 * topk), 1, topk)
        lens = [length + step + 1 for length in (10, 8) for _ in range(topk)]
        assert arrays.qo_indptr.tolist() == list(range(2 * topk + 1))
        assert arrays.kv_len_arr.tolist() == lens
        assert arrays.kv_indptr.tolist() == list(itertools.accumulate(lens, initial=0))
        assert arrays.kv_indices.tolist() == pages_of(lens)
        assert not arrays.causal


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_plans_of_verification_count_pages_and_not_keys(page_size):
    arrays = verify_arrays(4, torch.tensor([28, 60, 0]), table(3), page_size)
    counts = [-(-length // page_size) for length in (32, 64, 4)]
    assert arrays.qo_indptr.tolist() == [0, 4, 8, 12]
    assert arrays.kv_len_arr.tolist() == [32, 64, 4]
    assert arrays.kv_indptr.diff().tolist() == counts
    assert arrays.kv_indices.tolist() == pages_of(counts)
    assert arrays.causal


class Case:
    """Random queries and caches; rows that nobody may read are NaN."""

    def __init__(
        self, counts, lens, page_size=1, heads=2, dtype=torch.float32, stored=None, device="cpu", seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        self.counts, self.lens, self.page_size, self.heads, self.dtype = counts, lens, page_size, heads, dtype
        held = [-(-length // page_size) for length in lens]
        pages = torch.randperm(sum(held) + 3, generator=generator)
        rows = torch.full((len(pages) * page_size, LATENT + ROPE), float("nan"))
        self.slots = []
        indices = pages[: sum(held)].split(held)
        for owned, length in zip(indices, lens, strict=True):
            at = torch.arange(length)
            slots = owned[at // page_size] * page_size + at % page_size
            rows[slots] = torch.randn(length, LATENT + ROPE, generator=generator)
            self.slots.append(slots)
        self.cache = rows.to(stored or dtype).view(len(pages), page_size, -1).to(device)
        q = torch.randn(sum(counts), heads, LATENT + ROPE, generator=generator)
        self.q = q.to(dtype).to(device)
        qo, kv = (torch.tensor([0, *parts]).cumsum(0).int() for parts in (counts, held))
        parts = (qo, kv, pages[: sum(held)].int(), torch.tensor(lens, dtype=torch.int32))
        self.arrays = [part.to(device) for part in parts]

    def plan(self, causal=True, backend="reference", **options):
        wrapper = BatchMLAPagedAttention(backend)
        sizes = (self.heads, LATENT, ROPE, self.page_size)
        wrapper.plan(*self.arrays, *sizes, causal, 0.2, self.dtype, self.cache.dtype, **options)
        return wrapper

    @property
    def operands(self):
        return self.q[..., :LATENT], self.q[..., LATENT:], self.cache[..., :LATENT], self.cache[..., LATENT:]

    def expected(self, causal=True, ancestors=None):
        """One query at a time over the keys that it sees."""
        rows, out = self.cache.flatten(0, 1).double().cpu(), []
        for b, (count, length) in enumerate(zip(self.counts, self.lens, strict=True)):
            for i in range(count):
                before = length - count
                seen = list(range(before + i + 1 if causal else length))
                if ancestors is not None:
                    bits = int(ancestors[len(out)])
                    seen = list(range(before)) + [before + j for j in range(count) if bits >> j & 1]
                keys = rows[self.slots[b][seen]]
                p = (self.q[len(out)].double().cpu() @ keys.T * 0.2).softmax(-1)
                out.append(p @ keys[:, :LATENT])
        return torch.stack(out)


CASES = [
    pytest.param(([4, 4], [14, 12]), False, id="not causal"),
    pytest.param(([5, 0, 2, 1], [5, 4, 40, 1]), True, id="a prompt, no queries, windows that are not full"),
    pytest.param(([64], [64]), True, id="the sign bit"),
    pytest.param(([150, 65], [170, 65]), True, id="long", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("sizes", "causal"), CASES)
def test_equals_a_dense_softmax(triton_device, sizes, causal, backend):
    case = Case(*sizes, 3, device=triton_device)
    wrapper = case.plan(causal, backend)
    out = wrapper.run(*case.operands)
    torch.testing.assert_close(out.double().cpu(), case.expected(causal), atol=3e-6, rtol=3e-6)
    apart = wrapper.run(*[part.clone() for part in case.operands])
    torch.testing.assert_close(apart, out, atol=3e-6, rtol=3e-6)
    given = torch.full_like(out, float("nan"))
    assert wrapper.run(*case.operands, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_a_window_has_are_cut_and_a_plan_can_follow_another(causal):
    """129 queries are three windows. The second plan, of other sizes, leaves nothing of the first."""
    wrapper = BatchMLAPagedAttention("reference")
    for counts, lens in (([129, 3], [140, 9]), ([2], [5]), ([65], [65])):
        case = Case(counts, lens, 3)
        wrapper.plan(*case.arrays, case.heads, LATENT, ROPE, 3, causal, 0.2, case.dtype)
        out = wrapper.run(*case.operands)
        torch.testing.assert_close(out.double(), case.expected(causal), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_half_types_and_fp8_caches_in_runs_of_keys(triton_device, monkeypatch, stored):
    from eagle_kit.ops.attention.mla import triton
    from eagle_kit.ops.attention.window.sizes import Parts

    monkeypatch.setattr(triton, "choose_parts", lambda *_: Parts.even(3))
    case = Case([4, 2], [70, 12], 16, 5, torch.bfloat16, stored, triton_device)
    for backend in ("reference", "triton"):
        out = case.plan(True, backend).run(*case.operands)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double().cpu(), case.expected(), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_trees_beyond_what_flashinfer_offers(triton_device, backend):
    """A window of five and one of three, the shorter one with a column of its prefix in the window."""
    ancestors = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101, 0b1, 0b11, 0b101], device=triton_device)
    case = Case([5, 3], [17, 9], 3, device=triton_device)
    out = case.plan(True, backend, ancestors=ancestors).run(*case.operands)
    torch.testing.assert_close(out.double().cpu(), case.expected(True, ancestors), atol=3e-6, rtol=3e-6)
    assert torch.equal(case.plan(False, backend, ancestors=ancestors).run(*case.operands), out)


def test_requests_may_share_pages():
    case = Case([1, 2], [20, 20], 4)
    qo, kv, indices, lens = case.arrays
    indices = torch.cat((indices[:5], indices[:4], indices[9:]))
    case.arrays = [qo, kv, indices, lens]
    case.slots[1] = torch.cat((case.slots[0][:16], case.slots[1][16:]))
    wrapper = case.plan()
    torch.testing.assert_close(wrapper.run(*case.operands).double(), case.expected(), atol=3e-6, rtol=3e-6)
    apart = wrapper.run(*[part.clone() for part in case.operands])
    torch.testing.assert_close(apart.double(), case.expected(), atol=3e-6, rtol=3e-6)


class Counter(TorchDispatchMode):
    """Elements of the largest tensor put together, and whether the host read anything. (The interpreter of
    kernels clones its arguments, so clones are not counted.)"""

    largest, reads = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        self.reads += func in (aten._local_scalar_dense.default, aten.nonzero.default)
        if func in (aten.cat.default, aten.index.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_a_run_neither_reads_on_the_host_nor_copies_caches_that_are_one(triton_device):
    case = Case([4, 2], [33, 12], 16, device=triton_device)
    wrapper = case.plan(True, "triton")
    wrapper.run(*case.operands)
    windows, pages = 2 * 4 * case.heads * (LATENT + ROPE), 4 * 16 * (LATENT + ROPE)
    for operands, largest in ((case.operands, windows), ([part.clone() for part in case.operands], pages)):
        with Counter() as counter:
            wrapper.run(*operands)
        assert counter.reads == 0 and counter.largest == largest


def test_no_request_and_no_query():
    for counts, lens in (([], []), ([0, 0], [0, 5])):
        case = Case(counts, lens)
        assert case.plan().run(*case.operands).shape == (0, 2, LATENT)


@pytest.mark.parametrize(
    ("place", "values"),
    [
        pytest.param(0, [1, 3], id="begins with 1"),
        pytest.param(0, [0, 2], id="fewer requests"),
        pytest.param(0, [0, 6, 7], id="more queries than keys"),
        pytest.param(0, [0, 3, 2], id="falls"),
        pytest.param(1, [0, 5, 20], id="ends behind the pages"),
        pytest.param(3, [5, 12], id="more keys than pages"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(place, values):
    case = Case([1, 2], [5, 6])
    case.arrays[place] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(UserError):
        case.plan()


def test_queries_without_a_key_of_their_request_are_refused():
    case = Case([1, 1], [5, 0])
    for causal in (True, False):
        with pytest.raises(UserError, match="Request 1 has 1 queries, 0 pages of 1 and 0 keys"):
            case.plan(causal)
    assert Case([2], [1]).plan(False), "queries that see the same keys need none of their own"


def test_what_was_not_planned_is_refused():
    case = Case([1, 2], [5, 6])
    wrapper = case.plan()
    q_nope, q_pe, ckv, kpe = case.operands
    for operands in (
        (q_nope[:2], q_pe, ckv, kpe),
        (q_nope, q_pe.half(), ckv, kpe),
        (q_nope, q_pe, ckv, kpe[:-1]),
        (q_nope, q_pe, ckv.half(), kpe),
    ):
        with pytest.raises(UserError, match="was planned"):
            wrapper.run(*operands)
    with pytest.raises(UserError, match="65 nodes"):
        Case([65], [70]).plan(ancestors=torch.ones(65, dtype=torch.int64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("sizes", "causal"), CASES[:2])
def test_a_run_can_be_captured(sizes, causal):
    case = Case(*sizes, 16, 16, torch.bfloat16, device="cuda")
    wrapper = case.plan(causal, "triton")
    expected = wrapper.run(*case.operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(*case.operands)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("counts", "lens", "causal"),
    [
        ([1, 1], [1000, 8], False),
        ([4, 4], [1400, 12], True),
        ([3, 1, 2], [20, 300, 9], True),
    ],
)
def test_flashinfer_stands_in_and_says_the_same(counts, lens, causal, page_size):
    theirs = pytest.importorskip("flashinfer.mla").BatchMLAPagedAttentionWrapper
    device, heads = torch.device("cuda"), 16
    pages = [-(-length // page_size) for length in lens]
    arrays = [torch.tensor([0, *parts]).cumsum(0).int().cuda() for parts in (counts, pages)]
    arrays += [torch.randperm(sum(pages)).int().cuda(), torch.tensor(lens).int().cuda()]
    cache = torch.randn(sum(pages), page_size, 576, device=device, dtype=torch.bfloat16)
    q = torch.randn(sum(counts), heads, 576, device=device, dtype=torch.bfloat16)
    outs = []
    workspace = torch.empty(128 << 20, dtype=torch.int8, device=device)
    for wrapper in (BatchMLAPagedAttention(), theirs(workspace)):
        wrapper.plan(*arrays, heads, 512, 64, page_size, causal, 192**-0.5, torch.bfloat16, torch.bfloat16)
        outs.append(wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-2, rtol=2e-2)
