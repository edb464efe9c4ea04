"""Cycles on fake CUDA tensors: nothing of them is on the host, and nothing waits for it."""

import pytest
import torch
from fake_cuda import CUDA, GPUS, Copies, Device, fake_gpu, to_gpu
from tiny import tiny_head, tiny_hybrid, tiny_target
from tiny_cycle import BATCH, POLICIES, SAMPLING_PARAMS, cycle_engine, cycle_settings, sampling_batch
from tiny_mixtures import DEEPSEEK, MIXTURES, untrained

from eagle_kit.serve.runner import CycleInputs
from eagle_kit.speculation.propose.draft_model import HeadDraftModel

SHAPES = ("none", "1,1,2", "4,1,5", "5,4,16")


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capability", GPUS)
def test_a_cycle_is_on_the_device(capability, shape, sampling):
    trace(shape, sampling, tiny_target(), capability)


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize(("shape", "options"), POLICIES.values(), ids=POLICIES)
def test_every_policy_is_on_the_device(shape, options, sampling):
    trace(shape, sampling, tiny_target(), **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_recurrent_layers_are_on_the_device(shape):
    trace(shape, "greedy", tiny_hybrid())


@pytest.mark.parametrize(
    "name", ["v2 lite: no query bottleneck, greedy gate, YaRN", "v3: sigmoid gate with bias, groups"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_latents_are_on_the_device(shape, name):
    trace(shape, "greedy", untrained(DEEPSEEK[name]))


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("shape", ["none", "5,4,16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_on_the_device(name, shape, capability):
    trace(shape, "greedy", untrained(MIXTURES[name]), capability)


def trace(shape, sampling, target, capability="9.0", **options):
    head, vocab_size = tiny_head(target), target.config.vocab_size
    with fake_gpu(capability), torch.no_grad():
        to_gpu(target), to_gpu(head)
        engine = cycle_engine(target, HeadDraftModel(head, target), shape, **options)
        runner, rows = engine.runner, torch.arange(BATCH, device=CUDA)
        with Copies():
            batch = sampling_batch(sampling, vocab_size, CUDA)
        if batch is not None and batch.counts is not None:
            runner.slots.make_tables(vocab_size)
        with Device() as guard:
            out = runner.run_cycle(CycleInputs(rows, batch), cycle_settings(engine, shape))
    assert out.tokens.shape == (BATCH, runner.steps + 1) and out.tokens.device == CUDA
    assert guard.num_operations > 50
