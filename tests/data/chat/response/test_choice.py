"""The form of a target's responses is found in its chat template, and what the template writes is read
back."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_for
from tiny_run import make_target

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.forms import to_conversation
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.data.chat.response.choice import ResponseForms, choose_forms
from eagle_kit.data.chat.response.parts import Call, ResponseParts, read_response
from eagle_kit.engine.text_stream import TextStream
from eagle_kit.models.loading.source import load_tokenizer

FORMS = {
    "chatml": "reasoning none, tool calls none",
    "gemma": "reasoning none, tool calls none",
    "hermes": "reasoning none, tool calls hermes",
    "llama3": "reasoning none, tool calls llama3",
    "qwen3": "reasoning think, tool calls hermes",
    "deepseek_r1": "reasoning think, tool calls deepseek",
    "harmony": "reasoning harmony, tool calls harmony",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = {"city": "Łódź <|x|>", "days": [1, {"a": None}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
TALK = [
    {"role": "user", "content": "Rain in Łódź?"},
    {
        "role": "assistant",
        "reasoning_content": "I need a tool,\n\nthe にほん.",
        "content": "",
        "tool_calls": [CALL],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
    {"role": "assistant", "reasoning_content": "It rains.", "content": "Yes,\nthe whole day. 🙂"},
]


def forms_of(tokenizer: Any, reasoning: str = "auto", calls: str = "auto") -> ResponseForms:
    return choose_forms(ChatRenderer(tokenizer), reasoning, calls)


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_found_in_the_template(name: str) -> None:
    assert str(forms_of(tokenizer_for(name))) == FORMS[name]


def responses(
    name: str, messages: list[dict], tools: list[dict], **kwargs: Any
) -> list[tuple[list[int], list[int]]]:
    """Prompt and tokens of every response, as a server would be given and generate them."""
    record = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    found = []
    renderer = ChatRenderer(tokenizer_for(name))
    for row in renderer.tokenize_chat(to_conversation(record, "x"), 10_000, Counter()):
        for number in range(int(row.response.max()) + 1):
            span = np.flatnonzero(row.response == number)
            found.append((row.ids[: span[0]].tolist(), row.ids[span].tolist()))
    return found


def read_back(name: str, prompt: list[int], response: list[int], tools: list[dict]) -> ResponseParts:
    tokenizer = tokenizer_for(name)
    forms = forms_of(tokenizer)
    stream = TextStream(tokenizer, included_special_tokens=forms.shown_tokens(bool(tools)))
    stream.push(response[:-1])  # the end of a response is no text
    stream.finish()
    reader = forms.reader(prompt, tools)
    return ResponseParts("", stream.text, []) if reader is None else read_response(reader, stream.text)


@pytest.mark.parametrize("name", FORMS)
def test_what_the_template_writes_is_read_back(name: str) -> None:
    has_calls, has_thoughts = "calls none" not in FORMS[name], "reasoning none" not in FORMS[name]
    shows_tools = has_calls and name != "deepseek_r1"  # whose template lists none, though it writes calls
    messages = TALK if has_calls else [TALK[0], TALK[3]]
    if name == "deepseek_r1":
        messages = [json.loads(json.dumps(message)) for message in messages]
    found = responses(name, messages, [WEATHER] if shows_tools else [])
    said = [message for message in messages if message["role"] == "assistant"]
    assert len(found) == len(said)
    for (prompt, response), message in zip(found, said, strict=True):
        calls = [Call("weather", ARGUMENTS)] if "tool_calls" in message else []
        thought = message["reasoning_content"] if has_thoughts else ""
        assert read_back(name, prompt, response, [WEATHER]) == ResponseParts(
            thought, message["content"], calls
        )


def test_thoughts_that_the_prompt_has_closed_are_not_looked_for_in_the_answer() -> None:
    messages = [TALK[0], {"role": "assistant", "content": "A </think> b."}]
    ((prompt, _),) = responses("qwen3", [TALK[0], TALK[3]], [], enable_thinking=False)
    forms = forms_of(tokenizer_for("qwen3"))
    reader = forms.reader(prompt)
    assert reader is not None
    assert read_response(reader, messages[1]["content"]) == ResponseParts("", "A </think> b.")


def test_calls_are_read_only_where_the_prompt_shows_tools() -> None:
    assert forms_of(tokenizer_for("hermes")).reader([1, 2]) is None
    assert forms_of(tokenizer_for("deepseek_r1")).shown_tokens(False) == frozenset()


def test_forms_by_the_names_of_vllm_and_sglang_and_none() -> None:
    tokenizer = tokenizer_for("qwen3")
    renderer = ChatRenderer(tokenizer)
    for reasoning in ("deepseek_v3", "think", "qwen3"):
        assert choose_forms(renderer, reasoning, "hermes") == choose_forms(renderer)
    assert forms_of(tokenizer, "none", "none").reader([1], [WEATHER]) is None
    assert str(forms_of(tokenizer, "none", "llama3_json")) == "reasoning none, tool calls llama3"
    with pytest.raises(UserError, match="--tool-call-parser is 'pythonic'"):
        forms_of(tokenizer, "auto", "pythonic")
    with pytest.raises(UserError, match="another one was given"):
        forms_of(tokenizer, "gpt-oss", "auto")


NAMES = {
    "reasoning": {
        "think": ("think", "deepseek_v3", "deepseek-v3", "qwen3"),
        "deepseek_r1": ("deepseek_r1", "deepseek-r1"),
        "harmony": ("harmony", "openai_gptoss", "gpt-oss"),
        "none": ("none",),
    },
    "tool calls": {
        "hermes": ("hermes", "qwen", "qwen25", "qwen3_coder", "qwen3_xml"),
        "llama3": ("llama3", "llama3_json"),
        "deepseek": ("deepseek", "deepseek_v3", "deepseekv3", "deepseek_v31", "deepseekv31"),
        "mistral": ("mistral",),
        "harmony": ("harmony", "openai", "gpt-oss"),
        "none": ("none",),
    },
}


def test_every_documented_name_of_a_form_is_known() -> None:
    tokenizer = tokenizer_for("chatml")
    for form, names in NAMES["reasoning"].items():
        for name in names:
            assert str(forms_of(tokenizer, name, "none")) == f"reasoning {form}, tool calls none"
    for form, names in NAMES["tool calls"].items():
        for name in names:
            assert str(forms_of(tokenizer, "none", name)) == f"reasoning none, tool calls {form}"


def test_with_the_parser_deepseek_r1_a_grammar_begins_behind_the_first_thought() -> None:
    tokenizer = tokenizer_for("qwen3")
    forms = forms_of(tokenizer, "deepseek_r1", "none")
    thought = forms.constrained(tokenizer("Hi\n")["input_ids"]).thought
    assert thought is not None and thought.opener is None
    plain = forms_of(tokenizer, "think", "none").constrained(tokenizer("Hi\n")["input_ids"]).thought
    assert plain is not None and tokenizer.decode([plain.opener]) == "<think>"
    assert forms.constrained(tokenizer("<think>\n\n</think>\n\n")["input_ids"]).thought is None


def test_responses_of_the_parser_deepseek_r1_begin_with_a_thought_that_nothing_opens() -> None:
    tokenizer = tokenizer_for("qwen3")
    open_prompt, closed = (tokenizer(text)["input_ids"] for text in ("Hi\n", "<think>\n\n</think>\n\n"))
    for name in ("deepseek_r1", "deepseek-r1"):
        forms = forms_of(tokenizer, name, "none")
        for prompt, text, expected in (
            (open_prompt, "hm\n</think>\n\nFour.", ("hm", "Four.")),
            (open_prompt, "<think>\nhm</think>Four.", ("hm", "Four.")),
            (open_prompt, "hm", ("hm", "")),
            (closed, "Four.", ("", "Four.")),
        ):
            reader = forms.reader(prompt)
            assert reader is not None and read_response(reader, text) == ResponseParts(*expected)
        assert forms.shown_tokens(False) == forms_of(tokenizer, "think", "none").shown_tokens(False)


OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>)", "content": "text"},
    },
}
WRITTEN = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'
CITY = Call("weather", {"city": "Łódź"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>hm <b</think>Four.", ("hm <b", "Four.", [])),
        (f"<think>hm</think>{WRITTEN}\n{WRITTEN}", ("hm", "", [CITY] * 2)),
        (f"A <b. {WRITTEN}<|im_end|>", ("", "A <b.", [CITY])),
        (
            f"A\n<tool_call>x()</tool_call> and {WRITTEN}",
            ("", f"A\n<tool_call>x()</tool_call> and {WRITTEN}", []),
        ),
        (f"A {WRITTEN[:-12]}", ("", "A", [CITY])),
        (f"A {WRITTEN[:-13]}", ("", f"A {WRITTEN[:-13]}", [])),
        ("A <tool", ("", "A <tool", [])),
    ],
)
def test_a_checkpoints_own_response_template_comes_first(text: str, expected: tuple) -> None:
    """The template is the one that transformers' own server has for Qwen3, in any pieces."""
    tokenizer = tokenizer_for("qwen3")
    tokenizer.response_template = OWN
    try:
        forms = forms_of(tokenizer)
        assert str(forms) == "reasoning checkpoint, tool calls checkpoint"
        prompt = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        for size in (1, 2, 5, len(text)):
            reader = forms.reader(prompt, [WEATHER])
            assert reader is not None
            parts = ResponseParts()
            for i in range(0, len(text), size):
                parts.add(reader.feed(text[i : i + size]))
            parts.add(reader.finish())
            assert parts == ResponseParts(*expected)
    finally:
        tokenizer.response_template = None


