"""Reasoning and tool calls in chats, as OpenAI's client gets them, from an engine that writes published
formats."""

import json
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from chat_templates import tokenizer_for

from tests.server.api.scripted import ScriptedEngine, scripted_llm
from tests.server.api.serving import serving

QUESTION = {"role": "user", "content": "Rain?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
QWEN3 = f"<think>\nhm, にほん\n</think>\n\nOne <moment. \n{HERMES}\n{HERMES}"
HARMONY = (
    "<|channel|>analysis<|message|>hm, にほん<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>One <moment.<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Łódź"}'
)
CALL = ("weather", {"city": "Łódź"})
NO_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": \n</tool_call>'


@pytest.fixture(scope="module")
def served():
    """``served(format, text, **settings)``: a server whose responses have the text, a few tokens a step."""
    with ExitStack() as stack:
        kept: dict[Any, Any] = {}

        def make(name: str, text: str, **settings: Any) -> Any:
            key = name, tuple(settings.items())
            if key not in kept:
                llm = scripted_llm(tokenizer_for(name), max_context=4000)
                engine = ScriptedEngine(llm, lambda request: [])
                kept[key] = stack.enter_context(serving(llm, engine, **settings))
            server = kept[key]
            ids = server.llm.tokenizer(text, add_special_tokens=False)["input_ids"]
            server.engine.script = lambda request: ids
            return server

        yield make


def ask(server: Any, **body: Any) -> Any:
    """One choice, or what a stream of it adds up to, as OpenAI's client has it."""
    create = partial(server.openai.chat.completions.create, model="tiny", messages=[QUESTION])
    return create(**{"tools": [TOOL], "temperature": 0, **body})


