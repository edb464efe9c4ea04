"""Forbidden words: no response has one, speculation changes no token, and the rest of the distribution
stays."""

import itertools
import random
import sys

import numpy as np
import pytest
import torch
from restless import Restless
from tiny import tiny_head
from tiny_engine import PROMPTS, make_engine, serve
from tiny_run import END_TOKEN, make_target, tokens_of
from tiny_trained import trained_models
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar.bad_words import MAX_TOKENS, MatchWithoutBadWords, bad_word_ids
from eagle_kit.engine.grammar.masks import allowed_bits, unpacked
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.ops.tree_build import Tree

WORDS = ((3,), (5, 2), (1, 1), (7, 0, 7), (0, 7, 9), (7, 9))
"""Tokens of a vocabulary of 11."""
SHAPES = ("none", "3,1,4", "3,3,8")


@pytest.fixture(scope="module")
def trained():
    return trained_models(steps=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("words") / "target")


@pytest.fixture(scope="module")
def llm(folder):
    target = load_target(folder)
    head = tiny_head(target, draft_vocab_size=250)
    return LLM(target, head, tokenizer=load_tokenizer(folder), max_context=300, max_batch_size=4)


def responses(models, shape, words=WORDS, prompts=PROMPTS, options=None, **params) -> list[Request]:
    """Served responses without ``words``; with a parameter ``seed`` response i draws from its own numbers."""
    sizes = {"batch": 3, "page_size": 4, **(options or {})}
    engine = make_engine(models, **sizes)
    engine.use_shape(shape if isinstance(shape, Restless) else SpecShape.parse(shape))
    asked = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
    requests = [Request(i, list(ids), asked, bad_word_ids=words) for i, ids in enumerate(prompts)]
    serve(engine, requests)
    return requests


def tokens_of_all(requests) -> list[list[int]]:
    return [request.token_ids for request in requests]


def holds(tokens, words) -> bool:
    """Whether one of ``words`` is within ``tokens``."""
    return any(
        tuple(tokens[start : start + len(word)]) == tuple(word)
        for word in words
        for start in range(len(tokens))
    )


def forbidden_after(tokens, words) -> set[int]:
    """Tokens that complete one of ``words`` behind ``tokens``, by the definition."""
    return {word[-1] for word in words if tuple(tokens[len(tokens) - len(word) + 1 :]) == tuple(word[:-1])}


@pytest.mark.parametrize("seed", range(4))
def test_masks_of_a_tree_are_those_of_its_paths(seed):
    """Random words and trees; a node that is not used leaves its row alone."""
    rng = random.Random(seed)
    words = [tuple(rng.choices(range(5), k=rng.randint(1, 4))) for _ in range(8)]
    written = []
    match = MatchWithoutBadWords(words, 37)
    while len(written) < 6:
        token = rng.choice(sorted(set(range(37)) - forbidden_after(written, words)))
        written.append(token)
        assert match.advance([token]) == 1

    parents = [0, *(rng.randrange(node) for node in range(1, 12)), 12]
    tokens = [written[-1], *(rng.randrange(6) for _ in range(12))]
    tree = Tree(*(torch.tensor([part]) for part in (tokens, parents, parents, parents)))
    allowed = unpacked(allowed_bits([match], tree, 37), 37)[0]
    paths = [written]
    for node in range(1, 12):
        paths.append([*paths[parents[node]], tokens[node]])
        found = set((~allowed[node]).nonzero()[:, 0].tolist())
        assert found == forbidden_after(paths[node], words)
    assert set((~allowed[0]).nonzero()[:, 0].tolist()) == forbidden_after(written, words)
    assert allowed[12].all()


def operations_of_masks(words, tail) -> int:
    """Lines that run while the masks of a window of 16 nodes are written behind ``tail``."""
    match = MatchWithoutBadWords(words, 1000)
    assert match.advance(tail) == len(tail)
    parents = np.maximum(np.arange(16) - 1, 0)
    tokens = torch.full((16,), tail[-1])
    bitmask = torch.full((16, 32), -1, dtype=torch.int32)
    num_lines = 0

    def count(frame, event, argument):
        nonlocal num_lines
        if event == "line":
            num_lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        match.fill(parents, tokens, bitmask)
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("before", [(), (5,)])
def test_many_words_cost_no_more_operations_in_a_step_than_one(before):
    """Words of one token, and words that differ in their last: all responses wait for their masks."""
    one, many = ([(*before, last) for last in range(100, 100 + count)] for count in (1, 256))
    assert operations_of_masks(many, [5]) == operations_of_masks(one, [5])


