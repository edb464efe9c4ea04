"""Schemas with something that would be ignored, or that costs too much, are refused before compiling."""

import json
import time

import pytest
from tiny_run import make_target, tokens_of

from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar.compiler import GrammarCompiler
from eagle_kit.engine.grammar.schema_rules import MAX_DEPTH, check_pattern, check_schema
from eagle_kit.models.loading.source import load_tokenizer

INT, TEXT = {"type": "integer"}, {"type": "string"}
THING = {"type": "object", "properties": {"a": INT}}


def branch(kind):
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


def chain(length, levels):
    """A schema of ``length`` definitions, each with a reference to the next ``levels`` subschemas inside."""
    definitions = {}
    for i in range(length):
        inner = {"$ref": f"#/$defs/d{i + 1}"} if i + 1 < length else TEXT
        for _ in range(levels):
            inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        definitions[f"d{i}"] = inner
    return {"$ref": "#/$defs/d0", "$defs": definitions}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    tokenizer = load_tokenizer(make_target(tmp_path_factory.mktemp("rules") / "target"))
    return GrammarCompiler(tokenizer, 300, [2])


def start(compiler, schema):
    return compiler.start(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {**THING, "title": "x", "required": ["a"], "default": {"if": 1}},
        {"type": "object", "properties": {"not": INT}, "required": ["not"]},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", **THING},
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "pattern": "^a+$", "minLength": 3},
        {"type": ["string", "null"], "minLength": 5, "maxLength": 9},
        {"enum": ["a", "b"], "type": "string"},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"allOf": [INT]}}},
        {"oneOf": [INT, TEXT, {"const": None}]},
        {"oneOf": [{"enum": [1, 2]}, {"const": 3}, {"const": "3"}, {"const": True}]},
        {"oneOf": [branch("a"), branch("b"), {"type": "null"}]},
        {"oneOf": [branch(1), branch(2)]},
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": branch("a"), "b": branch("b")},
        },
        {"anyOf": [INT, {"type": "number", "minimum": 5, "maximum": 6}]},
        {"type": "object", "patternProperties": {"^a$": INT}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^a": INT, "^b": TEXT}, "properties": {"c": INT}},
        {"type": "array", "prefixItems": [INT, TEXT], "items": False},
        {"type": "string", "format": "date-time"},
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "multipleOf": 0.25},
        {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
        {"type": "string", "format": "path"},
        {"type": "string", "format": "binary", "minLength": 3},
        {"type": "string", "example": "x"},
        {"type": "object", "additionalProperties": INT, "minProperties": 1},
        {**THING, "required": ["a"], "minProperties": 1},
        {"type": "object", "properties": {f"p{i}": INT for i in range(1000)}},
        chain(60, 3),
    ],
    ids=lambda schema: str(schema)[:80],
)
def test_ordinary_schemas_compile(compiler, schema):
    start(compiler, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": INT, "uniqueItems": True},
        {"type": "array", "items": INT, "contains": {"const": 5}},
        {"not": TEXT},
        {**THING, "properties": {"a": {"not": {}}}},
        {**INT, "if": {"minimum": 3}, "then": {"minimum": 5}},
        {**THING, "dependentRequired": {"a": ["b"]}},
        {**THING, "propertyNames": {"pattern": "^b"}},
        {**THING, "unevaluatedProperties": False},
        {**THING, "x-guidance": {"lenient": True}},
        {**THING, "properties": {"a": {"$schema": "http://json-schema.org/draft-04/schema#"}}},
        {**THING, "properties": {"a": {"$id": "http://example.org"}}},
        {**TEXT, "format": "iri"},
        {**TEXT, "format": "unknown"},
        {**TEXT, "format": []},
        {**INT, "format": "int32"},
        {**TEXT, "pattern": "^a^b$"},
        {**TEXT, "pattern": "(?=a)"},
        {**TEXT, "pattern": "a\\"},
        {"type": "object", "patternProperties": {"a\\": INT}},
        {**TEXT, "contentEncoding": "base64"},
        {"allOf": [TEXT, {"enum": ["a"]}]},
        {"oneOf": [INT, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"const": "a"}, TEXT]},
        {"oneOf": [branch("a"), branch("a")]},
        {"oneOf": [branch("a"), branch("b"), {"type": "object"}]},
        {"oneOf": [branch("a"), {**branch("b"), "required": []}]},
        {"oneOf": [{"const": [1]}, {"const": [2]}]},
        {"oneOf": [{}, {}]},
        {"anyOf": [TEXT], "minLength": 3},
        {**THING, "anyOf": [{"required": ["a"]}]},
        {"$ref": "#/$defs/x", "minLength": 3, "$defs": {"x": TEXT}},
        {"$ref": "http://example.org/x"},
        {"$ref": "#/$defs/x"},
        {"type": "array", "items": {"$ref": "#/default"}, "default": {"not": {}}},
        {"type": "integer", "nullable": True},
        {**INT, "multipleOf": 0},
        {**INT, "multipleOf": 99991},
        {**INT, "multipleOf": 0.99991},
        {"type": "object", "additionalProperties": INT, "minProperties": 2},
        {"type": "object", "patternProperties": {"^a": INT}, "minProperties": 2},
        {**THING, "additionalProperties": True, "minProperties": 2},
        {"enum": list(range(5000))},
        {"type": "object", "properties": {f"p{i}": {**TEXT, "format": "uri"} for i in range(300)}},
        {"type": "object", "properties": {f"p{i}": INT for i in range(1025)}},
        {"const": "x" * 200_000},
        chain(60, 5),
        chain(MAX_DEPTH, 1),
        chain(1, MAX_DEPTH),
    ],
    ids=lambda schema: str(schema)[:80],
)
def test_schemas_with_something_that_would_be_ignored_or_costs_too_much_are_refused(compiler, schema):
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    inner = {name: value for name, value in schema.items() if name != "$defs"}
    for each in (schema, {"type": "array", "items": inner, **definitions}):
        with pytest.raises(UserError):
            start(compiler, each)


