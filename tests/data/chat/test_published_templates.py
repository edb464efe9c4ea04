"""Rows of published chat formats are what serving sends and would get: before every response stand the tokens
that our server, and transformers, make of the messages before it."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_for

from eagle_kit.data.chat.forms import Conversation, to_conversation
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.renderer import ChatRenderer, TokenizedChat
from eagle_kit.server.api.prompts import chat_prompt, chat_tools
from eagle_kit.server.api.protocol import ChatMessages

FORMATS = ("chatml", "hermes", "llama3", "qwen3", "deepseek_r1", "harmony", "gemma")
WITH_TOOLS = ("hermes", "llama3", "qwen3", "harmony")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, é?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "日本"},
    {"role": "assistant", "content": "the にほん 🙂"},
]
THOUGHTS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "reasoning_content": "Add them.", "content": "Four."},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "reasoning_content": "4 + 3 = 7", "content": "Seven."},
]
AGENT = [
    {"role": "user", "content": "Rain in Łódź?"},
    {"role": "assistant", "reasoning_content": "I need a tool.", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
    {"role": "assistant", "reasoning_content": "It rains.", "content": "Yes, the whole day."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "reasoning_content": "Polite.", "content": "Always."},
]


def served(tokenizer: Any, messages: list[dict], tools: list[dict], kwargs: dict) -> list[int]:
    """Prompt tokens of our server for a request as a client sends it."""
    body = {"messages": messages, "tools": tools or None, "chat_template_kwargs": kwargs or None}
    llm: Any = SimpleNamespace(renderer=ChatRenderer(tokenizer), max_context=10**6)
    chat = ChatMessages.model_validate_json(json.dumps(body))
    return chat_prompt(llm, chat, chat_tools(chat), 10**6)


def of_transformers(tokenizer: Any, messages: list[dict], tools: list[dict], kwargs: dict) -> list[int]:
    """Prompt tokens of transformers, for messages as each format's own documents ask for them."""
    turns = json.loads(json.dumps(messages))
    for turn in turns:
        turn["content"] = turn["content"] or ""
        if "reasoning_content" in turn and "message.thinking" in tokenizer.chat_template:
            turn["thinking"] = turn.pop("reasoning_content")
        for call in turn.get("tool_calls", []):
            if "call.function.arguments + " not in tokenizer.chat_template:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return tokenizer.apply_chat_template(
        turns, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs
    )


