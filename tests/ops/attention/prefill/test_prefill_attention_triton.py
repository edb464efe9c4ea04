"""Paged prefill kernel against fp64, request by request and head by head."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance for results of size 1: rounding of the result, and of P to the store's dtype before the second
product."""


def needs_fp8(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")


@dataclass
class Case:
    """Chunks of several requests over a store that holds NaN in all rows that must not be read.

    Attributes:
        chunks: (start, rows) of each request.
        heads: query heads, key heads.
        slack: number of rows by which the host's bound is too large.
    """

    chunks: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 1)
    size: int = 16
    page: int = 16
    first_position: int = 0
    slack: int = 0
    spread: float = 1.0
    slots: list[torch.Tensor] = field(default_factory=list, repr=False)

    def make(self, dtype, device, store=None):
        """``q, k_rows, v_rows, plan``."""
        generator = torch.Generator().manual_seed(5)
        batch, (hq, hkv) = len(self.chunks), self.heads
        starts, counts = (torch.tensor(x) for x in zip(*self.chunks, strict=True))
        pages = -(-int((starts + counts).max()) // self.page)
        table = torch.randperm(pages * batch + 2, generator=generator)[: pages * batch].view(batch, pages)
        k, v = torch.full((2, hkv, (pages * batch + 2) * self.page, self.size), float("nan"))
        for b, (start, count) in enumerate(self.chunks):
            slots = torch.arange(min(self.first_position, start), start + count)
            self.slots.append(table[b, slots // self.page] * self.page + slots % self.page)
            shape = (hkv, len(slots), self.size)
            k[:, self.slots[b]] = torch.randn(shape, generator=generator)
            v[:, self.slots[b]] = torch.randn(shape, generator=generator)
        q = torch.randn(int(counts.sum()), hq, self.size, generator=generator) * self.spread
        plan = PrefillPlan(
            page_tables=table.to(device),
            page_size=self.page,
            cu_rows=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(device),
            starts=starts.to(device),
            first_position=self.first_position,
            max_rows=int(counts.max()) + self.slack,
        )
        store = store or dtype
        return q.to(dtype).to(device), k.to(store).to(device), v.to(store).to(device), plan

    def expected(self, q, k, v, scale):
        """In fp64, on the CPU."""
        q, k, v = (x.cpu().double() for x in (q, k.float(), v.float()))
        out, group, row = torch.empty_like(q), q.shape[1] // k.shape[0], 0
        for (start, count), rows in zip(self.chunks, self.slots, strict=True):
            first = min(self.first_position, start)
            for position in range(start, start + count):
                low = min(self.first_position, position)
                mine = rows[low - first : position + 1 - first]
                for head in range(q.shape[1]):
                    p = (k[head // group, mine] @ q[row, head] * scale).softmax(-1)
                    out[row, head] = p @ v[head // group, mine]
                row += 1
        return out


def assert_equals_fp64(case, dtype, device):
    case = replace(case, slots=[])
    q, k, v, plan = case.make(dtype, device)
    scale = case.size**-0.5
    out = paged_prefill_attention(q, k, v, plan, scale, backend="triton")
    exact = case.expected(q, k, v, scale)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    theirs = paged_prefill_attention(q, k, v, plan, scale, backend="reference")
    torch.testing.assert_close(theirs.double().cpu(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was)


@diagonal(
    ("dtype", TOLERANCE),
    (
        "case",
        [
            pytest.param(Case(((0, 1),), heads=(1, 1)), id="one token"),
            pytest.param(
                Case(((0, 3), (64, 1), (63, 2)), heads=(3, 1), page=1), id="short chunks, page of 1"
            ),
            pytest.param(
                Case(((1, 61), (1, 5)), (2, 2), page=64, first_position=1, slack=40),
                id="page of 64, no group",
            ),
            pytest.param(
                Case(((70, 67), (0, 0), (5, 33)), heads=(5, 1), page=3, first_position=1), id="page of 3"
            ),
            pytest.param(
                Case(((0, 5), (0, 1)), heads=(2, 1), first_position=1), id="the empty slot sees itself"
            ),
            pytest.param(Case(((190, 9),), heads=(16, 1), size=80), id="group of 16, size 80"),
            pytest.param(Case(((0, 130),), heads=(2, 1), size=64, page=32), id="more than a tile"),
            pytest.param(Case(((50, 20),), heads=(3, 1), size=128, page=128), id="size 128, page of 128"),
            pytest.param(Case(((0, 40),), heads=(2, 1), size=256), id="size 256"),
        ],
    ),
)
def test_the_kernel_equals_fp64(triton_device, dtype, case):
    assert_equals_fp64(case, dtype, triton_device)


@st.composite
def cases(draw) -> Case:
    kv_heads = draw(st.integers(1, 2))
    chunk = st.tuples(st.integers(0, 150), st.integers(0, 80))
    chunks = draw(st.lists(chunk, min_size=1, max_size=3).filter(lambda found: any(n for _, n in found)))
    return Case(
        chunks=tuple(chunks),
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        size=draw(st.sampled_from((16, 24, 64, 80))),
        page=draw(st.sampled_from((1, 3, 16, 64))),
        first_position=draw(st.integers(0, 1)),
        slack=draw(st.sampled_from((0, 40))),
    )


@SWEEP
@given(case=cases(), dtype=st.sampled_from(list(TOLERANCE)))
def test_the_kernel_equals_fp64_for_any_case(triton_device, case, dtype):
    assert_equals_fp64(case, dtype, triton_device)


@crossed(("dtype", TOLERANCE), ("rows", [pytest.param(5, id="few rows"), pytest.param(45, id="a full tile")]))
def test_an_fp8_store_is_scaled(triton_device, dtype, rows):
    needs_fp8(triton_device)
    case = Case(((70, rows), (0, 2)), heads=(4, 2), first_position=1)
    q, k, v, plan = case.make(dtype, triton_device, FP8)
    exact = case.expected(q, k, v, 0.1) * 3
    tolerance = 3 * max(TOLERANCE[dtype], 0 if dtype == torch.float32 else 2e-3)
    for name in ("triton", "reference"):
        out = paged_prefill_attention(q, k, v, plan, 0.2, k_scale=0.5, v_scale=3.0, backend=name)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double().cpu(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spread", [0.0, 300.0], ids=["ties", "huge scores"])
def test_extreme_scores_and_strided_inputs(triton_device, spread):
    case = Case(((30, 50),), heads=(2, 1), spread=spread)
    q, k, v, plan = case.make(torch.float32, triton_device)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    plan = replace(plan, page_tables=plan.page_tables.repeat(2, 1).t().contiguous().t()[:1])
    out = paged_prefill_attention(strided, k, v, plan, 1.0, backend="triton").double().cpu()
    torch.testing.assert_close(out, case.expected(q, k, v, 1.0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_padding_get_zeros_and_their_pages_are_not_read(triton_device, dtype):
    """A request of padding without rows, and one of more rows than a tile has."""
    case = Case(((5, 3), (0, 7)), heads=(4, 2))
    q, k, v, plan = case.make(dtype, triton_device)
    exact = case.expected(q, k, v, 0.25)
    num_padded = 140
    no_pages = torch.full_like(plan.page_tables, 10**6)
    padded = replace(
        plan,
        page_tables=torch.cat((plan.page_tables, no_pages)),
        cu_rows=torch.cat((plan.cu_rows, plan.cu_rows[-1:], plan.cu_rows[-1:] + num_padded)),
        starts=torch.cat((plan.starts, torch.full_like(plan.starts, -1))),
        max_rows=len(q) + num_padded,
    )
    queries = torch.cat((q, torch.full_like(q[:1], float("nan")).expand(num_padded, -1, -1)))
    for name in ("triton", "reference"):
        out = paged_prefill_attention(queries, k, v, padded, 0.25, backend=name).double().cpu()
        torch.testing.assert_close(out[: len(q)], exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(out[len(q) :], torch.zeros(num_padded, 4, 16, dtype=torch.float64))


def test_no_row(triton_device):
    q, k, v, plan = Case(((3, 2),)).make(torch.float32, triton_device)
    empty = replace(plan, cu_rows=plan.cu_rows * 0, max_rows=0)
    for name in ("triton", "reference"):
        assert paged_prefill_attention(q[:0], k, v, empty, 1.0, backend=name).shape == (0, 4, 16)


def test_fake_tensors_pass(triton_device):
    from eagle_kit.ops.attention.prefill.triton import paged_prefill_attention_op

    q, k, v, p = Case(((40, 2),)).make(torch.bfloat16, triton_device)
    args = (
        q,
        k,
        v,
        p.page_tables,
        p.page_size,
        p.cu_rows,
        p.starts,
        p.first_position,
        p.max_rows,
        0.25,
        1.0,
        [0, 0],
        None,
        None,
    )
    torch.library.opcheck(
        paged_prefill_attention_op.overload, args, test_utils=("test_schema", "test_faketensor")
    )
    with FakeTensorMode() as mode:
        names = ("page_tables", "cu_rows", "starts")
        fake = replace(p, **{name: mode.from_tensor(getattr(p, name)) for name in names})
        tensors = (mode.from_tensor(x) for x in (q, k, v))
        out = paged_prefill_attention(*tensors, fake, 0.25, backend="triton")
        assert out.shape == q.shape and out.dtype == q.dtype
