"""Structured output: every reply matches its grammar, and speculation changes no token of it."""

import json
import re

import pytest
from tiny import tiny_head, tiny_target
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import Grammar, SamplingParams
from eagle_kit.models.loader import load_target
from eagle_kit.models.source import load_tokenizer
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