def prove(name: str, messages: list[dict], tools: list[dict] = (), **kwargs: Any) -> list[list[str]]:
    """Hold every row to serving -> the responses of each row as text."""
    tokenizer = tokenizer_for(name)
    record = {"messages": messages, "tools": list(tools), "chat_template_kwargs": kwargs}
    rows = rows_of(name, to_conversation(record, "x"))
    turns = iter(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for row in rows:
        for number in range(int(row.response.max()) + 1):
            span, turn = np.flatnonzero(row.response == number), next(turns)
            before = row.ids[: span[0]].tolist()
            assert before == served(tokenizer, messages[:turn], list(tools), kwargs)
            assert before == of_transformers(tokenizer, messages[:turn], list(tools), kwargs)
            assert (np.diff(span) == 1).all()
    assert next(turns, None) is None
    return [responses(tokenizer, row) for row in rows]


def rows_of(
    name: str, conversation: Conversation, remarks: Counter[str] | None = None
) -> list[TokenizedChat]:
    remarks = Counter() if remarks is None else remarks
    return ChatRenderer(tokenizer_for(name)).tokenize_chat(conversation, 10_000, remarks)


def responses(tokenizer: Any, row: TokenizedChat) -> list[str]:
    numbers = range(int(row.response.max()) + 1)
    return [tokenizer.decode(row.ids[row.response == number].tolist()) for number in numbers]


@pytest.mark.parametrize("name", FORMATS)
def test_a_plain_talk(name: str) -> None:
    end = tokenizer_for(name).eos_token
    said = ["Hello.", "the にほん 🙂"]
    opened = {"qwen3": "<think>\n\n</think>\n\n", "deepseek_r1": "\n</think>\n\n"}
    before = opened.get(name, "<|channel|>final<|message|>" if name == "harmony" else "")
    expected = [[f"{before}{text}{end}"] for text in said]
    shares = name in ("chatml", "hermes", "llama3", "gemma")
    assert prove(name, TALK) == ([[response for row in expected for response in row]] if shares else expected)


def test_thoughts_of_qwen3_are_dropped_later_on_so_each_turn_has_a_row() -> None:
    expected = [
        ["<think>\nAdd them.\n</think>\n\nFour.<|im_end|>"],
        ["<think>\n4 + 3 = 7\n</think>\n\nSeven.<|im_end|>"],
    ]
    assert prove("qwen3", THOUGHTS) == prove("qwen3", THOUGHTS, enable_thinking=True) == expected


def test_qwen3_with_thinking_off_learns_the_answers_alone_and_says_so() -> None:
    assert prove("qwen3", THOUGHTS, enable_thinking=False) == [["Four.<|im_end|>"], ["Seven.<|im_end|>"]]
    remarks: Counter[str] = Counter()
    record = {"messages": THOUGHTS, "chat_template_kwargs": {"enable_thinking": False}}
    rows_of("qwen3", to_conversation(record, "x"), remarks)
    assert remarks == {"reasoning is left out where the prompt has ended it, as with thinking off": 1}


@pytest.mark.parametrize("inline", [False, True], ids=["field", "text"])
def test_thoughts_that_deepseek_r1_never_renders_are_written_as_the_model_writes_them(inline: bool) -> None:
    messages = [dict(message) for message in THOUGHTS]
    if inline:
        for message in messages[1::2]:
            message["content"] = (
                f"<think>\n{message.pop('reasoning_content')}\n</think>\n\n{message['content']}"
            )
    assert prove("deepseek_r1", messages) == [
        ["Add them.\n</think>\n\nFour.<｜end▁of▁sentence｜>"],
        ["4 + 3 = 7\n</think>\n\nSeven.<｜end▁of▁sentence｜>"],
    ]


@pytest.mark.parametrize(
    ("name", "kwargs", "message", "expected"),
    [
        ("deepseek_r1", {}, {"content": "I add two and"}, "I add two and"),
        ("deepseek_r1", {}, {"content": "<think>\nI add two and"}, "I add two and"),
        ("deepseek_r1", {}, {"content": "", "reasoning_content": "I add two"}, "I add two"),
        ("deepseek_r1", {}, {"content": "I add.\n</think>\n\nIt is"}, "I add.\n</think>\n\nIt is"),
        ("qwen3", {}, {"content": "<think>\nI add two and"}, "<think>\nI add two and"),
        ("qwen3", {}, {"content": "", "reasoning_content": "I add two"}, "<think>\nI add two"),
        ("qwen3", {}, {"content": "It is", "reasoning_content": "Add."}, "<think>\nAdd.\n</think>\n\nIt is"),
        ("qwen3", {"enable_thinking": False}, {"content": "It is"}, "It is"),
        ("chatml", {}, {"content": "It is"}, "It is"),
    ],
)
def test_a_response_cut_off_in_its_thought_is_learned_as_it_was_generated(
    name: str, kwargs: dict, message: dict, expected: str
) -> None:
    """An earlier whole turn, then the cut one; behind its prompt stands what the target wrote and no more."""
    last = {"role": "assistant", **message}
    messages = [*THOUGHTS[:1], {"role": "assistant", "content": "Four."}, THOUGHTS[2], last]
    record = {"messages": messages, "chat_template_kwargs": kwargs, "finish_reasons": ["stop", "length"]}
    row = rows_of(name, to_conversation(record, "x"))[-1]
    tokenizer = tokenizer_for(name)
    assert responses(tokenizer, row)[-1] == expected
    before = row.ids[: np.flatnonzero(row.response == row.response.max())[0]].tolist()
    assert before == served(tokenizer, messages[:3], [], kwargs)


def test_thoughts_of_harmony_are_messages_of_their_own_channel() -> None:
    def response(thought: str, text: str) -> str:
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|>"
        return f"{analysis}<|start|>assistant<|channel|>final<|message|>{text}<|return|>"

    expected = [[response("Add them.", "Four.")], [response("4 + 3 = 7", "Seven.")]]
    assert prove("harmony", THOUGHTS) == prove("harmony", THOUGHTS, reasoning_effort="high") == expected


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_reasoning_without_a_place_in_the_template_is_left_out_and_counted(name: str) -> None:
    end = tokenizer_for(name).eos_token
    assert prove(name, THOUGHTS) == [[f"Four.{end}", f"Seven.{end}"]]
    remarks: Counter[str] = Counter()
    rows_of(name, to_conversation({"messages": THOUGHTS}, "x"), remarks)
    assert remarks == {"reasoning that the chat template has no place for is left out": 1}


AGENT_ROWS = {
    "hermes": [
        [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call><|im_end|>',
            "Yes, the whole day.<|im_end|>",
            "Always.<|im_end|>",
        ]
    ],
    "llama3": [
        [
            '{"name": "weather", "parameters": {"city": "Łódź"}}<|eot_id|>',
            "Yes, the whole day.<|eot_id|>",
            "Always.<|eot_id|>",
        ]
    ],
    "qwen3": [  # the thought before a call stays until the next question
        [
            "<think>\nI need a tool.\n</think>\n\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call><|im_end|>',
            "<think>\nIt rains.\n</think>\n\nYes, the whole day.<|im_end|>",
        ],
        ["<think>\nPolite.\n</think>\n\nAlways.<|im_end|>"],
    ],
    "harmony": [
        [
            "<|channel|>analysis<|message|>I need a tool.<|end|><|start|>assistant to=functions.weather"
            '<|channel|>commentary json<|message|>{"city": "Łódź"}<|call|>',
            "<|channel|>analysis<|message|>It rains.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes, the whole day.<|return|>",
        ],
        [
            "<|channel|>analysis<|message|>Polite.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Always.<|return|>"
        ],
    ],
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_and_results_of_tools(name: str) -> None:
    assert prove(name, AGENT, [TOOL]) == AGENT_ROWS[name]


def test_calls_of_qwen3_with_thinking_off() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call><|im_end|>'
    plain = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in AGENT]
    # The empty thought of an earlier turn is not rendered again, so that no two turns share a row.
    assert prove("qwen3", plain, [TOOL], enable_thinking=False) == [
        [call],
        ["Yes, the whole day.<|im_end|>"],
        ["Always.<|im_end|>"],
    ]


def test_calls_of_deepseek_r1_whose_arguments_are_text() -> None:
    messages = [AGENT[0], AGENT[1] | {"content": ""}, *AGENT[2:]]
    first, second, third = prove("deepseek_r1", messages)
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Łódź"}\n```'
    end = "<｜end▁of▁sentence｜>"
    calls = f"<｜tool▁calls▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert first == [f"I need a tool.\n</think>\n\n{calls}{end}"]
    assert second == [f"<think>\nIt rains.\n</think>\n\nYes, the whole day.{end}"]
    assert third == [f"Polite.\n</think>\n\nAlways.{end}"]


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"limit": 1.50}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\nOne moment.',
        "<tool_call>\nweather(Łódź)\n</tool_call>",
        " Let me see. \n",
    ],
    ids=["a number", "text behind the call", "no JSON", "white space"],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3"])
