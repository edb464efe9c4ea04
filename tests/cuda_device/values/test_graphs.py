"""Graphs of an engine with true values: their buffers, their number, and texts that no graph changes."""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from tiny import tiny_head, tiny_target

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.graphs.cuda_graph import GraphCall, GraphRunner, HostCopy
from eagle_kit.engine.llm import LLM
from tests.cuda_device.values.models import SIZES
from tests.engine.test_published_parts import HEADS

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [20]]
CUDA = torch.device("cuda", 0)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def make_models(make_head=lambda target: tiny_head(target, 50), vocab_size: int = 64, **changes):
    """A target of two layers and a head on the CPU."""
    target = tiny_target(vocab_size, 2, **SIZES, **changes)
    return target, make_head(target).eval().requires_grad_(False)


def llm_on(device, models, **options) -> LLM:
    """An LLM of copies of the models."""
    copies = [copy.deepcopy(model).to(device) for model in models]
    sizes = {"max_batch_size": 2, "max_context": 96, "batch_sizes": (1, 2), "kv_tokens": 512, "lag": 1}
    return LLM(*copies, **{**sizes, **options})


def responses(llm: LLM, params, prompts=PROMPTS, **options) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, **options)]


# ---- Buffers ----


@pytest.mark.smoke
def test_inputs_are_written_and_outputs_overwritten():
    runner = GraphRunner("cycle")

    def body(pair):
        return Pair(pair.left + 1, None)

    def idle():
        return Pair(torch.zeros(3, device=CUDA), None)

    first = runner.run(GraphCall("add", 3, body, Pair(torch.ones(3, device=CUDA), None), idle))
    kept = HostCopy(first)
    inputs = Pair(torch.full((3,), 5.0, device=CUDA), None)
    second = runner.run(GraphCall("add", 3, body, inputs, idle))
    assert first.left is second.left and second.left.tolist() == [6.0] * 3
    assert kept.wait().left.tolist() == [2.0] * 3, "what was sent to the host stays"


def test_the_inputs_of_the_same_batch_are_copied_once_and_others_whenever_they_come():
    runner = GraphRunner("cycle")
    total = torch.zeros(2, device=CUDA)
    first = (torch.tensor([1.0, 2.0], device=CUDA),)
    second = (torch.tensor([10.0, 20.0], device=CUDA),)

    def body(inputs):
        return (total.add_(inputs[0]).clone(),)

    def run(inputs):
        (out,) = runner.run(GraphCall("sum", 0, body, inputs, lambda: (torch.zeros(2, device=CUDA),)))
        return out.tolist()

    seen = [run(inputs) for inputs in (first, first, second, first)]
    assert seen == [[1.0, 2.0], [2.0, 4.0], [12.0, 24.0], [13.0, 26.0]]
    (graph,) = runner._graphs.values()
    graph.inputs[0].zero_()
    assert run(first) == [13.0, 26.0], "nothing was copied"


# ---- Texts ----


def test_a_change_of_shape_keeps_graphs_and_texts():
    models = make_models()
    expected = responses(llm_on("cpu", models, graph_mode="off"), GREEDY, shape="none")
    llm = llm_on(CUDA, models, shape="none")
    shapes = ("3,1,4", "none", "3,2,6")
    assert [responses(llm, GREEDY, shape=shape) for shape in shapes] == [expected] * 3
    num_graphs = llm.engine("none").runner.graphs.num_graphs
    assert [responses(llm, GREEDY, shape=shape) for shape in shapes] == [expected] * 3
    assert llm.engine("none").runner.graphs.num_graphs == num_graphs > 0


def test_a_request_with_penalties_takes_no_graph_from_the_others():
    models = make_models()
    penalised = SamplingParams(max_tokens=8, ignore_eos=True, presence_penalty=2.0, logit_bias={7: 5.0})
    params = [GREEDY, penalised]
    eager = llm_on("cpu", models, shape="3,1,4", graph_mode="off")
    expected = responses(eager, params, PROMPTS[:2])
    llm = llm_on(CUDA, models, shape="3,1,4")
    engine = llm.engine()
    replays = []
    run = engine.runner.graphs.run
    engine.runner.graphs.run = lambda call: replays.append(call.name) or run(call)
    assert responses(llm, params, PROMPTS[:2]) == expected
    assert replays.count("cycle") == sum(engine.totals.shapes.values()) > 0
    assert expected[1] != responses(eager, GREEDY, PROMPTS[1:2])[0], "the penalties changed nothing"


@pytest.mark.parametrize("name", ["narrower", "p-eagle, narrower, in windows"])
def test_heads_with_parts_that_few_have(name):
    models = make_models(HEADS[name], vocab_size=11)
    prompts = [[5, 6, 7], [9, 10, 1]]
    expected = responses(llm_on("cpu", models, graph_mode="off"), GREEDY, prompts, shape="none")
    assert responses(llm_on(CUDA, models, shape="4,1,5"), GREEDY, prompts) == expected


def test_a_request_ends_whose_states_are_not_finite_though_its_cycle_was_captured_before():
    models = make_models(tie_word_embeddings=False)
    shape = SpecShape.parse("3,1,4")
    llm = llm_on(CUDA, models, shape="3,1,4")
    expected = responses(llm, GREEDY)
    known = llm.engine(shape).runner.graphs.num_graphs
    token = expected[0][3]
    with torch.no_grad():
        llm.target.embed_tokens.weight[token] = math.nan
    first, *others = llm.generate(PROMPTS, GREEDY)
    assert first.finish_reason == "error"
    assert first.token_ids == expected[0][: len(first.token_ids)] and len(first.token_ids) <= 4
    for output, tokens in zip(others, expected[1:], strict=True):
        assert output.token_ids == tokens or token in tokens
    assert llm.engine(shape).runner.graphs.num_graphs == known > 0
