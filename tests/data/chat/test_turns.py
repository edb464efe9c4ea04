"""Prompts of long conversations are those of whole renderings, for few messages rendered."""

from collections import Counter
from typing import Any

import pytest
from chat_templates import tokenizer_for

from eagle_kit.data.chat import turns
from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.data.chat.turns import WindowedPrompts, can_be_windowed, sought_texts

CALL = {"type": "function", "function": {"name": "get", "arguments": {"x": "1"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Reads x.",
        "parameters": {"type": "object", "properties": {}},
    },
}
FLAG = (
    "{% set ns = namespace(off=false) %}{% for m in messages %}"
    "{% if '/no_think' in m.content %}{% set ns.off = true %}{% endif %}"
    "{% if '/think' in m.content %}{% set ns.off = false %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if ns.off %}{{ 'off' }}{% endif %}{% endif %}"
)
"""As Nemotron's: a word in any earlier message decides the generation prompt."""
COUNTS = (
    "{{ '<|im_start|>system\n' ~ (messages|length - 1) // 2 ~ ' turns<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The beginning of every prompt depends on the number of turns."""


def talk(num_turns: int, system: bool = False) -> Conversation:
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for i in range(num_turns):
        messages.append({"role": "user", "content": f"question {i} in the hall"})
        messages.append({"role": "assistant", "content": f"the answer {i} in all"})
    return Conversation("x", tuple(messages), "x")


def agent(num_users: int, num_calls: int, thinks: bool) -> Conversation:
    messages: list[dict[str, Any]] = []
    for i in range(num_users):
        messages.append({"role": "user", "content": f"question {i}"})
        for k in range(num_calls):
            thought = {"reasoning_content": f"thought {k}"} if thinks else {}
            messages.append({"role": "assistant", "content": "", "tool_calls": [CALL], **thought})
            messages.append({"role": "tool", "content": f"result {k}"})
        messages.append({"role": "assistant", "content": f"answer {i}"})
    return Conversation("x", tuple(messages), "x", (TOOL,))


def responses_of(conversation: Conversation) -> list[int]:
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def rows_of(tokenizer: Any, conversation: Conversation) -> tuple[list[tuple[list[int], list[int]]], Counter]:
    remarks: Counter[str] = Counter()
    rows = ChatRenderer(tokenizer).tokenize_chat(conversation, 100_000, remarks)
    return [(row.ids.tolist(), row.response.tolist()) for row in rows], remarks


CASES = {
    "talk": talk(15),
    "with a system": talk(15, system=True),
    "calls": agent(3, 5, thinks=False),
    "thoughts and calls": agent(1, 11, thinks=True),
}


WITH_TOOLS = ("hermes", "qwen3", "harmony")
TALKS = ("talk", "with a system")
PAIRS = [
    *((name, case) for name in ("chatml", "llama3", "deepseek_r1", "gemma", *WITH_TOOLS) for case in TALKS),
    *((name, case) for name in WITH_TOOLS for case in CASES if case not in TALKS),
]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_rows_from_windows_are_those_of_whole_renderings(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_for(name)
    conversation = CASES[case]
    assert len(conversation.messages) > 2 * turns.WINDOW
    from_windows = rows_of(tokenizer, conversation)
    monkeypatch.setattr(turns, "WINDOW", 10_000)
    assert from_windows == rows_of(tokenizer, conversation)


def test_a_word_far_before_decides_where_the_template_looks_for_it() -> None:
    conversation = talk(20)
    messages = list(conversation.messages)
    messages[2] = {"role": "user", "content": "/no_think"}
    messages[30] = {"role": "user", "content": "/think"}
    flagged = Conversation("x", tuple(messages), "x")
    assert sought_texts(FLAG) == {"/no_think", "/think"}
    assert can_be_windowed(FLAG, conversation)
    assert not can_be_windowed(FLAG, flagged)


def test_rows_of_a_template_that_counts_messages_are_rendered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_for("chatml")
    conversation = talk(12)
    before = tokenizer.chat_template
    tokenizer.chat_template = COUNTS
    try:
        found = rows_of(tokenizer, conversation)
        assert len(found[0]) == 12
        monkeypatch.setattr(turns, "WINDOW", 10_000)
        assert found == rows_of(tokenizer, conversation)
    finally:
        tokenizer.chat_template = before


def test_twice_the_turns_are_twice_the_messages_rendered() -> None:
    renderer = ChatRenderer(tokenizer_for("chatml"))
    sizes: list[int] = []

    def counted(prompt: ChatPrompt) -> str:
        sizes.append(len(prompt.messages))
        return renderer.render(prompt, generation_prompt=True)

    totals = []
    for num_turns in (50, 100):
        sizes.clear()
        conversation = talk(num_turns)
        prompts = WindowedPrompts(counted, conversation)
        texts = [prompts.at(turn).text for turn in responses_of(conversation)]
        totals.append(sum(sizes))
        last = conversation.prompt(2 * num_turns - 1)
        assert texts[-1] == renderer.render(last, generation_prompt=True)
    assert totals[1] < 2.1 * totals[0]


def test_a_long_row_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tokenised besides are the texts between an added token and a response."""
    renderer = ChatRenderer(tokenizer_for("chatml"))
    tokenized: list[int] = []
    token_ids = renderer.token_ids

    def counted(text: str) -> list[int]:
        tokenized.append(len(text))
        return token_ids(text)

    monkeypatch.setattr(renderer, "token_ids", counted)
    (row,) = renderer.tokenize_chat(talk(40), 100_000, Counter())
    assert row.response.max() == 39
    assert 0 < sum(tokenized) < 200
