"""Paged store read in place by kernels, and in fp8, against attention to copied keys."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from tiny import tiny_head, tiny_target
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.options import check_fp8
from eagle_kit.kv.keys_values import PagedKV, Segment
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.attention.window import chain_bits
from eagle_kit.ops.backend import use
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.rope import reference as rope

FP8 = torch.float8_e4m3fn
CHUNKS = ((1, 4, 1), (5, 30, 12), (9, 10, 9))
"""start, stop, write_from of requests: from the front, partly in shared pages, a last token alone."""
PROMPTS = [[5, 6, 7], [9, 10, 1, 2, 3, 4, 5, 6, 7, 8, 2, 5, 7, 1, 3, 9, 4, 4, 6]]


def needs_fp8(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")


def make(first_position=0, device="cpu", store_dtype=None, **options):
    """A store of 4 rows a page, filled where it is not fp8, and the pages of three requests."""
    generator = torch.Generator().manual_seed(0)
    layout = PoolLayout(30, 4, 3, window=8, dtype=store_dtype)
    kv = PagedKV(2, 2, 16, layout, first_position=first_position, device=device, **options)
    if kv.k.element_size() > 1:
        for part in (kv.k, kv.v):
            part.copy_(torch.randn(part.shape, generator=generator))
    return kv, torch.randperm(30, generator=generator)[:24].view(3, 8).to(device)


@pytest.mark.parametrize("placed", [True, False], ids=["stored by the model", "stored by the attention"])
@pytest.mark.parametrize("first_position", [0, 1])
@torch.inference_mode()
def test_reading_pages_in_place_says_what_copies_say(triton_device, first_position, placed):
    (copied, _), (paged, tables) = make(first_position), make(first_position, triton_device)
    rows = sum(stop - start for start, stop, _ in CHUNKS)
    q = torch.randn(rows, 6, 16, generator=torch.Generator().manual_seed(1))
    k, v = torch.randn(2, rows, 2, 16, generator=torch.Generator().manual_seed(2))
    for part, new in ((copied.k, k), (copied.v, v)):  # computed again, it rounds otherwise
        pool_rows = copied.rows_of(tables[1:2].cpu(), torch.arange(5, 12)[None])[0]
        new[3:10] = part[1][:, pool_rows].transpose(0, 1) * (1 + 1e-6)
    segments = [Segment(table.cpu(), *chunk) for table, chunk in zip(tables, CHUNKS, strict=True)]
    expected = copied.prefill_attend(segments)(1, q, k, v)
    with use("triton"):
        attend = paged.prefill_attend(
            [s._replace(page_table=s.page_table.to(triton_device)) for s in segments]
        )
        mine = [x.to(triton_device) for x in (q, k, v)]
        if placed:
            stored = attend.kv_rows(1)
            rope.store(stored.k_rows, stored.rows, mine[1], 1.0)
            rope.store(stored.v_rows, stored.rows, mine[2], 1.0)
            mine[1:] = (x[:0] for x in mine[1:])
        out = attend(1, *mine).cpu()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in ((paged.k, copied.k), (paged.v, copied.v)):
        assert torch.equal(ours[:, :, : paged.trash_row].cpu(), theirs[:, :, : paged.trash_row])


@pytest.mark.parametrize("first_position", [0, 1])
@torch.inference_mode()
def test_memory_that_nobody_has_written_is_not_attended_to(first_position):
    """In half precision, where keys are copied next to each other; torch fills new memory with NaN."""
    kv, tables = make(first_position, dtype=torch.bfloat16)
    segments = [Segment(table, *chunk) for table, chunk in zip(tables, CHUNKS, strict=True)]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(29, heads, 16, generator=generator).bfloat16() for heads in (6, 2, 2))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        out = kv.prefill_attend(segments)(1, q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@torch.inference_mode()
def test_an_fp8_store_is_prefilled_as_it_is_decoded(triton_device, backend):
    """One chunk, two chunks, and token by token through the scratch: the same bytes and results."""
    needs_fp8(triton_device)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(11, 4, 16, generator=generator).to(triton_device)
    k, v = (100 * torch.randn(2, 11, 2, 16, generator=generator)).to(triton_device)
    q, k[0] = q / 100, 1e4 * k[0]  # beyond what e4m3 holds
    outs, stores = [], []
    with use(backend):
        for borders in ((0, 11), (0, 4, 11), range(12)):
            kv, tables = make(device=triton_device, store_dtype=FP8)
            parts = []
            for start, stop in pairwise(borders):
                chunk = slice(start, stop)
                if len(borders) < 12:
                    attend = kv.prefill_attend([Segment(tables[0], start, stop, start)])
                    parts.append(attend(0, q[chunk], k[chunk], v[chunk]))
                    continue
                one = torch.ones(1, 1, dtype=torch.int64, device=triton_device)
                attend = kv.window_attend(tables[:1], one[0] * start, chain_bits(1, q.device)[None], 1, 64)
                parts.append(attend(0, q[chunk], k[chunk], v[chunk]))
                kv.commit_window(tables[:1], one * 0, one[0] * start, one[0])
            pool_rows = kv.rows_of(tables[:1], torch.arange(11, device=triton_device)[None])[0]
            outs.append(torch.cat(parts))
            stores.append(torch.stack((kv.k, kv.v)).view(torch.uint8)[..., pool_rows, :].view(FP8).float())
    for out, held in zip(outs, stores, strict=True):
        torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(held, stores[0])
    assert stores[0][0].abs().max() == 448
    exact = attention(q, *stores[0][:, 0])
    torch.testing.assert_close(outs[0].double().cpu(), exact, rtol=1e-4, atol=1e-3)


def attention(q, k, v):
    """Causal attention in fp64; ``q [T, Hq, D]``, ``k`` and ``v [Hkv, T, D]``."""
    q, k, v = (x.double().cpu() for x in (q.transpose(0, 1), k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).masked_fill(torch.ones(11, 11).triu(1) > 0, -1e300)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("store_dtype", [None, FP8])
def test_a_prefill_by_kernels_reads_nothing_on_the_host(triton_device, store_dtype):
    kv, tables = make(store_dtype=store_dtype)
    with torch.no_grad(), use("triton"), FakeTensorMode(allow_non_fake_inputs=True):
        attend = kv.prefill_attend([Segment(t, *chunk) for t, chunk in zip(tables, CHUNKS, strict=True)])
        q = torch.empty(29, 6, 16)
        assert attend(0, q, q[:0, :2], q[:0, :2]).shape == q.shape


def responses(
    backend=None, shape="3,1,4", max_tokens=24, device="cpu", prompts=PROMPTS, num_layers=4, **options
):
    target = tiny_target(vocab_size=11, num_layers=num_layers).to(device)
    head = tiny_head(target, draft_vocab_size=9).to(device)
    llm = LLM(target, head, max_batch_size=2, max_context=96, shape=shape, graph_mode="off", **options)
    with use(backend) if backend else nullcontext():
        answers = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return llm, [answer.token_ids for answer in answers]


@pytest.mark.parametrize("kv_dtype", [pytest.param("auto", marks=pytest.mark.nightly), "fp8_e4m3"])
def test_an_engine_by_kernels_says_what_the_reference_says(triton_device, kv_dtype):
    """A prompt in chunks beside another, then one that is in the prefix cache, and some cycles."""
    needs_fp8(triton_device)
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    options = {"max_tokens": 2, "prefill_tokens": 12, "page_size": 4, "shape": "1,1,2", "prompts": prompts}
    options["num_layers"] = 1
    sizes = {"kv_dtype": kv_dtype, "device": triton_device, **options}
    (llm, ours), (_, theirs) = responses("triton", **sizes), responses("reference", **sizes)
    assert ours == theirs and ours[0] == ours[2]
    assert llm.engine().totals.num_cached_prompt_tokens == 16


@pytest.mark.parametrize("shape", ["3,1,4", "3,3,8"])
def test_speculation_over_an_fp8_pool_is_plain_decoding_over_it(shape):
    llm, drafted = responses(shape=shape, kv_dtype="fp8_e4m3", prefill_tokens=8)
    assert llm.engine().runner.kv.k.dtype == llm.engine().runner.drafter.kv.v.dtype == FP8
    assert drafted == responses(shape="none", kv_dtype="fp8_e4m3")[1]
    wide, _ = responses(shape=shape)
    assert wide.memory_plan.bytes_per_token == 4 * llm.memory_plan.bytes_per_token
    kv = llm.engine().runner.kv, llm.engine().runner.drafter.kv
    assert llm.memory_plan.bytes_per_token == sum(each.bytes_per_token for each in kv)


def test_what_fp8_cannot_do_is_refused(monkeypatch):
    with pytest.raises(UserError, match="kv_dtype is 'int4'"):
        responses(kv_dtype="int4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"compute capability 8\.9"):
        check_fp8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_fp8(torch.device("cuda"))


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (8, 1)], ids=["grouped", "multi-head", "multi-query"])
@torch.inference_mode()
@pytest.mark.parametrize("in_cpp", [True, False])
def test_a_token_has_the_same_bits_in_any_chunk_and_any_window(heads, in_cpp, monkeypatch):
    """Lengths at which BLAS divides its sums otherwise lie on the way, 192 and 384."""
    if not in_cpp:
        monkeypatch.setattr(cpp, "available", lambda: False)
    generator = torch.Generator().manual_seed(5)
    length, (hq, hkv) = 460, heads
    q = torch.randn(length, hq, 64, generator=generator)
    k, v = torch.randn(2, length, hkv, 64, generator=generator)
    page_table = torch.randperm(30, generator=generator)[None]

    def run(size, windows):
        kv = PagedKV(1, hkv, 64, PoolLayout(30, 16, 1))
        outs = []
        for start in range(0, length, size):
            stop = min(start + size, length)
            part = (0, *(x[start:stop] for x in (q, k, v)))
            if not windows:
                outs.append(kv.prefill_attend([Segment(page_table[0], start, stop, start)])(*part))
                continue
            at, count = torch.tensor([start]), stop - start
            bits = chain_bits(count, torch.device("cpu"))[None]
            outs.append(kv.window_attend(page_table, at, bits, count, stop)(*part))
            kv.commit_window(page_table, torch.arange(count)[None], at, torch.tensor([count]))
        return torch.cat(outs)

    whole = run(length, windows=False)
    for size in (1, 7, 16, 33, 200):
        assert torch.equal(run(size, windows=False), whole), size
    for size in (1, 2, 5, 64):
        assert torch.equal(run(size, windows=True), whole), size
