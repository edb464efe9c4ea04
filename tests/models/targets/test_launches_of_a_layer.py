"""What a forward over a window launches: the operations of its layers and nothing else, on fake tensors."""

import pytest
import torch
from tiny import tiny_target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.backend import use

LAYER = ["mm", "rope_store", "window_attention", "mm", "add_rms_norm", "mm", "swiglu", "mm", "add_rms_norm"]
NO_LAUNCH = {"empty", "empty_like", "new_empty", "_unsafe_view", "device"}


class Launches(TorchDispatchMode):
    """Lists operations that launch something: views, allocations and queries do not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches(nodes: int, **changes) -> list[str]:
    pytest.importorskip("triton")
    target = tiny_target(num_layers=3, **changes)
    config = target.config
    store = open_store(config.cache, PoolLayout(8, 16, 2), target.variants)
    with torch.no_grad(), use("triton"), FakeTensorMode(allow_non_fake_inputs=True):
        table, lens = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        bits = torch.zeros(2, nodes, dtype=torch.int64)
        ids = torch.zeros(2 * nodes, dtype=torch.int64)
        with Launches() as counted:
            target(ids, ids, store.window_attend(table, lens, bits, nodes, 64))
    return counted.names


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"rotary_dim": 4}], ids=str)
def test_a_forward_is_its_layers_and_the_first_norm(nodes, changes):
    """Rows of the window, cosines and sines are made in the kernels; no copy of q, k or v is."""
    assert launches(nodes, **changes) == ["embedding", "rms_norm", *LAYER * 3]
