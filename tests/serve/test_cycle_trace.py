"""The whole decode cycle runs on fake tensors, where any host read or data-dependent shape raises."""

import pytest
import torch
from tiny import tiny_head, tiny_target
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.shape import SpecShape
from eagle_kit.serve.cycle import CycleState, cycle
from eagle_kit.serve.engine import Engine
from eagle_kit.speculation.eagle3 import DraftState


@pytest.mark.parametrize("shape", ["none", "1,1,2", "4,1,5", "5,4,16", "6,10,60"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_cycle_needs_no_host(shape, batch):
    target = tiny_target()
    engine = Engine(target, tiny_head(target), max_batch_size=batch, max_context=128, page_size=16)
    shape = SpecShape.parse(shape)
    engine.use_shape(shape)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        draft = DraftState(
            torch.zeros(batch, shape.topk, dtype=torch.int64),
            torch.zeros(batch, shape.topk),
            torch.zeros(batch, target.config.hidden_size),
        )
        ints = torch.zeros(batch, dtype=torch.int64)
        table = torch.zeros(batch, engine.max_pages, dtype=torch.int64)
        state = CycleState(table, ints, ints, draft if shape.steps else None)
        out = cycle(target, engine.kv, engine.proposer, state, shape, 192)
    assert out.tokens.shape == (batch, shape.steps + 1)
    assert [t.shape for t in out.state[:3]] == [t.shape for t in state[:3]]


def test_the_trace_would_notice_a_host_read():
    def reads(x):
        return x[: int(x.sum())]

    with pytest.raises(Exception, match="data.dependent|local_scalar"), FakeTensorMode():
        reads(torch.ones(3, dtype=torch.int64))
