"""Prompts of an engine by other libraries, the measured choice among them, and what is refused.

The libraries are `prefill_libraries`, which compute what they document.
"""

import logging
import sys
from argparse import Namespace

import prefill_libraries as theirs
import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_mixtures import DEEPSEEK, untrained

from eagle_kit.cli.serve import introduce
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.graphs.warm_up import representative_prompts
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.measured import choice_file, prefill_backends
from eagle_kit.engine.measured.choice_file import ChoiceFile
from eagle_kit.engine.measured.prefill_backends import PrefillBackends, open_backends, working_bytes
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.attention.prefill.libraries import flashinfer as room
from eagle_kit.ops.attention.prefill.libraries.flash_attn import FlashAttention2, FlashAttention3
from eagle_kit.ops.attention.prefill.libraries.flashinfer import FlashInfer
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.capability import facts_of
from eagle_kit.server.api.startup import ServedModel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KNOWN = [9, 10, 1, 2, 3, 4, 5, 6, 7, 8, 2, 5, 7, 1, 3, 9, 4, 4, 6]
PROMPTS = [[5, 6, 7], KNOWN, [*KNOWN[:17], 2, 2], KNOWN]
BF16 = torch.bfloat16


def library(name):
    """A library by its option, and what stands in for it."""
    if name == "flashinfer":
        module = theirs.FlashInfer()
        return FlashInfer(module.BatchPrefillWithPagedKVCacheWrapper, CPU), module
    module = theirs.FlashAttention3()
    return FlashAttention3(module.flash_attn_with_kvcache), module


def make(dtype=torch.float32, **options):
    target = tiny_target(11)
    head = tiny_head(target, draft_vocab_size=9)
    options = {"max_batch_size": 2, "max_context": 96, "prefill_tokens": 12, "page_size": 4, **options}
    return LLM(target.to(dtype), head.to(dtype), shape="3,1,4", **options)


def take(llm, backends):
    """Have an engine on a CPU take these backends."""
    runner = llm.engine().runner
    runner.prefill_backends = backends
    backends.serve(runner.kv)


@pytest.mark.parametrize("name", ["flash-attn", "flashinfer"])
def test_an_engine_says_the_same_by_a_library(name):
    """Prompts in chunks beside others, behind cached prefixes, and cycles over what they stored."""
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    ours = make(graph_mode="off").generate(PROMPTS, params)
    llm = make(graph_mode="off")
    by, module = library(name)
    take(llm, PrefillBackends("torch", {name: by}, forced=name))
    found = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in ours]
    engine, layers = llm.engine(), llm.target.config.num_layers
    assert engine.totals.num_cached_prompt_tokens > 0
    pool = engine.runner.kv.k.untyped_storage().data_ptr()
    assert module.calls and all(k.untyped_storage().data_ptr() == pool for k, _ in module.calls)
    assert len(module.calls) % layers == 0
    if name == "flashinfer":
        assert len(module.plans) * layers == len(module.calls), "a plan for each forward"


class GatheredRanks:
    """Ranks of which each has given its own of these values."""

    is_first = True

    def __init__(self, values):
        self.values = values

    def all(self, value):
        return self.values


class FakeTimer:
    """Times by backend, in place of a clock; each backend is run."""

    def __init__(self, **seconds):
        self.seconds, self.calls = {name.replace("_", "-"): s for name, s in seconds.items()}, []

    def __call__(self, run, device):
        (backend,) = run.args
        self.calls.append(backend)
        assert run().isfinite().all()
        if isinstance(second := self.seconds[backend], Exception):
            raise second
        return second


def measured(**seconds):
    """Forms over stand-ins with these times -> backends, and modules by name."""
    opened = {name: library(name) for name in ("flash-attn", "flashinfer")}
    backends = PrefillBackends(
        "torch", {name: each for name, (each, _) in opened.items()}, timer=FakeTimer(**seconds)
    )
    return backends, {name: module for name, (_, module) in opened.items()}


def warmed_up(backends):
    """An LLM that has measured the prompts of a warm-up, which a CPU does not compute of itself."""
    llm = make(BF16, batch_sizes=(2,))
    take(llm, backends)
    engine = llm.engine()
    for requests in representative_prompts(engine):
        with backends.measuring():
            engine.prefill(requests)
    engine.drain()
    engine.page_pool.clear()
    return llm


