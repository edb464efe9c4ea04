"""Window attention kernel against fp64, request by request and head by head."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from eagle_kit.ops.capability import facts_of
from eagle_kit.ops.tree_build.masks import tree_mask

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance for results of size 1: rounding of the result, and of P to the store's dtype before the second
product."""


def needs_fp8(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")


@dataclass
class Case:
    """Batch whose store holds NaN in all rows that must not be read.

    Attributes:
        prefixes: prefix length of each request.
        nodes, keys: queries and window keys; the queries are the last ones.
        heads: query heads, key heads.
    """

    prefixes: tuple[int, ...]
    nodes: int = 1
    keys: int = 0
    heads: tuple[int, int] = (4, 1)
    size: int = 16
    page: int = 16
    first_position: int = 0
    spread: float = 1.0
    seed: int = 0
    rows: list[torch.Tensor] = field(default_factory=list, repr=False)

    def make(self, dtype, device, store=None):
        """``q, k_rows, v_rows, plan``."""
        generator = torch.Generator().manual_seed(self.seed)
        keys, batch, (hq, hkv) = self.keys or self.nodes, len(self.prefixes), self.heads
        columns = max(self.prefixes) + keys
        pages = -(-columns // self.page)
        table = torch.randperm(pages * batch + 3, generator=generator)[: pages * batch].view(batch, pages)
        stride, start = keys + 2, (pages * batch + 3) * self.page
        k, v = torch.full((2, hkv, start + batch * stride + 1, self.size), float("nan"))
        parents = torch.zeros(batch, keys, dtype=torch.int64)
        for node in range(1, keys):
            parents[:, node] = torch.randint(0, node, (batch,), generator=generator)
        for b, prefix in enumerate(self.prefixes):
            slots = torch.arange(min(self.first_position, prefix), prefix)
            pool = table[b, slots // self.page] * self.page + slots % self.page
            self.rows.append(torch.cat((pool, start + b * stride + torch.arange(keys))))
            shape = (hkv, len(self.rows[b]), self.size)
            k[:, self.rows[b]] = torch.randn(shape, generator=generator)
            v[:, self.rows[b]] = torch.randn(shape, generator=generator)
        plan = WindowPlan(
            page_table=table.to(device),
            page_size=self.page,
            prefix_lens=torch.tensor(self.prefixes).to(device),
            first_position=self.first_position,
            scratch_start=start,
            scratch_stride=stride,
            num_keys=keys,
            ancestors=ancestor_bits(parents, keys)[:, keys - self.nodes :].to(device),
            num_columns=columns,
            dummy_row=start - 1,
            dtype=dtype,
        )
        q = torch.randn(batch, self.nodes, hq, self.size, generator=generator) * self.spread
        store = store or dtype
        return q.to(dtype).to(device), k.to(store).to(device), v.to(store).to(device), plan

    def expected(self, q, k, v, plan, scale):
        """In fp64, on the CPU."""
        q, k, v = (x.cpu().double() for x in (q, k.float(), v.float()))
        out, group = torch.empty_like(q), q.shape[2] // k.shape[0]
        for b, rows in enumerate(self.rows):
            prefix = len(rows) - plan.num_keys
            bits = plan.ancestors[b : b + 1].cpu()
            seen = tree_mask(bits, "full", [prefix], num_keys=plan.num_keys).view(self.nodes, -1)
            for head in range(q.shape[2]):
                scores = q[b, :, head] @ k[head // group, rows].t() * scale
                out[b, :, head] = (
                    scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[head // group, rows]
                )
        return out


def assert_close(ours, exact, dtype):
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double().cpu(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def assert_equals_fp64(case, dtype, device):
    case = replace(case, rows=[])
    q, k, v, plan = case.make(dtype, device)
    scale = case.size**-0.5
    out = window_attention(q, k, v, plan, scale, backend="triton")
    assert_close(out, case.expected(q, k, v, plan, scale), dtype)


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
            pytest.param(Case((0,), heads=(1, 1)), id="nothing but itself"),
            pytest.param(Case((1, 63, 64, 65), heads=(2, 1)), id="decode around block borders"),
            pytest.param(
                Case((5, 129), 5, heads=(6, 2), page=1, size=24), id="page of 1, group of 3, odd size"
            ),
            pytest.param(Case((200,), 7, heads=(3, 3), page=64, first_position=1), id="page of 64, no group"),
            pytest.param(
                Case((1, 97), 3, heads=(5, 1), page=3, first_position=1), id="page of 3, first slot empty"
            ),
            pytest.param(Case((0, 70, 131), 2, 9, page=32), id="a window that grows"),
            pytest.param(Case((190,), 16, heads=(4, 1), size=80), id="64 rows, size 80"),
            pytest.param(Case((66,), 64, heads=(2, 1), size=64), id="a full window"),
            pytest.param(Case((130,), 9, heads=(16, 1), size=96), id="group of 16, two tiles"),
            pytest.param(Case((67,), 2, heads=(2, 1), size=128, page=128), id="size 128, page of 128"),
            pytest.param(Case((45,), 3, heads=(8, 1), size=256), id="size 256"),
        ],
    ),
)
def test_the_kernel_equals_fp64(triton_device, dtype, case):
    assert_equals_fp64(case, dtype, triton_device)


@st.composite
def cases(draw) -> Case:
    keys = draw(st.integers(1, 64))
    kv_heads = draw(st.integers(1, 2))
    return Case(
        prefixes=tuple(draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))),
        nodes=draw(st.integers(1, keys)),
        keys=keys,
        heads=(kv_heads * draw(st.integers(1, 4)), kv_heads),
        size=draw(st.sampled_from((16, 24, 64, 80))),
        page=draw(st.sampled_from((1, 3, 16, 64))),
        first_position=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.nightly
@SWEEP
@given(case=cases(), dtype=st.sampled_from(list(TOLERANCE)))
def test_the_kernel_equals_fp64_for_any_case(triton_device, case, dtype):
    assert_equals_fp64(case, dtype, triton_device)


@crossed(
    ("dtype", TOLERANCE),
    (
        "case",
        [
            pytest.param(Case((0, 130, 64), 3, page=16, first_position=1), id="few rows"),
            pytest.param(Case((140,), 16, heads=(8, 2), size=32, page=64), id="64 rows, page of 64"),
        ],
    ),
)
def test_an_fp8_store_is_scaled(triton_device, dtype, case):
    needs_fp8(triton_device)
    case = replace(case, rows=[])
    q, k, v, plan = case.make(dtype, triton_device, FP8)
    out = window_attention(q, k, v, plan, 0.2, k_scale=0.5, v_scale=3.0, backend="triton")
    exact = case.expected(q, k, v, plan, 0.1) * 3
    assert out.dtype == dtype
    tolerance = 3 * max(TOLERANCE[dtype], 0 if dtype == torch.float32 else 2e-3)
    torch.testing.assert_close(out.double().cpu(), exact, rtol=tolerance, atol=tolerance)
    finite = [torch.where(x.float().isnan(), 0.0, x.float()).to(FP8) for x in (k, v)]  # it multiplies padding
    for name in ("reference", None):
        with torch.inference_mode():
            theirs = window_attention(q, *finite, plan, 0.2, k_scale=0.5, v_scale=3.0, backend=name)
        torch.testing.assert_close(out, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "splits",
    [
        1,
        2,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 5, 17)),
        pytest.param(128, marks=pytest.mark.essential),
    ],
)
def test_any_number_of_parts_gives_the_same(triton_device, splits):
    from eagle_kit.ops.attention.window.triton import window_attention_op

    case = Case((0, 300, 1, 128), 2, heads=(2, 1), first_position=1)
    q, k, v, p = case.make(torch.float32, triton_device)
    out = window_attention_op(
        *(q, k, v, p.page_table, p.page_size, p.prefix_lens, p.first_position, p.scratch_start),
        *(
            p.scratch_stride,
            p.num_keys,
            p.words,
            p.num_columns,
            0.25,
            2.0,
            [0, 0],
            None,
            None,
            None,
            splits,
        ),
    )
    assert_close(out / 2, case.expected(q, k, v, p, 0.25), torch.float32)


