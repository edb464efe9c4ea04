"""An engine whose graphs read memory that was freed. Nobody else writes there: poison alone shows it."""

import copy
from collections.abc import Iterator

import pytest
import torch
from tiny import tiny_head, tiny_target
from torch import nn

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.runner import Runner
from tests.cuda_device.values.models import SIZES

PROMPTS = [[5, 6, 7], [1] * 20, [9, 8]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class DerivedWeight:
    """A weight that a graph computes into its private pool, as one of another format would be."""

    def __init__(self, source: torch.Tensor) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            made = source * 1.0
        self.graph.replay()
        self.weight = nn.Parameter(made, requires_grad=False)


class Engines:
    """The same models on the CPU and on the device, where graphs are replayed.

    Attributes:
        target: the target on the device.
        expected: texts of the CPU.
    """

    def __init__(self) -> None:
        target = tiny_target(256, 2, **SIZES)
        head = tiny_head(target, 128)
        self.expected = [out.token_ids for out in self._llm(target, head).generate(PROMPTS, PARAMS)]
        self.target = copy.deepcopy(target).to("cuda")
        self._head = copy.deepcopy(head).to("cuda")

    def start(self) -> None:
        """Make the engine on the device."""
        self.llm = self._llm(self.target, self._head)

    def _llm(self, target: nn.Module, head: nn.Module) -> LLM:
        sizes = {"max_batch_size": 2, "max_context": 128, "batch_sizes": (1, 2), "kv_tokens": 1024}
        return LLM(target, head, shape="3,1,4", **sizes)

    @property
    def runner(self) -> Runner:
        """The device's side of the engine."""
        return self.llm.engine().runner

    def texts(self) -> list[list[int]]:
        """Responses of the device."""
        return [out.token_ids for out in self.llm.generate(PROMPTS, PARAMS)]

    def finish_reasons(self) -> set[str | None]:
        """How responses of the device end."""
        return {out.finish_reason for out in self.llm.generate(PROMPTS, PARAMS)}


@pytest.fixture
def engines() -> Iterator[Engines]:
    yield Engines()
    torch.cuda.empty_cache()


def test_a_weight_that_moved_while_graphs_read_its_old_block(engines):
    """The values are the same at the new place; the old block is free, and holds them but for the poison."""
    engines.start()
    assert engines.texts() == engines.expected
    assert engines.texts() == engines.expected
    assert engines.runner.graphs.num_graphs > 0

    norm = engines.target.norm
    norm.weight = nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    assert engines.finish_reasons() == {"error"}, "logits of graphs are NaN"

    engines.runner.graphs = engines.runner.graphs.new_empty()
    assert engines.texts() == engines.expected


def test_a_weight_in_the_private_pool_of_a_graph_that_was_dropped(engines):
    norm = engines.target.norm
    derived = DerivedWeight(norm.weight.detach())
    norm.weight = derived.weight
    engines.start()
    assert engines.texts() == engines.expected

    # The graph alone is gone: the tensor keeps its bytes.
    derived.graph.reset()
    assert engines.texts() == engines.expected

    # Graphs of the engine read the pool when the tensor is gone too.
    norm.weight = nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    del derived
    assert engines.finish_reasons() == {"error"}, "logits of graphs are NaN"

    engines.runner.graphs = engines.runner.graphs.new_empty()
    assert engines.texts() == engines.expected