@pytest.mark.parametrize(
    ("reasoning", "calls", "expected"),
    [
        ("auto", "none", ("hm", f"A {WRITTEN}", [])),
        ("none", "auto", ("", "<think>hm</think>A", [CITY])),
    ],
)
def test_parts_that_a_response_template_is_not_asked_for_stay_in_the_content(
    reasoning: str, calls: str, expected: tuple
) -> None:
    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.response_template = OWN
    forms = forms_of(tokenizer, reasoning, calls)
    prompt = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    reader = forms.reader(prompt, [WEATHER])
    assert reader is not None
    assert read_response(reader, f"<think>hm</think>A {WRITTEN}") == ResponseParts(*expected)


def test_with_a_response_template_a_grammar_begins_behind_the_marker_that_the_chat_template_writes() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    prompt = tokenizer("<|im_start|>assistant\n")["input_ids"]
    plain = forms_of(tokenizer).constrained(prompt)
    tokenizer.response_template = OWN
    constrained = forms_of(tokenizer).constrained(prompt)
    assert constrained.thought == plain.thought is not None and constrained.make_reader is not None
    assert read_response(constrained.make_reader(), "<think>\nhm</think>4") == ResponseParts("hm", "4")


CODER = (
    "\n<tool_call>\n<function={{ call.name }}>\n{% for key, value in call.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
MISTRAL = '[TOOL_CALLS] [{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}, "id": "x"}]'
MISTRAL_ARGS = "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"
PYTHONIC = "[{{ call.name }}(x={{ call.arguments.x }})]"


@pytest.mark.parametrize(
    ("call", "form"),
    [
        (CODER, "hermes"),
        (DEEPSEEK_V31, "deepseek"),
        (MISTRAL, "mistral"),
        (MISTRAL_ARGS, "mistral"),
        (PYTHONIC, "none"),
    ],
    ids=["qwen3-coder", "deepseek v3.1", "mistral", "mistral v11", "pythonic"],
)
def test_other_published_forms_of_calls_are_found(call: str, form: str) -> None:
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% for each in m.tool_calls or [] %}}{{% set call = each.function %}}{call}{{% endfor %}}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert str(forms_of(tokenizer)) == f"reasoning none, tool calls {form}"


