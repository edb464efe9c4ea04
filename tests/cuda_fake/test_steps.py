"""What an engine does around cycles, on fake CUDA tensors: the host copies by the functions made for it."""

import pytest
import torch
from fake_cuda import COPIES, CUDA, GPUS, Copies, Device, fake_gpu, to_gpu
from tiny import tiny_head, tiny_hybrid, tiny_target
from tiny_cycle import BATCH, SAMPLING_PARAMS, cycle_engine
from tiny_mixtures import DEEPSEEK, MIXTURES, untrained

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.serve.batch_kind import kind_of
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import CycleInputs
from eagle_kit.serve.scheduler import Chunk
from eagle_kit.speculation.propose.draft_model import HeadDraftModel
from eagle_kit.speculation.propose.ngram import NgramIndex, to_tree

TARGETS = {
    "llama": tiny_target,
    "hybrid": tiny_hybrid,
    "latents": lambda: untrained(DEEPSEEK["v3: YaRN"]),
    "experts": lambda: untrained(MIXTURES["qwen3-moe"]),
}
PAGES = 8


def on_gpu(target, head, shape="4,1,5", **options):
    to_gpu(target), to_gpu(head)
    return cycle_engine(target, HeadDraftModel(head, target), shape, **options)


def requests(sampling):
    """Prompts of 20, 40 and 33 tokens, in pages and slots of their own."""
    made = []
    for i, length in enumerate((20, 40, 33)):
        params = SAMPLING_PARAMS[sampling] or SamplingParams(logprobs=2)
        request = Request(i, [(7 * i + j) % 11 for j in range(length)], params)
        request.slot, request.allocation.pages = i, list(range(PAGES * i, PAGES * (i + 1)))
        made.append(request)
    return made


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "hybrid"])
@pytest.mark.parametrize("capability", GPUS)
def test_prompts_and_the_cycle_behind_them_wait_for_nothing(capability, name, sampling):
    """A whole prompt, a chunk behind a cached prefix that goes on, and one that ends."""
    target = TARGETS[name]()
    head = tiny_head(target)
    with fake_gpu(capability), torch.no_grad():
        engine = on_gpu(target, head)
        first, second, third = everyone = requests(sampling)
        chunks = [Chunk(first, 0, 20), Chunk(second, 16, 32), Chunk(third, 16, 33)]
        with Copies() as guard:
            found = engine.runner.prefill(chunks)
            decoded = engine.runner.decode(everyone, SpecShape(4, 1, 5))
    assert [len(results.requests) for results in found] == [1, 2]
    assert decoded.copy.wait().tokens.device.type == "cpu" and guard.used == COPIES


def test_prompts_of_recurrent_layers_wait_for_nothing():
    target = tiny_hybrid()
    head = tiny_head(target)
    with fake_gpu(), torch.no_grad():
        engine = on_gpu(target, head)
        for i in range(BATCH):
            engine.add_request(Request(i, [i, 2, 3] * (4 + i), SamplingParams(max_tokens=9)))
        chunks = engine.scheduler.plan().chunks
        with Copies():
            (found,) = engine.runner.prefill(chunks)
    assert chunks and len(found.requests) == len(chunks)


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
def test_both_halves_around_a_grammar_are_on_the_device(sampling):
    target = tiny_target()
    head, shape, vocab_size = tiny_head(target), "5,4,16", target.config.vocab_size
    with fake_gpu(), torch.no_grad():
        runner = on_gpu(target, head, shape).runner
        settings = runner._settings(BATCH, SpecShape.parse(shape), 192, 2)
        with Copies():
            asking = requests(sampling)
            batch = runner._sampling.of_cycle(asking, 0, kind_of(asking).level)
        runner.slots.make_tables(vocab_size)
        runner.slots.make_masks(vocab_size)
        with Device():
            inputs = CycleInputs(torch.arange(BATCH, device=CUDA), batch)
            window = runner._propose(inputs, settings)
            out = runner.run_cycle(inputs._replace(window=window, is_masked=True), settings)
    assert out.tokens.shape == (BATCH, 6) and out.tokens.is_cuda


def test_windows_of_n_grams_are_copied_and_verified_on_the_device():
    target = tiny_target()
    head, ngram = tiny_head(target), NgramIndex()
    ngram.insert(0, [1, 2, 3, 4, 1, 2, 5] * 3)
    found = ngram.propose([[1, 2], [4, 1], [9]], 16, 5)
    with fake_gpu(), torch.no_grad():
        engine = on_gpu(target, head, "5,4,16")
        with Copies():
            tree = to_tree(found, CUDA)
    assert tree.tokens.is_cuda and tree.ancestors.shape == (BATCH, 16) and engine.runner.steps == 5


def test_catching_up_waits_for_nothing():
    target = tiny_target()
    head = tiny_head(target)
    with fake_gpu(), torch.no_grad():
        runner = on_gpu(target, head, "3,2,6").runner
        runner.slots.make_missed(runner.drafter.model)
        everyone = requests("greedy")
        for request in everyone:
            request.num_missed = 3
        with Copies():
            runner._catch_up(everyone)
            assert [request.num_missed for request in everyone] == [0, 0, 0]
            everyone[1].num_missed = 64
            runner._store_missed(everyone)
    assert [request.num_missed for request in everyone] == [0, 1, 0]


def test_a_request_with_penalties_joins_without_a_wait():
    target = tiny_target()
    head = tiny_head(target)
    with fake_gpu(), torch.no_grad():
        runner = on_gpu(target, head).runner
        with Copies():
            sampling = runner._sampling.of_requests(requests("penalised"))
            runner.slots.adjust(requests("penalised")[1], 131, torch.ones(1, dtype=torch.int64, device=CUDA))
    assert sampling.bias.is_cuda and sampling.prompt_mask.is_cuda
