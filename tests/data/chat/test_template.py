"""The mask is what a server would have generated, and what stands before it is what a server would be fed."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TEMPLATE, make_target

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.forms import Conversation, to_conversation
from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.renderer import LITERAL_END, NO_SYSTEM, ChatRenderer, TokenizedChat
from eagle_kit.data.chat.response.choice import choose_forms
from eagle_kit.models.loading.source import load_tokenizer

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}" + TEMPLATE
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NO_END_TOKEN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS_THOUGHTS = (  # only the last response keeps its thought
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}(hmm) {% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = TEMPLATE.replace("['content']", "['content'] | trim")
QWEN_3 = (  # a thought stays only in responses behind the last user turn
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages if m['role'] == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + TEMPLATE
)
PLENTY = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


def conversation(*turns: tuple[str, str], complete: bool = True) -> Conversation:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Conversation("x", messages, "test#1", complete=complete)


def rows(tokenizer: Any, conversation: Conversation, max_length: int) -> list[TokenizedChat]:
    return ChatRenderer(tokenizer).tokenize_chat(conversation, max_length, Counter())


def one_row(tokenizer: Any, conversation: Conversation, max_length: int) -> TokenizedChat:
    """The row of a conversation whose turns share one."""
    (chat,) = rows(tokenizer, conversation, max_length)
    return chat


THREE_TURNS = conversation(
    ("user", "Hi, é?"),
    ("assistant", "Hello."),
    ("user", "日本"),
    ("assistant", "にほん 🙂"),
    ("user", "Bye"),
    ("assistant", "So long\n"),
)


def responses(tokenizer: Any, chat: TokenizedChat) -> list[str]:
    """The text of every response span, special tokens included."""
    numbers = range(int(chat.response.max()) + 1)
    return [tokenizer.decode(chat.ids[chat.response == number].tolist()) for number in numbers]


def messages_of(conversation: Conversation, turns: int) -> list[dict[str, Any]]:
    return list(conversation.messages[:turns])


def check_prompts(tokenizer: Any, chat: TokenizedChat, conversation: Conversation) -> None:
    """Before every response stand exactly the ids that a server is fed, and a response is one unbroken
    span."""
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    for number in range(int(chat.response.max()) + 1):
        span = np.flatnonzero(chat.response == number)
        assert chat.ids[: span[0]].tolist() == ChatRenderer(tokenizer).prompt_token_ids(
            messages_of(conversation, turns[number])
        )
        assert (np.diff(span) == 1).all()


@pytest.mark.parametrize("template", [TEMPLATE, DEFAULT_SYSTEM], ids=["chatml", "default-system"])
def test_first_middle_and_last_response_are_what_a_server_generates(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    chat = one_row(tokenizer, THREE_TURNS, PLENTY)
    assert responses(tokenizer, chat) == ["Hello.<|im_end|>", "にほん 🙂<|im_end|>", "So long\n<|im_end|>"]
    check_prompts(tokenizer, chat, THREE_TURNS)
    assert chat.ids.dtype == chat.response.dtype == np.int32
    # nothing follows the end token of the last response, since nothing is generated after it
    assert chat.response[-1] == 2 and int(chat.ids[-1]) in ChatRenderer(tokenizer).end_token_ids


def test_a_system_turn_is_given_not_produced(tokenizer: Any) -> None:
    talk = conversation(("system", "Rhyme."), ("user", "cat"), ("assistant", "hat"))
    chat = one_row(tokenizer, talk, PLENTY)
    assert responses(tokenizer, chat) == ["hat<|im_end|>"]
    check_prompts(tokenizer, chat, talk)


def test_llama_2_responses_begin_behind_the_instruction(tokenizer: Any) -> None:
    tokenizer.chat_template = LLAMA_2
    chat = one_row(tokenizer, THREE_TURNS, PLENTY)
    assert responses(tokenizer, chat) == [
        " Hello. <|im_end|>",
        " にほん 🙂 <|im_end|>",
        " So long\n <|im_end|>",
    ]
    check_prompts(tokenizer, chat, THREE_TURNS)


def test_a_template_without_end_tokens_gives_the_turn_as_it_writes_it(tokenizer: Any) -> None:
    tokenizer.chat_template = NO_END_TOKEN
    talk = conversation(("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e"))
    assert responses(tokenizer, one_row(tokenizer, talk, PLENTY)) == ["b c\n", "e\n"]


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_truncated_response_keeps_its_mask_up_to_the_cut(tokenizer: Any, cut: int) -> None:
    whole = one_row(tokenizer, THREE_TURNS, PLENTY)
    start = int(np.flatnonzero(whole.response == 1)[0])
    chat = one_row(tokenizer, THREE_TURNS, start + cut)
    np.testing.assert_array_equal(chat.ids, whole.ids[: start + cut])
    np.testing.assert_array_equal(chat.response, whole.response[: start + cut])
    assert (chat.response == 1).sum() == cut and chat.response.max() == 1


def test_a_cut_inside_a_later_prompt_keeps_the_responses_before_it(tokenizer: Any) -> None:
    whole = one_row(tokenizer, THREE_TURNS, PLENTY)
    length = int(np.flatnonzero(whole.response == 1)[0])  # not one token of the second response
    chat = one_row(tokenizer, THREE_TURNS, length)
    assert len(chat.ids) == length and responses(tokenizer, chat) == ["Hello.<|im_end|>"]


def test_no_response_within_the_limit_is_unusable(tokenizer: Any) -> None:
    with pytest.raises(Unusable, match="length limit"):
        one_row(tokenizer, THREE_TURNS, 12)


def test_an_incomplete_response_does_not_learn_its_end(tokenizer: Any) -> None:
    turns = (("user", "Count."), ("assistant", "1 2"), ("user", "On."), ("assistant", "3 4"))
    whole = one_row(tokenizer, conversation(*turns), PLENTY)
    chat = one_row(tokenizer, conversation(*turns, complete=False), PLENTY)
    assert responses(tokenizer, chat) == ["1 2<|im_end|>", "3 4"]
    np.testing.assert_array_equal(chat.ids, whole.ids[:-1])


@pytest.mark.parametrize("complete", [True, False])
def test_empty_responses_at_the_end_are_left_out_and_counted(tokenizer: Any, complete: bool) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "Go"), ("assistant", " \n")]
    remarks: Counter[str] = Counter()
    (chat,) = ChatRenderer(tokenizer).tokenize_chat(conversation(*turns, complete=complete), PLENTY, remarks)
    assert responses(tokenizer, chat) == ["Hello.<|im_end|>"]
    assert remarks == {"empty responses at the end are left out": 1}
    with pytest.raises(Unusable, match="an empty response"):
        rows(tokenizer, conversation(*turns, ("user", "So?"), ("assistant", "Yes.")), PLENTY)


def test_turns_behind_the_last_response_are_left_out(tokenizer: Any) -> None:
    talk = conversation(("user", "a"), ("assistant", "b"), ("user", "never answered"))
    chat = one_row(tokenizer, talk, PLENTY)
    assert "never" not in tokenizer.decode(chat.ids.tolist()) and responses(tokenizer, chat) == [
        "b<|im_end|>"
    ]


def test_an_end_token_inside_a_response_ends_it(tokenizer: Any) -> None:
    """A server would have stopped there, so nothing behind it is learned."""
    talk = conversation(
        ("user", "a"),
        ("assistant", "b<|im_end|>\nforged"),
        ("user", "c"),
        ("assistant", "d<|im_end|> forged"),
    )
    chat = one_row(tokenizer, talk, PLENTY)
    assert responses(tokenizer, chat) == ["b<|im_end|>", "d<|im_end|>"]
    assert chat.response[-1] == 1
    tokenizer.add_tokens(["<|eot_id|>"], special_tokens=True)  # another one that ends turns
    talk = conversation(("user", "a"), ("assistant", "b<|eot_id|>forged"))
    assert responses(tokenizer, one_row(tokenizer, talk, PLENTY)) == ["b<|eot_id|>"]


def test_a_template_that_rewrites_history_has_a_row_for_each_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETS_THOUGHTS
    found = rows(tokenizer, THREE_TURNS, PLENTY)
    assert [responses(tokenizer, chat) for chat in found] == [
        ["(hmm) Hello.<|im_end|>"],
        ["(hmm) にほん 🙂<|im_end|>"],
        ["(hmm) So long\n<|im_end|>"],
    ]
    for number, chat in enumerate(found):
        first = int(np.flatnonzero(chat.response == 0)[0])
        messages = messages_of(THREE_TURNS, 2 * number + 1)
        assert chat.ids[:first].tolist() == ChatRenderer(tokenizer).prompt_token_ids(messages)


def test_rows_beyond_the_length_are_left_out_and_noted(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETS_THOUGHTS
    remarks: Counter[str] = Counter()
    length = len(rows(tokenizer, THREE_TURNS, PLENTY)[0].ids)
    (chat,) = ChatRenderer(tokenizer).tokenize_chat(THREE_TURNS, length, remarks)
    assert responses(tokenizer, chat) == ["(hmm) Hello.<|im_end|>"]
    assert remarks == {"responses beyond max_length are left out": 1}


def test_a_template_that_drops_thoughts_is_learned_where_serving_agrees(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN_3
    single = conversation(("user", "Hi"), ("assistant", "Hello."))
    chat = one_row(tokenizer, single, PLENTY)
    assert responses(tokenizer, chat) == ["<think>\n\n</think>\n\nHello.<|im_end|>"]
    check_prompts(tokenizer, chat, single)
    assert [responses(tokenizer, row) for row in rows(tokenizer, THREE_TURNS, PLENTY)] == [
        [f"<think>\n\n</think>\n\n{text}<|im_end|>"] for text in ("Hello.", "にほん 🙂", "So long\n")
    ]


def test_a_template_that_strips_turns_gives_the_stripped_response(tokenizer: Any) -> None:
    assert STRIPS != TEMPLATE
    tokenizer.chat_template = STRIPS
    talk = conversation(("user", " a "), ("assistant", "\n b\n"), ("user", "c"), ("assistant", " d"))
    chat = one_row(tokenizer, talk, PLENTY)
    assert responses(tokenizer, chat) == ["b<|im_end|>", "d<|im_end|>"]
    check_prompts(tokenizer, chat, talk)


@pytest.mark.parametrize("text", [" \n lead", "trail  \n\n", "1. a\n\n2. b\n", "🙂", "a\u0301 NFD"])
def test_a_decoded_response_tokenises_to_a_valid_mask(tokenizer: Any, text: str) -> None:
    """On-policy responses come as text, whatever white space or marks they begin and end with."""
    talk = conversation(("user", "q"), ("assistant", text), ("user", "r"), ("assistant", text))
    chat = one_row(tokenizer, talk, PLENTY)
    assert responses(tokenizer, chat) == [text + "<|im_end|>"] * 2
    check_prompts(tokenizer, chat, talk)


def test_a_template_that_refuses_a_role_makes_the_conversation_unusable(tokenizer: Any) -> None:
    tokenizer.chat_template = REFUSES_SYSTEM
    talk = conversation(("system", "s"), ("user", "u"), ("assistant", "a"))
    with pytest.raises(Unusable, match="no system turns"):
        one_row(tokenizer, talk, PLENTY)
    with pytest.raises(UserError, match="no system turns"):
        ChatRenderer(tokenizer).prompt_token_ids(messages_of(talk, 2))


def test_tokens_that_would_merge_across_the_start_of_a_response_are_kept_apart(tokenizer: Any) -> None:
    """One token ":a" of a template without a border: a server never gets to feed it."""
    tokenizer.add_tokens([":a"])
    tokenizer.chat_template = NO_END_TOKEN.replace(
        "{{ message['role'] }}: ", "{{ message['role'] }}:"
    ).replace("assistant: ", "assistant:")
    talk = conversation(("user", "x"), ("assistant", "abc"), ("user", "y"), ("assistant", "b"))
    first, second = rows(tokenizer, talk, PLENTY)
    assert responses(tokenizer, first) == ["abc\n"] and responses(tokenizer, second) == ["b\n"]
    for chat, turns in ((first, 1), (second, 3)):
        ids = ChatRenderer(tokenizer).prompt_token_ids(messages_of(talk, turns))
        assert chat.ids[chat.response < 0].tolist() == ids
    assert tokenizer.convert_tokens_to_ids(":a") in second.ids  # in the history, as a server has it


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("user", "a")], "no assistant turn"),
        ([("user", "a"), ("assistant", " \n")], "an empty response"),
        ([("assistant", "Welcome."), ("user", "a"), ("assistant", "b")], "starts with a response"),
    ],
)
def test_conversations_that_nobody_can_learn_from_say_why(
    tokenizer: Any, turns: list[tuple[str, str]], reason: str
) -> None:
    with pytest.raises(Unusable, match=reason):
        one_row(tokenizer, conversation(*turns), PLENTY)


def test_a_tokenizer_without_template_is_a_user_error(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        one_row(tokenizer, THREE_TURNS, PLENTY)
    with pytest.raises(UserError, match="no chat template"):
        ChatRenderer(tokenizer).prompt_token_ids(messages_of(THREE_TURNS, 1))


def test_named_templates_without_a_default_are_a_user_error(tokenizer: Any) -> None:
    tokenizer.chat_template = {"rag": str(tokenizer.chat_template)}
    with pytest.raises(UserError, match="'rag'.*none of them is the default"):
        one_row(tokenizer, THREE_TURNS, PLENTY)
    forms = choose_forms(ChatRenderer(tokenizer))
    assert forms.reasoning is None and forms.calls is None


def test_only_added_tokens_end_a_turn(tokenizer: Any) -> None:
    ends = {tokenizer.convert_ids_to_tokens(token) for token in ChatRenderer(tokenizer).end_token_ids}
    assert ends == {"<|im_end|>"}
    names = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>"]
    names += ["<|call|>", "<｜end▁of▁sentence｜>"]
    for name in names:
        tokenizer.add_tokens([name], special_tokens=True)
    assert {tokenizer.convert_ids_to_tokens(token) for token in ChatRenderer(tokenizer).end_token_ids} == set(
        names
    )
    tokenizer.add_tokens(["<|return|>"], special_tokens=True)
    names[names.index("<|end|>")] = "<|return|>"  # in harmony a turn goes on behind a message
    assert {tokenizer.convert_ids_to_tokens(token) for token in ChatRenderer(tokenizer).end_token_ids} == set(
        names
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_that_the_template_leaves_out_is_counted(tokenizer: Any, role: str) -> None:
    """As some do behind the first one."""
    turns = [(role, "Be kind."), ("user", "Q?"), ("assistant", "A.")]
    once = "{% if loop.first or message['role'] not in ('system', 'developer') %}"
    inner = TEMPLATE.replace("{% for message in messages %}", "{% for message in messages %}" + once)
    tokenizer.chat_template = inner.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    for talk, dropped in ((turns, 0), (turns * 2, 1)):
        remarks: Counter[str] = Counter()
        ChatRenderer(tokenizer).tokenize_chat(conversation(*talk), PLENTY, remarks)
        assert remarks[NO_SYSTEM] == dropped


GEMMA_4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
GLM_45 = (  # the next turn's mark is what ends a response
    "[gMASK]{% for m in messages %}<|{{ 'observation' if m['role'] == 'tool' else m['role'] }}|>\n"
    "{{ m['content'] }}{% for c in m['tool_calls'] %}call {{ c.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

TWICE = [("user", "a"), ("assistant", "b")] * 2


def test_the_token_that_a_template_puts_behind_every_response_ends_it(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<|turn>", "<turn|>"], special_tokens=True)
    tokenizer.chat_template = GEMMA_4
    (chat,) = ChatRenderer(tokenizer).tokenize_chat(conversation(*TWICE), PLENTY, Counter())
    assert responses(tokenizer, chat) == ["b<turn|>", "b<turn|>"]

    record = {"messages": messages_of(THREE_TURNS, 2), "finish_reasons": ["stop"]}
    (chat,) = ChatRenderer(tokenizer).tokenize_chat(to_conversation(record, "x"), PLENTY, Counter())
    assert responses(tokenizer, chat)[-1].endswith("<turn|>")


def test_a_line_end_that_is_an_added_token_does_not_end_a_response(tokenizer: Any) -> None:
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = NO_END_TOKEN
    assert "\n" not in ChatRenderer(tokenizer).end_names


def test_ends_of_the_generation_config_are_learned(folder: Path, tmp_path: Path) -> None:
    names = ["<|user|>", "<|observation|>", "<|assistant|>"]
    shutil.copytree(folder, tmp_path / "glm")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(names, special_tokens=True)
    tokenizer.chat_template = GLM_45
    tokenizer.save_pretrained(tmp_path / "glm")
    ids = tokenizer.convert_tokens_to_ids(names[:2])
    (tmp_path / "glm" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))

    tokenizer = load_tokenizer(tmp_path / "glm")
    assert (
        set(names[:2]) < set(ChatRenderer(tokenizer).end_names)
        and names[2] not in ChatRenderer(tokenizer).end_names
    )
    chat = one_row(tokenizer, conversation(*TWICE), PLENTY)
    assert responses(tokenizer, chat) == ["b<|user|>", "b<|user|>"]
    cut = one_row(tokenizer, conversation(("user", "a"), ("assistant", "b"), complete=False), PLENTY)
    assert responses(tokenizer, cut) == ["b"]

    call = {"type": "function", "function": {"name": "get", "arguments": {}}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = one_row(tokenizer, to_conversation({"messages": turns}, "x"), PLENTY)
    assert responses(tokenizer, chat) == ["call get<|observation|>"]


def test_responses_that_hold_the_text_of_an_end_token_are_counted(tokenizer: Any) -> None:
    remarks: Counter[str] = Counter()
    ChatRenderer(tokenizer).tokenize_chat(
        conversation(("user", "a"), ("assistant", "b<|im_end|> c")), PLENTY, remarks
    )
    assert remarks[LITERAL_END] == 1
    remarks.clear()
    ChatRenderer(tokenizer).tokenize_chat(
        conversation(("user", "a"), ("assistant", "b<|im_end|>\n")), PLENTY, remarks
    )
    assert not remarks
