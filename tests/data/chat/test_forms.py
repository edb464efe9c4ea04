"""Records as they are published become OpenAI's messages; what cannot be read says why, what is not is
counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_kit.data.chat.forms import to_conversation
from eagle_kit.data.chat.messages import Unusable, on_the_wire, read_message
from eagle_kit.data.chat.records import SkipLog, read_conversations

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PYTHON = "{'arguments': {'city': 'Oslo'}, 'name': 'weather'}"
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SAID = {"role": "assistant", "content": "", "tool_calls": [CALL]}
AGENT = (
    {"role": "user", "content": "Rain?"},
    SAID,
    {"role": "tool", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes."},
)
OPENAI = {
    "messages": [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Yes."},
    ],
    "tools": [TOOL],
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": '{"rain": true}'},
        {"from": "gpt", "value": "Yes."},
    ],
    "tools": json.dumps([FUNCTION]),
}
HERMES = {
    "id": "h",
    "conversations": [
        {"from": "system", "value": "You call functions. <tools>[...]</tools>"},
        {"from": "human", "value": "Rain?"},
        {"from": "gpt", "value": f"<tool_call>\n{PYTHON}\n</tool_call>"},
        {"from": "tool", "value": '<tool_response>\n{"rain": true}\n</tool_response>'},
        {"from": "gpt", "value": "Yes."},
    ],
    "tools": json.dumps([TOOL]),
}
XLAM = {
    "id": 7,
    "query": "Rain?",
    "tools": json.dumps(
        [
            {
                "name": "weather",
                "description": "Of a city.",
                "parameters": {
                    "city": {"type": "str", "description": "Where."},
                    "days": {"type": "List[int]", "description": "When.", "default": "[]"},
                },
            }
        ]
    ),
    "answers": '[{"name": "weather", "arguments": {"city": "Oslo"}}]',
}
FORMS = {"openai": OPENAI, "sharegpt": SHAREGPT, "hermes": HERMES}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_calls_and_results_of_every_form_are_the_same_messages(
    tmp_path: Path, name: str, suffix: str
) -> None:
    found, skipped = read(tmp_path, suffix, [FORMS[name]])
    assert found[0].messages == AGENT and found[0].tools == (TOOL,) and not skipped.rows
    if name == "hermes":
        path = tmp_path / f"records.{suffix}"
        assert skipped.notes == [
            "a system message that lists the tools is left out, since the chat template writes it: "
            f"1 conversations of {path}"
        ]


def test_parquet_columns_of_objects_give_no_call_the_arguments_of_another(tmp_path: Path) -> None:
    records = []
    for name, arguments in (("weather", {"city": "Oslo"}), ("noise", {"loud": 1})):
        call = {"function": {"name": name, "arguments": arguments}}
        records.append(
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]}
        )
    found, _ = read(tmp_path, "parquet", records)
    calls = [conversation.messages[1]["tool_calls"][0]["function"] for conversation in found]
    assert calls == [
        {"name": "weather", "arguments": {"city": "Oslo"}},
        {"name": "noise", "arguments": {"loud": 1}},
    ]


def read(folder: Path, suffix: str, records: list[dict[str, Any]]) -> tuple[list[Any], SkipLog]:
    path = folder / f"records.{suffix}"
    if suffix == "parquet":
        pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    skipped = SkipLog()
    return list(read_conversations(str(path), skipped=skipped)), skipped


def test_calls_of_xlam_are_replies_and_its_parameters_a_schema() -> None:
    found = to_conversation(XLAM, "x")
    assert found.messages == AGENT[:2] and found.id == "7"
    assert found.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "array", "description": "When.", "default": "[]"},
        },
        "required": ["city"],
    }


def test_hermes_without_a_column_of_tools_stays_text() -> None:
    record = {key: value for key, value in HERMES.items() if key != "tools"}
    found = to_conversation(record, "x")
    assert [m["content"] for m in found.messages] == [turn["value"] for turn in HERMES["conversations"]]
    assert not found.tools and not found.remarks


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name_and_older_calls_one_form(name: str) -> None:
    turn = {"role": "assistant", "content": "a", name: "b", "function_call": {"name": "f", "arguments": ""}}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [call]}
    assert read_message(turn) == said
    result = {"role": "tool", "content": "r", "tool_call_id": "of another call"}
    sent, answered = on_the_wire([said, result])
    assert sent["tool_calls"][0]["function"]["arguments"] == "{}"
    assert sent["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert read_message(sent)["tool_calls"] == [call | {"id": answered["tool_call_id"]}]


def test_parts_of_text_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_message({"role": "user", "content": parts}) == {"role": "user", "content": "a\nb"}
    with pytest.raises(Unusable, match="content is not text"):
        read_message({"role": "user", "content": [*parts, {"type": "image_url", "image_url": {}}]})


def test_prompts_and_completions_may_be_messages_and_a_column_may_be_the_system() -> None:
    record = {"prompt": [AGENT[0]], "completion": [AGENT[3]], "system": "Be kind."}
    assert to_conversation(record, "x").messages == (
        {"role": "system", "content": "Be kind."},
        AGENT[0],
        AGENT[3],
    )


def test_turns_and_parameters_of_tools_may_be_json_text() -> None:
    """As Toucan keeps its messages, and files of Parquet the schemas of tools, which differ."""
    tool = FUNCTION | {"parameters": json.dumps(PARAMETERS)}
    turns = [
        AGENT[0],
        {"role": "tool_call", "content": json.dumps({"name": "weather", "arguments": '{"city": "Oslo"}'})},
        {"role": "tool_response", "content": '{"rain": true}'},
        AGENT[3],
    ]
    found = to_conversation({"messages": json.dumps(turns), "tools": [tool]}, "x")
    assert found.messages == AGENT and found.tools == (TOOL,)


def test_a_system_column_that_repeats_the_system_message_is_one_message() -> None:
    system = {"role": "system", "content": "Be kind."}
    record = {"messages": [system, AGENT[0], AGENT[3]], "system": "Be kind."}
    assert to_conversation(record, "x").messages == (system, AGENT[0], AGENT[3])


def test_content_of_no_parts_beside_calls_is_empty() -> None:
    assert read_message(SAID | {"content": []}) == SAID
    with pytest.raises(Unusable, match="content is not text"):
        read_message({"role": "assistant", "content": []})


def test_parts_of_records_that_are_not_read_are_named() -> None:
    late = {"from": "tool", "value": "<tool_response>1</tool_response> and more"}
    said = AGENT[3] | {"reasoning": "one", "thinking": "another"}
    record = {"conversations": [*HERMES["conversations"][:3], late, said], "tools": [TOOL], "category": 3}
    assert set(to_conversation(record, "x").remarks) >= {
        "text beside a <tool_response> is left out",
        "of several thoughts of a message one is read",
        "a category that is not text is not read",
    }
    assert not to_conversation({"messages": [AGENT[0], said | {"thinking": "one"}]}, "x").remarks


def test_template_arguments_are_read_and_unknown_keys_of_messages_are_named() -> None:
    turns = [AGENT[0], AGENT[3] | {"weight": 0}]
    found = to_conversation({"messages": turns, "chat_template_kwargs": '{"enable_thinking": false}'}, "x")
    assert found.chat_template_kwargs == {"enable_thinking": False}
    assert found.remarks == ("the key 'weight' of a message is not read",)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (SHAREGPT | {"tools": "{"}, "tools that are not JSON"),
        (SHAREGPT | {"tools": "{}"}, "tools that are not a list of objects"),
        (SHAREGPT | {"tools": [{"type": "function", "function": {}}]}, "a tool without a name"),
        ({"conversations": [{"from": "function_call", "value": "oops"}]}, "a call that is not JSON"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "a tool call without a name",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "a tool call that is not an object"),
        ({"query": "q", "answers": '[{"name": "f", "arguments": "[1]"}]'}, "are no JSON object"),
        ({"query": "q", "answers": "oops"}, "answers that are not JSON"),
        (
            {"messages": [AGENT[0]], "chat_template_kwargs": [1]},
            "chat_template_kwargs that are not an object",
        ),
        (
            {"messages": [{"role": "user", "content": "q", "tool_calls": [CALL]}]},
            "of the user with tool calls",
        ),
        (
            {
                "conversations": [AGENT[0], {"from": "gpt", "value": "<tool_call>oops</tool_call>"}],
                "tools": [TOOL],
            },
            "a <tool_call> that cannot be read",
        ),
        ({"messages": "oops"}, "turns that are not JSON"),
        *((OPENAI | {name: "\ud83d"}, "half a character") for name in ("id", "category")),
        (OPENAI | {"chat_template_kwargs": {"\ud83d": 1}}, "half a character"),
        (
            OPENAI | {"tools": [{"name": "f", "parameters": [1]}]},
            "parameters of a tool that are not an object",
        ),
        (OPENAI | {"system": ["Be kind."]}, "a system that is not text"),
        (OPENAI | {"finish_reasons": "stop"}, "finish_reasons that are not a list"),
        (OPENAI | {"finish_reasons": {"1": "stop"}}, "finish_reasons that are not a list"),
        ({"messages": [AGENT[0] | {"name": 5}]}, "a turn whose name is not text"),
        ({"messages": [{"role": "x" * 999}]}, r"unknown role 'x{50,60}\.\.\.$"),
    ],
)
def test_records_with_broken_calls_say_why(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        to_conversation(record, "x")


def test_results_of_several_calls_have_the_ids_of_the_calls_in_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("first", "second")]
    asked = read_message({"role": "assistant", "content": "", "tool_calls": calls})
    results = [read_message({"role": "tool", "content": text}) for text in ("of first", "of second")]
    sent, *answers = on_the_wire([asked, *results])
    ids = [call["id"] for call in sent["tool_calls"]]
    assert len(set(ids)) == 2
    assert [answer["tool_call_id"] for answer in answers] == ids
