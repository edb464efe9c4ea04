"""Ranks replay a graph all together, or run eagerly all together."""

import torch
from rank_processes import run_ranks
from uncaptured import UncapturedGraphs

from eagle_kit.engine.graphs.cuda_graph import CaptureError, GraphCall


class FailingGraphs(UncapturedGraphs):
    """Graphs of two kinds of calls that fail on one of the ranks."""

    def _capture(self, call):
        made = super()._capture(call)
        if call.key == "too large on rank 1" and self._ranks.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if call.key == "refused on rank 0" and self._ranks.rank == 0:
            raise CaptureError("The operation planted cannot be in a CUDA graph.", "planted")
        made.node_bytes = 100 + self._ranks.rank
        return made


def run_all(ranks):
    graphs = FailingGraphs()
    graphs._ranks = ranks
    graphs = graphs.new_empty()
    replays = []
    outputs = []
    for key in ("fits", "too large on rank 1", "refused on rank 0", "fits too", "too large on rank 1"):
        inputs = (torch.full((3,), 1.0 + ranks.rank),)
        call = GraphCall("sum", key, lambda given: (ranks.sum(given[0]),), inputs, lambda: (torch.zeros(3),))
        known = graphs.num_graphs
        outputs.append(graphs.run(call)[0].tolist())
        replays.append(graphs.num_graphs - known)
    return outputs, replays, graphs.num_graphs, graphs.num_out_of_memory, graphs.node_bytes


def test_ranks_agree_on_the_graphs_that_there_are():
    first, second = run_ranks(2, run_all)
    assert first == second
    outputs, replays, *figures = first
    assert outputs == [[3.0] * 3] * 5
    assert replays == [1, 0, 0, 1, 0]
    assert figures == [2, 1, 2 * 101], "bytes of the rank that needs most"