def properties(count, about):
    return {"type": "object", "properties": {f"p{i}": about for i in range(count)}}


def nested(levels):
    schema = {}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("largest", "larger"),
    [
        (properties(1023, INT), properties(1024, INT)),
        *(
            (properties(511, {**INT, name: 3}), properties(512, {**INT, name: 3}))
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        ),
        (properties(511, {**TEXT, "pattern": "a"}), properties(512, {**TEXT, "pattern": "a"})),
        (properties(204, {**TEXT, "format": "date"}), properties(205, {**TEXT, "format": "date"})),
        ({"enum": list(range(4092))}, {"enum": list(range(4093))}),
        ({**INT, "multipleOf": 4092}, {**INT, "multipleOf": 4093}),
        ({**INT, "multipleOf": 0.4092}, {**INT, "multipleOf": 0.4093}),
        (nested(256), nested(257)),
    ],
    ids=lambda schema: str(schema)[-40:],
)
def test_a_schema_may_be_as_large_as_documented_and_no_larger(largest, larger):
    check_schema(json.loads(json.dumps(largest)))
    with pytest.raises(UserError):
        check_schema(larger)


@pytest.mark.parametrize(
    "value", [3, "x", None, [], [{}], {"a": [[]]}, {"a": 3}, float("inf"), [[]], True, -1]
)
def test_ill_formed_schemas_are_refused_or_compiled(compiler, value):
    names = ["type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref"]
    names += ["$defs", "patternProperties", "format", "pattern", "minLength", "additionalProperties"]
    names += ["multipleOf", "minimum", "maxItems", "minProperties", "prefixItems"]
    num_refused = 0
    for name in names:
        for schema in ({"type": "object", "title": "x", name: value}, {name: value}):
            try:
                start(compiler, schema)
            except UserError:
                num_refused += 1
    assert num_refused > 5


@pytest.mark.parametrize("value", [3, "x", None, [], True])
def test_a_schema_that_is_no_object_is_refused(compiler, value):
    with pytest.raises(UserError, match="is no object"):
        start(compiler, value)


def test_a_pattern_that_ends_in_half_an_escape_is_refused():
    for pattern in ("a\\", "\\", "a\\\\\\"):
        with pytest.raises(UserError, match="backslash"):
            check_pattern(pattern)
    for pattern in ("", "a\\\\", "\\a"):
        check_pattern(pattern)


