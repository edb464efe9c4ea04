"""What xgrammar would ignore or choke on is refused before it is compiled."""

import time

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.serve.grammar.regex_rules import check_pattern, check_regex
from eagle_kit.serve.grammar.schema_rules import check_schema

INT, TEXT = {"type": "integer"}, {"type": "string"}
THING = {"type": "object", "properties": {"a": INT}}


def branch(kind):
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


@pytest.mark.parametrize(
    "regex",
    [
        "",
        "^ab$",
        "^a|b$",
        "(a|b|aa|ab)*c",
        "[a-z]{1,1000}",
        "([a-z]+,)+",
        r"(\d{3}){5}",
        r"[\^$]+\$",
        "[$^]",
        "a?",
    ]
    + [r"(?:a+b)?c*", r"(?<n>a|b)+", r"\u{1F600}+", "a*?b", "(a?){50}", "(((a+,)+;)+\n)+", "(ab|cd){20}"]
    + [r"(\d{1,3}){2}", r"(?P<n>a)"],
)
def test_ordinary_regexes_pass(regex):
    check_regex(regex)


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("((a{1,1000}){1,1000}){1,1000}", "repeats a repetition"),
        ("((((a*)*)*)*)*b", "repeats a repetition"),
        ("([a-z]+ ?){1,50}", "repeats a repetition"),
        ("(?:(a+)?b*)+", "repeats a repetition"),
        ("(x|a+)*", "repeats a repetition"),
        ("((a?){9}){9}", "repeats a repetition"),
        ("(ab){5000}", "longer than 4096"),
        ("((a|aa){100}){100}", "longer than 4096"),
        ("a{1,99999999999999999999}", "longer than 4096"),
        ("a" * 4097, "4097 characters"),
        ("(" * 5000, "groups in each other|characters"),
        ("(" * 50 + "a" + ")" * 50, "groups in each other"),
        ("a^b", r"has \^ at position 1"),
        ("a$b", r"has \$ at position 1"),
        ("(a$|b)c", r"has \$ at position 2"),
        (r"\Aa\Z", r"has \\A"),
        ("[[:alpha:]]+", "alpha"),
        ("(?=a)b", "look-around"),
        ("(?i)a", "look-around"),
        ("a)b", "closes nothing"),
        ("a++", "second quantifier"),
        ("(ab){2}+", "second quantifier"),
        (r"[\d-z]", "range with a class"),
        ("[]a]", "empty class"),
        (r"\ud83d", "no character"),
        ("a?" * 1000, "seconds to compile"),
        (".?" * 300, "seconds to compile"),
        (".{0,120}" * 30, "seconds to compile"),
    ],
)
def test_regexes_that_cost_too_much_or_say_something_else_are_refused(regex, words):
    with pytest.raises(UserError, match=words):
        check_regex(regex)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {
            "title": "x",
            "type": "object",
            "properties": {"not": INT},
            "required": ["not"],
            "default": {"if": 1},
        },
        {"type": "string", "pattern": "^a+$"},
        {"type": ["string", "null"], "minLength": 5, "maxLength": 9},
        {"enum": ["a", "b"], "type": "string"},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"allOf": [INT]}}},
        {"oneOf": [INT, TEXT, {"const": None}]},
        {"oneOf": [branch("a"), branch("b")]},
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": branch("a"), "b": branch("b")},
        },
        {"anyOf": [INT, {"type": "number", "minimum": 5, "maximum": 6}]},
        {"type": "object", "patternProperties": {"^a$": INT}, "additionalProperties": False},
        {"type": "array", "prefixItems": [INT, TEXT], "items": False},
        {"type": "string", "format": "date-time"},
        {"type": "integer", "multipleOf": 7},
        {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
        {"type": "string", "format": "uri", "minLength": 1},
        {"type": "string", "format": "path"},
        {"type": "string", "format": "binary", "minLength": 3},
        {"type": "string", "example": "x"},
        {"type": "object", "additionalProperties": INT, "minProperties": 1},
        {**THING, "required": ["a"], "minProperties": 1},
    ],
)
def test_ordinary_schemas_pass(schema):
    check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": INT, "uniqueItems": True},
        {"type": "array", "items": INT, "contains": {"const": 5}},
        {"not": TEXT},
        {**THING, "properties": {"a": {"not": {}}}},
        {**INT, "if": {"minimum": 3}, "then": {"minimum": 5}},
        {**THING, "dependentRequired": {"a": ["b"]}},
        {**TEXT, "format": "iri"},
        {**TEXT, "format": []},
        {**TEXT, "minLength": 3, "pattern": "^a+$"},
        {**TEXT, "format": "date", "pattern": "x"},
        {**TEXT, "pattern": "^a^b$"},
        {**TEXT, "pattern": "(a+)+"},
        {**TEXT, "contentEncoding": "base64"},
        {"allOf": [TEXT, {"enum": ["a"]}]},
        {"oneOf": [INT, {"type": "number"}]},
        {"oneOf": [branch("a"), branch("a")]},
        {"oneOf": [{"type": "object"}, branch("b")]},
        {"oneOf": [{"const": i} for i in range(100)]},
        {"anyOf": [TEXT], "minLength": 3},
        {**THING, "anyOf": [{"required": ["a"]}]},
        {"$ref": "#/$defs/x", "minLength": 3, "$defs": {"x": TEXT}},
        {"$ref": "http://example.org/x"},
        {"enum": [1, "a"], "type": "string"},
        {"const": 1.5, "type": "integer"},
        {"minimum": 5},
        {"required": ["a"]},
        {**THING, "required": ["b"]},
        {**THING, "required": [["b"]]},
        {**THING, "patternProperties": {"^b": INT}},
        {**THING, "propertyNames": {"pattern": "^b"}},
        {"type": "object", "patternProperties": {"a": INT}, "additionalProperties": TEXT},
        {"type": "object", "patternProperties": {"(a+)+": INT}},
        {"type": "number", "multipleOf": 0.5},
        {"$dynamicRef": "#x"},
        {**INT, "multipleOf": 2.5},
        {**INT, "multipleOf": 0},
        {**INT, "multipleOf": 1025},
        {**INT, "multipleOf": True},
        {"type": ["integer", "number"], "multipleOf": 2},
        {"type": "object", "additionalProperties": INT, "minProperties": 2},
        {"type": "object", "patternProperties": {"^a": INT}, "minProperties": 2},
        {**THING, "additionalProperties": True, "minProperties": 2},
        {"type": "array", "items": {"$ref": "#/default"}, "default": {"not": {}}},
        {**TEXT, "format": "json-pointer"},
        {**TEXT, "format": "relative-json-pointer"},
        {**TEXT, "format": "uri", "maxLength": 20},
        {**TEXT, "pattern": '^"hi"$'},
        {**TEXT, "pattern": r"^C:\\Users\\[a-z]{3}$"},
        {"type": "object", "patternProperties": {r"\t": INT}},
        {"type": "object", "propertyNames": {**TEXT, "pattern": "\n"}},
        {**INT, "nullable": True},
        {"enum": list(range(5000))},
        {**TEXT, "minLength": 10**6},
        {"type": "object", "properties": {f"p{i}": INT for i in range(1001)}},
    ],
    ids=str,
)
def test_schemas_with_something_that_would_be_ignored_are_refused(schema):
    for each in (schema, {"type": "array", "items": schema}, {"anyOf": [TEXT, {"$defs": {"x": schema}}]}):
        with pytest.raises(UserError):
            check_schema(each)


