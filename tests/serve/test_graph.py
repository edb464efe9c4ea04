"""Cycles as graphs: their buffers, their keys, and that an engine which replays says what an eager one says.

Without a GPU the graphs are `EagerGraph`: the same buffers, overwritten by every replay, without CUDA.
"""

from typing import NamedTuple

import pytest
import torch
from restless import Restless
from tiny import tiny_head, tiny_target
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import Grammar, SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.serve.graph import (
    CaptureError,
    EagerGraph,
    Graph,
    GraphCall,
    GraphRunner,
    HostCopy,
    leaves,
    map_tensors,
    write,
)
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.warm_up import warm_up
from eagle_kit.speculation.proposal import SampledChain

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [20], [3, 4, 3, 4, 3, 4], [30, 31]]
SAMPLING_PARAMS = {
    "filtered": {"temperature": 1.2, "seed": 6, "top_k": 9},
    "penalised": {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
}


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def with_graphs(llm, mode):
    llm.engine().runner.graphs = GraphRunner(mode, EagerGraph)
    return llm


def replies(llm, shape, **sampling):
    params = [SamplingParams(max_tokens=n, ignore_eos=True, **sampling) for n in (9, 14, 3, 20, 11)]
    engine = llm.engine(shape)
    requests = [llm.make_request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.token_ids for request in requests]


@pytest.mark.parametrize(("shape", "sampling"), [("4,1,5", "penalised"), ("5,4,16", "filtered")])
def test_replays_say_what_an_eager_engine_says_with_a_graph_for_each_size(shape, sampling):
    """More kinds of targets, drafts and options are in `test_conformance`."""
    target = tiny_target(vocab_size=64)
    head = tiny_head(target, 50)
    options = {"max_batch_size": 4, "max_context": 64, "batch_sizes": (1, 2, 4), "lag": 1, "shape": shape}
    expected = replies(LLM(target, head, **options), shape, **SAMPLING_PARAMS[sampling])
    llm = LLM(target, head, **options)
    assert replies(with_graphs(llm, "cycle"), shape, **SAMPLING_PARAMS[sampling]) == expected
    assert 1 <= llm.engine(shape).runner.graphs.num_graphs <= 3  # batches of 4, 2 and 1


def test_a_change_of_shape_keeps_graphs_and_is_right():
    target = tiny_target(vocab_size=64)
    head = tiny_head(target, 50)
    options = {"max_batch_size": 4, "max_context": 64, "batch_sizes": (1, 2, 4), "lag": 1, "shape": "none"}
    llm = with_graphs(LLM(target, head, **options), "cycle")
    shapes = [SpecShape.parse(shape) for shape in ("4,1,5", "none", "5,4,16", "3,1,4")]
    expected = replies(LLM(target, head, **options), shapes[0])
    graphs = llm.engine().runner.graphs
    assert [replies(llm, shape) for shape in shapes] == [expected] * 4
    known = graphs.num_graphs
    assert [replies(llm, shape) for shape in shapes] == [expected] * 4
    assert graphs.num_graphs == known


def test_kinds_of_batches_with_graphs_are_few():
    target = tiny_target(vocab_size=64)
    options = {"max_context": 64, "batch_sizes": (4,), "shape": "3,1,4"}
    llm = with_graphs(LLM(target, tiny_head(target, 50), **options), "cycle")
    filters = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "min_p": 0.2}, {}]
    for sampling in filters:
        for logprobs in (None, 0, 3, 17):
            params = SamplingParams(max_tokens=3, temperature=1.0, logprobs=logprobs, **sampling)
            llm.generate([[1, 2]], params)
    assert llm.engine().runner.graphs.num_graphs == 3
    for adjusted in ({"repetition_penalty": 1.2}, {"logit_bias": {1: 1.0}, "top_k": 3}, {"temperature": 0.0}):
        params = SamplingParams(**{"max_tokens": 3, "temperature": 1.0, "presence_penalty": 0.5, **adjusted})
        llm.generate([[1, 2]], params)
    assert llm.engine().runner.graphs.num_graphs == 4


def test_a_request_with_penalties_takes_no_graph_from_the_others():
    target = tiny_target(vocab_size=64)
    options = {"max_context": 64, "batch_sizes": (4,), "shape": "3,1,4"}
    head, prompts = tiny_head(target, 50), [[1, 2], [3, 4, 5]]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    penalised = SamplingParams(max_tokens=12, ignore_eos=True, presence_penalty=2.0, logit_bias={7: 5.0})
    eager = LLM(target, head, **options)
    expected = [
        eager.generate([p], s)[0].token_ids for p, s in zip(prompts, (greedy, penalised), strict=True)
    ]
    llm = with_graphs(LLM(target, head, **options), "cycle")
    engine, replays = llm.engine(), []
    run = engine.runner.graphs.run
    engine.runner.graphs.run = lambda call: replays.append(call.name) or run(call)
    found = llm.generate(prompts, [greedy, penalised])
    assert [each.token_ids for each in found] == expected
    assert len(replays) == sum(engine.totals.shapes.values()) > 0
    assert expected[1] != eager.generate([prompts[1]], greedy)[0].token_ids


