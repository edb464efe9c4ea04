"""Conversations through the tokenizer's own chat template, and which tokens the assistant must produce.

The mask is what serving would have generated. For every assistant turn the template is rendered up to its
generation prompt; the reply is what the full rendering puts behind that, through the end-of-turn token. Token
ids before the reply must equal the ids a server would be given; a conversation where they do not (templates
that rewrite history, tokens that merge across the border) is refused with the reason, never trained on.

Legend: n tokens of a conversation.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import is_unicode
from eagle_kit.data.chat.records import Conversation, Unusable


@dataclass
class TokenizedChat:
    """``ids`` int32 ``[n]``; ``reply`` int32 ``[n]``, the number of the reply that must produce the token,
    counted from 0 in the conversation, -1 for tokens that are given."""

    ids: np.ndarray
    reply: np.ndarray


def render(tokenizer: Any, messages: list[dict[str, Any]], *, generation_prompt: bool, **options: Any) -> str:
    """The chat template as text.

    Args:
        options: of the template, such as ``tools``.

    Raises:
        UserError: there is no template.
        Unusable: it rejects the turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "The tokenizer has no chat template.",
            "Use an instruction-tuned target, or set tokenizer.chat_template.",
        )
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **options
        )
    except TemplateError as error:
        raise Unusable(f"the chat template refuses it: {error}") from None


def prompt_token_ids(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Messages and the generation prompt as a server feeds them; ``options`` as for :func:`render`.

    Raises:
        UserError: there is no template, it refuses the messages, or they are no text.
    """
    try:
        text = render(tokenizer, messages, generation_prompt=True, **options)
    except Unusable as reason:
        raise UserError(
            f"The messages cannot be rendered: {reason}.", "Order the turns as the template asks."
        ) from None
    if not is_unicode(text):
        raise UserError("The messages hold half a character (a lone surrogate).", "Write them in UTF-8.")
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def tokenize_chat(tokenizer: Any, conversation: Conversation, max_length: int) -> TokenizedChat:
    """Ids and mask of one conversation, cut at ``max_length`` tokens.

    Raises:
        Unusable: no reply within ``max_length``, an empty reply, or a rendering that serving would not have
            produced.
        UserError: the tokenizer has no chat template.
    """
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise Unusable("no assistant turn")
    messages = messages[: last + 1]
    text = render(tokenizer, messages, generation_prompt=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    reply = np.full(len(ids), -1, dtype=np.int32)
    for number, turn in enumerate(i for i, message in enumerate(messages) if message["role"] == "assistant"):
        if not messages[turn]["content"].strip():
            raise Unusable("an empty reply")
        if turn == 0:
            raise Unusable("it starts with a reply")
        prefix = render(tokenizer, messages[:turn], generation_prompt=True)
        through = text if turn == last else render(tokenizer, messages[: turn + 1], generation_prompt=False)
        if not (text.startswith(prefix) and text.startswith(through)):
            raise Unusable("the chat template renders earlier turns differently later on")
        first = int(np.searchsorted(starts, len(prefix)))
        if first >= max_length:
            break
        given = tokenizer(prefix, add_special_tokens=False, verbose=False)["input_ids"]
        if len(given) != first or not np.array_equal(given, ids[:first]):
            raise Unusable("tokens merge across the start of a reply")
        stop = _reply_end(tokenizer, ids, first, int(np.searchsorted(starts, len(through))))
        reply[first:stop] = number
        if turn == last:
            if not conversation.complete:
                stop -= bool(ids[stop - 1] in end_tokens(tokenizer))
            ids, reply = ids[:stop], reply[:stop]
    if not (reply[:max_length] >= 0).any():
        raise Unusable("no reply within the length limit")
    return TokenizedChat(ids[:max_length], reply[:max_length])


def end_tokens(tokenizer: Any) -> set[int]:
    """Ids that end a turn: the tokenizer's end token and whichever added tokens name an end of turn."""
    ends = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    added = tokenizer.get_added_vocab()
    names = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "</s>")
    return ends | {added[name] for name in names if name in added}


def _reply_end(tokenizer: Any, ids: np.ndarray, first: int, limit: int) -> int:
    """Index behind the first end-of-turn token of ``ids[first:limit]``, where a server stops; or limit."""
    ends = end_tokens(tokenizer)
    for index in range(first, limit):
        if int(ids[index]) in ends:
            return index + 1
    return limit


def template_hash(tokenizer: Any) -> str:
    """A short hash of a tokenizer's chat template; empty without one."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""
