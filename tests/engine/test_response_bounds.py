"""Least lengths of responses and budgets of reasoning: the same text with every draft as without one."""

import itertools

import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_engine import make_engine, serve
from tiny_run import END_TOKEN, make_target
from tiny_tokenizers import byte_level
from tiny_trained import trained_models
from transformers import MinNewTokensLengthLogitsProcessor

from eagle_kit import LLM, SamplingParams
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.structured_outputs import Grammar, ThinkingBudget, Thought
from eagle_kit.engine.grammar.bounds import BoundedMatch
from eagle_kit.engine.request import Request
from eagle_kit.engine.text_stream import TextStream
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer

PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(9)] for i in range(4)]
STOPS = tuple(range(1, 60))
"""Half of the vocabulary, so that responses would end soon."""
KINDS = {
    "chain": {"shape": "4,1,5"},
    "tree": {"shape": "4,3,14"},
    "recorded": {"shape": "4,3,14", "graph_mode": "cycle"},
    "a cycle ahead": {"shape": "4,1,5", "lag": 1},
    "n-grams": {"algorithm": "NGRAM", "shape": "4,1,5"},
}


def make(**options):
    target = tiny_target()
    draft = None if options.get("algorithm") == "NGRAM" else tiny_head(target)
    return LLM(target, draft, max_context=64, **{"max_batch_size": 4, "page_size": 4, **options})


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_response_ends_before_its_least_length(kind, temperature):
    params = [
        SamplingParams(max_tokens=20, min_tokens=least, stop_token_ids=STOPS, temperature=temperature, seed=i)
        for i, least in enumerate((0, 5, 11, 20))
    ]
    outputs = make(**KINDS[kind]).generate(PROMPTS, params)
    for each, output in zip(params, outputs, strict=True):
        assert each.min_tokens <= len(output.token_ids) <= 20
        assert not set(output.token_ids[: each.min_tokens]) & set(STOPS)
    assert len(outputs[0].token_ids) < 5, "responses without a least length end soon"
    plain = make(**KINDS[kind]).generate(PROMPTS, params, shape="none")
    assert tokens_of(outputs) == tokens_of(plain)


def test_the_text_is_that_of_the_published_processor():
    """Greedy decoding by hand, with the processor of transformers."""
    llm = make(shape="4,3,14")
    for prompt in PROMPTS:
        ids = list(prompt)
        processor = MinNewTokensLengthLogitsProcessor(len(prompt), 8, list(STOPS), device="cpu")
        while len(ids) < len(prompt) + 20:
            scores = processor(torch.tensor([ids]), llm.logits(ids)[-1:].clone())
            ids.append(int(scores.argmax()))
            if ids[-1] in STOPS:
                break
        params = SamplingParams(max_tokens=20, min_tokens=8, stop_token_ids=STOPS)
        assert llm.generate([prompt], params)[0].token_ids == ids[len(prompt) :]


def test_sampled_drafts_keep_the_least_length():
    llm = make(shape="4,1,5", sampled_drafts=True)
    params = SamplingParams(max_tokens=12, min_tokens=12, stop_token_ids=STOPS, temperature=1.0, seed=0, n=20)
    (output,) = llm.generate([PROMPTS[0]], params)
    for each in output.outputs:
        assert len(each.token_ids) == 12 and not set(each.token_ids[:11]) & set(STOPS)


ENDS = (0, 3, 4, 6, 9)
"""Ends of responses in a vocabulary of 11."""


@pytest.fixture(scope="module")
def trained():
    return trained_models(steps=30)


LEAST = (1, 2, 3, 5, 6, 7, 9, 10)


def bounded(models, shape, temperature, options=None):
    """Requests with least lengths and with budgets of reasoning, which token 8 ends, and their tokens."""
    engine = make_engine(models, **{"batch": 4, "page_size": 4, **(options or {})})
    engine.use_shape(SpecShape.parse(shape or "none"))
    requests = []
    for number, count in enumerate(LEAST):
        common = {"max_tokens": 16, "temperature": temperature, "seed": number}
        least = SamplingParams(min_tokens=count, stop_token_ids=ENDS, **common)
        budget = ThinkingBudget(Thought((8,)), count)
        most = SamplingParams(thinking_budget=budget, logit_bias={8: -3.0}, ignore_eos=True, **common)
        requests.append(Request(2 * number, [1, 2, number], least))
        requests.append(Request(2 * number + 1, [1, 2, number], most))
    serve(engine, requests)
    return requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("shape", "options"),
    [("3,1,4", {}), ("3,3,8", {}), ("3,3,8", {"lag": 1}), ("3,1,4", {"graph_mode": "cycle"})],
    ids=str,
)
def test_bounds_within_accepted_runs_change_no_token(trained, shape, options, temperature):
    """A trained draft, whose tokens are accepted before, at and behind the place where a bound ends."""
    found = bounded(trained, shape, temperature, options)
    plain = bounded(trained, None, temperature, options)
    assert tokens_of(found) == tokens_of(plain)
    assert sum(sum(request.stats.spec.num_accepted_at) for request in found) > len(found)

    # The bounds hold, and ends follow soon.
    for count, least, most in zip(LEAST, found[::2], found[1::2], strict=True):
        assert not set(least.token_ids[:count]) & set(ENDS)
        assert Thought((8,)).num_tokens_of(most.token_ids) <= count
        assert 8 in most.token_ids[: count + 1]
    assert any(len(request.token_ids) < 16 for request in found[::2])


