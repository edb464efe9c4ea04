"""Cycles of all kinds of targets, shapes, verifiers and drafts can be captured, without a tensor of the host,
and so can prompts of fixed shape.

`make test-cuda-device` runs this file for the capabilities 9.0 and 8.0, where kernels and choices differ.
"""

import pytest
import torch
from conformance import untrained_head
from tiny import tiny_head, tiny_hybrid, tiny_target
from tiny_cycle import BATCH, POLICIES, SAMPLING_PARAMS, cycle_engine, cycle_settings, sampling_batch
from tiny_mixtures import MIXTURES, untrained

from eagle_kit.drafts.base.draft_model import HeadDraftModel, StandaloneDraftModel
from eagle_kit.engine.graphs.cuda_graph import CaptureError, Graph
from eagle_kit.engine.padded_prompts import pack_prompts
from eagle_kit.engine.runner import CycleInputs
from eagle_kit.ops.transfer import to_device
from tests.cuda_device.device import phase
from tests.cuda_device.host_tensors import HostTensor, OnDeviceOnly
from tests.cuda_device.targets import LATENTS, TARGETS

CUDA = torch.device("cuda", 0)
SHAPES = ("none", "1,1,2", "4,1,5", "5,4,16")


def capture_cycle(target, shape, sampling, **options) -> None:
    """Capture a cycle of a target in bf16 with an EAGLE-3 head, and replay it."""
    head = tiny_head(target).to(CUDA, torch.bfloat16)
    target.to(CUDA, torch.bfloat16)
    engine = cycle_engine(target, HeadDraftModel(head, target), shape, **options)
    runner = engine.runner
    rows = torch.arange(BATCH, device=CUDA)
    batch = sampling_batch(sampling, target.config.vocab_size, CUDA)
    if batch is not None and batch.counts is not None:
        runner.slots.make_tables(target.config.vocab_size)
    settings = cycle_settings(engine, shape)
    guard = OnDeviceOnly()

    def body(inputs: CycleInputs):
        with guard:
            return runner.run_cycle(inputs, settings)

    with torch.inference_mode(), phase() as found:
        graph = Graph(body, CycleInputs(rows, batch))
        graph.replay()
    assert graph.outputs.tokens.shape == (BATCH, runner.steps + 1)
    assert found.counts["captures"] == 1 and found.counts["graph_launches"] == 1
    assert guard.num_operations > 50 and found.counts["replayed_nodes"] > 50


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cycles_of_a_llama(shape, sampling):
    capture_cycle(tiny_target(), shape, sampling)


@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
@pytest.mark.parametrize(("shape", "options"), POLICIES.values(), ids=POLICIES)
def test_cycles_of_every_policy(shape, options, sampling):
    capture_cycle(tiny_target(), shape, sampling, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_cycles_of_recurrent_layers(shape):
    capture_cycle(tiny_hybrid(), shape, "greedy")


@pytest.mark.parametrize("name", ["v2 lite", "v3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cycles_of_latents(shape, name):
    capture_cycle(untrained(LATENTS[name]), shape, "greedy")


@pytest.mark.parametrize("shape", ["none", "5,4,16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_cycles_of_experts(name, shape):
    capture_cycle(untrained(MIXTURES[name]), shape, "greedy")


PROMPT_DRAFTS = {
    "eagle3": ("4,1,5", {}),
    "eagle1": ("5,4,16", {}),
    "p-eagle": ("4,1,5", {}),
    "dflash": ("4,3,14", {}),
    "dspark": ("4,1,5", {"sampled_drafts": True}),
    "static tree": (POLICIES["static"][0], {"tree": "static"}),
    "whole model": ("4,1,5", {}),
}


@pytest.mark.parametrize("name", ["llama", "experts"])
@pytest.mark.parametrize("kind", PROMPT_DRAFTS)
def test_prompts_of_fixed_shape_of_every_draft(kind, name):
    """Of the target and of the draft, in the smallest shape."""
    target = TARGETS[name]().to(CUDA, torch.bfloat16)
    if kind == "whole model":
        draft = StandaloneDraftModel(tiny_target().to(CUDA, torch.bfloat16))
    else:
        draft = HeadDraftModel(untrained_head(kind, target).to(CUDA, torch.bfloat16), target)
    shape, options = PROMPT_DRAFTS[kind]
    runner = cycle_engine(target, draft, shape, graph_mode="cycle", **options).runner
    prompt_shape = runner.prompt_shapes[0]
    numbers = to_device(pack_prompts([], prompt_shape, runner.slots.dummy), CUDA)
    for run in (runner._run_target_over_prompts, runner._run_draft_over_prompts):
        guard = OnDeviceOnly()

        def body(numbers, run=run, guard=guard):
            with guard:
                return run(numbers, prompt_shape)

        with torch.inference_mode(), phase() as found:
            Graph(body, numbers).replay()
        assert found.counts["captures"] == 1 and found.counts["replayed_nodes"] > 10
        assert guard.num_operations > 30


FAULTS = {
    "a single number of the host": lambda x: x + torch.tensor(1.0),
    "a comparison with one": lambda x: x > torch.tensor(1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_of_the_host_is_refused(fault):
    """A capture alone takes it."""
    x = torch.ones(3, device=CUDA)
    Graph(FAULTS[fault], x)

    def body(x):
        with OnDeviceOnly():
            return FAULTS[fault](x)

    with pytest.raises(HostTensor, match="tensor of the host"):
        Graph(body, x)


READS = {
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "counts": lambda x: x.long().bincount(),
    "a repetition without its size": lambda x: x.repeat_interleave(x.long()),
    "a copy to the host": lambda x: x.cpu(),
    "a copy from pageable memory": lambda x: torch.zeros(3).to(CUDA),
    "indices of the host": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.illegal_calls
@pytest.mark.parametrize("read", READS)
def test_what_waits_for_the_device_cannot_be_captured(read):
    """Two runs come before the capture, which may wait."""

    def body(x):
        return READS[read](x) if torch.cuda.is_current_stream_capturing() else x

    with pytest.raises(CaptureError):
        Graph(body, torch.ones(3, device=CUDA))
