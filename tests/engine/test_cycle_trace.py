"""The whole decode cycle runs on fake tensors, where any host read or data-dependent shape raises."""

from contextlib import contextmanager

import pytest
import torch
from crossed import crossed
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_hybrid, tiny_p_eagle, tiny_target
from tiny_cycle import (
    BATCH,
    POLICIES,
    SAMPLING_PARAMS,
    cycle_engine,
    cycle_settings,
    head_draft,
    sampling_batch,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.ngram.index import NgramIndex, to_tree
from eagle_kit.engine.cycle import CycleModels, cycle, finish_cycle
from eagle_kit.engine.request import Request
from eagle_kit.ops.backend import use
from eagle_kit.verify.proposal import Deterministic, DraftOutput

CPU = torch.device("cpu")
BACKENDS = "backend", ["reference", "triton"]


@crossed(("shape", ["none", "1,1,2", "4,1,5", "5,4,16", "6,10,60"]), ("sampling", SAMPLING_PARAMS), BACKENDS)
def test_the_cycle_needs_no_host(shape, sampling, backend):
    _trace(backend, sampling, shape)


@crossed(
    ("shape, options", [pytest.param(*each, id=name) for name, each in POLICIES.items()]),
    ("sampling", SAMPLING_PARAMS),
    BACKENDS,
)
def test_no_policy_needs_the_host(shape, options, sampling, backend):
    _trace(backend, sampling, shape, **options)


@crossed(("shape", ["none", "4,1,5", "5,4,16"]), BACKENDS)
def test_recurrent_layers_need_no_host(shape, backend):
    _trace(backend, "greedy", shape, target=tiny_hybrid())


@crossed(("shape", ["1,1,2", "5,1,6", "5,4,16"]), BACKENDS)
@pytest.mark.parametrize("make_head", [tiny_p_eagle, tiny_dflash, tiny_dspark])
def test_drafts_of_one_pass_need_no_host(shape, backend, make_head):
    _trace(backend, "greedy", shape, make_head=make_head)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sampling", SAMPLING_PARAMS)
def test_the_half_behind_a_window_from_the_host_needs_no_host(sampling, backend):
    """Windows that text was looked up for, with a grammar's masks."""
    target, engine, shape, settings = _engine("5,4,16")
    ngram = NgramIndex()
    ngram.insert(0, [1, 2, 3, 4, 1, 2, 5] * 3)
    tree = to_tree(ngram.propose([[1, 2], [4, 1], [9]], shape.tokens, shape.steps), CPU)
    allowed = torch.rand(BATCH, shape.tokens, target.config.vocab_size) < 0.5
    with _traced(backend):
        state = engine.runner.slots.gather(torch.arange(BATCH))._replace(draft=None)
        window = DraftOutput(tree, Deterministic())
        out = finish_cycle(
            CycleModels(target, engine.runner.kv),
            state,
            window,
            settings,
            sampling_batch(sampling, target.config.vocab_size, CPU),
            allowed,
        )
    assert out.emitted.tokens.shape == (BATCH, shape.steps + 1)


@pytest.mark.parametrize("make_head", [tiny_head, tiny_p_eagle, tiny_dflash, tiny_dspark])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_catching_up_needs_no_host(backend, make_head):
    """What plain cycles kept for the draft is read in one forward, whose length the host knows, or stored
    but for the last token."""
    _, engine, _, _ = _engine("3,2,6", make_head=make_head)
    engine.runner.slots.make_pending(engine.runner.drafter.model)
    requests = [Request(i, [1] * 20, SamplingParams()) for i in range(2)]
    for request, slot, num_pending in zip(requests, (0, 2), (3, 5), strict=True):
        request.sequence.slot = slot
        request.on_device.num_pending_draft_tokens = num_pending
    with _traced(backend):
        engine.runner._backfill_draft(requests)
        assert [request.on_device.num_pending_draft_tokens for request in requests] == [0, 0]
        requests[0].on_device.num_pending_draft_tokens = 64
        requests[1].on_device.num_pending_draft_tokens = 2
        engine.runner._store_pending_keys(requests)
    assert [request.on_device.num_pending_draft_tokens for request in requests] == [1, 1]


def _trace(backend: str, sampling: str, shape: str, **options) -> None:
    target, engine, shape, settings = _engine(shape, **options)
    runner = engine.runner
    with _traced(backend):
        state = runner.slots.gather(torch.arange(BATCH))
        out = cycle(runner.models, state, settings, sampling_batch(sampling, target.config.vocab_size, CPU))
    assert out.emitted.tokens.shape == (BATCH, shape.steps + 1)
    assert out.emitted.logprobs.ids.shape == (BATCH, shape.steps + 1, 3)
    assert [t.shape for t in out.state[:4]] == [t.shape for t in state[:4]]


def _engine(shape: str, target=None, make_head=tiny_head, **options):
    target = target or tiny_target()
    engine = cycle_engine(target, head_draft(target, make_head), shape, **options)
    return target, engine, SpecShape.parse(shape), cycle_settings(engine, shape)


@contextmanager
def _traced(backend: str):
    if backend == "triton":
        pytest.importorskip("triton")
    with torch.no_grad(), use(backend), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def test_the_trace_would_notice_a_host_read():
    def reads(x):
        return x[: int(x.sum())]

    with pytest.raises(Exception, match="data.dependent|local_scalar"), FakeTensorMode():
        reads(torch.ones(3, dtype=torch.int64))