@pytest.fixture(scope="module")
def law(trained):
    """Probability of every response of three tokens, ``[11, 11, 11]``, whose first two are no ends. A window
    has both the second token and the third, with different bounds."""
    alone = LLM(trained[0], max_context=64)
    law = torch.zeros(11, 11, 11, dtype=torch.float64)
    for one, two in itertools.product(range(11), repeat=2):
        logits = alone.logits([1, 2, one, two])[1:].double()
        logits[:2, list(ENDS)] = float("-inf")
        first, second, third = logits.softmax(-1)
        law[one, two] = first[one] * second[two] * third
    return law


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "2,1,3", "seed": 2, "sampled_drafts": True},
        {"shape": "2,1,3", "seed": 4, "sampled_drafts": True, "verifier": "rejection"},
        {"shape": "2,2,5", "seed": 3},
    ],
    ids=str,
)
def test_sampled_responses_have_the_enumerated_distribution(trained, law, options):
    """Both verifications of sampled chains, and trees, beside all responses; a chi-squared test."""
    count = 1_000
    options = dict(options)
    shape = options.pop("shape")
    engine = make_engine(
        trained,
        batch=1000,
        page_size=4,
        max_context=24,
        kv_tokens=40_000,
        mixed_prefill_tokens=512,
        **options,
    )
    engine.use_shape(SpecShape.parse(shape))
    params = SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=ENDS, temperature=1.0)
    requests = [Request(i, [1, 2], params) for i in range(count)]
    serve(engine, requests)

    # Count the responses, and put the rare ones together.
    cells = torch.tensor([121 * a + 11 * b + c for a, b, c in tokens_of(requests)])
    counts = torch.bincount(cells, minlength=1331).double()
    expected = count * law.flatten()
    assert counts[expected == 0].sum() == 0
    rare = expected < 8
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    distance = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert freedom > 20 and distance < freedom + 4 * (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("bounds") / "target")


@pytest.fixture(scope="module")
def served(folder):
    """A target with a tokenizer, by a head and by n-grams."""
    target = load_target(folder)
    common = {"tokenizer": load_tokenizer(folder), "max_context": 300, "max_batch_size": 4}
    return {
        "head": LLM(target, tiny_head(target, draft_vocab_size=250), **common),
        "n-grams": LLM(target, algorithm="NGRAM", **common),
    }


def test_end_tokens_wait_for_the_least_length_where_they_end_nothing(served):
    """With ignore_eos vLLM, SGLang and transformers forbid them until then."""
    params = SamplingParams(max_tokens=12, min_tokens=5, ignore_eos=True, logit_bias={END_TOKEN: 50.0})
    for shape in ("none", "3,1,4"):
        (output,) = served["head"].generate(["Say."], params, shape=shape)
        assert output.token_ids.index(END_TOKEN) == 5 and len(output.token_ids) == 12


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4}], ids=str)
@pytest.mark.parametrize(
    ("draft", "shape"), [("head", "3,1,4"), ("head", "4,4,12"), ("n-grams", "3,1,4")], ids=str
)
def test_a_grammar_and_bounds_hold_together(served, draft, shape, params):
    pytest.importorskip("llguidance")
    llm = served[draft]

    def answer(shape, **more):
        bias = {END_TOKEN: 50.0}
        asked = SamplingParams(**{"max_tokens": 60, "logit_bias": bias, **params, **more})
        return llm.generate(["Say."], asked, shape=shape)[0]

    # An end that the grammar allows waits for the least length. Where it allows nothing else, it ends.
    grammar = Grammar("regex", "[a-h]{3,24}")
    short = answer(shape, grammar=grammar)
    assert short.finish_reason == "stop" and len(short.text) < 10
    longer = answer(shape, grammar=grammar, min_tokens=12)
    assert longer.token_ids == answer("none", grammar=grammar, min_tokens=12).token_ids
    assert longer.finish_reason == "stop" and len(longer.token_ids) == 13
    assert set(longer.text) <= set("abcdefgh")
    most = answer(shape, grammar=Grammar("regex", "xyz"), min_tokens=50)
    assert (most.text, most.finish_reason) == ("xyz", "stop")

    # The grammar begins behind the reasoning, which has a budget.
    (end,) = llm.tokenizer("q", add_special_tokens=False)["input_ids"]
    thought = Thought((end,))
    bounds = {
        "grammar": Grammar("regex", "[a-h]{5}", thought),
        "thinking_budget": ThinkingBudget(thought, 4),
        "logit_bias": {end: -50.0},
    }
    found = answer(shape, **bounds)
    assert found.token_ids.index(end) == 4
    assert found.token_ids == answer("none", **bounds).token_ids
    assert set(llm.tokenizer.decode(found.token_ids[5:], skip_special_tokens=True)) <= set("abcdefgh")


