"""Random walks along the masks: whatever finishes matches the regex, or is valid for the schema."""

import json
import random
import re
import sys

import jsonschema_rs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.engine.grammar.compiler import GrammarCompiler
from eagle_kit.models.loading.source import load_tokenizer

VOCAB, STOP = 300, 2
CLOSING = {*b'"}]0123456789'}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    tokenizer = load_tokenizer(make_target(tmp_path_factory.mktemp("fuzz") / "target"))
    return GrammarCompiler(tokenizer, VOCAB, [STOP])


def walk(compiler, grammar, seed, longest=150):
    """Text of a random response that the masks allow, or None when it has not finished."""
    match, rng = compiler.start(grammar), random.Random(seed)
    root, text = np.zeros(1, dtype=np.int64), b""
    last = torch.zeros(1, dtype=torch.int64)
    for step in range(longest):
        bitmask = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
        match.fill(root, last, bitmask)
        if match.is_stuck:
            return None
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        assert allowed, "a match that is not stuck allows something"
        if STOP in allowed and rng.random() < 0.4:
            allowed = [STOP]
        elif rng.random() < step / 50:  # towards the end
            allowed = [t for t in allowed if compiler._tokenizer.decode_bytes([t])[0] in CLOSING] or allowed
        token = rng.choice(allowed)
        assert match.advance([token]) == 1, "what the mask allows is taken"
        if match.is_complete:
            return text.decode()
        text += compiler._tokenizer.decode_bytes([token])
    return None


ATOMS = st.sampled_from(
    [
        *"abz09 -_,:;",
        "é",
        '"',
        r"\\",
        "/",
        r"\/",
        r"\.",
        r"\n",
        "\n",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        ".",
    ]
    + ["[a-c]", "[^a-c]", r"[\d-]", r"[^\W_]", r"[\s\S]", '["\\\\]', r"[\]\[^-]", r"\x41", r"\(", r"\$"]
)
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("({})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)
RAW = st.text('ab\\/()|*?.^$dws"{2,} é\n', max_size=12)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(REGEXES | REGEXES.map("^{}$".format) | RAW, st.integers(0, 2**32))
def test_responses_match_the_regexes_that_are_accepted(compiler, regex, seed):
    try:
        text = walk(compiler, Grammar("regex", regex), seed)
    except UserError:
        return
    try:
        compiled = re.compile(regex, re.ASCII)
    except re.error as error:
        assert "bad escape (end of pattern)" not in str(error)
        return  # another dialect, such as a** or {,2}
    assert text is None or compiled.fullmatch(text), (regex, text)


def texts():
    pattern = st.one_of(REGEXES, REGEXES.map("^{}$".format), RAW)
    return st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "pattern": pattern,
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(2, 8),
            "format": st.sampled_from(["date", "uuid", "ipv4", "time"]),
        },
    )


def numbers():
    bound = st.one_of(st.integers(-30, 30), st.sampled_from([-0.5, 0.25, 7.75, 1e3]))
    return st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": bound,
            "maximum": bound,
            "exclusiveMinimum": bound,
            "exclusiveMaximum": bound,
            "multipleOf": st.sampled_from([1, 2, 3, 7, 0.5, 0.25]),
        },
    )


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-99, 99),
    st.text('a"\\\né\u2028', max_size=3),
    st.just([1, {"a": "b"}]),
)
NAMES = st.sampled_from(["a", "b", "kind", 'q"', "é", ""])


def composed(inner):
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(
                st.sampled_from(["^x", "y$", "[0-9]", "^z+$"]), inner, max_size=2
            ),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": st.booleans() | inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
        },
    )
    tagged = st.builds(
        lambda value, rest: {**rest, "properties": {"kind": {"const": value}}, "required": ["kind"]},
        VALUES,
        objects,
    )
    branches = st.lists(inner | tagged, min_size=1, max_size=3)
    choices = st.one_of(*(st.fixed_dictionaries({name: branches}) for name in ("anyOf", "oneOf")))
    return objects | arrays | choices | tagged


LEAVES = st.one_of(
    texts(),
    numbers(),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}),
    st.sampled_from([{"type": "boolean"}, {"type": ["null", "integer"]}, {"$ref": "#/$defs/x"}, True]),
)
SCHEMAS = st.builds(
    lambda schema, x: {**schema, "$defs": {"x": x}},
    st.recursive(LEAVES, composed, max_leaves=6).filter(lambda schema: isinstance(schema, dict)),
    LEAVES,
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**32))
def test_responses_are_valid_for_the_schemas_that_are_accepted(compiler, schema, seed):
    try:
        text = walk(compiler, Grammar("json_schema", json.dumps(schema)), seed)
    except UserError:
        return
    if text is None:
        return
    value = json.loads(text, parse_float=_finite)
    try:
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    except jsonschema_rs.ValidationError as error:
        assert "is not a" in str(error), (error, schema)  # a pattern that is no regex for it
        return
    assert validator.is_valid(value) or _is_a_date_of_no_calendar(text), (schema, text)


def _finite(digits):
    """A number of JSON may be beyond the largest float."""
    return max(-sys.float_info.max, min(float(digits), sys.float_info.max))


def _is_a_date_of_no_calendar(text):
    """The format date has days up to 31 in every month."""
    return re.search(r'"\d{4}-(02|04|06|09|11)-(29|30|31)"', text)


def test_most_walks_finish(compiler):
    """Otherwise the tests above would test nothing."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    grammars = [Grammar("regex", "(ab|c)*d{1,3}"), Grammar("json_schema", json.dumps(schema))]
    assert all(sum(walk(compiler, g, i) is not None for i in range(20)) >= 15 for g in grammars)
