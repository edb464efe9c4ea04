"""Chains and trees drafted in one pass over masks: the published forward's, and text that is that of plain
decoding."""

import itertools
import math
import re

import pytest
import torch
from published_p_eagle import PublishedPEagle
from tiny import tiny_p_eagle, tiny_target
from tiny_engine import PROMPTS, check_next_turn, decode, make_engine, record_proposals, serve
from tiny_run import make_target

from eagle_kit.checkpoints.draft import write_draft
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import Grammar, SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.eval.diagnose.chain import Source, read_chain
from eagle_kit.eval.diagnose.row import Text, compute_states, pack
from eagle_kit.kinds.p_eagle import P_EAGLE
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.serve import cpu_graph
from eagle_kit.serve.llm import LLM
from eagle_kit.serve.request import Request
from eagle_kit.train.run.simulate import match_table


@pytest.fixture(scope="module")
def models():
    target = tiny_target(vocab_size=11)
    return target, tiny_p_eagle(target, 9).eval().requires_grad_(False)


def texts(requests) -> list[list[int]]:
    return [request.token_ids for request in requests]


@torch.no_grad()
def test_every_chain_is_that_of_the_published_forward(models, tmp_path):
    """After every verify the draft is computed anew, over the whole text, and must be the engine's."""
    (target, head), steps = models, 4
    files = P_EAGLE.write(head, torch.float32)
    write_draft(tmp_path / "head", files.tensors, files.config, metadata={})
    published = PublishedPEagle(tmp_path / "head", target.embed_tokens.weight)
    engine = make_engine(models, page_size=4, prefill_tokens=7)
    engine.use_shape(SpecShape(steps, 1, steps + 1))
    proposals = record_proposals(engine)
    request = Request(0, list(PROMPTS[2]), SamplingParams(max_tokens=30))
    serve(engine, [request])
    text = torch.tensor(request.prompt_ids + request.token_ids)
    aux = target(text, torch.arange(len(text)), target.causal(), head.capture).aux
    assert len(proposals) > 5
    for length, draft in proposals:
        rows = [torch.arange(length)] + [torch.tensor([length - 1])] * (steps - 1)
        start = torch.zeros(length, dtype=torch.int64)
        logits = published(aux[:length], text[1 : length + 1], start, rows)[length - 1 :]
        assert draft.tree.tokens[0, 1:].tolist() == head.to_target(logits.argmax(-1)).tolist()
    prompt = len(request.prompt_ids)
    table = match_table(target, head, text, prompt, steps)
    row = pack([Text(request.prompt_ids, request.token_ids)])
    reading = read_chain(head, Source(target, row, compute_states(target, row, head.capture)), steps)
    for length, draft in (each for each in proposals if each[0] + steps < len(text)):
        right = draft.tree.tokens[0, 1:] == text[length + 1 : length + 1 + steps]
        assert table[length - prompt].tolist() == right.tolist()
        at = row.roots.tolist().index(length)
        assert reading.accepted[at] == right.long().cumprod(0).sum()


@torch.no_grad()
def test_every_tree_has_the_most_likely_paths_of_the_published_forward(models, tmp_path):
    """Of all paths of candidates, by the product of their probabilities over the whole text, in fp64."""
    (target, head), shape = models, SpecShape(4, 3, 14)
    files = P_EAGLE.write(head, torch.float32)
    write_draft(tmp_path / "head", files.tensors, files.config, metadata={})
    published = PublishedPEagle(tmp_path / "head", target.embed_tokens.weight)
    engine = make_engine(models, page_size=4, prefill_tokens=7)
    engine.use_shape(shape)
    proposals = record_proposals(engine)
    request = Request(0, list(PROMPTS[2]), SamplingParams(max_tokens=30))
    serve(engine, [request])
    text = torch.tensor(request.prompt_ids + request.token_ids)
    aux = target(text, torch.arange(len(text)), target.causal(), head.capture).aux
    assert len(proposals) > 5
    for length, draft in proposals:
        rows = [torch.arange(length)] + [torch.tensor([length - 1])] * (shape.steps - 1)
        start = torch.zeros(length, dtype=torch.int64)
        logits = published(aux[:length], text[1 : length + 1], start, rows)[length - 1 :]
        values, ids = logits.softmax(-1).topk(shape.topk, -1)
        tokens, ranked = head.to_target(ids).tolist(), []
        for depth in range(1, shape.steps + 1):
            for path in itertools.product(range(shape.topk), repeat=depth):
                product = math.prod(values[d, r].item() for d, r in enumerate(path))
                ranked.append((product, [tokens[d][r] for d, r in enumerate(path)]))
        best = [path for _, path in sorted(ranked, reverse=True)[: shape.tokens - 1]]
        paths: list[list[int]] = [[]]
        for token, parent in zip(draft.tree.tokens[0, 1:], draft.tree.parents[0, 1:], strict=True):
            paths.append([*paths[parent], token.item()])
        assert sorted(paths[1:]) == sorted(best)


