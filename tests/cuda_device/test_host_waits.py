"""Around cycles the host waits for nothing: prompts, windows of n-grams, pending draft tokens, penalties.

What it sends is in pinned memory: a copy from other memory ends with a wait. Results of a cycle are waited
for a step later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import prefill_libraries as theirs
import pytest
import torch
from tiny import tiny_head, tiny_hybrid, tiny_target
from tiny_cycle import BATCH, SAMPLING_PARAMS, cycle_engine

from benchmarks.engine.load import _random_tree, _verify, loaded
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.ngram.index import NgramIndex, to_tree
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.batch_kind import kind_of
from eagle_kit.engine.request import Request
from eagle_kit.engine.runner import CycleInputs
from eagle_kit.engine.scheduler import Chunk
from eagle_kit.kv import keys_values
from eagle_kit.ops.attention.prefill.libraries.flash_attn import FlashAttention2, FlashAttention3
from eagle_kit.ops.attention.prefill.libraries.flashinfer import FlashInfer
from tests.cuda_device.device import LogKind, phase
from tests.cuda_device.host_tensors import OnDeviceOnly
from tests.cuda_device.targets import TARGETS
from tests.ops.attention.prefill.test_libraries import CHUNKS, NAMES, VARIANTS, prompts

CUDA = torch.device("cuda", 0)
PAGES = 8


@contextmanager
def no_waits() -> Iterator[None]:
    """Within, no call has the host wait for the device."""
    with phase(LogKind.SYNCHRONISATION) as found:
        yield
    waits = [str(call) for call in found.of(LogKind.SYNCHRONISATION)]
    assert found.counts["synchronisations"] == 0, waits


def engine_of(target, shape: str = "4,1,5") -> Engine:
    """An engine of a target and an EAGLE-3 head in bf16."""
    head = tiny_head(target).to(CUDA, torch.bfloat16)
    target.to(CUDA, torch.bfloat16)
    return cycle_engine(target, HeadDraftModel(head, target), shape)


def requests(sampling: str) -> list[Request]:
    """Prompts of 20, 40 and 33 tokens, in pages and slots of their own."""
    made = []
    for i, length in enumerate((20, 40, 33)):
        params = SAMPLING_PARAMS[sampling] or SamplingParams(logprobs=2)
        request = Request(i, [(7 * i + j) % 11 for j in range(length)], params)
        request.sequence.slot = i
        request.sequence.allocation.pages = list(range(PAGES * i, PAGES * (i + 1)))
        made.append(request)
    return made


def compute_prompts(engine: Engine, sampling: str) -> None:
    """Compute a whole prompt, a chunk behind a cached prefix that goes on, and one that ends, and a cycle."""
    first, second, third = everyone = requests(sampling)
    runner = engine.runner
    runner.set_pages(everyone)
    found = runner.prefill([Chunk(first, 0, 20), Chunk(second, 16, 32), Chunk(third, 16, 33)])
    assert [len(results.requests) for results in found] == [1, 2]
    runner.decode(everyone, SpecShape(4, 1, 5))


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "hybrid"])
@torch.inference_mode()
def test_prompts_and_the_cycle_behind_them_wait_for_nothing(name, sampling):
    engine = engine_of(TARGETS[name]())
    with no_waits():
        compute_prompts(engine, sampling)


@torch.inference_mode()
def test_a_copy_from_pageable_memory_is_a_wait(monkeypatch):
    def to_device(numbers, device, dtype=torch.int64):
        return torch.as_tensor(numbers, dtype=dtype).to(device)

    monkeypatch.setattr(keys_values, "to_device", to_device)
    engine = engine_of(tiny_target())
    with phase(LogKind.SYNCHRONISATION) as found:
        compute_prompts(engine, "greedy")
    places = {call.place.function for call in found.of(LogKind.SYNCHRONISATION) if call.place}
    assert places == {"to_device"}


@torch.inference_mode()
def test_prompts_of_recurrent_layers_wait_for_nothing():
    engine = engine_of(tiny_hybrid())
    for i in range(BATCH):
        engine.add_request(Request(i, [i, 2, 3] * (4 + i), SamplingParams(max_tokens=9)))
    chunks = engine.scheduler.plan().chunks
    with no_waits():
        (found,) = engine.runner.prefill(chunks)
    assert chunks and len(found.requests) == len(chunks)


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@torch.inference_mode()
def test_both_halves_around_a_grammar_are_on_the_device(sampling):
    target = tiny_target()
    vocab_size = target.config.vocab_size
    runner = engine_of(target).runner
    settings = runner._settings(BATCH, SpecShape.parse("4,1,5"), 192, 2)
    with no_waits():
        asking = requests(sampling)
        batch = runner._sampling.of_cycle(asking, 0, kind_of(asking).level)
    runner.slots.make_tables(vocab_size)
    runner.slots.make_masks(vocab_size)
    with no_waits(), OnDeviceOnly():
        inputs = CycleInputs(torch.arange(BATCH, device=CUDA), batch)
        window = runner._propose(inputs, settings)
        out = runner.run_cycle(inputs._replace(window=window, is_masked=True), settings)
    assert out.tokens.shape == (BATCH, runner.steps + 1)


@torch.inference_mode()
def test_windows_of_n_grams_are_sent_without_a_wait():
    ngram = NgramIndex()
    ngram.insert(0, [1, 2, 3, 4, 1, 2, 5] * 3)
    found = ngram.propose([[1, 2], [4, 1], [9]], 16, 5)
    with no_waits():
        tree = to_tree(found, CUDA)
    assert tree.tokens.is_cuda and tree.ancestors.shape == (BATCH, 16)


@torch.inference_mode()
def test_reading_pending_draft_tokens_waits_for_nothing():
    runner = engine_of(tiny_target(), "3,2,6").runner
    runner.slots.make_pending(runner.drafter.model)
    everyone = requests("greedy")
    for request in everyone:
        request.on_device.num_pending_draft_tokens = 3
    with no_waits():
        runner._backfill_draft(everyone)
        assert [request.on_device.num_pending_draft_tokens for request in everyone] == [0, 0, 0]
        everyone[1].on_device.num_pending_draft_tokens = 64
        runner._store_pending_keys(everyone)
    assert [request.on_device.num_pending_draft_tokens for request in everyone] == [0, 1, 0]


@torch.inference_mode()
def test_a_request_with_penalties_joins_without_a_wait():
    target = tiny_target()
    runner = engine_of(target).runner
    with no_waits():
        sampling = runner._sampling.of_requests(requests("penalised"))
        token = torch.ones(1, dtype=torch.int64, device=CUDA)
        runner.slots.write_adjustments(requests("penalised")[1], target.config.vocab_size, token)
    assert sampling.bias.is_cuda and sampling.prompt_mask.is_cuda


def test_random_windows_of_a_benchmark_are_verified_on_the_device():
    target = tiny_target()
    head = tiny_head(target).to(CUDA, torch.bfloat16)
    target.to(CUDA, torch.bfloat16)
    llm = loaded(target, HeadDraftModel(head, target), 1, 64, graph_mode="off")
    runner = llm.engine(NO_SPECULATION).runner
    runner.linear_backends.timer = lambda form, size, device: 1.0
    tree = _random_tree(llm, 8)
    with no_waits(), OnDeviceOnly():
        out = _verify(llm, tree, 64)
    assert out.shape == (1, 8)


class Unread(theirs.Wrapper):
    """A wrapper that plans as the library does, and gives the queries back."""

    def run(self, q, pages):
        return q


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_laid_out_for_a_library_without_a_wait(name):
    module = theirs.FlashInfer()
    library = {
        "flash-attn 3": lambda: FlashAttention3(lambda q, *_, **places: q),
        "flash-attn 2": lambda: FlashAttention2(lambda q, *_, **places: q),
        "flashinfer": lambda: FlashInfer(lambda *args: Unread(module, *args), CUDA),
    }[name]()
    q, k, v, plan = prompts(CHUNKS["chunks behind others"], 256)
    places = {part: getattr(plan, part).to(CUDA) for part in ("page_tables", "cu_rows", "starts")}
    plan = replace(plan, **places)
    q, k, v = (each.to(CUDA) for each in (q, k, v))
    with no_waits():
        out = library.attention(plan)(q, k, v, VARIANTS["plain"])
    assert out is q
    assert len(module.plans) == (name == "flashinfer")
