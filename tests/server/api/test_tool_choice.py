"""Calls that a request insists on, from a real engine whose target would write anything but calls."""

import json
from typing import Any

import pytest
from jsonschema_rs import is_valid

from eagle_kit.core.errors import UserError
from eagle_kit.engine.grammar.schema_rules import check_schema
from eagle_kit.engine.llm import LLM
from eagle_kit.server.api.protocol import ChatRequest
from eagle_kit.server.api.tool_choice import ChosenCallReader, call_grammar
from tests.server.api.serving import serving

USER = {"role": "user", "content": "hi"}
CITY = {"enum": ["Oslo", "Rome"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "rain": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": CITY},
    },
    "wind": {"type": "object", "properties": {"fast": {"type": "boolean"}}, "additionalProperties": False},
}
TOOLS = [
    *(
        {"type": "function", "function": {"name": name, "parameters": about}}
        for name, about in SCHEMAS.items()
    ),
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def server(target_folder):
    llm = LLM(str(target_folder), max_batch_size=4, max_context=400, kv_tokens=1600)
    llm.tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + str(
        llm.tokenizer.chat_template
    )
    with serving(llm, llm.engine()) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_one_of_the_tools_and_follows_its_schema(server, stream):
    seen = set()
    for seed in range(6):
        answer = server.openai.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=200,
            stream=stream,
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            assert not any(chunk.delta.content for chunk in chunks)
            reason = chunks[-1].finish_reason
        else:
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            assert choice.message.content is None
            reason = choice.finish_reason
        assert reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        assert is_valid(SCHEMAS.get(call.function.name, {"maxProperties": 0}), arguments)
        seen.add(call.function.name)
    assert len(seen) > 1


def test_a_named_function_is_called(server):
    for name in ("rain", "wind", "stop"):
        choice = {"type": "function", "function": {"name": name}}
        (made,) = server.openai.chat.completions.create(
            model="tiny", messages=[USER], tools=TOOLS, tool_choice=choice, max_tokens=200
        ).choices
        (call,) = made.message.tool_calls
        assert call.function.name == name and made.finish_reason == "stop"
        assert is_valid(SCHEMAS.get(name, {"maxProperties": 0}), json.loads(call.function.arguments))


def test_a_call_that_max_tokens_cuts_off_is_content(server):
    (made,) = server.openai.chat.completions.create(
        model="tiny", messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=6
    ).choices
    assert made.message.tool_calls is None and made.finish_reason == "length"
    assert made.message.content.startswith("[")


def test_definitions_are_those_of_the_whole_schema_and_may_not_differ():
    grammar = call_grammar(_request(TOOLS, parallel_tool_calls=False))
    root = json.loads(grammar.text)
    assert root["$defs"] == {"City": CITY} and len(root["anyOf"]) == 3
    for name, arguments, valid in (
        ("rain", {"city": "Rome"}, True),
        ("rain", {"city": "x"}, False),
        ("no", {}, False),
    ):
        assert is_valid(root, {"name": name, "arguments": arguments}) is valid
    other = json.loads(json.dumps(TOOLS[0]).replace("Rome", "Bern").replace("rain", "snow"))
    with pytest.raises(UserError, match="define 'City' differently"):
        call_grammar(_request([TOOLS[0], other]))
    older = json.loads(json.dumps([TOOLS[0], other]).replace("$defs", "definitions"))
    assert json.loads(call_grammar(_request(older[:1])).text)["definitions"] == {"City": CITY}
    with pytest.raises(UserError, match="define 'City' differently"):
        call_grammar(_request(older))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_are_an_object_whether_their_schema_says_so_or_not(choice):
    for parameters in ({"properties": {"x": {}}}, {"type": "object", "properties": {"x": {}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        body = _request(tools, tool_choice=choice, parallel_tool_calls=False)
        root = json.loads(call_grammar(body).text)
        for arguments, valid in (({"x": 1}, True), (3, False), ("x", False), ([], False)):
            value = {"name": "f", "arguments": arguments} if choice == "required" else arguments
            assert is_valid(root, value) is valid


def _request(tools: list[dict], **more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], "tools": tools, "tool_choice": "required", **more})


def test_calls_are_a_list_unless_the_request_allows_one_only():
    rain, stop = {"name": "rain", "arguments": {"city": "Rome"}}, {"name": "stop", "arguments": {}}
    for given in (True, None):  # OpenAI's default is true
        root = json.loads(call_grammar(_request(TOOLS, parallel_tool_calls=given)).text)
        for value, valid in (([rain], True), ([rain, stop, rain], True), ([], False), (rain, False)):
            assert is_valid(root, value) is valid
    root = json.loads(call_grammar(_request(TOOLS, parallel_tool_calls=False)).text)
    assert is_valid(root, rain) and not is_valid(root, [rain])


def test_a_list_of_calls_is_read_from_a_server(server):
    found = []
    for seed in range(4):
        (made,) = server.openai.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=TOOLS,
            tool_choice="required",
            seed=seed,
            max_tokens=300,
        ).choices
        if made.finish_reason == "length":
            continue
        found.append(made.message.tool_calls)
        for call in made.message.tool_calls:
            schema = SCHEMAS.get(call.function.name, {"maxProperties": 0})
            assert is_valid(schema, json.loads(call.function.arguments))
    assert max(map(len, found)) > 1


@pytest.mark.parametrize("text", ['{"name": "a"', '{"name": 1}', "[]", '{"a": 1}'])
def test_what_is_no_call_is_content(text):
    reader = ChosenCallReader(None)
    assert reader.feed(text[:3]) == reader.feed(text[3:])
    parts = reader.finish()
    assert parts.content == text and not parts.calls


@pytest.mark.parametrize("kind", ["$defs", "definitions"])
@pytest.mark.parametrize("value", [5, "x", [1], True, None])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_definitions_that_are_no_object_are_refused_and_null_counts_as_missing(kind, value, choice):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {kind: value}}}]

    def schema() -> dict[str, Any]:
        grammar = call_grammar(_request(tools, tool_choice=choice, parallel_tool_calls=False))
        return check_schema(json.loads(grammar.text))

    if value is None:
        assert kind not in schema()
    else:
        with pytest.raises(UserError, match="no object"):
            schema()
