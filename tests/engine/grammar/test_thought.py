"""Grammars that begin behind a response's reasoning: what is allowed depends on a node's path alone, and
speculation changes no token."""

import itertools
import re

import numpy as np
import pytest
import torch
from sweep import sweep
from tiny import tiny_head
from tiny_run import END_TOKEN, make_target, tokens_of

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.structured_outputs import Grammar, Thought
from eagle_kit.engine.grammar.compiler import GrammarCompiler
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer

V, BEGIN, END, OTHER = 300, 270, 271, 272
OPENED, OPTIONAL = Thought((END,)), Thought((END,), opener=BEGIN)
SEQUENCE = Thought((BEGIN, OTHER, END), others=(275,))
THOUGHTS = {"opened": OPENED, "optional": OPTIONAL, "sequence": SEQUENCE}
SAMPLING = {
    "greedy": {},
    "seed 3": {"temperature": 1.0, "seed": 3},
    "seed 5": {"temperature": 1.3, "seed": 5},
}
REGEX = "(ab|ba){3}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_target(tmp_path_factory.mktemp("thought") / "target")
    target = load_target(folder)
    head = tiny_head(target, draft_vocab_size=V)
    return LLM(target, head, tokenizer=load_tokenizer(folder), max_context=300, max_batch_size=4)


@pytest.fixture(scope="module")
def compiler(llm):
    return GrammarCompiler(llm.tokenizer, V, llm.target.config.eos_token_ids)