@pytest.mark.parametrize("value", [3, "x", None, [], [{}], {"a": [[]]}, {"a": 3}, float("inf"), [[]], True])
def test_ill_formed_schemas_are_left_to_the_compiler_or_refused(value):
    for name in (
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "items",
        "anyOf",
        "oneOf",
        "$ref",
        "$defs",
    ) + (
        "patternProperties",
        "propertyNames",
        "format",
        "pattern",
        "minLength",
        "additionalProperties",
    ):
        try:
            check_schema({"type": "object", "title": "x", name: value})
            check_schema({name: value})
        except UserError:
            pass


@pytest.mark.parametrize(
    "pattern",
    ['"', r"\\", "\n", r"\n", r"\x22", r"\u005c", r"\u{22}", r"\cA", r"\0", r'["\\]', "[\\x00-\\x1f]"],
)
def test_patterns_that_need_escapes_in_json_are_refused(pattern):
    check_regex(pattern)
    with pytest.raises(UserError, match="escape"):
        check_pattern(f"^a?{pattern}$")


def test_classes_and_dots_stay_and_the_dot_is_no_line_end():
    for pattern in ("[^,]+", r"\S+", r"\W", "[!-~]", r"[\s\S]", '["a]'):
        assert check_pattern(f"^{pattern}$").text == pattern
    assert check_regex(r".\.[.]").text == r"[^\n]\.[.]"


def test_patterns_are_searched_for():
    anything = r"[^\n]*"
    for pattern, whole in (
        ("^a$", "a"),
        ("^a", f"a{anything}"),
        ("a$", f"{anything}a"),
        (r"^a\$", rf"a\${anything}"),
        ("^a|b$|c", f"a{anything}|{anything}b|{anything}c{anything}"),
        ("^(a|b)$", "(a|b)"),
    ):
        assert check_pattern(pattern).text == whole
    assert check_regex("^(?P<n>a)|b$").text == "(?<n>a)|b"


def test_schemas_that_take_long_to_compile_are_refused_at_once():
    many = [{**TEXT, "pattern": "^[a-z]{1,4000}$"}, {**TEXT, "pattern": "^.{1,100}$"}]
    many += [{**TEXT, "format": "uri-template"}, {**INT, "multipleOf": 1021}]
    schemas = [{"type": "object", "properties": {f"p{i}": one for i in range(300)}} for one in many]
    different = {f"p{i}": {**TEXT, "maxLength": 1000 + i} for i in range(9)}
    schemas += [{"type": "object", "properties": different}, {"const": "x" * 7_000_000}]
    schemas += [{"type": "object", "properties": {"x" * 10**6: INT}}]
    schemas += [{"enum": [f"{i}" + "x" * 900 for i in range(4096)]}]
    for schema in schemas:
        started = time.thread_time()
        with pytest.raises(UserError, match="seconds to compile"):
            check_schema(schema)
        assert time.thread_time() - started < 1


def test_annotations_do_not_reach_the_compiler():
    assert check_schema({**TEXT, "title": "x" * 10**6, "example": 3}) == TEXT
