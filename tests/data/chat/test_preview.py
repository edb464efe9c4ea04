"""The preview marks exactly what must be produced."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tiny_run import make_target
from tiny_tokenizers import llama2_like

from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.preview import DIM, GREEN, RESET, preview
from eagle_kit.data.chat.renderer import ChatRenderer, TokenizedChat
from eagle_kit.models.loading.source import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(make_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def chat(tokenizer: Any) -> TokenizedChat:
    turns = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "So"},
        {"role": "assistant", "content": "No"},
    )
    (row,) = ChatRenderer(tokenizer).tokenize_chat(Conversation("x", turns, "x"), 1000, Counter())
    return row


def test_without_colour_responses_stand_in_brackets(tokenizer: Any, chat: TokenizedChat) -> None:
    assert preview(chat, tokenizer, color=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧"
        "\n<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n⟦No<|im_end|>⟧"
    )


def test_with_colour_responses_are_green_and_the_rest_dim(tokenizer: Any, chat: TokenizedChat) -> None:
    text = preview(chat, tokenizer, color=True)
    assert f"{GREEN}Yes<|im_end|>{RESET}{DIM}\n<|im_start|>user\nSo<|im_end|>" in text
    assert text.count(GREEN) == text.count(DIM) == 2 and text.count(RESET) == 4 and "⟦" not in text


def test_a_long_chat_is_cut_and_says_so(tokenizer: Any, chat: TokenizedChat) -> None:
    text = preview(chat, tokenizer, color=False, max_tokens=5)
    assert text == f"<|im_start|>user … ({len(chat.ids) - 5} more tokens)"


def test_output_that_is_no_terminal_gets_no_colour(
    tokenizer: Any, chat: TokenizedChat, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "\033" not in preview(chat, tokenizer)


def test_a_chat_without_responses_has_no_marks(tokenizer: Any, chat: TokenizedChat) -> None:
    chat.response[:] = -1
    assert "⟦" not in preview(chat, tokenizer, color=False)


def test_blanks_between_parts_are_kept() -> None:
    tokenizer = llama2_like()
    ids = np.asarray(tokenizer("the cat sat on", add_special_tokens=False)["input_ids"], dtype=np.int32)
    chat = TokenizedChat(ids, np.asarray([-1, 0, 0, *[-1] * (len(ids) - 3)], dtype=np.int32))
    assert preview(chat, tokenizer, color=False) == "the⟦ cat sat⟧ on"
