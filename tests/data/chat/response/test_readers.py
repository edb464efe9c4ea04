"""Responses are read into the parts that were written, however the text is cut into pieces."""

import json
from typing import Any

import pytest

from eagle_kit.data.chat.response.calls import CALLS_BEGIN, DEEPSEEK, HERMES, LLAMA3, MISTRAL, CallForm
from eagle_kit.data.chat.response.harmony import HarmonyReader
from eagle_kit.data.chat.response.parts import Call, ResponseParts, ResponseReader, read_response
from eagle_kit.data.chat.response.tags import TagReader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "wet": {"type": "boolean"},
                },
            },
        },
    }
]
OSLO = Call("weather", {"city": "Łódź"})
JSON = '{"name": "weather", "arguments": {"city": "Łódź"}}'
ONE = f"<tool_call>\n{JSON}\n</tool_call>"
QUOTED = '<tool_call>{"name": "weather", "arguments": {"city": "a </tool_call> \\" b"}}</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=wet>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
TYPED = Call("weather", {"city": "7", "days": 3, "wet": True})
CUT_STRING = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo}}'
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Łódź"}\n```<｜tool▁call▁end｜>'
)
V31 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Łódź"}<｜tool▁call▁end｜>'
LLAMA_FUNCTION = '{"type": "function", "function": "weather", "parameters": {"city": "Łódź"}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Łódź"}}'


def tags(form: CallForm | None = HERMES, has_thoughts: bool = True, **kwargs: bool) -> ResponseReader:
    return TagReader(has_thoughts=has_thoughts, form=form, tools=TOOLS, **kwargs)


def parts_of_pieces(reader: ResponseReader, pieces: list[str]) -> ResponseParts:
    parts = ResponseParts()
    for piece in pieces:
        parts.add(reader.feed(piece))
    parts.add(reader.finish())
    return parts


