"""Heads that draft all steps in one pass, P-EAGLE over masks, DFlash and DSpark in blocks: chains and trees
of the published forwards. That no draft changes a text is in `test_conformance`."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from published_dflash import PublishedDFlash, PublishedDSpark
from published_p_eagle import PublishedPEagle
from tiny import tiny_dflash, tiny_dspark, tiny_p_eagle, tiny_target
from tiny_engine import PROMPTS, decode, make_engine, record_proposals, serve
from tiny_run import make_target

from eagle_kit.autotune import files
from eagle_kit.autotune.costs import Timing
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.drafts.files.draft import write_draft
from eagle_kit.drafts.registry import kind_of
from eagle_kit.engine.calibrate import policies as tune
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.eval.diagnose.chain import Source, draft_chains
from eagle_kit.eval.diagnose.row import PromptResponse, compute_states, pack
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.ops.backend import use
from eagle_kit.train.run.simulate import match_table

HEADS = {
    "p-eagle": (tiny_p_eagle, {"draft_vocab_size": 9}),
    "p-eagle, sliding, Qwen3's layers": (
        tiny_p_eagle,
        {"draft_vocab_size": 9, "sliding_window": 8, "sliding_layers": (0, 2)}
        | {"qk_norm": True, "norm_before_fc": True},
    ),
    "dflash": (tiny_dflash, {}),
    "dflash, next token": (tiny_dflash, {"predicts_next": True}),
    "dflash, sliding": (tiny_dflash, {"sliding_window": 8, "sliding_layers": (0, 2)}),
    "dflash, sliding both ways": (
        tiny_dflash,
        {"sliding_window": 8, "sliding_layers": (0, 2), "sliding_both": True},
    ),
    "dflash, own output": (tiny_dflash, {"draft_vocab_size": 9}),
    "dspark": (tiny_dspark, {"block_size": 5}),
    "dspark, gated": (tiny_dspark, {"markov_form": "gated", "predicts_next": False}),
    "dspark, rnn": (tiny_dspark, {"markov_form": "rnn", "draft_vocab_size": 9}),
    "dspark, rank 0": (tiny_dspark, {"markov_rank": 0, "confidence_reads_token": False}),
}
KINDS = ("p-eagle", "dflash", "dspark")


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=11)


@pytest.fixture(scope="module")
def pairs(target):
    """A target and a head of each name."""
    return {name: (target, make_head(target, name)) for name in HEADS}


def make_head(target, name: str):
    make, changes = HEADS[name]
    return make(target, **changes).eval().requires_grad_(False)


def texts(requests) -> list[list[int]]:
    return [request.token_ids for request in requests]


class Round(NamedTuple):
    """A proposal behind ``length`` tokens of the pool, with what the published forward says there:
    ``probs(path)`` are the draft's probabilities ``[Vd]`` behind a path of target ids, the root first."""

    length: int
    draft: Any
    probs: Callable[[list[int]], torch.Tensor]


def rounds(pair, folder, shape: SpecShape):
    """Serve a request -> itself, its text, and its rounds, whose drafts are computed anew over the whole
    text."""
    (target, head), steps = pair, shape.steps
    files = kind_of(head.config).write(head, torch.float32)
    write_draft(folder, files.tensors, files.config, metadata={})
    engine = make_engine(pair, page_size=4, prefill_tokens=7)
    engine.use_shape(shape)
    proposals = record_proposals(engine)
    request = Request(0, list(PROMPTS[2]), SamplingParams(max_tokens=30))
    serve(engine, [request])
    text = torch.tensor(request.prompt_ids + request.token_ids)
    aux = target(text, torch.arange(len(text)), target.causal(), head.capture).aux_hidden_states
    assert len(proposals) > 5
    weights = folder, target.embed_tokens.weight, target.head_weight
    return (
        request,
        text,
        [Round(n, draft, published(head, weights, text, aux, n, steps)) for n, draft in proposals],
    )


def published(head, weights, text, aux, length: int, steps: int):
    start = torch.zeros(length + 1, dtype=torch.int64)
    if not hasattr(head.config, "block_size"):
        rows = [torch.arange(length)] + [torch.tensor([length - 1])] * (steps - 1)
        logits = PublishedPEagle(*weights[:2])(aux[:length], text[1 : length + 1], start[1:], rows)[
            length - 1 :
        ]
        return lambda path: logits[len(path) - 1].softmax(-1)
    first, anchor = head.config.first_drafted, torch.tensor([length])
    states = torch.cat((aux[:length], torch.full_like(aux[:1], 9.0)))  # the root's own is not known
    kind = PublishedDFlash if head.markov is None else PublishedDSpark
    forward = kind(*weights)
    logits = forward(states, text[: length + 1], start, anchor, steps + first)
    if head.markov is None:
        return lambda path: logits[0, first + len(path) - 1].softmax(-1)
    return lambda path: forward.corrected(logits, torch.tensor([path]), first)[0][0, -1].softmax(-1)