HOSTILE = {
    "enums to be told apart": {"oneOf": [{"enum": [f"{j} {i}" for i in range(4000)]} for j in range(64)]},
    "fewer of them": {"oneOf": [{"enum": [f"{j} {i}" for i in range(60)]} for j in range(64)]},
    "constants": {"oneOf": [{"const": i} for i in range(1000)]},
    "objects": {"oneOf": [branch(f"k{i}") for i in range(300)]},
    "bars": {**TEXT, "pattern": "|" * 3990},
    "patterns joined": {"allOf": [{**TEXT, "pattern": f"a.{{{i}}}b"} for i in range(30)]},
    "choices joined": {"allOf": [{"anyOf": [branch(f"a{i}"), branch(f"b{i}")]} for i in range(10)]},
    "references doubled": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(80)},
            "d80": TEXT,
        },
    },
    "long chain of references": chain(1000, 0),
    "formats": {
        "type": "object",
        "properties": {f"p{i}": {**TEXT, "format": "uri", "maxLength": 300 + i} for i in range(200)},
    },
    "multiples": {"type": "object", "properties": {f"p{i}": {**INT, "multipleOf": 997} for i in range(4)}},
    "one multiple": {**INT, "multipleOf": 4091, "minimum": 17, "maximum": 10**15},
    "patterns": {
        "type": "object",
        "properties": {f"p{i}": {**TEXT, "pattern": f"(a|b)*a(a|b){{12}}{'c' * 90}{i}"} for i in range(500)},
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {f"^(a|b)*a(a|b){{10}}{'c' * i}$": INT for i in range(40)},
    },
    "patterns with lengths": {
        "type": "object",
        "properties": {
            f"p{i}": {**TEXT, "pattern": f"a.{{3}}{i}", "minLength": 9, "maxLength": 300} for i in range(500)
        },
    },
    "properties": {"type": "object", "properties": {f"p{i}": TEXT for i in range(1000)}},
    "a long constant": {"const": "xy" * 60_000},
    "ranges": {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "number", "minimum": -i / 7, "maximum": 1e9 / 7 + i} for i in range(340)
        },
    },
    "annotations": {**TEXT, "examples": list(range(20_000))},
    "deep": {"const": json.loads("[" * 120 + "]" * 120)},
    "deeper": {"const": json.loads("[" * 900 + "]" * 900)},
}


@pytest.fixture(scope="module")
def ordinary_s(compiler):
    """Time of this thread in which an object of a thousand properties is compiled."""
    start(compiler, {"type": "object", "properties": {f"first{i}": TEXT for i in range(9)}})
    started = time.thread_time()
    start(compiler, {"type": "object", "properties": {f"q{i}": TEXT for i in range(1000)}})
    return time.thread_time() - started


@pytest.mark.parametrize("name", HOSTILE)
def test_every_schema_is_compiled_or_refused_in_bounded_time_and_space(compiler, name, ordinary_s):
    started = time.thread_time()
    try:
        start(compiler, HOSTILE[name])
    except UserError as refusal:
        assert len(refusal.cause) < 600
    assert time.thread_time() - started < 15 * ordinary_s


def test_thousands_of_bars_in_a_pattern_compile_at_once(compiler, ordinary_s):
    started = time.thread_time()
    start(compiler, {**TEXT, "pattern": "|" * 3980})
    assert time.thread_time() - started < ordinary_s, "it was four times as much with 300 tokens"


HOSTILE_REGEXES = ["|" * 3990, "(a?){4000}", "a?" * 2000, ".{0,120}" * 30, "((a{1,1000}){1,1000}){1,1000}"]
HOSTILE_REGEXES += ["((((a*)*)*)*)*b", "(ab){1000000}", "[xy]a{4000000000}", "(((a{0,100}){0,100}){0,100})b"]
HOSTILE_REGEXES += [
    "(?:.*a.{30}|.*b.{31}|.*c.{32}|.*d.{33})",
    r"(\w+\s?){1,2000}",
    "(" * 2000,
    r"\p{L}" * 800,
]
HOSTILE_REGEXES += ["(?i)" + "éàüß" * 900, "a*b*c*d*e*f*g*h*" * 200, "[^a]{1,100}" * 300, "a" * 5000]


@pytest.mark.parametrize("regex", HOSTILE_REGEXES, ids=lambda regex: regex[:30])
def test_every_regex_is_compiled_or_refused_and_followed_in_bounded_time(compiler, regex, ordinary_s):
    started = time.thread_time()
    try:
        match = compiler.start(Grammar("regex", regex))
    except UserError:
        assert time.thread_time() - started < 10 * ordinary_s
        return
    assert time.thread_time() - started < 10 * ordinary_s
    for text in ("xab", "aaaa", "abcdabcdabcdabcd", "a b c d"):
        copy = compiler.start(Grammar("regex", regex))
        copy.advance(tokens_of(text))
    assert time.thread_time() - started < 20 * ordinary_s and not match.is_complete


def test_annotations_and_free_formats_do_not_reach_the_compiler_as_keywords():
    assert check_schema({**TEXT, "format": "path", "$schema": "x"}) == TEXT
