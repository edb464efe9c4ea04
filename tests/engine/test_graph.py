"""Nests of tensors that graphs take and give, and modes. Graphs are tested in `tests/cuda_device`."""

from typing import NamedTuple

import pytest
import torch
from tiny import tiny_target

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.switches import parse
from eagle_kit.engine.graphs.cuda_graph import leaves, map_tensors, write
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.options import without_graphs
from eagle_kit.verify.proposal import SampledChain


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def test_nests():
    chain = SampledChain(torch.ones(2))
    nest = (Pair(torch.zeros(1), None), chain, 3, None)
    doubled = map_tensors(lambda tensor: tensor + 1, nest)
    assert isinstance(doubled[0], Pair) and isinstance(doubled[1], SampledChain) and doubled[2:] == (3, None)
    assert [leaf.tolist() for leaf in leaves(doubled)] == [[1.0], [2.0, 2.0]]
    write(nest, doubled)
    assert chain.q.tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="shorter|longer"):
        write((torch.ones(1),), (torch.ones(1), torch.ones(1)))


def test_modes_are_checked():
    with pytest.raises(UserError, match="graph_mode is 'whole'"):
        LLM(tiny_target(), graph_mode="whole")


def test_the_switch_turns_graphs_off(monkeypatch):
    target = tiny_target()
    config = without_graphs(EngineConfig(), target)
    assert config.resolve(on_gpu=True).graph_mode == "cycle"
    monkeypatch.setattr("eagle_kit.core.switches.disabled_parts", lambda: parse("graphs"))
    assert config.resolve(on_gpu=True).graph_mode == "off"