def allowed_in_grammar(compiler, tokens):
    """Tokens after ``tokens`` of the plain grammar; everything where they do not match it."""
    match = compiler.start(Grammar("regex", REGEX))
    bits = torch.full((1, -(-V // 32)), -1, dtype=torch.int32)
    if match.advance(tokens) == len(tokens) and not match.is_complete:
        match.fill(np.array([0]), torch.tensor([0]), bits)
    return set_of(bits[0])


def set_of(row):
    return {i for i in range(V) if int(row[i // 32]) >> (i % 32) & 1}


def expected(compiler, thought, path):
    """What may follow a whole response ``path``, found by searching it."""
    stops = {END_TOKEN}
    everything = set(range(V))
    if thought.opener is not None:
        if not path:
            return allowed_in_grammar(compiler, []) | {thought.opener}
        if path[0] != thought.opener:
            return allowed_in_grammar(compiler, path)
        path = path[1:]
    end = thought.end
    for i in range(len(path) - len(end) + 1):
        if tuple(path[i : i + len(end)]) == end:
            return allowed_in_grammar(compiler, path[i + len(end) :])
    for length in range(len(end) - 1, 0, -1):
        if tuple(path[-length:]) == end[:length]:
            return {end[length], *(thought.others if length == 1 else ())}
    return everything - stops


@pytest.mark.parametrize("thought", [OPENED, OPTIONAL, SEQUENCE], ids=["opened", "optional", "sequence"])
def test_masks_of_every_window_are_those_of_its_paths(compiler, thought):
    """All windows of four nodes, in all forms of a tree, behind several beginnings of a response."""
    a, b = (tokens_of(text)[0] for text in "ab")
    tokens = dict.fromkeys((a, b, END, BEGIN, OTHER))
    beginnings = [[], [BEGIN], [a], [BEGIN, OTHER], [BEGIN, END], [BEGIN, OTHER, END, a]]
    shapes = [(0, 0, *rest) for rest in itertools.product(range(3), range(3))]  # 2 at 2 is not used
    memo = {}
    for begun in beginnings:
        match = compiler.start(Grammar("regex", REGEX, thought))
        if match.advance(begun) < len(begun):
            continue
        for parents in shapes:
            for drafts in itertools.product(tokens, repeat=3):
                bits = torch.full((4, -(-V // 32)), -1, dtype=torch.int32)
                match.fill(np.array(parents), torch.tensor([7, *drafts]), bits)
                paths = [tuple(begun)]
                for node in range(1, 4):
                    paths.append((*paths[min(parents[node], node - 1)], drafts[node - 1]))
                for node, (path, row) in enumerate(zip(paths, bits, strict=True)):
                    if node and parents[2] == 2 and node in (2, 3 if parents[3] == 2 else 2):
                        assert row.eq(-1).all()
                        continue
                    key = (path, row.numpy().tobytes())
                    if key not in memo:
                        memo[key] = expected(compiler, thought, list(path)) == set_of(row)
                    assert memo[key], (thought, path)
    assert len(memo) > 50


@pytest.mark.parametrize("thought", [OPENED, OPTIONAL, SEQUENCE], ids=["opened", "optional", "sequence"])
def test_responses_taken_in_pieces_end_where_whole_ones_do(compiler, thought):
    a, b = (tokens_of(text)[0] for text in "ab")
    response = [
        BEGIN,
        a,
        *(() if thought is not SEQUENCE else (BEGIN, OTHER)),
        END,
        *[a, b] * 3,
        END_TOKEN,
        a,
    ]
    for size in range(1, len(response) + 1):
        match, taken = compiler.start(Grammar("regex", REGEX, thought)), 0
        for start in range(0, len(response), size):
            taken += match.advance(response[start : start + size])
            if match.is_complete:
                break
        assert match.is_complete and taken == len(response) - 1


def response(llm, thought, shape, **params):
    """A response whose reasoning ends soon, as the target's logits are made to."""
    bias = {END: 9.0, BEGIN: 7.0, OTHER: 7.0}
    params = SamplingParams(
        max_tokens=120, logit_bias=bias, grammar=Grammar("regex", REGEX, thought), **params
    )
    return llm.generate(["Tell me."], params, shape=shape)[0]


@pytest.mark.parametrize(
    ("name", "sampling"),
    sweep(
        itertools.product(THOUGHTS, SAMPLING),
        fast=[
            ("opened", "greedy"),
            ("opened", "seed 3"),
            ("optional", "seed 5"),
            ("sequence", "greedy"),
            ("sequence", "seed 3"),
        ],
    ),
)
def test_speculation_changes_no_token_and_the_answer_matches(llm, name, sampling):
    thought, params = THOUGHTS[name], SAMPLING[sampling]
    plain = response(llm, thought, "none", **params)
    assert plain.finish_reason == "stop"
    tokens, end = plain.token_ids, thought.end
    behind = (
        next(i + len(end) for i in range(len(tokens)) if tuple(tokens[i : i + len(end)]) == end)
        if END in tokens
        else 0
    )
    assert behind or thought.opener is not None
    assert re.fullmatch(REGEX, llm.tokenizer.decode(tokens[behind:-1]))
    for shape in ("3,1,4", "4,4,12"):
        assert response(llm, thought, shape, **params).token_ids == tokens


def test_a_response_cannot_end_within_its_reasoning_and_is_not_held_there(llm):
    """A target that wants nothing but its end token writes something else until the tokens are spent."""
    params = SamplingParams(
        max_tokens=12, logit_bias={2: 99.0}, grammar=Grammar("regex", REGEX, OPENED), temperature=1.0, seed=0
    )
    for shape in ("none", "3,1,4"):
        answer = llm.generate(["Tell me."], params, shape=shape)[0]
        assert answer.finish_reason == "length" and len(set(answer.token_ids)) > 4


def test_tokens_that_the_target_does_not_know_are_refused(compiler):
    for thought in (Thought((V,)), Thought((END,), opener=V), Thought((END,), others=(V,))):
        with pytest.raises(UserError, match="outside the target's vocabulary"):
            compiler.start(Grammar("regex", "a", thought))
    compiler.start(Grammar("regex", "a", Thought((V - 1,), opener=V - 2)))


def test_a_token_that_ends_responses_may_be_one_that_the_target_does_not_have(llm):
    compiler = GrammarCompiler(llm.tokenizer, 200, [END_TOKEN, 230])
    match = compiler.start(Grammar("regex", REGEX, Thought((150,))))
    bits = torch.full((1, 7), -1, dtype=torch.int32)
    match.fill(np.array([0]), torch.tensor([0]), bits)
    allowed = {i for i in range(200) if int(bits[0][i // 32]) >> (i % 32) & 1}
    assert allowed == set(range(200)) - {END_TOKEN}


def test_responses_with_reasoning_and_without_share_a_compiled_grammar(llm):
    compiler = GrammarCompiler(llm.tokenizer, V, llm.target.config.eos_token_ids)
    for thought in (None, OPENED, OPTIONAL):
        compiler.start(Grammar("regex", REGEX, thought))
    assert compiler.num_compiled == 1