def streamed(chunks: Any, index: int = 0) -> dict[str, Any]:
    """What a stream of a choice adds up to, by the rules of OpenAI's clients."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "reason": None, "tokens": 0}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            delta = choice.delta
            found["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            found["content"] += delta.content or ""
            for call in delta.tool_calls or []:
                assert call.index == len(found["calls"]) and call.type == "function"
                found["calls"].append((call.id, call.function.name, json.loads(call.function.arguments)))
            assert found["reason"] is None
            found["reason"] = choice.finish_reason
            found["tokens"] += len(choice.logprobs.content) if choice.logprobs else 0
    return found


def whole(choice: Any) -> dict[str, Any]:
    """The same of a whole choice."""
    message = choice.message
    calls = [
        (call.id, call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
    ]
    return {
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "content": message.content or "",
        "calls": calls,
        "reason": choice.finish_reason,
        "tokens": len(choice.logprobs.content) if choice.logprobs else 0,
    }


def both(server: Any, **body: Any) -> dict[str, Any]:
    """A response whole and as a stream, which are the same but for the ids of calls."""
    one = whole(ask(server, **body).choices[0])
    other = streamed(ask(server, stream=True, **body))
    ids = [call[0] for found in (one, other) for call in found["calls"]]
    assert len(set(ids)) == len(ids) and all(len(name) == 9 and name.isalnum() for name in ids)
    for found in (one, other):
        found["calls"] = [call[1:] for call in found["calls"]]
    assert one == other
    return one


@pytest.mark.parametrize(
    ("name", "text", "num_calls"),
    [("qwen3", QWEN3, 2), ("harmony", HARMONY, 1)],
)
def test_reasoning_content_and_calls_whole_and_streamed(
    served: Any, name: str, text: str, num_calls: int
) -> None:
    server = served(name, text)
    expected = {"reasoning": "hm, にほん", "content": "One <moment.", "calls": [CALL] * num_calls}
    assert both(server) == {**expected, "reason": "tool_calls", "tokens": 0}
    tokens = len(server.llm.tokenizer(text, add_special_tokens=False)["input_ids"])
    found = both(server, logprobs=True)
    assert found == {**expected, "reason": "tool_calls", "tokens": tokens + 1}, "and the one that ends it"


def test_the_message_can_be_sent_back_and_is_rendered_as_it_was_written(served: Any) -> None:
    server = served("qwen3", QWEN3)
    message = ask(server).choices[0].message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "dry"} for call in message["tool_calls"]
    ]
    messages = [QUESTION, message, *results]
    body = {"messages": messages, "tools": [TOOL]}
    ids = server.http.post("/tokenize", json=body).json()["tokens"]
    written = QWEN3.replace("moment. \n", "moment.\n")
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in server.llm.tokenizer.decode(ids)


def test_calls_alone_have_no_content_and_thoughts_alone_an_empty_one(served: Any) -> None:
    server = served("hermes", HERMES)
    message = server.http.post("/v1/chat/completions", json={"messages": [QUESTION], "tools": [TOOL]}).json()[
        "choices"
    ][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Łódź"}'
    server = served("qwen3", "<think>\nhm")
    message = server.http.post("/v1/chat/completions", json={"messages": [QUESTION]}).json()["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": "hm"}


def test_a_response_that_a_prompt_has_begun(served: Any) -> None:
    server = served("deepseek_r1", "hm\n</think>\n\nDry.")
    found = both(server, tools=None)
    assert (found["reasoning"], found["content"], found["reason"]) == ("hm", "Dry.", "stop")
    server = served("qwen3", "Dry.")
    found = both(server, tools=None, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert (found["reasoning"], found["content"]) == ("", "Dry.")


@pytest.mark.parametrize(
    "body", [{"tools": None}, {"tool_choice": "none"}], ids=["no tools", "tool_choice none"]
)
def test_calls_are_content_where_no_tools_are_shown(served: Any, body: dict) -> None:
    found = both(served("qwen3", HERMES), **body)
    assert (found["content"], found["calls"], found["reason"]) == (HERMES, [], "stop")


def test_what_is_no_call_stays_in_the_content(served: Any) -> None:
    found = both(served("qwen3", f"See:\n{NO_CALL}\n{HERMES}"))
    assert (found["content"], found["calls"]) == (f"See:\n{NO_CALL}", [CALL])
    broken = HARMONY[:-1]
    found = both(served("harmony", broken))
    text = broken[broken.rfind("<|start|>") :].removeprefix("<|start|>assistant")
    assert (found["content"], found["reason"]) == (f"One <moment.\n{text}<|return|>", "stop")


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("<think>\nhm", {"reasoning": "hm", "content": "", "calls": [], "reason": "length", "tokens": 0}),
        (
            QWEN3[:-17],
            {"content": f"One <moment. \n\n{HERMES[:-17]}", "calls": [CALL], "reason": "length"},
        ),
    ],
    ids=["thought", "call"],
)
def test_responses_cut_at_max_tokens_keep_all_that_was_written(served: Any, cut: str, expected: dict) -> None:
    server = served("qwen3", QWEN3)
    tokens = len(server.llm.tokenizer(cut, add_special_tokens=False)["input_ids"])
    found = both(server, max_tokens=tokens)
    assert {name: found[name] for name in expected} == expected


def test_stop_texts_are_looked_for_in_all_that_is_written(served: Any) -> None:
    for stop, expected in (
        ("にほん", {"reasoning": "hm, ", "content": "", "calls": []}),
        ("moment", {"reasoning": "hm, にほん", "content": "One <", "calls": []}),
        ("</tool_call>", {"reasoning": "hm, にほん", "content": "One <moment.", "calls": [CALL]}),
    ):
        found = both(served("qwen3", QWEN3), stop=stop)
        assert {name: found[name] for name in expected} == expected
        assert found["reason"] == ("tool_calls" if expected["calls"] else "stop")


def test_choices_are_read_apart_and_their_calls_have_ids_of_their_own(served: Any) -> None:
    server = served("qwen3", QWEN3)
    made = ask(server, n=3, extra_body={"return_speculation": True})
    assert made.speculation["num_verifies"] > 0
    choices = [whole(choice) for choice in made.choices]
    assert len({call[0] for choice in choices for call in choice["calls"]}) == 6
    chunks = list(ask(server, n=3, stream=True))
    for index in range(3):
        found = streamed(chunks, index)
        assert [call[1:] for call in found["calls"]] == [CALL] * 2 and found["content"] == "One <moment."


def test_calls_of_requests_with_one_id_have_ids_of_their_own(served: Any) -> None:
    server = served("qwen3", QWEN3)
    made = [ask(server, extra_headers={"X-Request-Id": "same"}).choices[0] for _ in range(3)]
    assert len({call.id for choice in made for call in choice.message.tool_calls}) == 6


def test_without_parallel_calls_later_ones_are_dropped(served: Any) -> None:
    for name, text in (
        ("qwen3", QWEN3),
        ("qwen3", f"{QWEN3}\n{HERMES}"),
        ("harmony", HARMONY + HARMONY[HARMONY.rindex("<|start|>") :]),
    ):
        found = both(served(name, text), parallel_tool_calls=False)
        assert (found["calls"], found["reason"]) == ([CALL], "tool_calls")
        assert "weather" not in found["content"]
    for given in (True, None):
        assert both(served("qwen3", QWEN3), parallel_tool_calls=given)["calls"] == [CALL] * 2


def test_a_call_without_arguments_that_ends_a_response_of_harmony_is_one(served: Any) -> None:
    header = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    found = both(served("harmony", f"{header}<|call|>"))
    assert (found["calls"], found["content"], found["reason"]) == ([("weather", {})], "", "tool_calls")
    server = served("harmony", header)
    found = both(server, max_tokens=len(server.llm.tokenizer(header, add_special_tokens=False)["input_ids"]))
    assert (found["calls"], found["content"], found["reason"]) == ([], header, "length")


def test_an_aborted_response_keeps_what_was_written(served: Any) -> None:
    server = served("qwen3", "<think>\n" + "hm " * 30)
    server.engine.most_tokens = 30
    found = []
    for chunk in ask(server, stream=True, tools=None):
        found.append(chunk)
        if getattr(chunk.choices[0].delta, "reasoning_content", None) and len(server.engine.running):
            assert server.http.post("/abort", json={"abort_all": True}).status_code == 200
    server.engine.release()
    said = streamed(found)
    assert said["reason"] == "abort" and said["content"] == ""
    assert said["reasoning"] and ("hm " * 30).startswith(said["reasoning"])


def test_with_a_grammar_all_behind_the_reasoning_is_content(served: Any) -> None:
    form = {"type": "json_object"}
    for name, text in (
        ("deepseek_r1", 'hm</think>{"a": "</think>"}'),
        ("qwen3", '<think>hm</think>{"a": "</think>"}'),
        ("harmony", '<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>{"a": "</think>"}'),
    ):
        server = served(name, text)
        found = both(server, tools=None, response_format=form)
        assert (found["reasoning"], found["content"]) == ("hm", '{"a": "</think>"}')
        assert server.engine.seen[-1].params.grammar.thought is not None, "the engine begins it there"
    server = served("chatml", '{"a": 1}')
    found = both(server, tools=None, response_format=form)
    assert (found["reasoning"], found["content"]) == ("", '{"a": 1}')
    assert server.engine.seen[-1].params.grammar.thought is None


def test_parsers_by_name_and_none(served: Any) -> None:
    found = both(served("qwen3", QWEN3, reasoning_parser="none", tool_call_parser="none"))
    assert (found["content"], found["calls"], found["reasoning"]) == (QWEN3, [], "")
    found = both(served("chatml", QWEN3, reasoning_parser="qwen3"), tools=None)
    assert found["reasoning"] == "hm, にほん" and HERMES in found["content"]
    # Special tokens stay out of the text as they did before there were readers.
    found = both(served("harmony", HARMONY, reasoning_parser="none", tool_call_parser="none"))
    assert found["content"].startswith("analysishm, にほんassistantcommentaryOne")


def test_completions_are_text_as_before(served: Any) -> None:
    server = served("qwen3", QWEN3)
    made = server.openai.completions.create(model="tiny", prompt="a", max_tokens=4000 - 1)
    assert made.choices[0].text == QWEN3
    server = served("harmony", HARMONY)
    made = server.openai.completions.create(model="tiny", prompt="a", max_tokens=4000 - 1)
    assert "<|" not in made.choices[0].text and "analysishm" in made.choices[0].text
