"""Records as they are published become OpenAI's messages; what cannot be read says why, what is not is
counted."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.forms import TokenRow, to_conversation, to_record
from eagle_kit.data.chat.messages import Unusable, on_the_wire, read_message, read_tools
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


def test_calls_of_xlam_are_responses_and_its_parameters_a_schema() -> None:
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
    turns = [AGENT[0], AGENT[3] | {"stars": 0}]
    found = to_conversation({"messages": turns, "chat_template_kwargs": '{"enable_thinking": false}'}, "x")
    assert found.chat_template_kwargs == {"enable_thinking": False}
    assert found.remarks == ("the key 'stars' of a message is not read",)


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
        (OPENAI | {"tools": [TOOL, {"name": "\ud83d"}]}, "half a character"),
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


ROLES = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "bing", "bard", "model"),
    "tool": ("tool", "function", "function_response", "tool_response", "observation", "ipython"),
}


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, names in ROLES.items() for name in (*names, names[-1].upper())]
)
def test_every_name_of_a_role_is_understood(role: str, name: str) -> None:
    assert read_message({"role": name, "content": "a"}) == {"role": role, "content": "a"}


@pytest.mark.parametrize("name", ["function_call", "tool_call"])
def test_roles_whose_content_is_a_call(name: str) -> None:
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    for content, calls in ((call, [CALL]), ([call, call], [CALL, CALL])):
        said = read_message({"role": name, "content": json.dumps(content)})
        assert said == {"role": "assistant", "content": "", "tool_calls": calls}


KINDS = {
    "string": ("str", "string"),
    "integer": ("int", "integer"),
    "number": ("float", "number"),
    "boolean": ("bool", "boolean"),
    "array": ("list", "array", "tuple", "set", "List[int]", "Tuple[int, str]", "set (of texts)"),
    "object": ("dict", "object", "Dict[str, int]"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_types_of_python_are_those_of_json_schema(kind: str, name: str) -> None:
    about = {"x": {"type": name}, "y": {"type": f"{name}, optional"}, "z": {"type": name, "default": None}}
    (tool,) = read_tools([{"name": "f", "parameters": about}])
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"x": {"type": kind}, "y": {"type": kind}, "z": {"type": kind, "default": None}},
        "required": ["x"],
    }


def test_a_type_that_json_schema_does_not_have_stays_and_so_does_a_schema() -> None:
    about = {"x": {"type": "date"}}
    (tool,) = read_tools([{"name": "f", "parameters": about}])
    assert tool["function"]["parameters"]["properties"] == about
    for schema in ({}, {"type": "object"}, {"properties": {}}):
        (tool,) = read_tools([{"name": "f", "parameters": schema}])
        assert tool["function"]["parameters"] == schema


@pytest.mark.parametrize(
    "column",
    [
        {"tools": [TOOL]},
        {"tools": [FUNCTION]},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"functions": [FUNCTION]},
        {"tools": [], "functions": json.dumps([FUNCTION])},
    ],
    ids=str,
)
def test_tools_of_every_form_are_those_of_openai(column: dict[str, Any]) -> None:
    assert to_conversation({"messages": [AGENT[0], AGENT[3]], **column}, "x").tools == (TOOL,)


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "parameters": {"city": "Oslo"}},
        {"function": {"name": "weather", "parameters": '{"city": "Oslo"}'}},
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}, "id": None},
    ],
    ids=str,
)
def test_calls_of_every_form_are_those_of_openai(call: dict[str, Any]) -> None:
    assert read_message({"role": "assistant", "tool_calls": [call]}) == SAID


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object_of_them(arguments: Any) -> None:
    said = read_message({"role": "assistant", "function_call": {"name": "f", "arguments": arguments}})
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_turns_of_both_columns_may_be_json_text(key: str) -> None:
    names = ("from", "value") if key == "conversations" else ("role", "content")
    turns = [dict(zip(names, pair, strict=True)) for pair in (("user", "a"), ("assistant", "b"))]
    found = to_conversation({key: json.dumps(turns)}, "x")
    assert [message["content"] for message in found.messages] == ["a", "b"]


def test_text_beside_calls_of_hermes_stays_and_every_result_is_a_turn() -> None:
    call = f"<tool_call>\n{PYTHON}\n</tool_call>"
    turns = [
        *HERMES["conversations"][:2],
        {"from": "gpt", "value": f"Let me see.\n{call}\n{call}"},
        {"from": "tool", "value": "<tool_response>1</tool_response>\n<tool_response>2</tool_response>"},
        {"from": "gpt", "value": "Yes."},
    ]
    found = to_conversation(HERMES | {"conversations": turns}, "x")
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    assert list(found.messages) == [AGENT[0], said, *results, AGENT[3]]
    assert found.remarks == (
        "a system message that lists the tools is left out, since the chat template writes it",
    )


def test_responses_that_ended_by_themselves_are_whole() -> None:
    for reason in ("stop", "tool_calls", "function_call", "eos_token"):
        record = {"messages": [AGENT[0], AGENT[3]], "finish_reasons": ["length", reason]}
        assert to_conversation(record, "x").complete, reason
    assert to_conversation({"messages": [AGENT[0], AGENT[3]], "finish_reasons": []}, "x").complete


def test_names_and_ids_of_messages_stay_and_what_says_nothing_is_no_remark() -> None:
    asked = {"role": "user", "content": [{"text": "a"}], "name": "Bo", "id": "1"}
    said = {"role": "assistant", "content": "b", "refusal": "no", "audio": {"id": "1"}, "annotations": [1]}
    result = {"role": "tool", "content": "c", "tool_call_id": "call_7"}
    found = to_conversation({"messages": [asked, said, result, AGENT[3]], "system": " \n"}, "x")
    assert found.messages[0] == {"role": "user", "content": "a", "name": "Bo"}
    assert found.messages[1] == {"role": "assistant", "content": "b"}
    assert found.messages[2] == result and not found.remarks


def test_calls_of_all_turns_have_ids_of_their_own_on_the_wire() -> None:
    given = SAID | {"tool_calls": [CALL | {"id": "own"}]}
    lost = {"role": "tool", "content": "of nothing", "tool_call_id": "gone"}
    sent = on_the_wire([AGENT[0], SAID, AGENT[2], SAID, AGENT[2], given, AGENT[2], lost])
    ids = [call["id"] for message in sent for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert len(set(ids)) == 3 and answered == [*ids, "gone"] and ids[2] == "own"
    assert all("tool_call_id" not in message for message in (AGENT[2], SAID)), "what was given stays"


def test_results_of_several_calls_have_the_ids_of_the_calls_in_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("first", "second")]
    asked = read_message({"role": "assistant", "content": "", "tool_calls": calls})
    results = [read_message({"role": "tool", "content": text}) for text in ("of first", "of second")]
    sent, *answers = on_the_wire([asked, *results])
    ids = [call["id"] for call in sent["tool_calls"]]
    assert len(set(ids)) == 2
    assert [answer["tool_call_id"] for answer in answers] == ids


ASKED = {"role": "user", "content": "Q?"}
ANSWERED = {"role": "assistant", "content": "A."}
SAME_TALK = {
    "alpaca": {"instruction": "Q?", "input": "", "output": "A."},
    "completion": {"prompt": "Q?", "completion": "A."},
    "empty list of turns": {"conversations": [], "messages": [ASKED, ANSWERED]},
    "empty lists of turns": {"conversations": [], "messages": [], "prompt": "Q?", "completion": "A."},
    "list behind a text": {"prompt": "Q?", "completion": [ANSWERED]},
    "lmsys": {"conversation_id": "1", "model": "m", "conversation": [ASKED, ANSWERED], "turn": 1},
    "magpie": {
        "uuid": "1",
        "instruction": "Q?",
        "response": "A.",
        "conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}],
    },
    "metamath": {"query": "Q?", "response": "A.", "type": "GSM"},
    "question": {"question": "Q?", "answer": "A."},
    "text behind a list": {"prompt": [ASKED], "completion": "A."},
    "text beside turns": {"text": "Q? A.", "messages": [ASKED, ANSWERED]},
    "ultrachat": {"id": "1", "data": ["Q?", "A."]},
    "ultrachat 200k": {"prompt": "Q?", "prompt_id": "1", "messages": [ASKED, ANSWERED]},
}


@pytest.mark.parametrize("name", SAME_TALK)
def test_every_common_form_is_the_same_talk(name: str) -> None:
    assert to_record(SAME_TALK[name], "x").messages == (ASKED, ANSWERED)


def test_parts_of_instruction_sets_are_turns() -> None:
    record = {
        "system_prompt": "S.",
        "instruction": "Q",
        "input": "Text.",
        "output": "A.",
        "history": [["a", "b"]],
    }
    found = to_record(record, "x")
    assert [message["content"] for message in found.messages] == ["S.", "a", "b", "Q\n\nText.", "A."]
    assert not found.remarks
    assert (
        "only prompt and response are read"
        in to_record({"prompt": "a", "question": "b", "response": "c"}, "x").remarks[0]
    )


@pytest.mark.parametrize(
    ("roles", "meaning"),
    [
        (("user", "gpt-4o", "user", "gpt-4o"), "assistant"),
        (("student", "assistant", "student", "assistant"), "user"),
    ],
)
def test_the_one_unknown_role_is_the_one_that_is_missing(roles: tuple[str, ...], meaning: str) -> None:
    turns = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    found = to_conversation({"messages": turns}, "x")
    unknown = [i for i, role in enumerate(roles) if role in ("gpt-4o", "student")]
    assert {found.messages[i]["role"] for i in unknown} == {meaning}
    assert found.remarks == (f"the role '{roles[unknown[0]]}' is read as the {meaning}'s",)


@pytest.mark.parametrize("roles", [("user", "a", "b"), ("user", "assistant", "narrator"), ("a", "b")])
def test_roles_that_could_be_several_are_unknown(roles: tuple[str, ...]) -> None:
    turns = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(Unusable, match="unknown role"):
        to_conversation({"messages": turns}, "x")


def test_weights_of_messages_are_read() -> None:
    turns = [
        ASKED,
        ANSWERED | {"weight": 0},
        ASKED,
        ANSWERED | {"weight": 1},
        ASKED,
        ANSWERED | {"train": False},
    ]
    found = to_conversation({"messages": turns, "system": "S."}, "x")
    assert found.not_learned == {2, 6}
    assert set().union(*found.messages) == {"role", "content"}
    half = to_conversation({"messages": [ASKED, ANSWERED | {"weight": 0.5}]}, "x")
    assert half.not_learned == set() and "counts as 1" in half.remarks[0]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({"loss_mask": [0, 1, 1]}, (False, True, True)),
        ({"assistant_masks": [0, 0, 1]}, (False, False, True)),
        ({"labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}, (False, True, True)),
        ({"loss_mask": [True, False, True]}, (True, False, True)),
    ],
)
def test_tokens_with_a_mask_are_rows(mask: dict[str, Any], expected: tuple[bool, ...]) -> None:
    found = to_record({"input_ids": [5, 6, 7], **mask}, "x")
    assert isinstance(found, TokenRow)
    assert (found.ids, found.is_learned) == ((5, 6, 7), expected)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [5, 6]}, "input_ids without loss_mask"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "as many numbers"),
        ({"input_ids": [5, -6], "loss_mask": [1, 1]}, "not a list of token ids"),
        ({"input_ids": "56", "loss_mask": [1, 1]}, "not a list of token ids"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "other numbers than 0 and 1"),
        ({"input_ids": [5, 6], "labels": [-100, 7]}, "neither -100 nor the token"),
        ({"text": " "}, "a text that is empty"),
        ({"text": ["a"]}, "no text"),
        ({"text": "\ud800"}, "half a character"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "a history that is not a list of pairs"),
        ({"messages": [ASKED, ANSWERED | {"weight": "0"}]}, "of a message that is no number"),
    ],
)
def test_records_of_other_forms_say_what_is_wrong(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        to_record(record, "x")


@pytest.mark.parametrize("suffix", [".json.gz", ".jsonl.gz"])
def test_packed_files_are_read(tmp_path: Path, suffix: str) -> None:
    records = [{"messages": [ASKED, ANSWERED]}, {"prompt": "Q?", "completion": "A."}]
    lines = json.dumps(records) if suffix == ".json.gz" else "\n".join(map(json.dumps, records))
    path = tmp_path / f"chats{suffix}"
    path.write_bytes(gzip.compress(lines.encode()))
    found = list(read_conversations(str(path), skipped=SkipLog()))
    assert [one.messages for one in found] == [(ASKED, ANSWERED)] * 2
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match="is damaged"):
        list(read_conversations(str(path), skipped=SkipLog()))
    path.write_bytes(lines.encode())
    with pytest.raises(UserError, match="is damaged"):
        list(read_conversations(str(path), skipped=SkipLog()))


def test_texts_and_tokens_are_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    records = [{"text": "words"}, {"input_ids": [1, 2], "loss_mask": [0, 1]}, {"messages": [ASKED, ANSWERED]}]
    path.write_text("\n".join(map(json.dumps, records)))
    skipped = SkipLog()
    assert len(list(read_conversations(str(path), skipped=skipped))) == 1
    assert skipped.counts == {"text or tokens, which have no turns": 2}


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": {"type": "string"}},
        {"$defs": {"a": {"type": "string"}}, "patternProperties": {"^a": {"$ref": "#/$defs/a"}}},
        {"not": {"required": ["a"]}, "propertyNames": {"maxLength": 3}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}},
    ],
    ids=str,
)
def test_a_schema_without_properties_is_not_taken_for_parameters_by_name(schema):
    (tool,) = read_tools([{"name": "f", "parameters": schema}])
    assert tool["function"]["parameters"] == schema


def test_parameters_may_have_names_of_keywords():
    parameters = {"not": {"type": "str"}, "city": {"type": "int"}}
    (tool,) = read_tools([{"name": "f", "parameters": parameters}])
    expected = {"not": {"type": "string"}, "city": {"type": "integer"}}
    assert tool["function"]["parameters"]["properties"] == expected