def test_calls_in_regenerated_text_are_learned_as_the_target_wrote_them(name: str, written: str) -> None:
    """The prompts are those of the text as it stands, as the engine was asked with."""
    tokenizer = tokenizer_for(name)
    said = f"<think>\nhm\n</think>\n\n{written}" if name == "qwen3" else written
    messages = [AGENT[0], {"role": "assistant", "content": said}, AGENT[2], {"role": "user", "content": "?"}]
    messages.append({"role": "assistant", "content": said})
    record = {"messages": messages, "tools": [TOOL], "finish_reasons": ["stop", "stop"]}
    remarks: Counter[str] = Counter()
    rows = rows_of(name, to_conversation(record, "x"), remarks)
    assert [response for row in rows for response in responses(tokenizer, row)] == [
        said + tokenizer.eos_token
    ] * 2
    last = rows[-1]
    before = last.ids[: np.flatnonzero(last.response == last.response.max())[0]].tolist()
    assert before == served(tokenizer, messages[:4], [TOOL], {}) and not remarks


def test_regenerated_responses_that_a_template_writes_something_before_are_left_out_and_counted() -> None:
    whole = "<think>\nhm\n</think>\n\nFour."
    messages = [THOUGHTS[0], {"role": "assistant", "content": "Four."}, THOUGHTS[2]]
    record = {"messages": messages, "finish_reasons": ["stop"]}
    with pytest.raises(Unusable, match="renders the regenerated responses otherwise"):
        rows_of("qwen3", to_conversation(record, "x"))
    remarks: Counter[str] = Counter()
    record["messages"] = [*messages, {"role": "assistant", "content": whole}]
    (row,) = rows_of("qwen3", to_conversation(record | {"finish_reasons": ["stop", "stop"]}, "x"), remarks)
    assert responses(tokenizer_for("qwen3"), row) == [f"{whole}<|im_end|>"]
    assert remarks == {"regenerated responses that the chat template renders otherwise are left out": 1}