CASES: list[tuple[str, Any, str, tuple[str, str, list[Call]]]] = [
    ("plain", {}, " Let me see. \n", ("", " Let me see. \n", [])),
    ("empty", {}, "", ("", "", [])),
    ("thought", {}, "<think>\nhm < it\n</think>\n\nFour.", ("hm < it", "Four.", [])),
    ("thought, no calls", {"form": None}, "\n<think>hm</think>\n\nFour. ", ("hm", "Four. ", [])),
    ("thought, cut", {}, "<think>\nI add </thi", ("I add </thi", "", [])),
    ("thought, opened", {"is_opened": True}, "I add.\n</think>\n\n4", ("I add.", "4", [])),
    ("thought, opened twice", {"is_opened": True}, "<think>\nI add.\n</think>4", ("I add.", "4", [])),
    ("thought, opened and cut", {"is_opened": True}, "I add two ", ("I add two ", "", [])),
    ("thought, empty", {}, "<think>\n\n</think>\n\nFour.", ("", "Four.", [])),
    ("tags in the middle", {}, "A <think> tag </think> x", ("", "A <think> tag </think> x", [])),
    ("tags not read", {"has_thoughts": False}, "<think>a</think>", ("", "<think>a</think>", [])),
    ("call", {}, ONE, ("", "", [OSLO])),
    ("thought and call", {}, f"<think>\na\n</think>\n\n{ONE}", ("a", "", [OSLO])),
    (
        "text, calls, text",
        {},
        f"A:\n{ONE}\n{ONE}\n\nOne moment.\n",
        ("", "A:\n\n\n\nOne moment.\n", [OSLO] * 2),
    ),
    ("call, text", {}, f"{ONE}\nOne moment.", ("", "One moment.", [OSLO])),
    (
        "call of python",
        {},
        "<tool_call>{'name': 'weather', 'arguments': {'wet': True}}</tool_call>",
        ("", "", [Call("weather", {"wet": True})]),
    ),
    (
        "call as openai writes it",
        {},
        f'<tool_call>{{"type": "function", "function": {JSON}}}</tool_call>',
        ("", "", [OSLO]),
    ),
    ("name in spaces", {}, ONE.replace('"weather"', '" weather "'), ("", "", [OSLO])),
    ("end tag in a string", {}, QUOTED, ("", "", [Call("weather", {"city": 'a </tool_call> " b'})])),
    ("no end tag", {}, f"<tool_call>\n{JSON}", ("", "", [OSLO])),
    ("cut in the call", {}, f"a\n<tool_call>\n{JSON[:-3]}", ("", f"a\n<tool_call>\n{JSON[:-3]}", [])),
    (
        "no JSON, then a call",
        {},
        f"<tool_call>\nx(1)\n</tool_call>\n{ONE}",
        ("", "<tool_call>\nx(1)\n</tool_call>", [OSLO]),
    ),
    (
        "a number that JSON lacks",
        {},
        "<tool_call>{'name': 'f', 'arguments': {'x': 1e999}}</tool_call>",
        ("", "<tool_call>{'name': 'f', 'arguments': {'x': 1e999}}</tool_call>", []),
    ),
    (
        "half a character",
        {},
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        ("", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', []),
    ),
    (
        "no object",
        {},
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ("", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ),
    ("almost a tag", {}, "a <tool_cat> <too", ("", "a <tool_cat> <too", [])),
    ("xml", {}, XML, ("", "", [TYPED])),
    (
        "an open string, then a call",
        {},
        f"{CUT_STRING}</tool_call>{ONE}\n{CUT_STRING}\n</tool_call>{ONE}",
        ("", f"{CUT_STRING}</tool_call>\n{CUT_STRING}\n</tool_call>", [OSLO] * 2),
    ),
    ("no end, then a call", {}, f"<tool_call>{JSON[:-1]}\n{ONE}", ("", f"<tool_call>{JSON[:-1]}", [OSLO])),
    (
        "a brace too many",
        {},
        f"<tool_call>{JSON}}}</tool_call>",
        ("", f"<tool_call>{JSON}}}</tool_call>", []),
    ),
    ("prose about the tag", {}, f"With <tool_call> I call. {ONE}", ("", "With <tool_call> I call.", [OSLO])),
    (
        "xml, cut, then a call",
        {},
        f"{XML[:60]}\n</tool_call>\n{XML}",
        ("", f"{XML[:60]}\n</tool_call>", [TYPED]),
    ),
    (
        "xml, no parameter, then a call",
        {},
        f"<tool_call><function=weather>Oslo</function></tool_call>{ONE}",
        ("", "<tool_call><function=weather>Oslo</function></tool_call>", [OSLO]),
    ),
    (
        "xml, end tags in a parameter",
        {},
        XML.replace("7", "</function> or </tool_call>"),
        ("", "", [Call("weather", {**TYPED.arguments, "city": "</function> or </tool_call>"})]),
    ),
    ("xml, broken", {}, XML.replace("</parameter>", ""), ("", XML.replace("</parameter>", ""), [])),
    (
        "deepseek v3",
        {"form": DEEPSEEK},
        f"Well.\n\n{V3}\n{V3.removeprefix(CALLS_BEGIN)}<｜tool▁calls▁end｜>",
        ("", "Well.", [OSLO] * 2),
    ),
    ("deepseek v3.1", {"form": DEEPSEEK}, f"{V31}<｜tool▁calls▁end｜>", ("", "", [OSLO])),
    (
        "deepseek, no call",
        {"form": DEEPSEEK},
        "<｜tool▁calls▁begin｜>\nx",
        ("", "<｜tool▁calls▁begin｜>\nx", []),
    ),
    ("deepseek, broken", {"form": DEEPSEEK}, V31.replace('"}', ""), ("", V31.replace('"}', ""), [])),
    ("mistral", {"form": MISTRAL}, f"Well. [TOOL_CALLS] [{JSON}, {JSON}]", ("", "Well.", [OSLO] * 2)),
    ("mistral v11", {"form": MISTRAL}, '[TOOL_CALLS]weather[ARGS]{"city": "Łódź"}' * 2, ("", "", [OSLO] * 2)),
    (
        "mistral v11, ids",
        {"form": MISTRAL},
        '[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Łódź"}',
        ("", "", [OSLO]),
    ),
    ("mistral, no call", {"form": MISTRAL}, "[TOOL_CALLS] I would. {}", ("", "[TOOL_CALLS] I would. {}", [])),
    ("mistral, cut", {"form": MISTRAL}, f"a [TOOL_CALLS][{JSON}", ("", f"a [TOOL_CALLS][{JSON}", [])),
    ("llama", {"form": LLAMA3}, LLAMA, ("", "", [OSLO])),
    ("llama, two", {"form": LLAMA3}, f" {LLAMA}; {LLAMA}\n{LLAMA}", ("", "", [OSLO] * 3)),
    ("llama, separators", {"form": LLAMA3}, f"{LLAMA}; ; {LLAMA} ; Well.", ("", "Well.", [OSLO] * 2)),
    ("llama, text and separators", {"form": LLAMA3}, f"A <|python_tag|>{LLAMA}; ; B", ("", "A  B", [OSLO])),
    ("llama, python tag", {"form": LLAMA3}, f"<|python_tag|>{LLAMA}", ("", "", [OSLO])),
    ("llama, list", {"form": LLAMA3}, f"[{LLAMA}, {LLAMA}]", ("", "", [OSLO] * 2)),
    (
        "llama, list of one behind the tag",
        {"form": LLAMA3},
        f"<|python_tag|>[ {LLAMA}]",
        ("", "", [OSLO]),
    ),
    (
        "llama, name in function",
        {"form": LLAMA3},
        LLAMA_FUNCTION,
        ("", "", [OSLO]),
    ),
    ("llama, names of no tool", {"form": LLAMA3}, '[{"name": 1}]', ("", '[{"name": 1}]', [])),
    ("llama, list of code", {"form": LLAMA3}, "<|python_tag|>[1]", ("", "<|python_tag|>[1]", [])),
    ("calls of a list", {"form": MISTRAL}, f"[TOOL_CALLS][{JSON}, {JSON}] Well.", ("", "Well.", [OSLO] * 2)),
    ("llama, code", {"form": LLAMA3}, "<|python_tag|>print(1)", ("", "<|python_tag|>print(1)", [])),
    ("llama, answer in JSON", {"form": LLAMA3}, '{"names": [1]}', ("", '{"names": [1]}', [])),
    (
        "llama, no tool of that name",
        {"form": LLAMA3},
        LLAMA.replace("wea", "hea"),
        ("", LLAMA.replace("wea", "hea"), []),
    ),
    ("llama, JSON in a text", {"form": LLAMA3}, f"Call {LLAMA}", ("", f"Call {LLAMA}", [])),
    ("llama, cut", {"form": LLAMA3}, LLAMA[:-1], ("", LLAMA[:-1], [])),
]


@pytest.mark.parametrize(
    ("kwargs", "text", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_tags_and_calls_in_any_pieces(kwargs: dict, text: str, expected: tuple) -> None:
    assert read_response(tags(**kwargs), text) == ResponseParts(*expected)
    for cut in range(len(text) + 1):
        assert parts_of_pieces(tags(**kwargs), [text[:cut], text[cut:]]) == ResponseParts(*expected), text[
            :cut
        ]
    for size in (1, 2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parts_of_pieces(tags(**kwargs), pieces) == ResponseParts(*expected)


ANALYSIS = "<|channel|>analysis<|message|>I look.<|end|>"
TO = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
TO_LATE = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Four."
ARGUMENTS = '{"city": "Łódź"}'
LONG = "<|start|>assistant" + "<|channel|>" + "x" * 300
HARMONY_CASES: list[tuple[str, dict, str, tuple[str, str, list[Call]]]] = [
    ("thought and answer", {}, ANALYSIS + FINAL, ("I look.", "Four.", [])),
    ("answer", {}, "<|channel|>final<|message|>Four.<|return|>", ("", "Four.", [])),
    ("thought, cut", {}, ANALYSIS[:-8], ("I look", "", [])),
    ("header, cut", {}, f"{ANALYSIS}<|start|>assis", ("I look.", "", [])),
    ("call", {}, f"{ANALYSIS}{TO}{ARGUMENTS}", ("I look.", "", [OSLO])),
    ("recipient in the channel", {}, f"{ANALYSIS}{TO_LATE}{ARGUMENTS}<|call|>", ("I look.", "", [OSLO])),
    (
        "recipient first",
        {},
        f" to=functions.weather<|channel|>commentary<|message|>{ARGUMENTS}",
        ("", "", [OSLO]),
    ),
    ("two calls", {"begun": ""}, f"{TO}{ARGUMENTS}<|call|>{TO_LATE}{ARGUMENTS}", ("", "", [OSLO] * 2)),
    ("no arguments", {"begun": ""}, f"{TO}<|call|>", ("", "", [Call("weather", {})])),
    ("cut before the arguments", {"begun": ""}, TO, ("", TO.removeprefix("<|start|>assistant"), [])),
    (
        "no end of a call before a start",
        {"begun": ""},
        TO + FINAL,
        ("", TO.removeprefix("<|start|>assistant") + "\nFour.", []),
    ),
    (
        "preamble",
        {},
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>Hm.<|end|>{TO}{ARGUMENTS}",
        ("I look.", "Hm.", [OSLO]),
    ),
    (
        "two thoughts and texts",
        {},
        ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL + "<|end|>" + FINAL,
        ("I look.\nI look.", "Four.\nFour.", []),
    ),
    ("no end before a start", {}, ANALYSIS[:-7] + FINAL, ("I look.", "Four.", [])),
    (
        "broken call",
        {},
        f"{ANALYSIS}{TO_LATE}{ARGUMENTS[:-1]}<|call|>",
        ("I look.", TO_LATE.removeprefix("<|start|>assistant") + ARGUMENTS[:-1] + "<|call|>", []),
    ),
    (
        "a built-in tool",
        {},
        "<|channel|>analysis to=python<|message|>print(1)",
        ("", "<|channel|>analysis to=python<|message|>print(1)", []),
    ),
    ("another channel", {}, "<|channel|>secret<|message|>x", ("", "<|channel|>secret<|message|>x", [])),
    ("no markers", {}, "Hello to you", ("", "Hello to you", [])),
    ("no header", {"begun": ""}, LONG, ("", LONG, [])),
    (
        "another's message",
        {},
        ANALYSIS + "<|start|>user<|message|>Hi",
        ("I look.", "<|start|>user<|message|>Hi", []),
    ),
    (
        "calls not read",
        {"has_calls": False},
        f"{ANALYSIS}{TO}{ARGUMENTS}",
        ("I look.", TO.removeprefix("<|start|>assistant") + ARGUMENTS, []),
    ),
    (
        "thoughts not read",
        {"has_thoughts": False},
        ANALYSIS + FINAL,
        ("", "<|channel|>analysis<|message|>I look.\nFour.", []),
    ),
    ("begun", {"begun": "<|start|>assistant<|channel|>final<|message|>Fo"}, "ur.", ("", "ur.", [])),
    ("begun header", {"begun": "<|start|>assistant<|channel|>"}, "final<|message|>Four.", ("", "Four.", [])),
    (
        "begun thought",
        {"begun": "<|start|>assistant<|channel|>analysis<|message|>I"},
        f" look.<|end|>{FINAL}",
        (" look.", "Four.", []),
    ),
    ("not begun", {"begun": ""}, FINAL, ("", "Four.", [])),
]


@pytest.mark.parametrize(
    ("kwargs", "text", "expected"), [case[1:] for case in HARMONY_CASES], ids=[c[0] for c in HARMONY_CASES]
)
def test_harmony_in_any_pieces(kwargs: dict, text: str, expected: tuple) -> None:
    def reader() -> HarmonyReader:
        return HarmonyReader(**{"has_thoughts": True, "has_calls": True, **kwargs})

    assert read_response(reader(), text) == ResponseParts(*expected)
    for cut in range(len(text) + 1):
        assert parts_of_pieces(reader(), [text[:cut], text[cut:]]) == ResponseParts(*expected), text[:cut]
    for size in (1, 2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parts_of_pieces(reader(), pieces) == ResponseParts(*expected)


@pytest.mark.parametrize(
    "kwargs", [{}, {"form": None}, {"form": LLAMA3}, {"form": MISTRAL}, {"form": DEEPSEEK}]
)
def test_text_is_not_held_back_where_no_marker_can_begin(kwargs: dict) -> None:
    reader = tags(**kwargs)
    for piece in ("Hello", " you", ", a < b", " and 1 [x] {", '"name": 2}'):
        assert reader.feed(piece).content == piece
    assert reader.finish() == ResponseParts()


def test_prose_about_the_tag_is_not_held_back() -> None:
    reader = tags()
    said = [reader.feed(piece).content for piece in ("The tag <tool_call>", " is", " followed by JSON.")]
    assert said == ["The tag", " <tool_call> is", " followed by JSON."]


def test_thoughts_come_as_they_are_written_and_calls_with_their_end() -> None:
    reader = tags(is_opened=True)
    assert [reader.feed(piece).reasoning for piece in ("I ", "add", " two\n", "and</", "think>")] == [
        *("I", " add", " two", "\nand", ""),
    ]
    found = [reader.feed(piece) for piece in ("<tool_call>" + JSON, "\n</tool", "_call>")]
    assert [len(parts.calls) for parts in found] == [0, 0, 1]


def test_long_calls_take_time_in_proportion_to_their_length() -> None:
    """A call of a megabyte in pieces of four characters; looked at as a whole for each, it would be 125
    gigabytes."""
    text = json.dumps({"name": "weather", "arguments": {"city": "x" * 10**6}})
    for form, whole in ((HERMES, f"<tool_call>{text}</tool_call>"), (LLAMA3, text)):
        pieces = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        assert parts_of_pieces(tags(form), pieces).calls[0].arguments == {"city": "x" * 10**6}


def test_a_call_of_harmony_without_arguments_is_whole_where_its_end_ended_the_response() -> None:
    for end, expected in (
        ("<|call|>", ResponseParts(calls=[Call("weather", {})])),
        ("", ResponseParts(content=TO.removeprefix("<|start|>assistant"))),
        ("<|endoftext|>", ResponseParts(content=TO.removeprefix("<|start|>assistant"))),
    ):
        reader = HarmonyReader(has_thoughts=True, has_calls=True, begun="")
        assert read_response(reader, TO, end) == expected
    for text, end in ((FINAL, "<|return|>"), (f"{TO}{ARGUMENTS}", "<|call|>")):
        both = [HarmonyReader(has_thoughts=True, has_calls=True, begun="") for _ in range(2)]
        assert read_response(both[0], text, end) == read_response(both[1], text)


@pytest.mark.parametrize(
    ("begun", "text"),
    [
        ("<|start|>assistant", "\n<|channel|>analysis"),
        ("", f"{' ' * 255}<|channel|><|start|>"),
        ("", f"{' ' * 240}<|channel|>x<|message|>a"),
        ("<|start|>assistant", f"{' ' * 255}\n<|channel|>commentary<|channel|>final<|message|>b"),
        ("", f"x<|end|>\n{' ' * 255}<|start|>"),
        ("<|start|>assistant<|channel|>analysis", f"{' ' * 255}<|channel|>json"),
    ],
)
def test_ill_formed_headers_of_harmony_are_read_alike_in_any_pieces(begun: str, text: str) -> None:
    def reader() -> HarmonyReader:
        return HarmonyReader(has_thoughts=True, has_calls=True, begun=begun)

    whole = read_response(reader(), text)
    for size in (1, 2, 3, 7, 40):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parts_of_pieces(reader(), pieces) == whole
