"""Structured output: every response matches its grammar, and speculation changes no token of it."""

import json
import re
import threading
import time

import numpy as np
import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_run import END_TOKEN, make_target, tokens_of

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar import compiler as grammar_module
from eagle_kit.engine.grammar.compiler import (
    MAX_FILL_S,
    MAX_REGEX_CHARS,
    NUM_COMPILED,
    NUM_STARTS,
    GrammarCompiler,
    GrammarMatch,
)
from eagle_kit.engine.llm import LLM
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.source import load_tokenizer

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


def response(llm, grammar, shape=None, **params):
    params = {"max_tokens": 80, "grammar": grammar, **params}
    return llm.generate(["Tell me."], SamplingParams(**params), shape=shape)[0]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("shape", ["none", "3,1,4", "4,4,12"])
def test_responses_match_their_grammar(llm, shape, params):
    answer = response(llm, Grammar("json_schema", json.dumps(SCHEMA)), shape, **params)
    value = json.loads(answer.text)
    assert set(value) == {"name", "age"} and value["name"] in ("cat", "dog") and isinstance(value["age"], int)
    assert answer.finish_reason == "stop"
    answer = response(llm, Grammar("regex", "(ab|cd){3}[0-9]{2}"), shape, **params)
    assert re.fullmatch("(ab|cd){3}[0-9]{2}", answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}])
def test_speculation_changes_no_token_and_some_drafts_are_kept(llm, params):
    grammar = Grammar("regex", "(ab|cd|ef|gh){20}")
    plain = response(llm, grammar, "none", **params)
    for shape in ("3,1,4", "4,8,24"):
        assert response(llm, grammar, shape, **params).token_ids == plain.token_ids


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


def test_max_tokens_cuts_a_response_inside_its_grammar(llm):
    answer = response(llm, Grammar("json_object"), "3,1,4", max_tokens=1)
    assert (answer.text, answer.finish_reason) == ("{", "length")


def test_a_json_object_is_an_object(llm):
    for seed in range(5):
        answer = response(llm, Grammar("json_object"), "3,1,4", temperature=2.0, seed=seed, max_tokens=250)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.text.startswith("{")


@pytest.fixture(scope="module")
def compiler(llm):
    return GrammarCompiler(llm.tokenizer, llm.target.config.vocab_size, llm.target.config.eos_token_ids)


def accepts(compiler, grammar, text):
    """Whether the response may be ``text``, a byte a token, and end there."""
    match = compiler.start(grammar)
    match.advance([*tokens_of(text), END_TOKEN])
    return match.is_complete


def json_schema(schema):
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize("grammar", [Grammar("json_schema", "{"), Grammar("regex", "[")])
def test_a_grammar_that_cannot_be_compiled_is_refused(llm, grammar):
    with pytest.raises(UserError, match="cannot be compiled") as refusal:
        response(llm, grammar)
    assert len(refusal.value.cause) < 400 and "\n" not in refusal.value.cause
    assert not llm.engine().has_work


def test_a_grammar_without_a_tokenizer_is_refused():
    with pytest.raises(UserError, match="tokenizer"):
        LLM(tiny_target(), max_context=64).generate([[1]], SamplingParams(grammar=Grammar("json_object")))


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", r"[^\s\S]"), Grammar("regex", r"ab[^\s\S]"), json_schema({"$ref": "#"})],
    ids=str,
)
def test_a_grammar_that_no_response_matches_is_refused(llm, grammar):
    with pytest.raises(UserError, match="No response can match the"):
        response(llm, grammar)


DEAD_END = {
    "type": "array",
    "prefixItems": [{"$ref": "#/$defs/x"}],
    "minItems": 1,
    "$defs": {"x": {"$ref": "#/$defs/x"}},
}


@pytest.mark.parametrize("shape", ["none", "3,1,4", "4,4,12"])
def test_a_grammar_that_leads_nowhere_ends_its_response_and_no_other(llm, shape):
    """The engine goes on: what follows is served."""
    answer = response(llm, json_schema(DEAD_END), shape)
    assert answer.text.strip() == "[" and answer.finish_reason == "abort"
    answer = response(llm, Grammar("regex", "[ab]{3}"), shape)
    assert re.fullmatch("[ab]{3}", answer.text) and answer.finish_reason == "stop"