TWO_CALLS = [AGENT[0], AGENT[1] | {"tool_calls": [CALL, CALL | {"id": "call_2"}]}, *AGENT[2:]]


@pytest.mark.parametrize(
    ("name", "messages", "tools", "reason"),
    [
        ("chatml", TALK, [TOOL], "no place for tools"),
        ("gemma", TALK, [TOOL], "no place for tools"),
        ("deepseek_r1", AGENT, [TOOL], "no place for tools"),
        ("chatml", AGENT, [], "no place for calls of tools"),
        ("gemma", AGENT, [], "must alternate"),
        ("harmony", TWO_CALLS, [TOOL], "no place for several calls of tools in a turn"),
        ("llama3", TWO_CALLS, [TOOL], "one call at a time"),
        ("harmony", [AGENT[0], AGENT[2], AGENT[3]], [TOOL], "a result without a call"),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_data_and_server(
    name: str, messages: list[dict], tools: list[dict], reason: str
) -> None:
    with pytest.raises(Unusable, match=reason):
        rows_of(name, to_conversation({"messages": messages, "tools": tools}, "x"))
    with pytest.raises(ValueError, match=reason):
        served(tokenizer_for(name), messages, tools, {})


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"enable_thinking": True}, "does not read enable_thinking"),
        ({"add_generation_prompt": False}, "no argument of a chat template"),
        ({"chat_template": "{{ 1 }}"}, "no argument of a chat template"),
    ],
)
def test_arguments_that_a_template_does_not_read_are_refused(kwargs: dict, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        rows_of("llama3", to_conversation({"messages": TALK, "chat_template_kwargs": kwargs}, "x"))
    with pytest.raises(ValueError, match=reason):
        served(tokenizer_for("llama3"), TALK, [], kwargs)


@pytest.mark.parametrize("name", ["harmony", "hermes"])
def test_a_developer_is_one_where_the_template_knows_developers_and_else_the_system(name: str) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *TALK[1:]]
    rows = rows_of(name, to_conversation({"messages": messages}, "x"))
    text = tokenizer_for(name).decode(rows[0].ids.tolist())
    mark = "<|start|>developer<|message|># Instructions\n\n" if name == "harmony" else "<|im_start|>system\n"
    assert f"{mark}Be brief." in text
    served_ids = served(tokenizer_for(name), messages[:2], [], {})
    assert rows[0].ids[: len(served_ids)].tolist() == served_ids
