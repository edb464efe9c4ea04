"""Faults that are planted in an engine's graphs show in its texts; without them they are the CPU's.

Each is right for a run without graphs, so that nothing but a replay can show it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle_kit.engine.graphs import cuda_graph as graph
from eagle_kit.engine.request import Request
from eagle_kit.engine.runner import Runner
from tests.cuda_device.values.models import Models, make_request, serve_all

LENGTHS = (4, 12, 16, 6, 9)
PROMPTS = [[5, 6, 7], [1] * 20, [9, 8], [3, 4, 5, 6], [10]]
OPTIONS = {"shape": "3,1,4", "max_batch_size": 2}


def requests() -> list[Request]:
    """Greedy requests of unlike lengths, so that each row of a batch is taken by several."""
    numbers = range(len(PROMPTS))
    return [make_request(i, PROMPTS[i], {}, LENGTHS[i]) for i in numbers]


def texts(models: Models, device: str, **options: Any) -> list[list[int]]:
    """Texts of a small Llama with an EAGLE-3 head."""
    given = OPTIONS | ({"batch_sizes": (1, 2)} if device == "cuda" else {}) | options
    llm = models.llm(device, "grouped queries", "eagle3", **given)
    return [request.token_ids for request in serve_all(llm, requests())]


def copy_inputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a stale input: buffers of a graph are written when it is captured, and never again."""
    plain = graph.write
    written: list[Any] = []

    def write(buffers: Any, values: Any) -> None:
        if any(buffers is each for each in written):
            return
        written.append(buffers)
        plain(buffers, values)

    monkeypatch.setattr(graph, "write", write)


def bake_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a number of the host in the body of a cycle: how long the only request of the batch is."""
    decode = Runner.decode
    state_of = Runner._state
    lengths: list[int] = []

    def remembering(self: Runner, batch: list[Request], *rest: Any, **named: Any) -> Any:
        lengths[:] = [request.num_tokens - 1 for request in batch]
        return decode(self, batch, *rest, **named)

    def baked(self: Runner, inputs: Any, *, with_draft: bool = True) -> Any:
        state, sampling = state_of(self, inputs, with_draft=with_draft)
        (length,) = lengths
        return state._replace(seq_lens=torch.full_like(state.seq_lens, length)), sampling

    monkeypatch.setattr(Runner, "decode", remembering)
    monkeypatch.setattr(Runner, "_state", baked)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (copy_inputs_once, {}),
        (bake_a_length, {"max_batch_size": 1, "batch_sizes": (1,), "lag": 0}),
    ],
    ids=["stale input", "baked number"],
)
def test_a_planted_fault_shows_in_the_texts(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
):
    expected = texts(models, "cpu")
    assert texts(models, "cuda", **options) == expected
    plant(monkeypatch)
    assert texts(models, "cuda", graph_mode="off", **options) == expected
    found = texts(models, "cuda", **options)
    assert found != expected
