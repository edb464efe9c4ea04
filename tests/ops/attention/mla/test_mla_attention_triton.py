"""Kernels of MLA window attention against a softmax in fp64, and their fake implementation."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.mla.sizes import MLABlocks
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, chain_bits
from eagle_kit.ops.attention.window import sizes as window_sizes
from eagle_kit.ops.attention.window.sizes import Parts
from eagle_kit.ops.capability import facts_of

LATENT, ROPE = 64, 16
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance relative to the largest value. In half dtypes probabilities and results are rounded."""


@pytest.fixture
def kernels(triton_device):
    """Kernel module, with uninitialised memory poisoned."""
    from eagle_kit.ops.attention.mla import triton

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield triton
    torch.use_deterministic_algorithms(False)


@dataclasses.dataclass
class Case:
    """Requests with the given prefixes, windows of ``keys`` nodes and queries for the last ``nodes`` of them;
    rows that must not be read are NaN."""

    prefix: tuple[int, ...]
    nodes: int
    keys: int
    heads: int
    page_size: int = 16
    first_position: int = 0
    columns: int = 256
    chain: bool = False
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    seed: int = 0

    def build(self, device):
        generator = torch.Generator().manual_seed(self.seed)
        batch, pages = len(self.prefix), -(-max(self.prefix) // self.page_size) + 1
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages)
        parents = torch.zeros(batch, self.keys, dtype=torch.int64)
        for node in range(1, self.keys):
            parents[:, node] = torch.randint(0, node, (batch,), generator=generator)
        bits = ancestor_bits(parents, self.keys)
        if self.chain:
            bits = chain_bits(self.keys, bits.device).expand(batch, -1)
        scratch, stride = batch * pages * self.page_size, self.keys + 3
        rows = torch.full((scratch + batch * stride, LATENT + ROPE), float("nan"))
        for b, length in enumerate(self.prefix):
            slots = torch.arange(self.first_position, max(length, self.first_position))
            at = table[b, slots // self.page_size] * self.page_size + slots % self.page_size
            rows[at] = torch.randn(len(at), LATENT + ROPE, generator=generator)
            window = slice(scratch + b * stride, scratch + b * stride + self.keys)
            rows[window] = torch.randn(self.keys, LATENT + ROPE, generator=generator)
            table[b, -(-length // self.page_size) :] = table[b, pages - 1]  # a page of NaN
        plan = WindowPlan(
            page_table=table.to(device),
            page_size=self.page_size,
            prefix_lens=torch.tensor(self.prefix, device=device),
            first_position=self.first_position,
            scratch_start=scratch,
            scratch_stride=stride,
            num_keys=self.keys,
            ancestors=bits[:, self.keys - self.nodes :].to(device),
            num_columns=self.columns,
            dummy_row=scratch,
            dtype=self.dtype,
        )
        q = torch.randn(batch, self.nodes, self.heads, LATENT + ROPE, generator=generator).to(self.dtype)
        return q.to(device), rows.to(self.stored or self.dtype).to(device), plan


def dense(q, rows, plan, scale, kv_scale=1.0):
    """Attention of one request and node at a time to its visible rows."""
    out = torch.zeros(*q.shape[:3], LATENT, dtype=torch.float64)
    table, bits = plan.page_table.tolist(), plan.ancestors.tolist()
    q, rows = q.double().cpu(), rows.cpu().double() * kv_scale
    for b, length in enumerate(plan.prefix_lens.tolist()):
        size = plan.page_size
        prefix = [table[b][slot // size] * size + slot % size for slot in range(plan.first_position, length)]
        first = plan.scratch_start + b * plan.scratch_stride
        for node in range(q.shape[1]):
            seen = prefix + [first + j for j in range(plan.num_keys) if bits[b][node] >> j & 1]
            if seen:
                keys = rows[seen]
                out[b, node] = (q[b, node] @ keys.T * scale).softmax(-1) @ keys[:, :LATENT]
    return out


def check(q, rows, plan, tolerance, scale=0.11, kv_scale=1.0):
    out = mla_window_attention(q, rows, plan, scale, kv_scale=kv_scale, latent_dim=LATENT, backend="triton")
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], LATENT)
    expected = dense(q, rows, plan, scale, kv_scale)
    error = (out.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert error <= tolerance, error  # NaN fails too
    return out


@diagonal(
    ("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    (
        "case",
        [
            pytest.param(Case((0,), 1, 1, 1, page_size=1), id="one row and one key"),
            pytest.param(Case((0, 1, 2), 3, 3, 2, first_position=1), id="prefixes around the first slot"),
            pytest.param(Case((129, 5, 64), 1, 1, 16), id="decode"),
            pytest.param(
                Case((70, 3), 4, 12, 8, page_size=64, first_position=1),
                id="a draft step, queries behind keys",
            ),
            pytest.param(Case((31, 130, 77), 7, 7, 5, page_size=3), id="primes"),
            pytest.param(Case((63,), 1, 1, 128, page_size=1, columns=64), id="128 heads"),
            pytest.param(Case((30,), 64, 64, 1, chain=True), id="the last bit is the sign"),
        ],
    ),
)
def test_equals_a_dense_softmax(triton_device, kernels, case, dtype):
    q, rows, plan = dataclasses.replace(case, dtype=dtype).build(triton_device)
    check(q, rows, plan, TOLERANCE[dtype])


@st.composite
def cases(draw) -> Case:
    keys = draw(st.integers(1, 64))
    prefix = tuple(draw(st.lists(st.integers(0, 190), min_size=1, max_size=2)))
    return Case(
        prefix=prefix,
        nodes=draw(st.integers(1, min(keys, 5))),
        keys=keys,
        heads=draw(st.sampled_from((1, 3, 16))),
        page_size=draw(st.sampled_from((1, 3, 16, 64))),
        first_position=draw(st.integers(0, 1)),
        chain=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.nightly
@SWEEP
@given(case=cases())
def test_equals_a_dense_softmax_for_any_case(triton_device, kernels, case):
    q, rows, plan = case.build(triton_device)
    check(q, rows, plan, TOLERANCE[case.dtype])


@crossed(
    ("swapped", [pytest.param(False, id="plain"), pytest.param(True, id="swapped")]),
    ("queries, keys, splits", [(16, 64, 1), (32, 32, 3), (64, 64, 1), (64, 64, 2), (16, 16, 5)]),
)
def test_every_form_tile_and_number_of_runs(
    triton_device, kernels, monkeypatch, queries, keys, splits, swapped
):
    monkeypatch.setattr(kernels, "choose_blocks", lambda *_: MLABlocks(queries, keys, swapped, 4, 2))
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts.even(splits))
    q, rows, plan = Case((150, 0), 5, 5, 4, seed=3).build(triton_device)
    check(q, rows, plan, TOLERANCE[torch.float32])


@crossed(
    ("queries, swapped", [(16, True), (16, False), (32, True)]),
    (
        "case, splits",
        [
            (Case((150, 0, 60), 5, 5, 4), 3),  # three, one and two runs
            (Case((400, 129), 1, 1, 2, first_position=1), 7),
            (Case((300, 20), 6, 9, 8, page_size=3, dtype=torch.bfloat16), 4),
        ],
    ),
)
def test_the_last_program_of_a_block_adds_up_its_runs_as_a_second_launch_does(
    triton_device, kernels, monkeypatch, case, splits, queries, swapped
):
    """The counters are 0 again afterwards, no second launch is needed, and programs do not race."""
    from races import detect_races

    monkeypatch.setattr(kernels, "choose_blocks", lambda *_: MLABlocks(queries, 32, swapped, 4, 2))
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts.even(splits))
    monkeypatch.setattr(kernels, "few_enough", lambda parts, *_: parts)
    q, rows, plan = case.build(triton_device)
    expected = check(q, rows, plan, TOLERANCE[case.dtype])
    monkeypatch.setattr(kernels, "_merge", None)
    counters = torch.zeros(99, dtype=torch.int32, device=triton_device)
    counted = dataclasses.replace(plan, arrivals=counters)
    with detect_races() if triton_device == "cpu" else nullcontext():
        for _ in range(2):
            assert torch.equal(check(q, rows, counted, TOLERANCE[case.dtype]), expected)
            assert not counters.any()


def test_wide_blocks_are_added_up_by_a_second_launch(triton_device, kernels, monkeypatch):
    """64 query rows of 512 in two runs are 256 KB; and fewer counters than blocks are not used."""
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts.even(2))
    monkeypatch.setattr(window_sizes, "MERGED_NUMBERS", 2 * 16 * LATENT - 1)
    counters = torch.zeros(99, dtype=torch.int32, device=triton_device)
    q, rows, plan = Case((150,), 4, 4, 4).build(triton_device)
    monkeypatch.setattr(kernels, "_merge", None)
    for usable in (counters, counters[:0]):
        with pytest.raises(TypeError, match="NoneType"):
            check(q, rows, dataclasses.replace(plan, arrivals=usable), TOLERANCE[torch.float32])


@crossed(("dtype", [torch.bfloat16, torch.float16]), ("heads", [1, 24]))
def test_fp8_rows_are_scaled(triton_device, kernels, dtype, heads):
    case = Case((70, 0, 33), 2, 3, heads, dtype=dtype, stored=torch.float8_e4m3fn)
    q, rows, plan = case.build(triton_device)
    check(q, rows, plan, TOLERANCE[dtype], kv_scale=0.375)


@crossed(("splits", [1, 3]), ("nodes, heads", [(1, 16), (4, 8), (4, 24)]))
def test_a_block_of_query_rows_loads_each_key_once(triton_device, kernels, monkeypatch, nodes, heads, splits):
    """Up to 32 query rows, which are one block, read each latent of a window once, and no other row."""
    if triton_device != "cpu":
        pytest.skip("counts loads of the interpreter")
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    chosen = kernels.choose_blocks(nodes * heads, 2, facts_of(90))
    blocks = -(-nodes * heads // chosen.queries)
    assert blocks == 1 or nodes * heads > 32
    monkeypatch.setattr(kernels, "choose_blocks", lambda *_: chosen)
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts.even(splits))
    q, rows, plan = Case((70, 5), nodes, nodes, heads, page_size=3).build(triton_device)
    plain, loads = InterpreterBuilder.create_masked_load, torch.zeros(len(rows), LATENT + ROPE)

    def load(self, ptrs, mask, other, *options):
        at = np.unique(ptrs.data[mask.data]).astype(np.int64) - rows.data_ptr()
        at = torch.from_numpy(at[(at >= 0) & (at < rows.nbytes)]) // rows.element_size()
        loads.view(-1)[at] += 1
        return plain(self, ptrs, mask, other, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    check(q, rows, plan, TOLERANCE[torch.float32])
    expected = torch.zeros(len(rows))
    for b, length in enumerate((70, 5)):
        slots = torch.arange(length)
        expected[plan.page_table[b, slots // 3] * 3 + slots % 3] = blocks
        first = plan.scratch_start + b * plan.scratch_stride
        expected[first : first + nodes] = blocks
    assert torch.equal(loads, expected[:, None].expand_as(loads))


def test_more_columns_than_keys_leave_empty_runs(triton_device, kernels):
    q, rows, plan = Case((3, 200), 2, 2, 3, columns=1500).build(triton_device)
    assert kernels.choose_parts(2, 1500, 132).usual > 4
    check(q, rows, plan, TOLERANCE[torch.float32])


def test_a_row_without_keys_is_zero_and_spoils_no_other(triton_device, kernels):
    q, rows, plan = Case((0, 9), 3, 3, 2).build(triton_device)
    bits = plan.ancestors.clone()
    bits[:, 1] = 0
    out = check(q, rows, dataclasses.replace(plan, ancestors=bits), TOLERANCE[torch.float32])
    assert (out[0, 1] == 0).all() and (out[1, 1] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_scores_and_ties(triton_device, kernels, dtype):
    q, rows, plan = Case((90, 20), 2, 2, 3, dtype=dtype).build(triton_device)
    check(q * 4096, rows, plan, TOLERANCE[dtype])  # one key takes all
    q[:, :, 0] = 0  # every key alike
    check(q, rows, plan, TOLERANCE[dtype])
    rows[plan.scratch_start :] = rows[plan.scratch_start]  # the window's keys are one and the same
    check(q * -300, rows, plan, max(TOLERANCE[dtype], 1e-4))  # scores of 1e3 are rounded to 1e-4


def test_no_request_no_change_of_inputs_and_views(triton_device, kernels):
    q, rows, plan = Case((20, 40), 2, 2, 2).build(triton_device)
    wide = torch.full((len(rows), LATENT + ROPE + 48), float("nan"), device=triton_device)
    wide[:, : LATENT + ROPE] = rows
    table = torch.stack((plan.page_table, plan.page_table * 0 + 10**6), 2)[..., 0]
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    ours = check(strided, wide[:, : LATENT + ROPE], dataclasses.replace(plan, page_table=table), 3e-6)
    assert torch.equal(ours, check(q, rows, plan, 3e-6))
    empty = dataclasses.replace(
        plan, page_table=table[:0], prefix_lens=plan.prefix_lens[:0], ancestors=plan.ancestors[:0]
    )
    assert mla_window_attention(q[:0], rows, empty, 1.0, latent_dim=LATENT, backend="triton").shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(triton_device, kernels, dtype):
    q, rows, plan = Case((70, 12), 4, 6, 4, first_position=1, dtype=dtype).build(triton_device)
    rows = rows.nan_to_num()  # the reference reads a dummy row
    ours, theirs = (
        mla_window_attention(q, rows, plan, 0.1, latent_dim=LATENT, backend=name)
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_operator_is_registered_as_it_behaves(triton_device, kernels):
    q, rows, plan = Case((17,), 1, 1, 2).build(triton_device)
    arguments = (q, rows, plan.page_table, plan.prefix_lens, None, plan.words, 16, 0, plan.scratch_start)
    arguments += (plan.scratch_stride, 1, 64, 0.1, 1.0, LATENT, None)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.mla_window_attention.overload, arguments, test_utils=checks)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        plan = WindowPlan(
            page_table=torch.zeros(2, 4, dtype=torch.int64),
            page_size=16,
            prefix_lens=torch.zeros(2, dtype=torch.int64),
            first_position=0,
            scratch_start=64,
            scratch_stride=4,
            num_keys=4,
            ancestors=torch.zeros(2, 3, dtype=torch.int64),
            num_columns=68,
            dummy_row=72,
            dtype=torch.bfloat16,
        )
        q, rows = torch.ones(2, 3, 16, 576, dtype=torch.bfloat16), torch.ones(80, 576).to(torch.float8_e4m3fn)
        for backend in ("triton", "reference"):
            out = mla_window_attention(q, rows, plan, 0.1, backend=backend)
            assert out.shape == (2, 3, 16, 512) and out.dtype == torch.bfloat16


def test_sizes_are_chosen_by_what_the_host_knows():
    from eagle_kit.ops.attention.mla.sizes import MAX_SPLITS, choose_blocks, choose_parts

    assert [choose_blocks(rows, 2, facts_of(90)).queries for rows in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert choose_blocks(8, 2, facts_of(90)).swapped and not choose_blocks(8, 2, facts_of(80)).swapped
    assert choose_parts(1, 64, 132).most == 1 == choose_parts(1, 1, 132).most
    assert 60 <= choose_parts(2, 32768, 132).usual <= 66  # one wave
    assert 100 < choose_parts(1, 10**6, 132).usual <= MAX_SPLITS
    assert choose_parts(132, 4096, 132).most == 1
    assert choose_parts(1, 1024, 132).usual <= 16


def test_a_long_request_of_a_full_batch_has_more_runs_than_the_others(triton_device, kernels, monkeypatch):
    """A batch that fills the device in one run each may hold a request of 100,000 tokens."""
    from eagle_kit.ops.attention.mla.sizes import choose_parts

    assert choose_parts(132, 32768, 132) == (1, 8, 4096)
    assert choose_parts(64, 131072, 132) == (2, 32, 4096)
    assert choose_parts(528, 131072, 132) == (1, 8, 16384)  # 32 rounds of programs

    monkeypatch.setattr(kernels, "choose_blocks", lambda *_: MLABlocks(16, 32, True, 4, 2))
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts(1, 4, 128))
    q, rows, plan = Case((400, 60, 0, 129), 3, 5, 2, first_position=1).build(triton_device)
    by_launch = check(q, rows, plan, TOLERANCE[torch.float32])
    counters = torch.zeros(99, dtype=torch.int32, device=triton_device)
    counted = dataclasses.replace(plan, arrivals=counters)
    assert torch.equal(check(q, rows, counted, TOLERANCE[torch.float32]), by_launch)
    assert not counters.any()

    # The bits of short requests are those of one run.
    monkeypatch.setattr(kernels, "choose_parts", lambda *_: Parts.even(1))
    whole = check(q, rows, plan, TOLERANCE[torch.float32])
    assert [torch.equal(whole[b], by_launch[b]) for b in range(4)] == [False, True, True, False]
