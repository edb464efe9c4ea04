"""Prompts of few rows are two graphs: what the host does for one, counted exactly."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch

from benchmarks.engine.host import Counting
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.padded_prompts import prompt_shapes
from tests.cuda_device.device import phase
from tests.cuda_device.engines import made_up_results
from tests.cuda_device.test_warm_up import prepared

LENGTHS = (30, 128, 512)
SAMPLINGS = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.2},
)


class Counts(NamedTuple):
    """Of a prefill: torch's operations, blocks of torch's allocator, launches, replays and copies."""

    operations: int
    allocations: int
    launches: int
    replays: int
    copies: int


REPLAYED = Counts(operations=28, allocations=10, launches=9, replays=2, copies=7)
"""Of a greedy prompt: the numbers of the step in two buffers, the first token, and its results."""
EAGER = {
    4: Counts(operations=231, allocations=145, launches=119, replays=0, copies=24),
    6: Counts(operations=265, allocations=167, launches=137, replays=0, copies=24),
}
"""The same without graphs, by layers of the target."""


def counted(llm: LLM, length: int, **params) -> Counts:
    """Compute a prompt, and count what the host does until its results are on their way."""
    engine = llm.engine()
    ids = [(7 * i + length) % 500 for i in range(length)]
    request = llm.make_request(ids, SamplingParams(max_tokens=1, ignore_eos=True, **params))
    engine.add_request(request)
    chunks = engine.scheduler.plan().chunks
    with torch.inference_mode():
        engine.runner.set_pages([request])
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with Counting() as counting, phase() as found:
            engine._prefill(chunks)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert found.counts["device_allocations"] == found.counts["synchronisations"] == 0
        engine._collect_until(0)
    return Counts(
        counting.counts.total(),
        after - before,
        found.launches,
        found.counts["graph_launches"],
        found.counts["copies"],
    )


def long_llm(num_layers: int = 4, **options) -> LLM:
    """An engine for prompts of 512 tokens, warmed up."""
    changes = {"num_layers": num_layers, "max_position_embeddings": 1024}
    sizes = {"max_context": 640, "kv_tokens": 4096, "prefix_cache": False}
    llm, _ = prepared("usual", changes=changes, **{**sizes, **options})
    return llm


@pytest.mark.smoke
@pytest.mark.parametrize("num_layers", EAGER)
def test_what_the_host_does_for_a_prompt(num_layers):
    """A replayed prompt does not depend on layers, and neither kind on the number of tokens."""
    llm = long_llm(num_layers)
    with made_up_results():
        counted(llm, 3)  # it clears what the warm-up has left in its slot
        for length in LENGTHS:
            assert counted(llm, length) == REPLAYED, length
        with llm.engine().runner.unpadded_prompts():
            for length in LENGTHS:
                assert counted(llm, length) == EAGER[num_layers], length


def names_of_graphs(llm: LLM) -> Counter[str]:
    """Number of an engine's graphs by name."""
    return Counter(name for name, _ in llm.engine().runner.graphs._graphs)


@pytest.mark.parametrize(
    ("options", "num_graphs"),
    [({}, 2), ({"shape": "none"}, 1), ({"algorithm": "NGRAM"}, 1)],
    ids=["head", "no drafts", "n-grams"],
)
def test_a_warm_up_captures_the_prompts_of_every_shape(options, num_graphs):
    llm = long_llm(max_batch_size=12, batch_sizes=(1, 12), **options)
    shapes = prompt_shapes(llm.config)
    assert len(shapes) == 9 and {shape.requests for shape in shapes} == {8, 12}
    names = names_of_graphs(llm)
    assert (names["prefill"], names["prefill_draft"]) == (9, 9 * (num_graphs - 1))


def test_prompts_behind_a_warm_up_are_replayed_and_capture_and_compile_nothing():
    """Of any length up to 512 rows together, and of any number of requests."""
    llm = long_llm(max_batch_size=12, batch_sizes=(1, 12))
    engine = llm.engine()
    reserved = torch.cuda.memory_reserved()
    sizes = [[1], [31], [33], [200, 150, 150], [500], [1] * 12, [30] * 12, [40] * 12, [5, 400, 3]]
    with phase() as found, made_up_results():
        for lengths in sizes:
            requests = []
            for i, length in enumerate(lengths):
                sampling = SAMPLINGS[i % len(SAMPLINGS)]
                params = SamplingParams(max_tokens=1, ignore_eos=True, **sampling)
                requests.append(llm.make_request([(i + j) % 500 for j in range(length)], params))
            engine.prefill(requests)
    assert found.counts["graph_launches"] == 2 * len(sizes)
    assert found.counts["captures"] == found.counts["modules_loaded"] == 0
    assert torch.cuda.memory_reserved() == reserved


def test_larger_steps_and_more_requests_are_eager():
    llm = long_llm(max_batch_size=70, batch_sizes=(70,), kv_tokens=8192)
    assert {shape.requests for shape in llm.engine().runner.prompt_shapes} == {8, 64}
    for lengths in ([513], [200, 200, 200], [1] * 65):
        requests = [
            llm.make_request([i % 500] * length, SamplingParams(max_tokens=1, ignore_eos=True))
            for i, length in enumerate(lengths)
        ]
        with phase() as found, made_up_results():
            llm.engine().prefill(requests)
        assert found.counts["graph_launches"] == 0 and found.launches > 50