@pytest.mark.parametrize("shape", ["none", "3,1,4", "4,4,12"])
def test_greedy_responses_are_those_of_transformers(llm, folder, shape):
    """The prompt has none of the words' tokens, since transformers looks for words in prompts, too."""
    prompt = tokens_of("Tell me.")
    plain = llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True), shape="none")[0].token_ids
    later = [token for token in plain if token not in prompt]
    ids = [[later[0]], plain[5:7], plain[10:13]]
    assert holds(plain, ids)

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = torch.tensor([prompt])
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(
        given,
        logits_processor=[NoBadWordsLogitsProcessor(ids)],
        attention_mask=torch.ones_like(given),
        **options,
    )
    engine = llm.engine(SpecShape.parse(shape))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    request = Request(0, prompt, params, bad_word_ids=tuple(map(tuple, ids)))
    serve(engine, [request])
    assert request.token_ids == expected[0, len(prompt) :].tolist() != plain


@pytest.fixture(scope="module")
def plain(trained):
    """Greedy responses of plain decoding without the words."""
    found = tokens_of_all(responses(trained, None))
    assert not any(holds(tokens, WORDS) for tokens in found)
    assert any(holds(tokens, WORDS) for tokens in tokens_of_all(responses(trained, None, words=None)))
    return found


@pytest.mark.parametrize(
    ("shape", "lag", "params"),
    [
        ("3,1,4", 1, {"temperature": 1.0, "seed": 5}),
        (
            "3,3,8",
            0,
            {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2, "logit_bias": {4: 1.5}, "logprobs": 2},
        ),
        ("3,3,8", 1, {"temperature": 1.0, "seed": 7, "allowed_token_ids": (0, 1, 2, 3, 4, 5, 7, 9)}),
    ],
    ids=str,
)
def test_speculation_changes_no_token_that_is_drawn(trained, shape, lag, params):
    """A chain and a tree, with a pool that runs full, and both lags, beside plain decoding."""
    alone = tokens_of_all(responses(trained, None, **params))
    assert not any(holds(tokens, WORDS) for tokens in alone)
    small = {"kv_tokens": 104, "lag": lag, "max_context": 100}
    found = responses(trained, shape, options=small, **params)
    assert tokens_of_all(found) == alone
    assert sum(request.stats.num_preemptions for request in found) > 0


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("3,1,4", {"kv_tokens": 104, "max_context": 100}),
        ("3,3,8", {"lag": 1}),
        ("3,1,4", {"sampled_drafts": True}),
        ("3,1,4", {"sampled_drafts": True, "verifier": "rejection"}),
    ],
    ids=str,
)
def test_speculation_changes_no_greedy_token(trained, plain, shape, options):
    assert tokens_of_all(responses(trained, shape, options=options)) == plain


def test_windows_that_are_packed_change_no_token(trained, plain):
    """Shapes and numbers of drafts that change from cycle to cycle."""
    shapes = (SpecShape(3, 1, 4), SpecShape(3, 3, 8))
    policy = Restless(1, shapes, most_plain=2)
    assert tokens_of_all(responses(trained, policy)) == plain
    assert policy.used >= set(shapes)


def test_drafts_of_ngrams_are_masked(trained):
    prompts = [[4, 6, 8, 3, 4, 6, 8, 3, 4, 6]] * 2
    target = (trained[0], None)
    alone = tokens_of_all(responses(target, None, prompts=prompts))
    found = responses(target, "4,1,5", prompts=prompts, options={"algorithm": "NGRAM"})
    assert tokens_of_all(found) == alone
    assert not any(holds(tokens, WORDS) for tokens in alone)