def test_masks_of_a_tree_are_those_of_its_paths(compiler):
    """Nodes that break the grammar, lie behind its end, or are not used, leave their rows alone."""
    match = compiler.start(Grammar("regex", "a(b|cd)"))
    token = {text: tokens_of(text)[0] for text in "abcdx"}
    parents = np.array([0, 0, 0, 1, 1, 3, 6, 4, 2])
    tokens = torch.tensor([7, *(token[t] for t in "axbc"), END_TOKEN, 0, token["d"], token["a"]])
    bitmask = torch.full((9, -(-300 // 32)), -1, dtype=torch.int32)
    match.fill(parents, tokens, bitmask)
    rows = [{i for i in range(300) if int(row[i // 32]) >> (i % 32) & 1} for row in bitmask]
    everything = set(range(300))
    assert rows[:5] == [
        {token["a"]},
        {token["b"], token["c"]},
        everything,
        {END_TOKEN},
        {token["d"]},
    ]
    assert rows[5:] == [everything, everything, {END_TOKEN}, everything]
    again = torch.zeros_like(bitmask)
    match.fill(parents, tokens, again)
    assert again[0].equal(bitmask[0]) and not match.is_stuck, "the match stays where it is"


def test_an_automaton_that_has_grown_to_its_limit_is_made_anew(llm, monkeypatch):
    monkeypatch.setitem(grammar_module.LIMITS, "max_lexer_states", 60)
    compiler = GrammarCompiler(llm.tokenizer, 300, [END_TOKEN])
    grammar = Grammar("regex", "y|x(a|b)*a(a|b){40}")
    match = compiler.start(grammar)
    draft = [7, *tokens_of("x" + "ab" * 30)]
    bitmask = torch.full((len(draft), -(-300 // 32)), -1, dtype=torch.int32)
    match.fill(np.maximum(np.arange(len(draft)) - 1, 0), torch.tensor(draft), bitmask)
    (letter,) = tokens_of("y")
    assert bitmask[-1].eq(-1).all() and match.advance([letter]) == 0 and match.is_stuck
    for _ in range(NUM_STARTS):
        match = compiler.start(grammar)
    assert match.advance([letter]) == 1


class SlowMatcher:
    """Takes its time over masks."""

    def __init__(self, cpu_s=0.0):
        self.cpu_s = cpu_s

    def compute_bitmask(self):
        until = time.thread_time() + self.cpu_s
        while time.thread_time() < until:
            pass
        return bytes(40)

    def deep_copy(self):
        return self

    def is_error(self):
        return False

    def try_consume_tokens(self, tokens):
        return 1


def fill(match, num_nodes=1):
    bitmask = torch.full((num_nodes, 10), -1, dtype=torch.int32)
    match.fill(np.maximum(np.arange(num_nodes) - 1, 0), torch.zeros(num_nodes, dtype=torch.int64), bitmask)
    return bitmask


def test_masks_that_take_too_long_are_given_up():
    match = GrammarMatch(SlowMatcher(cpu_s=MAX_FILL_S / 4), frozenset())
    started = time.thread_time()
    bitmask = fill(match, 100)
    assert match.is_stuck and time.thread_time() - started < 2 * MAX_FILL_S
    assert bitmask[0].eq(0).all() and bitmask[-1].eq(-1).all()
    assert match.advance([1, 2]) == 0 and fill(match).eq(-1).all()


def test_a_response_has_a_budget_of_time(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_EXTRA_S", 0.1)
    match = GrammarMatch(SlowMatcher(cpu_s=0.05), frozenset())
    fill(match)
    assert not match.is_stuck and match.advance([1]) == 1
    for _ in range(3):
        fill(match)
    assert match.is_stuck
    monkeypatch.setattr(grammar_module, "MAX_EXTRA_S", 0.02)
    match = GrammarMatch(SlowMatcher(cpu_s=0.004), frozenset())
    for _ in range(12):
        fill(match)
    assert not match.is_stuck, "short calls count nothing, however many they are"


def test_a_response_whose_grammar_takes_too_long_is_ended_and_the_next_is_served(llm, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_EXTRA_S", -1.0)
    answer = response(llm, Grammar("regex", "[ab]{50}"), "3,1,4")
    assert answer.finish_reason == "abort" and len(answer.text) <= 1
    monkeypatch.undo()
    assert re.fullmatch("[ab]{3}", response(llm, Grammar("regex", "[ab]{3}")).text)


@pytest.mark.parametrize("grammar", [Grammar("json_object"), json_schema(SCHEMA)])
def test_whitespace_in_json_has_an_end(compiler, grammar):
    tokens = tokens_of("{ \n ")
    assert compiler.start(grammar).advance(tokens) == 3


def test_compiled_grammars_of_one_salt_are_not_those_of_another(llm):
    compiler = GrammarCompiler(llm.tokenizer, llm.target.config.vocab_size, llm.target.config.eos_token_ids)
    numbers = []
    for salt in (None, "a", "b", None, "a", "b"):
        compiler.start(Grammar("regex", "[ab]{3}"), salt)
        numbers.append(compiler.num_compiled)
    assert numbers == [1, 2, 3, 3, 3, 3]


def test_compiled_grammars_are_remembered_and_their_number_is_bounded(llm):
    compiler = GrammarCompiler(llm.tokenizer, llm.target.config.vocab_size, llm.target.config.eos_token_ids)
    texts = [f"[ab]{{3}}{i}" for i in range(NUM_COMPILED + 1)]
    for text in texts:
        compiler.start(Grammar("regex", text))
    assert compiler.num_compiled == NUM_COMPILED
    misses = compiler._compiled.cache_info().misses
    first, second = (compiler.start(Grammar("regex", texts[-1])) for _ in range(2))
    assert compiler._compiled.cache_info().misses == misses
    a, b = tokens_of("ab")
    assert first.advance([a, a, a, a]) == 3 and second.advance([b, b, b]) == 3, "they share no state"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[0-9]{3}"}, ["123b", "123"], ["b123", "12"]),
        ({"pattern": "[0-9]{3}$"}, ["b123"], ["123b"]),
        ({"pattern": "a|^b"}, ["xay", "by"], ["xb"]),
        ({"pattern": "^.[^,]$"}, ["ab", r"a\"", r"a\\", r"a\n"], ["a,", 'a"', "a\\", "a\n", "\x01b"]),
        ({"pattern": '^"hi"$'}, [r"\"hi\""], ["hi", '"hi"']),
        ({"pattern": "^a+$", "minLength": 2, "maxLength": 3}, ["aa", "aaa"], ["a", "aaaa", "ab"]),
        ({"format": "uri", "minLength": 1, "maxLength": 2083}, ["https://a.org/x?y=1"], ["x", ""]),
        ({"format": "path"}, ["/a/b", ""], []),
    ],
)
def test_strings_of_json_follow_their_patterns(compiler, schema, good, bad):
    for each in (
        {"type": "array", "items": {"type": "string", **schema}, "minItems": 1},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"type": "string", **schema}}}},
    ):
        assert all(accepts(compiler, json_schema(each), f'["{text}"]') for text in good)
        assert not any(accepts(compiler, json_schema(each), f'["{text}"]') for text in bad)


FORMATS = {
    "date": ("2024-02-29", "2024-2-29"),
    "time": ("10:20:30Z", "10:20"),
    "date-time": ("2024-02-29T10:20:30Z", "2024-02-29"),
    "duration": ("P3D", "3D"),
    "email": ("a@b.org", "a.org"),
    "hostname": ("a.org", "-a-"),
    "ipv4": ("10.0.0.255", "10.0.0.256"),
    "ipv6": ("::1", ":1"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "uri": ("https://a.org/x?y=1", "x"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_is_documented_is_followed(compiler, name):
    good, bad = FORMATS[name]
    schema = json_schema({"type": "string", "format": name})
    assert accepts(compiler, schema, f'"{good}"') and not accepts(compiler, schema, f'"{bad}"')


@pytest.mark.parametrize("name", ["path", "binary", "password"])
def test_formats_that_say_nothing_of_the_characters_allow_all(compiler, name):
    assert accepts(compiler, json_schema({"type": "string", "format": name}), '"any /text\\n"')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["7", "-7"], ["7.5", '"7"']),
        ({"type": ["null", "boolean"]}, ["null", "true"], ["0"]),
        ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
        ({"const": {"a": [1]}}, ['{"a":[1]}'], ['{"a":[2]}']),
        ({"type": "integer", "minimum": 5, "maximum": 7}, ["5", "7"], ["4", "8"]),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8}, ["6", "7"], ["5", "8"]),
        ({"type": "integer", "multipleOf": 4}, ["8"], ["6"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"ab"'], ['""', '"abc"']),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}, ["[null]"], ["[]"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, ["[null,null]"], ["[null,null,null]"]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1,2]"], ["[2,2]"]),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "maxProperties": 1}, ['{"a":1}', "{}"], ['{"a":1,"b":1}']),
        ({"properties": {"a": {}}, "required": ["a"], "type": "object"}, ['{"a":1}'], ["{}", '{"b":1}']),
        ({"type": "object", "additionalProperties": {"type": "null"}}, ['{"a":null}'], ['{"a":1}']),
        ({"anyOf": [{"type": "null"}, {"const": 1}]}, ["null", "1"], ["2"]),
        ({"oneOf": [{"type": "null"}, {"const": 1}]}, ["null", "1"], ["2"]),
        ({"allOf": [{"const": 1}]}, ["1"], ["2"]),
        ({"$ref": "#/definitions/x", "definitions": {"x": {"const": 1}}}, ["1"], ["2"]),
    ],
    ids=str,
)
def test_every_keyword_that_is_documented_is_followed(compiler, schema, good, bad):
    """Beside annotations, which say nothing of a value."""
    annotations = {"title": "t", "description": "d", "default": 1, "example": 1, "examples": [1]}
    annotations |= {"discriminator": {}, "deprecated": True, "readOnly": True, "writeOnly": True}
    for each in (schema, schema | annotations | {"$comment": "c"}):
        for text in good:
            assert accepts(compiler, json_schema(each), text), text
        for text in bad:
            assert not accepts(compiler, json_schema(each), text), text


def test_the_longest_regex_is_followed_and_a_longer_one_refused(compiler):
    longest = "a" * MAX_REGEX_CHARS
    assert accepts(compiler, Grammar("regex", longest), longest)
    assert MAX_REGEX_CHARS == 4096
    with pytest.raises(UserError, match="4097 characters, 4096 are allowed"):
        compiler.start(Grammar("regex", longest + "a"))


def test_an_empty_regex_is_an_empty_response(compiler):
    assert accepts(compiler, Grammar("regex", ""), "") and not accepts(compiler, Grammar("regex", ""), "a")


def test_names_of_json_follow_their_patterns(compiler):
    schema = json_schema(
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
    )
    assert accepts(compiler, schema, '{"xy": 1}') and not accepts(compiler, schema, '{"yx": 1}')


def test_a_listed_name_cannot_come_in_escapes(compiler):
    schema = json_schema({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True})
    assert accepts(compiler, schema, '{"a": 1, "b": 2}')
    for text in ('{"a": 2}', r'{"\u0061": 2}', '{"b": 2, "a": 2}', r'{"a": 1, "\u0061": 2}'):
        assert not accepts(compiler, schema, text)


def test_classes_of_a_regex_are_ascii_and_its_dot_is_no_line_end(compiler):
    for regex, good, bad in (
        (".", 'a"é', "\n"),
        (r"\d", "07", "\u0663"),
        (r"\w", "aZ_0", "é"),
        (r"\s", " \t\n", "\u00a0"),
    ):
        assert all(accepts(compiler, Grammar("regex", regex), text) for text in good)
        assert not any(accepts(compiler, Grammar("regex", regex), text) for text in bad)


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_large_counts_compile(compiler, kind):
    schema = {"type": "string", "pattern": "^[a-z]{1,4000}$"}
    compiler.start(Grammar(kind, "[a-z]{1,4000}" if kind == "regex" else json.dumps(schema)))


def test_several_threads_may_compile_and_copy_at_once(compiler):
    errors = []

    def work():
        try:
            for i in range(20):
                match = compiler.start(Grammar("regex", f"a{{{i % 3 + 1}}}b"))
                assert match.advance(tokens_of("aaa")) == i % 3 + 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