def test_cycles_are_plain_ones_again_when_the_bounds_are_spent():
    llm = make(shape="4,1,5")
    runner = llm.engine().runner
    names = []
    run = runner._run_as_graph
    runner._run_as_graph = lambda name, *args: names.append(name) or run(name, *args)
    llm.generate([PROMPTS[0]], max_tokens=24, min_tokens=4, stop_token_ids=(1,))
    assert names[0] == "propose" and names[-1] == "cycle"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opener", [None, 7])
def test_reasoning_ends_where_its_budget_is_spent(kind, temperature, opener):
    thought = Thought((61,), opener)
    params = [
        SamplingParams(
            max_tokens=16,
            ignore_eos=True,
            temperature=temperature,
            seed=i,
            thinking_budget=ThinkingBudget(thought, budget),
            logit_bias={61: -50.0, 7: 30.0 if opener else 0.0},
        )
        for i, budget in enumerate((0, 3, 6, 40))
    ]
    outputs = make(**KINDS[kind]).generate(PROMPTS, params)
    begin = 0 if opener is None else 1
    for budget, output in zip((0, 3, 6), outputs, strict=False):
        assert output.token_ids.index(61) == begin + budget
        assert thought.num_tokens_of(output.token_ids) == budget
    assert 61 not in outputs[3].token_ids
    plain = make(**KINDS[kind]).generate(PROMPTS, params, shape="none")
    assert tokens_of(outputs) == tokens_of(plain)


def test_reasoning_that_ends_by_itself_is_left_alone():
    thought = Thought((61,))
    params = {"max_tokens": 10, "ignore_eos": True, "logit_bias": {61: 50.0}}
    (free,) = make(shape="4,1,5").generate([PROMPTS[0]], **params)
    budget = ThinkingBudget(thought, 5)
    (bounded,) = make(shape="4,1,5").generate([PROMPTS[0]], **params, thinking_budget=budget)
    assert bounded.token_ids == free.token_ids and free.token_ids[0] == 61


class OnlyStop:
    """A grammar after whose first token nothing but token 3 may follow."""

    is_complete = is_stuck = False

    def fill(self, parents, tokens, bitmask):
        bitmask[:] = 0
        bitmask[:, 0] = 1 << 3

    def advance(self, tokens):
        return len(tokens)


def test_a_grammar_that_allows_only_an_end_goes_before_the_least_length():
    import numpy as np

    match = BoundedMatch(frozenset({3}), 64, 10, match=OnlyStop())
    bitmask = torch.full((1, 2), -1, dtype=torch.int32)
    match.fill(np.zeros(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64), bitmask)
    assert bitmask.tolist() == [[8, 0]]


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, and max_tokens is 8"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1"),
        ({"min_tokens": 2, "stop_token_ids": (1,), "allowed_token_ids": (1,)}, "only tokens that end"),
        (
            {"thinking_budget": ThinkingBudget(Thought((61,)), 3), "allowed_token_ids": (5, 6)},
            "allowed_token_ids have no token",
        ),
    ],
)
def test_what_cannot_be_is_refused(params, cause):
    with pytest.raises(UserError, match=cause):
        make(shape="4,1,5").generate([PROMPTS[0]], **params)


def expected_text(tokenizer, ids, stops, min_tokens, includes_stop):
    """The text by the definition, and how many tokens it takes: the first token behind ``min_tokens`` with
    which the whole text has a stop text that ends in this token's text."""
    for count in range(min_tokens + 1, len(ids) + 1):
        before = len(tokenizer.decode(ids[: count - 1]))
        text = tokenizer.decode(ids[:count])
        ends = []
        for stop in stops:
            at = text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), at))
        if ends:
            end, start = min(ends)
            return text[: end if includes_stop else start], count
    return tokenizer.decode(ids), None


@pytest.mark.parametrize("includes_stop", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("stops", [("cat",), (" the", "cat"), ("e c", "n t", "at o"), ("e cat sa", "cat")])
def test_stop_texts_end_a_response_behind_the_least_length(stops, size, includes_stop):
    """A stop text that begins within the least length and ends behind it counts, as in vLLM."""
    tokenizer = byte_level()
    ids = tokenizer("the cat sat on the mat")["input_ids"]
    for min_tokens in range(len(ids) + 1):
        stream = TextStream(tokenizer, stop=stops, min_tokens=min_tokens, includes_stop=includes_stop)
        kept = None
        for start in range(0, len(ids), size):
            found = stream.push(ids[start : start + size])
            if found is not None:
                kept = start + found
                break
        stream.finish()
        expected = expected_text(tokenizer, ids, stops, min_tokens, includes_stop)
        assert (stream.text, kept) == expected, min_tokens