@pytest.fixture(scope="module")
def law(trained):
    """Probability of every response of three tokens, ``[11, 11, 11]``, masked by the definition."""
    alone = LLM(trained[0], max_context=64)
    law = torch.zeros(11, 11, 11, dtype=torch.float64)
    for one, two in itertools.product(range(11), repeat=2):
        logits = alone.logits([1, 2, one, two])[1:].double() / 1.1
        for count in range(3):
            logits[count, list(forbidden_after([one, two][:count], WORDS))] = float("-inf")
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
    """Both verifications of sampled chains, and trees, beside all responses of three tokens."""
    count = 1_000
    options = dict(options)
    shape = options.pop("shape")
    sizes = {"batch": 1000, "max_context": 24, "kv_tokens": 40_000, "mixed_prefill_tokens": 512, **options}
    found = responses(trained, shape, prompts=[[1, 2]] * count, options=sizes, temperature=1.1, max_tokens=3)
    cells = torch.tensor([121 * a + 11 * b + c for a, b, c in tokens_of_all(found)])
    counts = torch.bincount(cells, minlength=1331).double()
    expected = count * law.flatten()
    assert counts[expected == 0].sum() == 0
    rare = expected < 8
    counts, expected = (torch.cat((each[~rare], each[rare].sum()[None])) for each in (counts, expected))
    distance = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert freedom > 20 and distance < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_response_ends_where_everything_is_forbidden_and_no_other_does(trained, shape):
    """Behind the token 5 all that may follow completes a word. Others go on."""
    dead = ((5, 5), (5, 6))
    engine = make_engine(trained, batch=2, page_size=4)
    engine.use_shape(SpecShape.parse(shape))
    params = SamplingParams(max_tokens=10, ignore_eos=True, allowed_token_ids=(5, 6), logit_bias={5: 50.0})
    requests = [
        Request(0, [1], params, bad_word_ids=dead),
        Request(1, [1], SamplingParams(max_tokens=10, ignore_eos=True)),
        Request(2, [1], SamplingParams(), bad_word_ids=tuple((token,) for token in range(11))),
    ]
    serve(engine, requests)
    assert (requests[0].token_ids, requests[0].finish_reason) == ([5], "abort")
    assert (len(requests[1].token_ids), requests[1].finish_reason) == (10, "length")
    assert (requests[2].token_ids, requests[2].finish_reason) == ([], "abort")


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4}])
def test_a_grammar_and_words_hold_together(llm, params):
    """The regex alone may have the words; a word that it insists on ends the response."""
    asked = {"max_tokens": 60, "grammar": Grammar("regex", "[a-h]{24}"), **params}
    free = llm.generate(["Say."], SamplingParams(**asked), shape="none")[0].text
    words = (free[:3], free[6:8])
    found = [
        llm.generate(["Say."], SamplingParams(**asked, bad_words=words), shape=shape)[0]
        for shape in ("none", "3,1,4", "4,4,12")
    ]
    assert len({tuple(answer.token_ids) for answer in found}) == 1
    assert len(found[0].text) == 24 and not any(word in found[0].text for word in words)
    assert found[0].finish_reason == "stop"

    asked["grammar"] = Grammar("regex", "xyz")
    for shape in ("none", "3,1,4"):
        answer = llm.generate(["Say."], SamplingParams(**asked, bad_words=("yz",)), shape=shape)[0]
        assert (answer.text, answer.finish_reason) == ("xy", "abort")


def test_words_in_the_prompt_are_not_a_part_of_the_response(llm):
    """The prompt ends with the word's first token: the response may begin with its second."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompt = tokens_of("ab")
    first = llm.generate([prompt], params)[0].token_ids
    request = Request(0, prompt, params, bad_word_ids=((prompt[-1], *first),))
    serve(llm.engine(), [request])
    assert request.token_ids == first


def test_words_are_tokenised_with_and_without_a_blank(llm):
    (blank,) = tokens_of(" ")
    bare = tuple(tokens_of("ab"))
    assert bad_word_ids(llm.tokenizer, ["ab", " ab", "  ab"], 300) == (bare, (blank, *bare))
    assert bad_word_ids(llm.tokenizer, ["\n"], 300)[0] == tuple(tokens_of("\n"))
    assert bad_word_ids(llm.tokenizer, ["<|im_end|>"], 300)[0] == (END_TOKEN,)
    assert bad_word_ids(llm.tokenizer, ["ab"], min(bare)) == (), "what the target cannot emit"


@pytest.mark.parametrize("word", [" ", "   "])
def test_words_without_tokens_are_refused(llm, word):
    with pytest.raises(UserError, match="bad_words"):
        llm.generate(["Say."], SamplingParams(bad_words=(word,)))


def test_words_are_allowed_up_to_their_number_and_lengths(llm):
    SamplingParams(bad_words=("a" * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORDS)
    for words in (("a",) * (MAX_BAD_WORDS + 1), ("",), ("a" * (MAX_BAD_WORD_CHARS + 1),)):
        with pytest.raises(UserError, match="bad_words"):
            SamplingParams(bad_words=words)
    # A word of n characters has n tokens here, and n + 1 with a blank.
    words = [letter * 127 for letter in "abcdefgh"]
    assert sum(map(len, bad_word_ids(llm.tokenizer, words, 300))) == MAX_TOKENS - 8
    with pytest.raises(UserError, match=str(MAX_TOKENS)):
        bad_word_ids(llm.tokenizer, [*words, "ijkl"], 300)


def test_words_without_a_tokenizer_are_refused(trained):
    with pytest.raises(UserError, match="tokenizer"):
        LLM(trained[0], max_context=64).generate([[1]], SamplingParams(bad_words=("a",)))


def test_the_longest_words_cost_few_steps_for_a_node(monkeypatch):
    """A node looks once for each length of a word, however many words there are."""
    lengths = range(2, 60)
    words = [(1,) * length for length in lengths] + [(2, token) for token in range(90)]
    match = MatchWithoutBadWords(words, 100)
    looked = itertools.count()

    class Counted(dict):
        def get(self, *given):
            next(looked)
            return super().get(*given)

    monkeypatch.setattr(match, "_last_tokens", Counted(match._last_tokens))
    nodes = torch.zeros(64, dtype=torch.int64)
    bitmask = torch.full((64, 4), -1, dtype=torch.int32)
    match.fill(np.maximum(np.arange(64) - 1, 0), nodes, bitmask)
    assert next(looked) <= 64 * len(lengths)
