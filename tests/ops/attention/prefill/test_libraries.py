"""Other libraries' prompt attention: their documented calls, in torch, against our reference."""

import sys
from dataclasses import replace

import prefill_libraries as theirs
import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention
from eagle_kit.ops.attention.prefill.libraries import StoreFacts, is_installed, open_library
from eagle_kit.ops.attention.prefill.libraries.flash_attn import FlashAttention2, FlashAttention3
from eagle_kit.ops.attention.prefill.libraries.flashinfer import FlashInfer
from eagle_kit.ops.attention.prefill.libraries.library import pages_hnd, pages_nhd
from eagle_kit.ops.attention.variant import AttentionVariant, Limits

CPU = torch.device("cpu")
NAMES = ["flash-attn 3", "flash-attn 2", "flashinfer"]
VARIANTS = {
    "plain": AttentionVariant(0.25),
    "window": AttentionVariant(0.3, Limits(window=7)),
    "soft cap": AttentionVariant(0.5, soft_cap=3.0),
    "window of one, soft cap": AttentionVariant(0.5, Limits(window=1), soft_cap=1.5),
}
CHUNKS = {
    "one prompt": [(0, 9)],
    "chunks behind others": [(0, 5), (24, 41), (17, 18), (3, 24), (8, 16)],
}


def adapter(name):
    """The adapter, what stands in for the library, and a size of pages that it takes."""
    if name == "flashinfer":
        module = theirs.FlashInfer()
        return FlashInfer(module.BatchPrefillWithPagedKVCacheWrapper, CPU), module, 8
    if name == "flash-attn 3":
        module = theirs.FlashAttention3()
        return FlashAttention3(module.flash_attn_with_kvcache), module, 3
    module = theirs.FlashAttention2()
    return FlashAttention2(module.flash_attn_varlen_func), module, 256


