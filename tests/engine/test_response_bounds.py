"""Least lengths of responses and budgets of reasoning: the same text with every draft as without one."""

import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_tokenizers import byte_level
from transformers import MinNewTokensLengthLogitsProcessor

from eagle_kit import LLM, SamplingParams
from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import ThinkingBudget, Thought
from eagle_kit.engine.grammar.bounds import BoundedMatch
from eagle_kit.engine.text_stream import TextStream

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
    ],
)
def test_what_cannot_be_is_refused(params, cause):
    with pytest.raises(UserError, match=cause):
        make(shape="4,1,5").generate([PROMPTS[0]], **params)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stop_texts_are_looked_for_behind_the_least_length(size):
    tokenizer = byte_level()
    ids = tokenizer("the cat sat on the mat")["input_ids"]
    first = tokenizer.decode(ids[:3])

    def text_of(**options):
        stream = TextStream(tokenizer, stop=(" the", "cat"), **options)
        kept = 0
        for start in range(0, len(ids), size):
            found = stream.push(ids[start : start + size])
            if found is not None:
                kept = start + found
                break
        else:
            stream.finish()
        return stream.text, kept

    whole = tokenizer.decode(ids)
    assert text_of()[0] == whole[: whole.index("cat")]
    text, kept = text_of(min_tokens=3)
    rest = whole[len(first) :]
    places = [rest.index(stop) for stop in (" the", "cat") if stop in rest]
    assert text == (first + rest[: min(places)] if places else whole)
    assert kept > 3 or not places
    included, _ = text_of(includes_stop=True)
    assert included == whole[: whole.index("cat") + 3]