def best_chain(head, probs, root: int, steps: int) -> list[int]:
    path = [root]
    for _ in range(steps):
        path.append(int(head.to_target(probs(path).argmax())))
    return path[1:]


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_every_chain_is_that_of_the_published_forward(pairs, tmp_path, name):
    """After every verify, and as training's validation and diagnosis read the text."""
    (target, head), steps = pairs[name], 4
    request, text, made = rounds(pairs[name], tmp_path / "head", SpecShape(steps, 1, steps + 1))
    for length, draft, probs in made:
        assert draft.tree.tokens[0, 1:].tolist() == best_chain(head, probs, int(text[length]), steps)
    prompt = len(request.prompt_ids)
    table = match_table(target, head, text, prompt, steps)
    row = pack([PromptResponse(request.prompt_ids, request.token_ids)])
    reading = draft_chains(head, Source(target, row, compute_states(target, row, head.capture)), steps)
    for length, draft, _ in (each for each in made if each.length + steps < len(text)):
        right = (draft.tree.tokens[0, 1:] == text[length + 1 : length + 1 + steps]).long().cumprod(0)
        leading = table[length - prompt].long().cumprod(0)  # behind a miss, a correction reads the text
        assert leading.tolist() == right.tolist()
        at = row.roots.tolist().index(length)
        assert reading.num_accepted[at] == right.sum()


def candidates(head, probs, root: int, shape: SpecShape):
    """Target ids of the candidates of each depth, and their probability behind each of the depth before: the
    greedy chain's first, then the most likely over all of them. A path to one is greedy but for its end."""
    greedy, before, weights, found = [root], [root], torch.ones(1, dtype=torch.float64), []
    for _ in range(shape.steps):
        behind = torch.stack([probs([*greedy[:-1], token]) for token in before])
        overall = weights @ behind
        best = behind[0].argmax()
        rest = [i for i in overall.argsort(descending=True).tolist() if i != best]
        ids = torch.tensor([int(best), *rest[: shape.topk - 1]])
        before, weights = head.to_target(ids).tolist(), overall[ids]
        greedy.append(before[0])
        found.append((before, behind[:, ids].expand(shape.topk, -1)))
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", ["p-eagle", "dflash", "dspark", "dspark, gated", "dspark, rnn"])
def test_every_tree_has_the_most_likely_paths_of_the_published_forward(pairs, tmp_path, name):
    """Of all paths of candidates, by the product of their probabilities over the whole text, in fp64."""
    (_, head), shape = pairs[name], SpecShape(4, 3, 14)
    _, text, made = rounds(pairs[name], tmp_path / "head", shape)
    for length, draft, probs in made:
        table, ranked = candidates(head, probs, int(text[length]), shape), []
        for depth in range(1, shape.steps + 1):
            for path in itertools.product(range(shape.topk), repeat=depth):
                steps = zip(path, (0, *path), range(depth), strict=False)
                product = math.prod(table[d][1][given, rank].item() for rank, given, d in steps)
                ranked.append((product, [table[d][0][rank] for d, rank in enumerate(path)]))
        best = [path for _, path in sorted(ranked, reverse=True)[: shape.tokens - 1]]
        paths: list[list[int]] = [[]]
        for token, parent in zip(draft.tree.tokens[0, 1:], draft.tree.parents[0, 1:], strict=True):
            paths.append([*paths[parent], token.item()])
        assert sorted(paths[1:]) == sorted(best)


@pytest.fixture(scope="module")
def plain(target):
    """Responses of plain decoding."""
    return texts(decode((target, None)))