def test_a_grammar_and_ngrams_split_the_cycle(tmp_path):
    folder = make_target(tmp_path / "target")
    target = load_target(folder)
    options = {"tokenizer": load_tokenizer(folder), "max_context": 128, "max_batch_size": 2}
    params = SamplingParams(max_tokens=30, grammar=Grammar("regex", "(ab|cd){6}"))
    head = tiny_head(target, draft_vocab_size=250)
    expected = LLM(target, head, shape="3,1,4", **options).generate(["Say.", "Go."], params)
    llm = with_graphs(LLM(target, head, shape="3,1,4", **options), "cycle")
    llm.engine().runner.graphs = GraphRunner("cycle", EagerGraph)
    assert [a.token_ids for a in llm.generate(["Say.", "Go."], params)] == [a.token_ids for a in expected]
    plain = SamplingParams(max_tokens=40)
    expected = LLM(target, algorithm="NGRAM", **options).generate(["Say.", "Go."], plain)
    llm = with_graphs(LLM(target, algorithm="NGRAM", **options), "cycle")
    assert [a.token_ids for a in llm.generate(["Say.", "Go."], plain)] == [a.token_ids for a in expected]


def test_warm_up_captures_the_largest_batches_first_and_changes_nothing():
    target = tiny_target(vocab_size=64)
    head = tiny_head(target, 50)
    options = {"max_batch_size": 4, "max_context": 64, "batch_sizes": (1, 2, 4), "shape": "3,1,4"}
    expected = replies(LLM(target, head, **options), LLM(target, head, **options).default_shape)
    llm = with_graphs(LLM(target, head, **options), "cycle")
    runner = llm.engine().runner
    assert warm_up(llm.engine()).num_graphs == 18
    assert [key[1][0] for key in runner.graphs._graphs][::6] == [4, 2, 1]
    assert replies(llm, llm.default_shape) == expected
    assert runner.graphs.num_graphs == 18, "what was warmed up is what runs"


def test_nothing_is_captured_behind_the_warm_up_while_shapes_change():
    target = tiny_target(vocab_size=64)
    head, shapes = tiny_head(target, 50), [*map(SpecShape.parse, ("1,1,2", "3,2,6", "4,1,5"))]
    options = {"max_batch_size": 4, "max_context": 64, "batch_sizes": (1, 2, 4), "lag": 1, "shape": "none"}
    expected = replies(LLM(target, head, **options), "none")
    llm = with_graphs(LLM(target, head, **options), "cycle")
    engine, policy = llm.engine("none"), Restless(0, shapes, most_plain=5)
    engine.use_shape(policy)
    assert warm_up(engine).num_graphs == 6 * len(policy.shapes) * 3
    before = engine.runner.graphs.num_warm_ups
    llm.engine = lambda shape: engine
    assert replies(llm, None) == expected and policy.used == set(policy.shapes)
    assert engine.runner.graphs.num_warm_ups == before


def test_inputs_are_written_and_outputs_overwritten():
    runner = GraphRunner("cycle", EagerGraph)

    def body(pair):
        return Pair(pair.left + 1, None)

    def idle():
        return Pair(torch.zeros(3), None)

    first = runner.run(GraphCall("add", 3, body, Pair(torch.ones(3), None), idle))
    kept = HostCopy(first)
    second = runner.run(GraphCall("add", 3, body, Pair(torch.full((3,), 5.0), None), idle))
    assert first.left is second.left and second.left.tolist() == [6.0] * 3
    assert kept.wait().left.tolist() == [2.0] * 3, "what was sent to the host stays"


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


@pytest.mark.gpu
def test_a_capture_failure_names_the_operation():
    with pytest.raises(CaptureError, match="item|local_scalar"):
        Graph(lambda x: x * x.sum().item(), torch.ones(3, device="cuda"))


def test_the_inputs_of_the_same_batch_are_copied_once_and_others_whenever_they_come():
    graphs, total = GraphRunner("cycle", EagerGraph), torch.zeros(2)
    first, second = ((torch.tensor([1.0, 2.0]),), (torch.tensor([10.0, 20.0]),))
    body = lambda inputs: (total.add_(inputs[0]).clone(),)  # noqa: E731
    seen = []
    for inputs in (first, first, second, first):
        (out,) = graphs.run(GraphCall("sum", 0, body, inputs, lambda: (torch.zeros(2),)))
        seen.append(out.tolist())
    assert seen == [[1.0, 2.0], [2.0, 4.0], [12.0, 24.0], [13.0, 26.0]]
    (graph,) = graphs._graphs.values()
    graph.inputs[0].zero_()
    (out,) = graphs.run(GraphCall("sum", 0, body, first, lambda: first))
    assert out.tolist() == [13.0, 26.0], "nothing was copied"
