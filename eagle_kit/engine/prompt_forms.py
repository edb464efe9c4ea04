"""Forms in which callers of ``LLM`` give prompts: one or several, as texts, token ids or chats.

Arrays and tensors are token ids. A list is one prompt if it is token ids or the messages of one chat.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.data.chat.messages import ChatPrompt, Unusable, read_message, read_tools

TextPrompt = str | list[int]
"""Text, or its token ids."""
Conversation = str | list[int] | list[dict[str, Any]] | ChatPrompt
"""User turn, token ids of a rendered chat, messages, or messages with tools and arguments of the template."""
ID_KEYS = ("prompt_token_ids", "input_ids")
"""Keys of token ids: vLLM's, and those of a tokenizer's result."""
TEXT_KEYS = ("prompt", *ID_KEYS)
"""Keys of the text of a prompt."""
TOKENIZER_KEYS = ("attention_mask", "token_type_ids")
"""Keys of a tokenizer's result that say nothing more of a text without padding."""
REMEDIES = {
    "cache_salt": "Give SamplingParams(cache_salt=...).",
    "multi_modal_data": "Leave it out: prompts are text.",
    "mm_processor_kwargs": "Leave it out: prompts are text.",
    "prompt_embeds": "Give a text or token ids.",
}
"""What to do about a key that prompts of vLLM may have."""


def read_texts(given: Any) -> list[TextPrompt]:
    """Read one text or several, each as text, token ids, or a mapping with ``prompt``, ``prompt_token_ids``
    or ``input_ids``.

    Raises:
        UserError: something else is given, or the messages of a chat.
    """
    given = _as_lists(given)
    is_mapping = isinstance(given, Mapping)
    if is_mapping:  # of one text, or the result of a tokenizer for several
        given = _of_mapping(given)

    # An empty list has no texts; an empty list in a mapping is a text without tokens.
    if isinstance(given, str) or (is_token_ids(given) and (given or is_mapping)):
        return [_read_text(given)]
    if not isinstance(given, Sequence):
        raise _no_prompt(given)
    return [_read_text(each) for each in given]


def read_chats(given: Any) -> list[Conversation]:
    """Read one conversation or several.

    Raises:
        UserError: something else is given.
    """
    given = _as_lists(given)
    if isinstance(given, str | ChatPrompt) or (given and is_token_ids(given)) or _is_messages(given):
        return [_read_chat(given)]
    if isinstance(given, Mapping):
        raise _no_conversation(given, "One message was given instead of a conversation.")
    if not isinstance(given, Sequence):
        raise _no_prompt(given)
    return [_read_chat(each) for each in given]


def with_arguments(
    conversation: Conversation, tools: Any, chat_template_kwargs: Mapping[str, Any] | None
) -> Conversation:
    """Add definitions of tools and arguments of the chat template to messages.

    Args:
        tools: definitions as OpenAI has them; None for none.

    Raises:
        UserError: the conversation has its own, or is rendered already, or a tool or message is none.
    """
    if not tools and not chat_template_kwargs:
        return conversation
    if isinstance(conversation, ChatPrompt) or is_token_ids(conversation):
        raise UserError(
            "tools or chat_template_kwargs were given beside a conversation that is no list of messages.",
            "Give messages.",
        )
    if isinstance(conversation, str):
        conversation = [{"role": "user", "content": conversation}]
    try:
        messages = [read_message(message) for message in conversation]
        return ChatPrompt(messages, read_tools(tools), chat_template_kwargs or {})
    except Unusable as reason:
        raise UserError(f"The conversation has {reason}.", "Correct it.") from None


def is_token_ids(value: Any) -> bool:
    """True for a list of whole numbers, an empty one included."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return False
    return all(_is_whole(each) for each in value)


def _is_whole(value: Any) -> bool:
    """True for a whole number of Python, NumPy or torch, not for an array of them."""
    is_single = getattr(value, "ndim", 0) == 0
    return is_single and hasattr(value, "__index__") and not isinstance(value, bool)


def _is_messages(value: Any) -> bool:
    """True for a list that begins with a message."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def _as_lists(value: Any) -> Any:
    """An array or a tensor as lists of numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _read_text(given: Any) -> TextPrompt:
    """Read one text. Raises UserError."""
    given = _as_lists(given)
    if isinstance(given, Mapping):
        given = _of_mapping(given)
    if isinstance(given, str):
        return given
    if is_token_ids(given):
        return [operator.index(token) for token in given]
    if isinstance(given, ChatPrompt) or _is_messages(given):
        raise UserError(
            "generate was given messages, and it continues texts.", "Give the conversation to LLM.chat."
        )
    raise _no_prompt(given)


def _of_mapping(given: Mapping[str, Any]) -> Any:
    """Text or token ids of a mapping. Raises UserError."""
    if "role" in given:
        raise UserError(
            "generate was given a message, and it continues texts.", "Give the conversation to LLM.chat."
        )
    values = {key: value for key, value in given.items() if value is not None}
    found = [key for key in TEXT_KEYS if key in values]
    if not found:
        raise _no_prompt(dict(given))
    _check_keys(values, found)
    return _as_lists(values[found[0]])


def _check_keys(given: Mapping[str, Any], found: list[str]) -> None:
    """Raise UserError for what a prompt has besides the key ``found``, and nothing would read."""
    if len(found) > 1:
        raise UserError(f"A prompt has both {found[0]} and {found[1]}.", "Give one of them.")
    for key in given:
        if key not in (*found, *TOKENIZER_KEYS):
            remedy = REMEDIES.get(key, f"Leave it out; a prompt has one of {', '.join(TEXT_KEYS)}.")
            raise UserError(f"A prompt has the key {shown(key)}, which nothing here reads.", remedy)
    if _has_zero(given.get("attention_mask", 1)):
        raise UserError(
            "The attention_mask of a prompt has zeros, so its token ids have padding.",
            "Tokenise without padding; prompts of a call may have different lengths.",
        )


def _has_zero(mask: Any) -> bool:
    """True if a number of an attention mask, given as numbers, lists or an array, is zero."""
    mask = _as_lists(mask)
    if isinstance(mask, Sequence):
        return any(_has_zero(each) for each in mask)
    return bool(mask == 0)


def _read_chat(given: Any) -> Conversation:
    """Read one conversation. Raises UserError."""
    given = _as_lists(given)
    if isinstance(given, str | ChatPrompt):
        return given
    if is_token_ids(given):
        return [operator.index(token) for token in given]
    if _is_messages(given):
        return list(given)
    if isinstance(given, Mapping):
        raise _no_conversation(given, "A message stands where a conversation is expected.")
    raise _no_prompt(given)


def _no_conversation(given: Mapping[str, Any], cause: str) -> UserError:
    """Error for a mapping in place of a conversation: ``cause`` if it is a message."""
    if "messages" in given:
        return UserError(
            "A conversation was given as a mapping with messages.",
            "Give the list of messages, and tools and chat_template_kwargs as keywords.",
        )
    return UserError(cause, "Put the messages of a conversation in a list.")


def _no_prompt(given: Any) -> UserError:
    return UserError(
        f"{shown(given)} is no prompt.",
        "Give a text, token ids or, to LLM.chat, messages with role and content; several of them in a list.",
    )