LONGEST = {
    "p-eagle": ("32,1,33", {}),
    "dflash": ("31,1,32", {"block_size": 32}),
    "dspark": ("31,1,32", {"block_size": 31}),
}


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_chain(target, plain, name):
    shape, changes = LONGEST[name]
    make, own = HEADS[name]
    assert texts(decode((target, make(target, **own | changes)), shape, batch=2)) == plain


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_keeps_the_candidates_of_its_own_shape(pairs, plain, name):
    """One request has a tree, two have chains of two; candidates that larger batches left out come back."""
    engine, kept = make_engine(pairs[name], batch=2), []
    engine.use_shape(ShapeTable.parse("4,3,14 2:2,1,3"))
    extend = engine.runner.drafter.draft_extend

    def extended(state, *rest):
        made = extend(state, *rest)
        kept.append((len(state.roots), *made.tokens.shape[1:]))
        return made

    engine.runner.drafter.draft_extend = extended
    requests = [Request(i, list(p), SamplingParams(max_tokens=10 + 7 * i)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    assert set(kept) == {(1, 4, 3), (2, 2, 1)}
    assert texts(requests) == [response[: 10 + 7 * i] for i, response in enumerate(plain)]
    assert engine.runner.slots.draft.tokens.shape[1:] == (4, 3)


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize(("lag", "is_chosen"), [(0, False), (1, True), (0, True)])
def test_confidences_are_computed_where_they_are_read(pairs, monkeypatch, lag, is_chosen, is_sampled):
    """By a policy, and in time for the next cycle."""
    shape, told, (_, head) = SpecShape(4, 1, 5), [], pairs["dspark"]
    engine, compute = make_engine(pairs["dspark"], lag=lag, sampled_drafts=is_sampled), head.confidence_logits
    monkeypatch.setattr(head, "confidence_logits", lambda *given: told.append(0) or compute(*given))
    engine.use_shape(ShapePolicy({1: [shape]}, shape) if is_chosen else shape)
    serve(engine, [Request(0, PROMPTS[0], SamplingParams(max_tokens=20))])
    assert bool(told) == (is_chosen and not lag)


@pytest.mark.parametrize(
    ("name", "shape"), [("p-eagle", "4,1,5"), ("dflash", "4,3,14"), ("dspark", "4,3,14")]
)
def test_responses_match_their_grammar(tmp_path, name, shape):
    target = load_target(make_target(tmp_path / "target"))
    head, tokenizer = HEADS[name][0](target, seed=250), load_tokenizer(tmp_path / "target")
    llm = LLM(target, head, tokenizer=tokenizer, max_context=300, max_batch_size=2, shape=shape)
    params = SamplingParams(max_tokens=40, grammar=Grammar("regex", "(ab|cd){3}[0-9]{2}"))
    plain, drafted = (llm.generate(["Tell me."], params, shape=shape)[0] for shape in ("none", shape))
    assert re.fullmatch("(ab|cd){3}[0-9]{2}", drafted.text) and drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["p-eagle", "dspark"])
def test_shapes_are_chosen_among_chains_and_trees(pairs, plain, name, monkeypatch, tmp_path):
    """By times that are given: a node more costs a hundredth of a cycle."""

    def timed(engine, plan, **options):
        shapes = [NO_SPECULATION, *plan.shapes]
        return [
            Timing(point.batch_size, shape, point.context, 1e-3 + 1e-5 * shape.tokens)
            for point in plan.points
            for shape in shapes
        ]

    monkeypatch.setattr(tune, "time_cycles", timed)
    monkeypatch.setattr(files, "folder", lambda: tmp_path)
    llm = LLM(*pairs[name], max_context=128, max_batch_size=2)
    assert llm.chooses_shapes and str(llm.default_shape) == "5,1,6"
    outputs = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=30, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [response[:30] for response in plain[:2]]
    assert {shape.topk for shape in llm.engine().shapes.shapes} > {1}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("p-eagle", {"shape": "33,1,34"}, "in one pass, at most 32. Use fewer steps, such as 32,1,33"),
        ("p-eagle", {"shape": "2,10,30"}, "more candidates than the draft's 9 tokens"),
        ("p-eagle", {"tree": "static"}, "masks for its later steps"),
        ("dflash", {"shape": "6,1,7"}, "in one pass, at most 5. Use fewer steps, such as 5,1,6"),
        ("dflash", {"tree": "static"}, "The draft has blocks"),
        ("dspark", {"shape": "6,1,7"}, "in one pass, at most 5. Use fewer steps, such as 5,1,6"),
    ],
)
def test_what_they_cannot_draft_is_refused(pairs, name, options, message):
    with pytest.raises(UserError, match=message):
        LLM(*pairs[name], max_context=128, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the models are on a CPU")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dflash, sliding", "dspark, gated"])
def test_kernels_draft_the_same(pairs, triton_device, name):
    """Every proposal and response of Triton's kernels under the interpreter is that of the references."""

    def run():
        engine = make_engine(pairs[name], page_size=4)
        engine.use_shape(SpecShape(4, 1, 5))
        proposals = record_proposals(engine)
        request = Request(0, list(PROMPTS[2]), SamplingParams(max_tokens=8))
        serve(engine, [request])
        return request.token_ids, [draft.tree.tokens.tolist() for _, draft in proposals]

    expected = run()
    with use("triton"):
        assert run() == expected
    assert len(expected[1]) > 3