def test_prompts_of_a_warm_up_measure_each_size_once_and_others_take_the_fastest(monkeypatch):
    monkeypatch.setattr(room, "HEAD_DIMS", (8,))
    backends, modules = measured(torch=3e-4, flash_attn=2e-4, flashinfer=1e-4)
    llm = warmed_up(backends)
    table = backends.table
    assert {1, 2, 4, 8, 16} <= {size.rows for size in table}
    assert all(choice.backend == "flashinfer" for choice in table.values())
    assert len(backends.timer.calls) == 3 * len(table)
    counts = {name: len(module.calls) for name, module in modules.items()}
    llm.generate(PROMPTS, SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(modules["flashinfer"].calls) > counts["flashinfer"]
    assert len(modules["flash-attn"].calls) == counts["flash-attn"]
    assert backends.table == table and len(backends.timer.calls) == 3 * len(table)
    lines = backends.report()
    assert len(lines) == len(table)
    times = "flashinfer (torch 300.0 us, flash-attn 200.0 us, flashinfer 100.0 us)"
    assert lines[0] == f"1 rows, 6 heads on 2 of 8, scale 0.3536: {times}"


@pytest.mark.parametrize(
    ("seconds", "backend"),
    [
        ({"torch": 1e-4, "flash_attn": 0.98e-4, "flashinfer": 2e-4}, "torch"),
        ({"torch": 1e-4, "flash_attn": 0.9e-4, "flashinfer": 2e-4}, "flash-attn"),
        (
            {"torch": 1e-4, "flash_attn": 0.9e-4, "flashinfer": RuntimeError("no kernel\nat all")},
            "flash-attn",
        ),
        ({"torch": 1e-4, "flash_attn": RuntimeError("x"), "flashinfer": RuntimeError("x")}, "torch"),
        ({"torch": torch.OutOfMemoryError(), "flash_attn": 1e-4, "flashinfer": 1e-4}, "torch"),
    ],
    ids=["a tie is ours", "faster", "one fails", "all fail", "ours fails"],
)
def test_a_tie_and_what_cannot_be_measured_is_ours(seconds, backend, monkeypatch, caplog):
    monkeypatch.setattr(room, "HEAD_DIMS", (8,))
    backends, _ = measured(**seconds)
    with caplog.at_level(logging.WARNING):
        warmed_up(backends)
    assert {choice.backend for choice in backends.table.values()} == {backend}
    failed = [str(each).split("\n")[0] for each in seconds.values() if isinstance(each, Exception)]
    assert caplog.text.count("cannot be measured, so torch runs") == len(failed) * len(backends.table)
    assert all(reason in caplog.text for reason in failed) and "at all" not in caplog.text


def test_layers_that_no_library_computes_are_ours_and_sizes_that_never_came_up(monkeypatch):
    backends, modules = measured(torch=3e-4, flash_attn=2e-4, flashinfer=1e-4)  # which has no heads of 8
    llm = warmed_up(backends)
    assert {choice.backend for choice in backends.table.values()} == {"flash-attn"}
    assert not modules["flashinfer"].calls and set(backends.timer.calls) == {"torch", "flash-attn"}
    fresh, modules = measured(torch=3e-4, flash_attn=2e-4, flashinfer=1e-4)
    take(llm, fresh)
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert not fresh.table and not modules["flash-attn"].calls


def store(variants=1, page_size=256, dtype=BF16, head_dim=64, **layout):
    """A store that says it is on a GPU: what is asked of it needs no memory."""
    given = [AttentionVariant(1.0)] * variants if isinstance(variants, int) else variants
    layout = PoolLayout(4, page_size, 2, **layout)
    kv = PagedKV(len(given), 2, head_dim, layout, variants=given, dtype=dtype, device="meta")
    kv.device = GPU
    return kv


STAND_INS = {
    "flash_attn_interface": ("FlashAttention3", "flash_attn_with_kvcache"),
    "flash_attn": ("FlashAttention2", "flash_attn_varlen_func"),
    "flashinfer": ("FlashInfer", "BatchPrefillWithPagedKVCacheWrapper"),
}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open backends as on a GPU of a capability, beside these modules."""
    names = "flash_attn_interface", "flash_attn", "flashinfer"
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])

    def open_with(name, kv, modules=(), capability=90, ranks=None, has_equal_parts=True):
        for each in modules:
            kind, call = STAND_INS[each]
            text = f"import prefill_libraries\nmodule = prefill_libraries.{kind}()\n{call} = module.{call}"
            (tmp_path / f"{each}.py").write_text(text)
        monkeypatch.setattr(prefill_backends, "device_facts", lambda device: facts_of(capability))
        monkeypatch.setattr(prefill_backends, "device_key", lambda device, sources: {"device": str(device)})
        return open_backends(name, kv, ranks, has_equal_parts=has_equal_parts)

    yield open_with
    for name in names:
        sys.modules.pop(name, None)


def test_auto_takes_all_that_are_installed_and_says_what_is_not(opened):
    assert str(opened("auto", store())) == ("torch; flash-attn is not installed; flashinfer is not installed")
    both = opened("auto", store(), ["flash_attn_interface", "flashinfer"])
    assert str(both) == (
        "torch or flash-attn (FlashAttention-3) or flashinfer (FlashInfer), as measured in the warm-up"
    )
    assert both.forced is None and isinstance(both.libraries["flash-attn"], FlashAttention3)


def test_ranks_choose_among_libraries_that_all_of_them_have(opened):
    modules = ["flash_attn_interface", "flashinfer"]
    both = ["FlashAttention-3", "FlashInfer"]
    alike = opened("auto", store(), modules, ranks=GatheredRanks([both, both]))
    assert set(alike.libraries) == {"flash-attn", "flashinfer"} and alike.ranks is not None
    for ranks, has_equal_parts in (
        (GatheredRanks([both, both[:1]]), True),
        (GatheredRanks([both, both]), False),
    ):
        found = opened("auto", store(), modules, ranks=ranks, has_equal_parts=has_equal_parts)
        assert not found.libraries and "different libraries or parts of different sizes" in str(found)


def test_choices_of_prompts_have_a_file_for_each_kind_of_store(opened):
    first, again, other = (
        opened("auto", kv, ["flashinfer"]) for kv in (store(), store(), store(page_size=16))
    )
    assert first.file.path == again.file.path != other.file.path
    assert first.file.path.name.startswith("prefill-")


def test_a_restart_makes_the_same_choices_of_prompts(tmp_path, monkeypatch):
    """With other times, and with what an engine reads in place of a measurement."""
    monkeypatch.setattr(room, "HEAD_DIMS", (8,))
    monkeypatch.setattr(choice_file, "folder", lambda: tmp_path)
    first, _ = measured(torch=3e-4, flash_attn=2e-4, flashinfer=1e-4)
    first.file = ChoiceFile("prefill", {})
    warmed_up(first)
    again, modules = measured(torch=1e-4, flash_attn=2e-4, flashinfer=3e-4)
    again.file = ChoiceFile("prefill", {})
    warmed_up(again)
    assert again.table == first.table and not again.timer.calls
    assert {choice.backend for choice in again.table.values()} == {"flashinfer"}
    assert modules["flashinfer"].calls and not modules["flash-attn"].calls
    num_sizes = len(again.table)
    assert again.origin() == [
        f"{num_sizes} of {num_sizes} sizes read from {again.file.path}, where all are kept"
    ]


def test_auto_leaves_out_what_computes_no_layer_and_what_is_broken(opened, tmp_path, caplog):
    found = opened("auto", store(page_size=16), ["flash_attn", "flashinfer"])
    assert list(found.libraries) == ["flashinfer"]
    assert "FlashAttention-2 takes pages of a multiple of 256 slots (--page-size), not 16" in str(found)
    chunked = AttentionVariant(1.0, Limits(chunk=8))
    assert set(opened("auto", store([chunked, AttentionVariant(1.0)])).libraries) == {
        "flash-attn",
        "flashinfer",
    }
    assert not opened("auto", store([chunked, chunked])).libraries
    sys.modules.pop("flashinfer")
    (tmp_path / "flashinfer.py").write_text("raise ImportError('libcudart.so.12')")
    found = opened("auto", store())
    assert list(found.libraries) == ["flash-attn"] and "libcudart.so.12" in caplog.text
    assert "flashinfer cannot be used" in str(found)


def test_a_named_backend_is_taken(opened):
    found = opened("flash-attn", store(), ["flash_attn_interface", "flash_attn"])
    assert found.forced == "flash-attn" and str(found) == "flash-attn (FlashAttention-3)"
    assert isinstance(found.libraries["flash-attn"], FlashAttention3)
    newer = opened("flash-attn", store(), capability=100)
    assert isinstance(newer.libraries["flash-attn"], FlashAttention2)
    assert str(opened("flashinfer", store(page_size=16), ["flashinfer"])) == "flashinfer (FlashInfer)"


@pytest.mark.parametrize(
    ("name", "modules", "kv", "cause"),
    [
        ("flash-attn", [], {}, "needs flash_attn, which is not installed"),
        ("flashinfer", [], {}, "needs flashinfer, which is not installed"),
        ("flash-attn", ["flash_attn"], {"page_size": 16}, "multiple of 256 slots"),
        ("flash-attn", ["flash_attn_interface"], {"dtype": torch.float32}, "not float32"),
        ("flash-attn", ["flash_attn_interface"], {"head_dim": 320}, "not 320"),
        ("flashinfer", ["flashinfer"], {"head_dim": 96}, "not 96"),
        (
            "flashinfer",
            ["flashinfer"],
            {"variants": [AttentionVariant(1.0), AttentionVariant(1.0, sinks=torch.zeros(4))]},
            "no attention sinks",
        ),
    ],
)
def test_a_named_backend_that_does_not_fit_is_refused(opened, name, modules, kv, cause):
    with pytest.raises(UserError) as error:
        opened(name, store(**kv), modules)
    assert cause in error.value.cause and "prefill backend" in error.value.remedy


def test_fp8_pages_and_latents_are_refused(opened):
    modules = ["flash_attn_interface", "flashinfer"]
    fp8 = PoolLayout(4, 16, 2, dtype=torch.float8_e4m3fn)
    kv = PagedKV(1, 2, 64, fp8, dtype=BF16, device="meta")
    spec = untrained(DEEPSEEK["v3: YaRN"])
    latents = open_store(spec.config.cache, PoolLayout(4, 16, 2), spec.variants, dtype=BF16, device="meta")
    kv.device = latents.device = GPU
    for name in ("flash-attn", "flashinfer"):
        with pytest.raises(UserError, match="float8_e4m3fn without scales"):
            opened(name, kv, modules)
        with pytest.raises(UserError, match="keeps latents"):
            opened(name, latents, modules)
    found = opened("auto", latents, modules)
    assert not found.libraries and "keeps latents" in str(found)


@pytest.mark.parametrize("name", ["triton", "flash-attn", "flashinfer"])
def test_on_a_cpu_prompts_are_ours_and_other_backends_refused(name):
    llm = make()
    assert str(llm.engine().runner.prefill_backends) == "torch"
    assert llm.engine().runner.kv.prompt_attention is None
    with pytest.raises(UserError, match=f"{name} was asked for, and runs on GPUs only"):
        make(prefill_backend=name).engine()
    with pytest.raises(UserError, match="prefill_backend is 'fa4'"):
        make(prefill_backend="fa4")


def test_the_server_names_the_backend_at_its_start(capsys):
    args = Namespace(no_self_test=True, speculative_algorithm=None)
    introduce(args, ServedModel("target", "draft"), make())
    lines = capsys.readouterr().err.splitlines()
    assert "prefill    torch" in lines
    assert any(line.startswith("chat       ") for line in lines)


def test_the_memory_of_flashinfer_is_planned():
    variants = [AttentionVariant(1.0), AttentionVariant(1.0), AttentionVariant(1.0, Limits(window=4))]
    assert working_bytes("flashinfer", GPU, variants) == (128 << 20) + 2 * (8 << 20)
    assert working_bytes("flash-attn", GPU, variants) == working_bytes("flashinfer", CPU, variants) == 0
