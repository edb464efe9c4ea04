"""The whole decode cycle runs on fake tensors, where any host read or data-dependent shape raises."""

import pytest
import torch
from tiny import tiny_head, tiny_target
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.backend import use
from eagle_kit.kernels.sampling import make_sampling_batch
from eagle_kit.serve.cycle import Settings, cycle
from eagle_kit.serve.engine import Engine, EngineOptions
from eagle_kit.speculation.draft_model import Eagle3Draft

LAWS = {
    "greedy": None,
    "sampled": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(temperature=1.0, repetition_penalty=1.2, logit_bias={3: 1.0}),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", ["none", "1,1,2", "4,1,5", "5,4,16", "6,10,60"])
def test_the_cycle_needs_no_host(shape, law, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    target, batch = tiny_target(), 3
    options = EngineOptions(max_running=batch, max_context=128, kv_tokens=600)
    engine = Engine(target, Eagle3Draft(tiny_head(target), target), options)
    shape = SpecShape.parse(shape)
    engine.use_shape(shape)
    runner, vocab = engine.runner, target.config.vocab_size
    params = LAWS[law]
    with torch.no_grad(), use(backend), FakeTensorMode(allow_non_fake_inputs=True):
        sampling = None
        if params is not None:
            sampling = make_sampling_batch(
                [params] * batch, [[1, 2]] * batch, [7] * batch, vocab, torch.device("cpu")
            )
        state = runner.slots.gather(torch.arange(batch))
        settings = Settings(shape, 192, num_logprobs=3)
        out = cycle(target, runner.kv, runner.drafter, state, settings, sampling)
    assert out.tokens.shape == (batch, shape.steps + 1)
    assert out.logprobs.ids.shape == (batch, shape.steps + 1, 3)
    assert [t.shape for t in out.state[:4]] == [t.shape for t in state[:4]]


def test_the_trace_would_notice_a_host_read():
    def reads(x):
        return x[: int(x.sum())]

    with pytest.raises(Exception, match="data.dependent|local_scalar"), FakeTensorMode():
        reads(torch.ones(3, dtype=torch.int64))