OPTIONS = {
    "alone": {"batch": 1},
    "chunked prefill": {"batch": 3, "options": {"prefill_tokens": 7}},
    "lag": {"batch": 3, "options": {"lag": 1}},
    "preemption": {"batch": 4, "page_size": 2, "max_context": 100, "options": {"kv_tokens": 130}},
}


@pytest.mark.parametrize("shape", ["1,1,2", "5,1,6", "1,4,5", "4,3,14"])
@pytest.mark.parametrize("case", OPTIONS)
def test_greedy_text_is_that_of_plain_decoding(models, case, shape):
    options = {**OPTIONS[case], "prompts": PROMPTS[:4]}
    drafted = decode(models, shape, **options)
    assert texts(drafted) == texts(decode(models, prompts=PROMPTS[:4]))
    assert sum(r.stats.num_emitted_tokens - r.stats.num_verifies for r in drafted) > 0


@pytest.mark.parametrize("shape", ["4,1,5", "4,3,14"])
def test_seeded_text_is_that_of_plain_decoding(models, shape):
    params = {"temperature": 0.9, "seed": 3, "prompts": PROMPTS[:4]}
    drafted = decode(models, shape, batch=3, options={"lag": 1}, **params)
    assert texts(drafted) == texts(decode(models, **params))


def test_the_longest_chain(models):
    assert texts(decode(models, "32,1,33", batch=2)) == texts(decode(models))


def test_the_shape_may_follow_the_batch(models):
    engine = make_engine(models, batch=4)
    engine.use_shape(ShapeTable.parse("5,1,6 2:3,4,9 3:2,1,3 4:none"))
    requests = [Request(i, list(p), SamplingParams(max_tokens=40)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    assert texts(requests) == texts(decode(models, batch=4))


def test_a_cached_prefix_has_the_drafts_entries(models):
    check_next_turn(models)


@pytest.mark.parametrize("shape", ["4,1,5", "4,3,14"])
def test_replies_match_their_grammar(tmp_path, shape):
    target = load_target(make_target(tmp_path / "target"))
    head, tokenizer = tiny_p_eagle(target, 250), load_tokenizer(tmp_path / "target")
    llm = LLM(target, head, tokenizer=tokenizer, max_context=300, max_batch_size=2)
    params = SamplingParams(max_tokens=40, grammar=Grammar("regex", "(ab|cd){3}[0-9]{2}"))
    plain, drafted = (llm.generate(["Tell me."], params, shape=shape)[0] for shape in ("none", shape))
    assert re.fullmatch("(ab|cd){3}[0-9]{2}", drafted.text) and drafted.token_ids == plain.token_ids


@pytest.mark.skipif(not cpu_graph.available(), reason="torch without TorchScript's graphs")
@pytest.mark.parametrize("shape", ["4,1,5", "4,3,14"])
def test_recorded_cycles_say_the_same(models, shape):
    target, head = models
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    llm = LLM(target, head, max_batch_size=2, max_context=128, shape=shape, lag=0)
    llm.engine().runner.graphs = cpu_graph.CpuGraphs(1)
    ours = [output.token_ids for output in llm.generate(PROMPTS[:2], params)]
    assert llm.engine().runner.graphs.num_graphs > 0 and not llm.engine().runner.graphs._refused
    assert ours == [request.token_ids[:60] for request in decode(models, prompts=PROMPTS[:2], max_tokens=60)]


def test_shapes_are_chosen_among_chains_and_trees(models):
    llm = LLM(*models, max_context=128, max_batch_size=2)
    assert llm.chooses_shapes and str(llm.default_shape) == "5,1,6"
    outputs = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=30, ignore_eos=True))
    assert [output.token_ids for output in outputs] == texts(
        decode(models, prompts=PROMPTS[:2], max_tokens=30)
    )
    assert {shape.topk for shape in llm.engine().shapes.shapes} > {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "33,1,34"}, "all steps in one pass, at most 32. Use fewer steps, such as 32,1,33"),
        ({"shape": "2,10,30"}, "more candidates than the draft's 9 tokens"),
        ({"tree": "static"}, "masks for its later steps"),
        ({"sampled_drafts": True}, "masks for its later steps"),
    ],
)
def test_what_it_cannot_draft_is_refused(models, options, message):
    with pytest.raises(UserError, match=message):
        LLM(*models, max_context=128, **options)
