"""Structured output: every reply matches its grammar, and speculation changes no token of it."""

import json
import re
import threading
import time

import numpy as np
import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import Grammar, SamplingParams
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.serve.grammar import compiler as grammar_module
from eagle_kit.serve.grammar.compiler import MAX_FILL_S, GrammarCompiler, GrammarMatch, _Aside
from eagle_kit.serve.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_target(tmp_path_factory.mktemp("grammar") / "target")
    target = load_target(folder)
    head = tiny_head(target, draft_vocab_size=250)
    return LLM(target, head, tokenizer=load_tokenizer(folder), max_context=300, max_batch_size=4)


def reply(llm, grammar, shape=None, **params):
    params = {"max_tokens": 80, "grammar": grammar, **params}
    return llm.generate(["Tell me."], SamplingParams(**params), shape=shape)[0]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("shape", ["none", "3,1,4", "4,4,12"])
def test_replies_match_their_grammar(llm, shape, params):
    answer = reply(llm, Grammar("json_schema", json.dumps(SCHEMA)), shape, **params)
    value = json.loads(answer.text)
    assert set(value) == {"name", "age"} and value["name"] in ("cat", "dog") and isinstance(value["age"], int)
    assert answer.finish_reason == "stop"
    answer = reply(llm, Grammar("regex", "(ab|cd){3}[0-9]{2}"), shape, **params)
    assert re.fullmatch("(ab|cd){3}[0-9]{2}", answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}])
def test_speculation_changes_no_token_and_some_drafts_are_kept(llm, params):
    grammar = Grammar("regex", "(ab|cd|ef|gh){20}")
    plain = reply(llm, grammar, "none", **params)
    for shape in ("3,1,4", "4,8,24"):
        assert reply(llm, grammar, shape, **params).token_ids == plain.token_ids


def test_a_batch_may_mix_grammars_with_free_text(llm):
    free = SamplingParams(max_tokens=12)
    bound = SamplingParams(max_tokens=40, grammar=Grammar("regex", "[ab]{5}"))
    alone = [llm.generate([p], s, shape="3,1,4")[0].token_ids for p, s in (("Hi.", free), ("Yes?", bound))]
    engine = llm.engine(llm.default_shape)
    requests = [llm.make_request("Hi.", free), llm.make_request("Yes?", bound), llm.make_request("Hi.", free)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert [r.token_ids for r in requests] == [alone[0], alone[1], alone[0]]


def test_max_tokens_cuts_a_reply_inside_its_grammar(llm):
    answer = reply(llm, Grammar("json_object"), "3,1,4", max_tokens=1)
    assert (answer.text, answer.finish_reason) == ("{", "length")


def test_a_json_object_is_an_object(llm):
    for seed in range(5):
        answer = reply(llm, Grammar("json_object"), "3,1,4", temperature=2.0, seed=seed, max_tokens=250)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.text.startswith("{")


@pytest.mark.parametrize("grammar", [Grammar("json_schema", "{"), Grammar("regex", "[")])
def test_a_grammar_that_cannot_be_compiled_is_refused(llm, grammar):
    with pytest.raises(UserError, match="cannot be compiled") as refusal:
        reply(llm, grammar)
    assert "/project" not in refusal.value.cause
    assert not llm.engine().has_work


def test_a_grammar_without_a_tokenizer_is_refused():
    with pytest.raises(UserError, match="tokenizer"):
        LLM(tiny_target(), max_context=64).generate([[1]], SamplingParams(grammar=Grammar("json_object")))


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", r"[^\s\S]"), Grammar("json_schema", '{"$ref": "#"}')], ids=str
)
def test_a_grammar_that_no_reply_matches_is_refused(llm, grammar):
    with pytest.raises(UserError, match="No reply can match the"):
        reply(llm, grammar)


@pytest.mark.parametrize("shape", ["none", "3,1,4", "4,4,12"])
def test_a_grammar_that_leads_nowhere_ends_its_reply_and_no_other(llm, shape):
    """The engine goes on: what follows is served."""
    answer = reply(llm, Grammar("regex", r"ab[^\s\S]"), shape)
    assert (answer.text, answer.finish_reason) == ("ab", "abort")
    answer = reply(llm, Grammar("regex", "[ab]{3}"), shape)
    assert re.fullmatch("[ab]{3}", answer.text) and answer.finish_reason == "stop"


class SlowMatcher:
    """Takes its time over masks; it notices when two threads use it."""

    def __init__(self, cpu_s=0.0, wait=None):
        self.cpu_s, self.wait, self.busy = cpu_s, wait, False

    def traverse_draft_tree(self, child, sibling, tokens, bitmask, seconds):
        self.busy = True
        until = time.thread_time() + self.cpu_s
        while time.thread_time() < until:
            pass
        bitmask[:] = 0
        if self.wait is not None:
            self.wait.wait(20)
        self.busy = False

    def accept_token(self, token):
        assert not self.busy
        return True

    def is_terminated(self):
        return False


def fill(match, seconds=MAX_FILL_S):
    bitmask = torch.full((1, 10), -1, dtype=torch.int32)
    match.fill(np.zeros(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64), bitmask, seconds)
    return bitmask