def test_a_tokenizer_without_a_chat_template_has_no_form() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = None
    assert str(forms_of(tokenizer)) == "reasoning none, tool calls none"


def test_a_response_template_that_is_none_is_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.response_template = {"fields": {"content": {"content": "unheard"}}}
    with pytest.raises(UserError, match="response_template cannot be read"):
        forms_of(tokenizer)
    assert str(forms_of(tokenizer, "none", "none")) == "reasoning none, tool calls none"


@pytest.mark.parametrize("names", [("think", "auto"), ("auto", "hermes")])
def test_a_response_template_beside_another_form_is_refused(names: tuple[str, str]) -> None:
    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.response_template = OWN
    with pytest.raises(UserError, match="another one was given"):
        forms_of(tokenizer, *names)


def test_where_the_reasoning_of_a_response_with_a_grammar_ends() -> None:
    """By template and prompt; what the template renders has those tokens, and is read as it is held."""
    for name in FORMS:
        tokenizer = tokenizer_for(name)
        forms = forms_of(tokenizer)
        ((prompt, response),) = responses(name, [TALK[0], TALK[3]], [])
        constrained = forms.constrained(prompt)
        if "reasoning none" in FORMS[name]:
            assert constrained.thought is None and constrained.make_reader is None
            continue
        thought = constrained.thought
        assert thought is not None and constrained.make_reader is not None
        assert (thought.opener is None) == (name != "qwen3")
        end = "<|channel|>final<|message|>" if name == "harmony" else "</think>"
        assert tokenizer.decode(thought.end) == end
        stream = TextStream(tokenizer, included_special_tokens=constrained.shown_tokens)
        stream.push(response[:-1])
        stream.finish()
        parts = read_response(constrained.make_reader(), stream.text)
        space = "" if name == "harmony" else "\n\n"
        assert parts.content == space + TALK[3]["content"] and TALK[3]["reasoning_content"] in parts.reasoning
        places = [i for i in range(len(response)) if tuple(response[i : i + len(thought.end)]) == thought.end]
        assert tokenizer.decode(response[places[0] + len(thought.end) : -1]) == parts.content
    ((closed, _),) = responses("qwen3", [TALK[0], TALK[3]], [], enable_thinking=False)
    assert forms_of(tokenizer_for("qwen3")).constrained(closed).thought is None
    assert forms_of(tokenizer_for("qwen3"), "none", "none").constrained([1]).thought is None
    begun = tokenizer_for("harmony")("<|start|>assistant<|channel|>final<|message|>")["input_ids"]
    assert forms_of(tokenizer_for("harmony")).constrained(begun).thought is None
    begun = tokenizer_for("harmony")("<|start|>assistant<|channel|>analysis<|message|>I")["input_ids"]
    constrained = forms_of(tokenizer_for("harmony")).constrained(begun)
    assert constrained.thought is not None and constrained.make_reader is not None
    text = " add.<|end|><|start|>assistant<|channel|>final<|message|>4"
    assert read_response(constrained.make_reader(), text) == ResponseParts(" add.", "4")
    reader = forms_of(tokenizer_for("harmony")).reader(begun)
    assert reader is not None and read_response(reader, text) == ResponseParts(" add.", "4")


def test_a_grammar_begins_at_once_where_the_marks_of_reasoning_are_several_tokens(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target")
    for first, second in (("<think>", "</think>"), ("</think>", "<think>")):
        bare = load_tokenizer(folder)
        for added, is_found in (([], False), ([first], False), ([second], True)):
            bare.add_tokens(added)
            assert (forms_of(bare, "think", "none").constrained([5]).thought is not None) is is_found
