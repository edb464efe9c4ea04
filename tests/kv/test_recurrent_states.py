"""Memory of recurrent layers' states: what plans count is what is allocated."""

import pytest
import torch

from eagle_kit.kv.recurrent_states import StatePool
from eagle_kit.models.cache_specs import RecurrenceSpec, StateSpec
from eagle_kit.ops.recurrence import Inputs, recurrent_window

SPECS = {
    "delta rule": StateSpec(((34, 4),) * 2, (RecurrenceSpec(2, 4, 5, 6),) * 2),
    "channels decay by themselves": StateSpec((), (RecurrenceSpec(2, 4, 5, 6, per_channel=True),)),
    "convolutions alone": StateSpec(((20, 3), (12, 2))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_a_text_has_as_many_bytes_as_its_slot(name, dtype):
    spec = SPECS[name]
    pool = StatePool(spec, 2, 3, dtype=dtype)
    assert all(len(tensor) == 6 for tensor in (*pool.states, *pool.tails))  # and the slot of padding
    assert sum(tensor[0].nbytes for tensor in (*pool.states, *pool.tails)) == spec.num_bytes(dtype.itemsize)


@pytest.mark.parametrize("name", SPECS)
def test_a_node_of_a_window_has_as_many_bytes_as_it_keeps(name):
    spec = SPECS[name]
    nodes = 3
    kept = sum(channels for channels, _ in spec.convolutions) * nodes * 2
    for each in spec.recurrences:
        q, k = (torch.randn(1, nodes, each.num_key_heads, each.key_dim) for _ in range(2))
        v = torch.randn(1, nodes, each.num_heads, each.value_dim)
        decay = (each.num_heads, each.key_dim) if each.per_channel else (each.num_heads,)
        inputs = Inputs(q, k, v, -torch.rand(1, nodes, *decay), torch.rand(1, nodes, each.num_heads))
        ancestors = torch.tensor([[1, 3, 7]])
        _, written = recurrent_window(
            inputs, torch.zeros(1, *each.shape), torch.tensor([0]), ancestors, delta=not each.per_channel
        )
        kept += sum(tensor.nbytes for tensor in written)
    assert kept == nodes * spec.num_bytes_of_node(2)


def test_pairs_of_nodes_need_memory_where_channels_decay_by_themselves():
    """Three products of keys in fp32, of the largest layer."""
    small, large = (RecurrenceSpec(2, heads, 5, 6, per_channel=True) for heads in (2, 4))
    spec = StateSpec((), (small, large, SPECS["delta rule"].recurrences[0]))
    assert spec.num_bytes_of_pair == 3 * 4 * 5 * 4
    assert SPECS["delta rule"].num_bytes_of_pair == SPECS["convolutions alone"].num_bytes_of_pair == 0