def test_masks_that_take_too_long_are_given_up_and_hold_no_other_up():
    aside, gate = _Aside(), threading.Event()
    slow, quick = GrammarMatch(SlowMatcher(wait=gate), aside), GrammarMatch(SlowMatcher(), aside)
    started = time.perf_counter()
    bitmask = fill(slow)
    assert slow.is_stuck and bitmask.eq(-1).all() and time.perf_counter() - started < 5
    assert slow.advance([1, 2]) == 0 and fill(slow).eq(-1).all()
    assert fill(quick).eq(0).all() and not quick.is_stuck
    gate.set()
    assert bitmask.eq(-1).all(), "it writes into memory of its own"


def test_a_reply_has_a_budget_of_time(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_EXTRA_S", 0.1)
    match = GrammarMatch(SlowMatcher(cpu_s=0.05), _Aside())
    fill(match, 20)
    assert not match.is_stuck and match.advance([1]) == 1
    for _ in range(3):
        fill(match, 20)
    assert match.is_stuck


def test_an_error_while_masks_are_filled_reaches_the_caller():
    class Broken(SlowMatcher):
        def traverse_draft_tree(self, *args):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fill(GrammarMatch(Broken(), _Aside()))


def test_a_reply_whose_grammar_takes_too_long_is_ended_and_the_next_is_served(llm, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_EXTRA_S", -1.0)
    monkeypatch.setattr(GrammarCompiler, "start", _start_untried)
    answer = reply(llm, Grammar("regex", "[ab]{50}"), "3,1,4")
    assert answer.finish_reason == "abort" and not answer.text
    monkeypatch.undo()
    assert re.fullmatch("[ab]{3}", reply(llm, Grammar("regex", "[ab]{3}")).text)


def _start_untried(self, grammar):
    return GrammarMatch(self._new_matcher(self._compile(grammar)), self._aside)


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "((((a*)*)*)*)*b"), Grammar("json_schema", '{"not": {"type": "string"}}')]
)
def test_a_grammar_of_the_wrong_kind_is_refused_before_it_is_compiled(llm, grammar, monkeypatch):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    monkeypatch.setattr(compiler, "_compiler", None)
    with pytest.raises(UserError, match="repeats a repetition|not is not supported"):
        compiler.start(grammar)


@pytest.mark.parametrize("grammar", [Grammar("json_object"), Grammar("json_schema", json.dumps(SCHEMA))])
def test_whitespace_in_json_has_an_end(llm, grammar):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    assert compiler.start(grammar)._matcher.accept_string("{ \n")
    assert not compiler.start(grammar)._matcher.accept_string("{ \n ")


def test_the_memory_of_compiled_grammars_is_bounded(llm, monkeypatch):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    texts = [f"[ab]{{3}}{i}" for i in range(20)]
    monkeypatch.setattr(grammar_module, "CACHE_BYTES", 10_000)
    for text in texts:
        compiler.start(Grammar("regex", text))
    assert 0 < len(compiler._cache._compiled) < 20 and 0 < compiler._cache._num_bytes <= 10_000
    monkeypatch.setattr(compiler, "_compiler", None)
    compiler.start(Grammar("regex", texts[-1]))


def accepts(compiler, schema, text):
    matcher = compiler.start(Grammar("json_schema", json.dumps(schema)))._matcher
    return matcher.accept_string(text) and matcher.accept_token(2)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[0-9]{3}"}, ["123b", "123"], ["b123", "12"]),
        ({"pattern": "[0-9]{3}$"}, ["b123"], ["123b"]),
        ({"pattern": "a|^b"}, ["xay", "by"], ["xb"]),
        ({"pattern": "^.[^,]$"}, ["ab"], ["a,", 'a"', "a\\", "a\n", "\x01b"]),
        ({"format": "uri", "minLength": 1, "maxLength": 2083}, ["https://a.org/x?y=1"], ["x", ""]),
        ({"format": "path"}, ["/a/b", ""], []),
    ],
)
def test_strings_of_json_follow_their_patterns(llm, schema, good, bad):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    for each in (
        {"type": "array", "items": {"type": "string", **schema}, "minItems": 1},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"type": "string", **schema}}}},
    ):
        assert all(accepts(compiler, each, f'["{text}"]') for text in good)
        assert not any(accepts(compiler, each, f'["{text}"]') for text in bad)


def test_names_of_json_follow_their_patterns(llm):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    schema = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}
    assert accepts(compiler, schema, '{"xy": 1}') and not accepts(compiler, schema, '{"yx": 1}')


def test_a_dot_of_a_regex_is_no_line_end(llm):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    assert compiler.start(Grammar("regex", ".*"))._matcher.accept_string('a"')
    assert not compiler.start(Grammar("regex", ".*"))._matcher.accept_string("a\n")


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_large_counts_compile(llm, kind):
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size, [2])
    schema = {"type": "string", "pattern": "^[a-z]{1,300}$"}
    match = compiler.start(Grammar(kind, "[a-z]{1,300}" if kind == "regex" else json.dumps(schema)))._matcher
    quote = "" if kind == "regex" else '"'
    assert match.accept_string(quote + "a" * 300) and not match.accept_string("a")