class _Order:
    """Order of the interpreter's programs: parts of the keys are taken by ``order`` instead of by number."""

    def __init__(self, monkeypatch):
        from triton.runtime.interpreter import InterpreterBuilder

        self.order = lambda part, count: part
        plain = InterpreterBuilder.set_grid_idx

        def set_grid_idx(builder, x, y, z):
            plain(builder, x, self.order(y, builder.grid_dim[1]), z)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)


@crossed(
    (
        "splits",
        [
            2,
            *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 5)),
            17,
            pytest.param(128, marks=pytest.mark.nightly),
        ],
    ),
    (
        "case",
        [
            pytest.param(Case((0, 300, 1, 128), 2, heads=(2, 1), first_position=1), id="few rows"),
            pytest.param(Case((290, 20), 3, heads=(10, 2), size=24), id="a block of 15 rows"),
        ],
    ),
)
def test_the_last_program_merges_all_parts_in_their_order(triton_device, monkeypatch, case, splits):
    """Whichever program is the last, the bits are the same; counters are 0 again for the next launch. New
    memory is NaN, so a part that was read before it was written would show."""
    from eagle_kit.ops.attention.window.sizes import Parts, are_merged
    from eagle_kit.ops.attention.window.triton import window_attention_op

    case = replace(case, rows=[])
    q, k, v, p = case.make(torch.float32, triton_device)
    rows = case.nodes * case.heads[0] // case.heads[1]
    assert splits > 17 or are_merged(Parts.even(splits), rows * case.size)
    arrivals = torch.zeros(99, dtype=torch.int32, device=triton_device)
    found = []
    order = _Order(monkeypatch) if triton_device == "cpu" else None
    for each in (
        lambda part, count: part,
        lambda part, count: count - 1 - part,
        lambda part, count: (part + count // 2) % count,
    ):
        if order is not None:
            order.order = each
        found.append(
            window_attention_op(
                *(q, k, v, p.page_table, p.page_size, p.prefix_lens, p.first_position, p.scratch_start),
                *(p.scratch_stride, p.num_keys, p.words, p.num_columns, 0.25, 2.0, [0, 0], None, None),
                *(arrivals, splits),
            )
        )
        assert not arrivals.any()
    assert_close(found[0] / 2, case.expected(q, k, v, p, 0.25), torch.float32)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_wide_windows_are_merged_by_a_launch_of_their_own():
    """A program reads at most 128 KB of partial results, or 1 MB of a long request."""
    pytest.importorskip("triton")
    from eagle_kit.ops.attention.window.sizes import Parts, are_merged, choose_blocks, few_enough, merged_rows

    def rows_at_once(rows):
        return merged_rows(rows, 128, choose_blocks(rows, 128, 2, 2, facts_of(90)))[0]

    assert [rows_at_once(rows) for rows in (1, 4, 16, 64)] == [1, 4, 2, 2]
    assert [are_merged(Parts.even(splits), 4 * 128) for splits in (64, 65)] == [True, False]
    assert [are_merged(Parts.even(splits), 64 * 128) for splits in (4, 5)] == [True, False]
    assert [are_merged(Parts(4, most, 4096), 64 * 128) for most in (32, 33)] == [True, False]
    wide, rows_of_16, rows_of_64 = Parts(33, 33, 4096), 16 * 128, 64 * 128
    assert few_enough(wide, 8, 8192, rows_of_16) == (16, 16, 4096)  # 128 programs: nearly one on each of 132
    assert few_enough(wide, 8, 8192, rows_of_64) == wide  # 32 programs would leave most of them idle
    assert few_enough(wide, 8, 131072, rows_of_16) == (16, 32, 4096)  # a long request keeps its parts
    assert few_enough(Parts(5, 5, 4096), 8, 8192, rows_of_16) == (5, 5, 4096)


def on_multiprocessors(monkeypatch, count):
    """Let the kernels take their parts for a GPU of so many multiprocessors."""
    from eagle_kit.ops.attention.window import triton as kernels

    facts = facts_of(90)._replace(multiprocessors=count)
    monkeypatch.setattr(kernels, "device_facts", lambda device: facts)


@pytest.mark.parametrize("counters", [0, 99], ids=["a second launch", "the last program"])
def test_a_long_request_has_more_parts_than_the_others(triton_device, monkeypatch, counters):
    from eagle_kit.ops.attention.window import triton as kernels
    from eagle_kit.ops.attention.window.sizes import Parts

    case = Case((0, 60, 300, 700), 2, heads=(2, 1), first_position=1)
    q, k, v, plan = case.make(torch.float32, triton_device)
    plan = replace(plan, arrivals=torch.zeros(counters, dtype=torch.int32, device=triton_device))
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts(2, 6, 128))
    out = window_attention(q, k, v, plan, 0.25, backend="triton")
    assert_close(out, case.expected(q, k, v, plan, 0.25), torch.float32)
    assert not plan.arrivals.any()