def prompts(chunks, page, heads=(6, 2), size=16):
    """Queries, a store with NaN where nothing is to be read, and the plan."""
    generator = torch.Generator().manual_seed(1)
    pages = -(-max(stop for _, stop in chunks) // page) + 1
    table = torch.randperm(pages * len(chunks) + 3, generator=generator)[: pages * len(chunks)]
    table = table.view(len(chunks), pages)
    rows = (pages * len(chunks) + 3) * page + 5  # a scratch behind the pages
    k, v = torch.full((2, heads[1], rows, size), torch.nan)
    for mine, (_, stop) in zip(table, chunks, strict=True):
        slots = torch.arange(stop)
        at = mine[slots // page] * page + slots % page
        k[:, at], v[:, at] = torch.randn(2, heads[1], stop, size, generator=generator)
    counts = torch.tensor([stop - start for start, stop in chunks])
    q = torch.randn(int(counts.sum()), heads[0], size, generator=generator)
    cu_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    starts = torch.tensor([start for start, _ in chunks])
    return q, k, v, PrefillPlan(table, page, cu_rows, starts, 0, int(counts.max()), chunks)


@pytest.mark.parametrize("name", NAMES)
def test_a_library_computes_what_the_reference_does_over_the_pool_itself(name):
    library, module, page = adapter(name)
    for variant in VARIANTS.values():
        q, k, v, plan = prompts(CHUNKS["chunks behind others"], page)
        out = library.attention(plan)(q, k, v, variant)
        expected = paged_prefill_attention(q, k, v, plan, variant, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        for pages, rows in zip(module.calls[-1], (k, v), strict=True):
            assert pages.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    assert len(module.calls) == len(VARIANTS)


def test_a_slot_of_a_page_is_the_row_of_its_number():
    page = 7
    rows = torch.arange(3 * 30 * 2).view(3, 30, 2)
    nhd, hnd = pages_nhd(rows, page), pages_hnd(rows, page)
    assert nhd.shape == (30 // page, page, 3, 2)
    assert torch.equal(nhd.transpose(1, 2), hnd)
    for slot in range(30 // page * page):
        assert torch.equal(nhd[slot // page, slot % page], rows[:, slot])


def test_flashinfer_plans_once_for_layers_of_a_kind_and_again_for_the_next_forward():
    library, module, page = adapter("flashinfer")
    first, second = (prompts(CHUNKS[name], page) for name in ("one prompt", "chunks behind others"))
    attends = [library.attention(each[3]) for each in (first, second)]
    for turn in (0, 0, 1, 1, 0):  # the last one after another forward has planned
        *operands, plan = (first, second)[turn]
        for variant in ("plain", "window"):
            out = attends[turn](*operands, VARIANTS[variant])
            expected = paged_prefill_attention(*operands, plan, VARIANTS[variant])
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert len(module.calls) == 10 and len(module.plans) == 6
    assert len(module.workspaces) == 2 and len(set(module.workspaces)) == 1


STORE = StoreFacts(128, torch.bfloat16, torch.bfloat16, 256, 0, 1 << 20)
PLAIN = AttentionVariant(1.0)


def test_what_no_library_computes_is_not_given_to_one():
    refused = [
        ({"dtype": torch.float32, "store_dtype": torch.float32}, PLAIN),
        ({"store_dtype": torch.float8_e4m3fn}, PLAIN),
        ({"first_position": 1}, PLAIN),
        ({"head_dim": 100}, PLAIN),
        ({"head_dim": 512}, PLAIN),
        ({}, AttentionVariant(1.0, sinks=torch.zeros(8))),
        ({}, AttentionVariant(1.0, Limits(chunk=64))),
    ]
    for name in NAMES:
        library = adapter(name)[0]
        for variant in (PLAIN, AttentionVariant(1.0, Limits(window=3), soft_cap=30.0)):
            assert library.reason_against(STORE, variant) is None
        for store, variant in refused:
            assert library.reason_against(STORE._replace(**store), variant), (name, store, variant)


def test_what_a_single_library_does_not_compute_is_not_given_to_it():
    v3, v2, infer = (adapter(name)[0] for name in NAMES)
    of_16 = STORE._replace(page_size=16)
    of_96 = STORE._replace(head_dim=96)
    of_many = STORE._replace(num_values=1 << 32)
    assert [bool(each.reason_against(of_16, PLAIN)) for each in (v3, v2, infer)] == [False, True, False]
    assert [bool(each.reason_against(of_96, PLAIN)) for each in (v3, v2, infer)] == [False, False, True]
    assert [bool(each.reason_against(of_many, PLAIN)) for each in (v3, v2, infer)] == [False, False, True]


CALL_3 = "def flash_attn_with_kvcache(q, k_cache, v_cache, page_table=None, softcap=0.0): return 3"
CALL_2 = "def flash_attn_varlen_func(q, k, v, softcap=0.0, block_table=None): return 2"
WRAPPER = "class BatchPrefillWithPagedKVCacheWrapper:\n    def plan(self): ...\n    def run(self): ..."


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make modules that can be imported for the length of a test, and hide installed ones."""
    names = "flash_attn_interface", "flash_attn", "flashinfer"
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])

    def write(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_version_3_is_taken_where_the_gpu_runs_it_and_version_2_elsewhere(install):
    install(flash_attn_interface=CALL_3, flash_attn=CALL_2, flashinfer=WRAPPER)
    assert open_library("flash-attn", CPU, 9).call(0, 0, 0) == 3
    assert open_library("flash-attn", CPU, 10).call(0, 0, 0) == 2
    assert isinstance(open_library("flashinfer", CPU, 10), FlashInfer)
    assert is_installed("flash-attn") and is_installed("flashinfer")


@pytest.mark.parametrize(
    ("name", "modules", "cause"),
    [
        ("flash-attn", {}, "flash_attn"),
        ("flash-attn", {"flash_attn": "raise ImportError('libcudart.so.12')"}, "libcudart.so.12"),
        ("flash-attn", {"flash_attn": "def flash_attn_varlen_func(q, k, v): ..."}, "flash_attn"),
        ("flashinfer", {"flashinfer": ""}, "flashinfer"),
    ],
)
def test_a_library_that_is_missing_or_broken_is_named(install, name, modules, cause):
    install(**modules)
    with pytest.raises(UserError) as error:
        open_library(name, CPU, 9)
    assert cause in error.value.cause
    assert is_installed(name) == bool(modules)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("name", ["flash-attn", "flashinfer"])
def test_an_installed_library_computes_what_the_reference_does(name, page, variant):
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    device = torch.device("cuda")
    library = open_library(name, device, torch.cuda.get_device_capability()[0])
    facts = STORE._replace(page_size=page)
    if reason := library.reason_against(facts, VARIANTS[variant]):
        pytest.skip(f"{library.title} {reason}")
    q, k, v, plan = prompts([(0, 300), (20, 341), (517, 518)], page, (8, 2), 128)
    exact = paged_prefill_attention(q, k, v, plan, VARIANTS[variant], backend="reference")
    places = {part: getattr(plan, part).to(device) for part in ("page_tables", "cu_rows", "starts")}
    q, k, v = (each.to(device, torch.bfloat16) for each in (q, k.nan_to_num(), v.nan_to_num()))
    out = library.attention(replace(plan, **places))(q, k, v, VARIANTS[variant])
    torch.testing.assert_close(out.float().cpu(), exact, rtol=3e-2, atol=3e-2)
