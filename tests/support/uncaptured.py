"""Graphs of cycles that are not captured, for tests on a CPU of what an engine does around its graphs.

Such an engine pads batches to sizes, has few kinds of them, chooses a graph by name and key, and sends
results to the host before the next replay overwrites them. A GPU is needed for none of that. Captures,
private memory and streams are tested in `tests/cuda_device`.
"""

from collections.abc import Callable
from typing import Any

import torch

from eagle_kit.config.engine import GraphMode
from eagle_kit.engine.graphs.cuda_graph import GraphCall, GraphRunner, map_tensors, write


class UncapturedGraph:
    """The buffers of a graph; a replay runs the body over them."""

    node_bytes = 0

    def __init__(self, body: Callable[[Any], Any], example: Any) -> None:
        self.inputs = map_tensors(torch.clone, example)
        self.last_inputs: Any = None
        self.outputs = map_tensors(torch.clone, body(self.inputs))
        self._body = body

    def replay(self) -> None:
        """Run the body over ``inputs`` and write its results into ``outputs``."""
        write(self.outputs, self._body(self.inputs))


class UncapturedGraphs(GraphRunner):
    """A graph runner whose graphs are uncaptured ones."""

    def __init__(self, mode: GraphMode = "cycle") -> None:
        super().__init__(mode)

    def _capture(self, call: GraphCall) -> Any:
        return UncapturedGraph(call.body, call.idle())