def test_a_full_batch_is_not_cut_for_the_sake_of_a_long_bound(triton_device, monkeypatch):
    """The parts of short requests are those of a short bound, to the bit; partial results would cost as many
    bytes as the keys."""
    on_multiprocessors(monkeypatch, 1)
    case = Case((300, 40, 500, 7), 2)
    q, k, v, plan = case.make(torch.float32, triton_device)
    plan = replace(plan, arrivals=torch.zeros(99, dtype=torch.int32, device=triton_device))
    out = window_attention(q, k, v, replace(plan, num_columns=131072), 1.0, backend="triton")
    short = window_attention(q, k, v, replace(plan, num_columns=502), 1.0, backend="triton")
    first = {name: getattr(plan, name)[:1] for name in ("page_table", "prefix_lens", "ancestors")}
    cut = window_attention(q[:1], k, v, replace(plan, **first), 1.0, backend="triton")
    assert torch.equal(out, short)
    assert not torch.equal(cut, out[:1]), "alone, the first request has parts"


def test_it_equals_the_reference_on_expanded_and_strided_plans(triton_device):
    case = Case((70, 70), 4, heads=(4, 2))
    q, k, v, plan = case.make(torch.float32, triton_device)
    k, v = k.nan_to_num(), v.nan_to_num()
    wide = torch.cat((plan.page_table, plan.page_table), 1)
    for changed in (
        replace(plan, ancestors=plan.ancestors[:1].expand(2, -1), prefix_lens=plan.prefix_lens[:1].expand(2)),
        replace(plan, page_table=wide[:, : plan.page_table.shape[1]]),
        replace(plan, page_table=plan.page_table.t().contiguous().t(), num_columns=4096),
    ):
        ours, theirs = (
            window_attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, changed, 0.3, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 300.0], ids=["ties", "huge scores"])
