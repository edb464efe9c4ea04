"""After a warm-up nothing is captured or timed, whatever requests ask for.

Without a GPU graphs are `EagerGraph`. What Triton compiles in traffic is not counted here.
"""

import pytest
import torch
from restless import Restless
from tiny import tiny_head
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import Grammar, SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.linear import plain as linear_room
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.serve.graph import EagerGraph, GraphRunner
from eagle_kit.serve.graph_memory import graphs_of
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.warm_up import warm_up

GRAMMAR = Grammar("regex", "(ab|cd){2,6}")
KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "top_p": 0.5},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {3: 2.0}, "frequency_penalty": 0.1},
    {"logprobs": 0},
    {"temperature": 1.0, "logprobs": 5, "min_p": 0.1},
    {"grammar": GRAMMAR},
    {"temperature": 1.0, "grammar": GRAMMAR, "logprobs": 3},
]
FEW_KINDS = KINDS[::3]
"""Greedy, filtered, adjusted, and with a grammar."""


def served(tmp_path, **options):
    """An LLM with a tokenizer, whose graphs are replayed eagerly."""
    folder = make_target(tmp_path / "target")
    target = load_target(folder, dtype=torch.bfloat16)
    sizes = {"max_batch_size": 3, "max_context": 96, "batch_sizes": (1, 2, 3), "prefill_tokens": 40, "lag": 1}
    options = {"tokenizer": load_tokenizer(folder), **sizes, **options}
    head = (
        None
        if options.get("algorithm") or not options.pop("has_draft", True)
        else tiny_head(target, 250).bfloat16()
    )
    llm = LLM(target, head, **options)
    llm.engine().runner.graphs = GraphRunner("cycle", EagerGraph)
    return llm


def traffic(llm, engine, kinds, max_tokens=6):
    """Serve prompts of many lengths, some of which share their beginning: every kind alone, then beside
    others, in batches of 1 and more."""
    known = [5 + i % 40 for i in range(64)]
    prompts = [known[:1], known[:16], known[:17], known[:64], [*known[:48], 7, 9, 11], [*known[:40], 1] * 2]
    for i in range(2 * len(kinds)):
        several = kinds[i : i + 1] if i < len(kinds) else [*kinds[i - len(kinds) :], *kinds][:3]
        for j, kind in enumerate(several):
            params = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 1, **kind})
            request = llm.make_request(prompts[(i + j) % len(prompts)], params)
            engine.add_request(request)
            engine.step()
        while engine.has_work:
            engine.step()
    engine.drain()


@pytest.mark.parametrize(
    ("options", "shape", "kinds"),
    [
        ({"has_draft": False}, None, FEW_KINDS),
        ({"shape": "3,1,4"}, None, KINDS),
        ({"shape": "2,2,4 2:2,1,3 3:none"}, None, FEW_KINDS),
        ({"shape": "2,1,3", "sampled_drafts": True}, None, FEW_KINDS),
        ({"algorithm": "NGRAM", "shape": "3,2,6"}, None, FEW_KINDS),
        ({}, "auto", FEW_KINDS),
    ],
    ids=["plain", "chain", "by size", "sampled drafts", "n-grams", "auto"],
)
def test_nothing_is_captured_or_timed_in_traffic(tmp_path, options, shape, kinds, monkeypatch):
    llm = served(tmp_path, **{"shape": "none", **options})
    engine, timed = llm.engine(), []
    if shape == "auto":
        engine.use_shape(Restless(0, [*map(SpecShape.parse, ("1,1,2", "3,2,5"))], most_plain=4))
    monkeypatch.setattr(linear_room, "uses_triton", lambda x: True)
    monkeypatch.setattr(
        linear_room, "small_linear", lambda x, w, b, backend: torch.nn.functional.linear(x, w, b)
    )
    engine.runner.linear_forms.timer = lambda form, size, device: timed.append(size) or 1e-5
    prepared = warm_up(engine)
    assert (
        engine.totals.num_prompt_tokens == 0 and engine.page_pool.num_available == engine.page_pool.num_pages
    )
    graphs, before, num_timed = engine.runner.graphs, engine.runner.graphs.num_warm_ups, len(timed)
    assert prepared.num_graphs == graphs.num_graphs == before > 0
    if shape is None:
        planned = graphs_of(llm.target.config, llm.draft, llm.config, "all", chooses_shapes=False)
        assert planned.number == graphs.num_graphs
    eager = []
    run = graphs.run
    graphs.run = lambda call: eager.append(call.name) or run(call)
    traffic(llm, engine, kinds)
    assert eager and engine.totals.num_generated_tokens > 60
    assert graphs.num_warm_ups == before, "captured in traffic"
    assert len(timed) == num_timed, "timed in traffic"


@pytest.mark.parametrize(
    ("extent", "left_out"), [("usual", "logprobs or grammars"), ("none", "anything: graphs")]
)
def test_a_smaller_warm_up_says_what_it_leaves_out(tmp_path, extent, left_out):
    llm = served(tmp_path, has_draft=False, shape="none")
    engine = llm.engine()
    progress = []
    prepared = warm_up(engine, extent, on_step=lambda number, total: progress.append((number, total)))
    planned = graphs_of(llm.target.config, None, llm.config, extent, chooses_shapes=False)
    assert prepared.num_graphs == engine.num_graphs == planned.number
    assert left_out in str(prepared)
    assert [number for number, _ in progress] == list(range(1, len(progress) + 1))
    assert not progress or progress[-1][0] == progress[-1][1] > planned.number
    names = ("greedy", "drawn", "filtered", "penalties, biases")
    expected = {f"graphs of batches: {name}" for name in names}
    if extent == "none":
        expected = set()
    assert {work.what for work in prepared.works if work.number == 3} == expected


def test_the_compiler_of_grammars_is_made_before_the_first_request(tmp_path):
    pytest.importorskip("llguidance")
    folder = make_target(tmp_path / "target")
    llm = LLM(folder, max_context=64)
    assert "compiler of grammars" not in str(llm.warm_up("usual")) and llm.engine().num_grammars == 0
    assert "compiler of grammars" in str(llm.warm_up()) and llm.engine().num_grammars == 1
    bare = LLM(load_target(folder), max_context=64)
    assert not str(bare.warm_up())


def test_a_tokenizer_without_grammars_does_not_stop_the_server(tmp_path, caplog):
    pytest.importorskip("llguidance")
    llm = LLM(make_target(tmp_path / "target"), max_context=64)
    engine = llm.engine()

    def refuse():
        raise UserError("Structured output cannot be had.", "Leave the grammar out.")

    engine._make_grammars = refuse
    assert not str(warm_up(engine)) and "cannot be had" in caplog.text