def test_extreme_scores(triton_device, spread):
    case = Case((150,), 3, heads=(2, 1), spread=spread)
    q, k, v, plan = case.make(torch.float32, triton_device)
    out = window_attention(q, k, v, plan, 1.0, backend="triton").double().cpu()
    torch.testing.assert_close(out, case.expected(q, k, v, plan, 1.0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [80, 1000], ids=["one part", "parts"])
def test_a_node_that_sees_nothing_gets_zeros(triton_device, columns):
    case = Case((0, 1), 64, heads=(1, 1), first_position=1)
    q, k, v, plan = case.make(torch.float32, triton_device)
    bits = plan.ancestors.clone()
    bits[:, 5] = 0
    bits[1, 63] = -(2**63)  # itself alone
    plan = replace(plan, ancestors=bits, num_columns=columns)
    out = window_attention(q, k, v, plan, 1.0, backend="triton")
    assert out.isfinite().all() and not out[:, 5].any() and out[:, 6].all()
    torch.testing.assert_close(out[1, 63, 0], v[0, case.rows[1][-1].item()])


def test_equal_sizes_are_computed_alike_whatever_the_company(triton_device):
    case = Case((300, 40), 2)
    q, k, v, plan = case.make(torch.float32, triton_device)
    out = window_attention(q, k, v, plan, 1.0, backend="triton")
    names = ("page_table", "prefix_lens", "ancestors")
    same = replace(plan, scratch_stride=0, **{name: getattr(plan, name)[[0, 0]] for name in names})
    twice = window_attention(q[[0, 0]], k, v, same, 1.0, backend="triton")
    assert torch.equal(twice[0], out[0]) and torch.equal(twice[1], out[0])


def test_the_number_of_parts_fills_the_machine_and_stays_small():
    pytest.importorskip("triton")
    from eagle_kit.ops.attention.window.sizes import choose_blocks, choose_parts

    def parts(batch, columns, rows, kv_heads=8, sms=132):
        return choose_parts(batch, kv_heads, columns, rows, choose_blocks(rows, 128, 2, 2, facts_of(90)), sms)

    assert parts(1, 128, 4).most == 1  # too short to be cut
    assert 128 <= 8 * parts(1, 32768, 4).usual <= 2 * 132  # one request fills all multiprocessors
    assert parts(64, 1024, 4).most == 1  # a full batch needs no merge
    assert parts(8, 131072, 4) == (4, 32, 4096)  # one long request must not keep the others waiting
    assert parts(64, 8192, 4) == (1, 2, 4096)
    assert parts(64, 131072, 4) == (1, 8, 16384)  # 16 rounds of programs, most of which find nothing
    assert parts(1, 2**20, 4, kv_heads=1).most == 128
    assert parts(0, 4096, 4).usual >= 1
    assert parts(4, 8192, 4, sms=66).usual < parts(4, 8192, 4).usual
    for rows in (4, 32, 64, 128, 256):
        for batch in (1, 3, 8, 40, 200):
            for columns in (64, 1000, 4096, 70000, 131072):
                usual, most, longest = parts(batch, columns, rows)
                assert 1 <= usual <= most and most * longest >= columns
                assert most == 1 or columns / most >= min(128, rows)


def test_no_request_and_no_node(triton_device):
    q, k, v, plan = Case((3,), 2).make(torch.float32, triton_device)
    none = replace(
        plan, page_table=plan.page_table[:0], prefix_lens=plan.prefix_lens[:0], ancestors=plan.ancestors[:0]
    )
    assert window_attention(q[:0], k, v, none, 1.0, backend="triton").shape == (0, 2, 4, 16)
    assert window_attention(q[:, :0], k, v, plan, 1.0, backend="triton").shape == (1, 0, 4, 16)


def test_fake_tensors_pass(triton_device):
    from eagle_kit.ops.attention.window.triton import window_attention_op

    q, k, v, p = Case((40,), 2).make(torch.bfloat16, triton_device)
    args = (
        *(q, k, v, p.page_table, p.page_size, p.prefix_lens, p.first_position, p.scratch_start),
        *(p.scratch_stride, p.num_keys, p.words, p.num_columns, 0.25, 1.0, [0, 0], None, None),
        None,
    )
    torch.library.opcheck(window_attention_op.overload, args, test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode() as mode:
        fake = replace(
            p,
            **{
                name: mode.from_tensor(getattr(p, name))
                for name in ("page_table", "prefix_lens", "ancestors")
            },
        )
        out = window_attention(*(mode.from_tensor(x) for x in (q, k, v)), fake, 0.25, backend="triton")
        assert out.shape == q.shape and out.dtype == q.dtype
