"""Conversations as rows of tokens, and which tokens the assistant must produce.

The mask is what serving would have generated. Every assistant turn is rendered as a server renders its
prompt, and the reply is what the template puts behind that, through the end-of-turn token. Where the prompt
of a turn begins with the row of the turn before, both share a row; a template that renders earlier turns
differently later on (Qwen3 and DeepSeek-R1 drop earlier reasoning) gives the turn a row of its own. So the
tokens before every reply are those that a server would be given for it; a conversation where they are not
(tokens that merge across the border) is refused with the reason, never trained on.

Legend: n tokens of a row.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eagle_kit.data.chat.forms import Conversation, RawText, Record, TokenRow
from eagle_kit.data.chat.messages import Message, Unusable, is_empty
from eagle_kit.data.chat.reply.tags import END_THINK, OPENED, THINK, opens_thought
from eagle_kit.data.chat.template import (
    chat_template,
    check_prompt,
    cut_tokens,
    drops_system,
    end_names,
    render,
    text_token_ids,
)
from eagle_kit.data.chat.turns import TurnPrompt, TurnPrompts, can_be_windowed

THOUGHT = re.compile(r"\A(?:\s*<think>)?.*?</think>\s*", re.DOTALL)
TAG = re.compile(r"\A\s*<think>\n?")
NO_PLACE = "reasoning that the chat template has no place for is left out"
ENDED = "reasoning is left out where the prompt has ended it, as with thinking off"
TOO_LATE = "replies beyond max_length are left out"
CUT = "a reply is cut at max_length"
OTHERWISE = "regenerated replies that the chat template renders otherwise are left out"
NO_SYSTEM = "a system message that the chat template has no place for is left out"
LITERAL_END = "a reply that holds the text of an end token is cut there"
EMPTY_END = "empty replies at the end are left out"


@dataclass
class TokenizedChat:
    """``ids`` int32 ``[n]``; ``reply`` int32 ``[n]``, the number of the reply that must produce the token,
    counted from 0 in the row, -1 for tokens that are given; ``turns``, the message that each reply is."""

    ids: np.ndarray
    reply: np.ndarray
    turns: tuple[int, ...] = ()


@dataclass
class _Row:
    """Text of a row, and for each of its replies the characters of it before and through the reply, and the
    message that it is."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)


def tokenize(tokenizer: Any, record: Record, max_length: int, remarks: Counter[str]) -> list[TokenizedChat]:
    """Rows of one record of any form; arguments and errors as of :func:`tokenize_chat`."""
    if isinstance(record, RawText):
        return _tokenize_text(tokenizer, record, max_length)
    if isinstance(record, TokenRow):
        return _tokens_as_row(tokenizer, record, max_length, remarks)
    return tokenize_chat(tokenizer, record, max_length, remarks)


def _tokenize_text(tokenizer: Any, record: RawText, max_length: int) -> list[TokenizedChat]:
    """Rows of a text, cut every ``max_length`` tokens; it begins as a prompt of the completions API does."""
    bos = tokenizer.bos_token
    has_bos = bool(bos) and record.text.startswith(bos)
    found = tokenizer(record.text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    ids = np.asarray(found, dtype=np.int32)
    rows = []
    for start in range(0, len(ids), max_length):
        row = ids[start : start + max_length]
        reply = np.zeros(len(row), dtype=np.int32)
        reply[0] = -1
        rows.append(TokenizedChat(row, reply))
    rows = [row for row in rows if len(row.ids) > 1]
    if not rows:
        raise Unusable("a text of one token")
    return rows


def _tokens_as_row(
    tokenizer: Any, record: TokenRow, max_length: int, remarks: Counter[str]
) -> list[TokenizedChat]:
    if max(record.ids, default=0) >= len(tokenizer):
        raise Unusable(f"a token id above the tokenizer's last, {len(tokenizer) - 1}")
    ids = np.asarray(record.ids, dtype=np.int32)
    is_learned = np.asarray(record.is_learned, dtype=bool)

    # Learned tokens side by side are one reply.
    begins = is_learned & ~np.concatenate(([False], is_learned[:-1]))
    reply = np.where(is_learned, np.cumsum(begins) - 1, -1).astype(np.int32)
    row = TokenizedChat(ids[:max_length], reply[:max_length])
    if not (row.reply >= 0).any():
        raise Unusable("no token to learn within the length limit")
    if len(ids) > max_length and (reply[max_length:] >= 0).any():
        remarks[CUT if reply[max_length] >= 0 else TOO_LATE] += 1
    return [row]


def tokenize_chat(
    tokenizer: Any, conversation: Conversation, max_length: int, remarks: Counter[str]
) -> list[TokenizedChat]:
    """Rows of one conversation, each cut at ``max_length`` tokens.

    Args:
        remarks: counts what of the conversation is left out.

    Raises:
        Unusable: no reply within ``max_length``, an empty reply before another, something that the template
            leaves out, or a rendering that serving would not have produced.
        UserError: the tokenizer has no chat template.
    """
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not turns:
        raise Unusable("no assistant turn")
    if turns[0] == 0:
        raise Unusable("it starts with a reply")
    noted: Counter[str] = Counter()
    messages = conversation.messages
    while turns and is_empty(messages[turns[-1]]) and not _begun_thought(tokenizer, conversation, turns[-1]):
        turns.pop()
        conversation = replace(conversation, complete=True)
        noted[EMPTY_END] = 1
    if not turns or any(is_empty(messages[turn]) for turn in turns[:-1]):
        raise Unusable("an empty reply")
    is_generated = _generated(conversation, turns[-1]) is not None  # and is not rendered
    check_prompt(tokenizer, conversation.prompt(turns[-1] if is_generated else turns[-1] + 1))
    if drops_system(tokenizer, conversation.prompt(turns[-1])):
        noted[NO_SYSTEM] = 1
    if turns[-1] in conversation.not_learned:
        conversation = replace(conversation, complete=True)  # the last reply that is learned has its end
    turns = [turn for turn in turns if turn not in conversation.not_learned]
    if not turns:
        raise Unusable("no reply that is to be learned")
    chats: list[TokenizedChat] = []
    rows = _rows(tokenizer, conversation, turns, noted)
    if not rows:
        raise Unusable("the chat template renders the regenerated replies otherwise")
    for row in rows:
        chat = _encode(tokenizer, row, max_length)
        if chat is not None:
            chats.append(chat)
            continue
        for turn, (start, stop) in zip(row.turns, row.spans, strict=True):
            chats.append(_encode_turn(tokenizer, row.text, start, stop, turn))
    num_replies = sum(int(chat.reply.max()) + 1 for chat in chats)
    if any(len(chat.ids) > max_length and chat.reply[max_length] >= 0 for chat in chats):
        noted[CUT] = 1
    chats = [TokenizedChat(chat.ids[:max_length], chat.reply[:max_length], chat.turns) for chat in chats]
    chats = [chat for chat in chats if (chat.reply >= 0).any()]
    if not chats:
        raise Unusable("no reply within the length limit")
    if num_replies > sum(int(chat.reply.max()) + 1 for chat in chats):
        noted[TOO_LATE] = 1
    remarks.update(noted.keys())
    return chats


class _Otherwise(Exception):
    """A whole rendering differs from that of a window."""


def _rows(tokenizer: Any, conversation: Conversation, turns: list[int], noted: Counter[str]) -> list[_Row]:
    if can_be_windowed(tokenizer, conversation):
        found: Counter[str] = Counter()
        try:
            rows = _rows_of(tokenizer, conversation, turns, found, is_windowed=True)
        except _Otherwise:
            pass
        else:
            noted.update(found)
            return rows
    return _rows_of(tokenizer, conversation, turns, noted, is_windowed=False)


def _rows_of(
    tokenizer: Any, conversation: Conversation, turns: list[int], noted: Counter[str], is_windowed: bool
) -> list[_Row]:
    ends = end_names(tokenizer)
    prompts = TurnPrompts(tokenizer, conversation, is_windowed)
    rows: list[_Row] = []
    for number, turn in enumerate(turns, 1):
        is_last = turn == turns[-1]
        is_checked = is_windowed and (is_last or number & (number - 1) == 0)

        # The prompt, and the reply behind it.
        found = prompts.at(turn)
        reply = _turn_reply(tokenizer, found, ends, noted, is_last)
        if is_checked:
            text = prompts.whole(turn)
            seen = TurnPrompt(text, replace(conversation, messages=conversation.messages[: turn + 1]), text)
            if text != found.text or reply != _turn_reply(tokenizer, seen, ends, Counter(), is_last):
                raise _Otherwise
        if reply is None:
            noted[OTHERWISE] += 1
            continue

        # A row goes on as long as the template does not rewrite it.
        if not rows or not found.text.startswith(rows[-1].text):
            rows.append(_Row(""))
        rows[-1].text = found.text + reply
        rows[-1].spans.append((len(found.text), len(found.text) + len(reply)))
        rows[-1].turns.append(turn)
    return rows


def _turn_reply(
    tokenizer: Any, found: TurnPrompt, ends: list[str], noted: Counter[str], is_last: bool
) -> str | None:
    """The reply behind a prompt, with its end; None for a regenerated one that is rendered otherwise."""
    conversation = found.conversation
    turn = found.turn
    prompt = found.window_text
    if (generated := _generated(conversation, turn)) is not None:
        return generated
    if is_last and (begun := _begun_thought(tokenizer, conversation, turn)):
        return TAG.sub("", begun) if opens_thought(prompt) else begun
    written = _reply(tokenizer, conversation, turn, prompt, noted)
    reply, is_ended = _until_end(written, ends)
    end = next(end for end in ends if reply.endswith(end)) if is_ended else ""
    reply = reply.removesuffix(end)
    message = conversation.messages[turn]
    if any(message["content"].partition(end)[2].strip() for end in ends):
        noted[LITERAL_END] += 1
    if not is_ended:
        end = _end_of_next(tokenizer, found, written, ends)
    if conversation.regenerated and not message.keys() & {"tool_calls", "reasoning_content"}:
        text = message["content"]
        text = TAG.sub("", text) if opens_thought(prompt) else text
        if text.split() != reply.split():
            return None
        reply = text  # white space too, which templates strip
    return reply + end if conversation.complete or not is_last else reply


def _end_of_next(tokenizer: Any, found: TurnPrompt, reply: str, ends: list[str]) -> str:
    """The end token with which a template begins the turn behind a reply, as GLM-4.5's does, if any."""
    messages = found.conversation.messages
    role = "tool" if "tool_calls" in messages[-1] else "user"
    behind = replace(found.conversation, messages=(*messages, {"role": role, "content": "~"}))
    try:
        text = render(tokenizer, behind.prompt(len(behind.messages)), generation_prompt=False)
    except Unusable:
        return ""
    start = found.window_text + reply
    if not text.startswith(start):
        return ""
    return next((end for end in ends if text.startswith(end, len(start))), "")


def _generated(conversation: Conversation, turn: int) -> str | None:
    """The regenerated reply number ``turn`` as it was written, with its end; None where it was not read into
    parts."""
    return conversation.messages[turn].get("generated") if conversation.regenerated else None


def _begun_thought(tokenizer: Any, conversation: Conversation, turn: int) -> str:
    """The last reply, the assistant's message number ``turn``, as it was generated if it was cut before its
    thought ended: the template would end the thought, and take what there is of it for the answer. Empty for
    any other reply."""
    message = conversation.messages[turn]
    thought, text = message.get("reasoning_content"), message["content"]
    knows_thoughts = END_THINK in chat_template(tokenizer, conversation.tools)
    has_ended = END_THINK in text or "tool_calls" in message or (thought and text.strip())
    if conversation.complete or not knows_thoughts or has_ended:
        return ""
    return f"{THINK}\n{thought}" if thought else text


def _until_end(reply: str, ends: list[str]) -> tuple[str, bool]:
    """A reply through the first end-of-turn token, where a server stops, and whether there is one."""
    places = [place + len(end) for end in ends if (place := reply.find(end)) >= 0]
    return (reply[: min(places)], True) if places else (reply, False)


def _reply(tokenizer: Any, conversation: Conversation, turn: int, prompt: str, noted: Counter[str]) -> str:
    """What the model must write behind ``prompt`` for the assistant's message number ``turn``."""

    def through(message: Message) -> str:
        given = conversation.prompt(turn)
        messages = [*given.messages, message]
        return render(tokenizer, replace(given, messages=messages), generation_prompt=False)

    message = conversation.messages[turn]
    thought, plain = _split(message)
    text = through(message)
    if text.startswith(prompt) and _without_tags(thought) in text[len(prompt) :]:
        return text[len(prompt) :]
    bare = through(plain)
    knows_thoughts = END_THINK in chat_template(tokenizer, conversation.tools)
    if bare.startswith(prompt) and (not knows_thoughts or prompt.rstrip().endswith(END_THINK)):
        noted[ENDED if knows_thoughts else NO_PLACE] += 1
        return bare[len(prompt) :]
    # The template drops the thought even of the last reply (DeepSeek-R1): it is written as the model does.
    opening = OPENED.search(prompt)
    head = prompt[: opening.start()] if opening else prompt
    if not knows_thoughts or not bare.startswith(head):
        mark = prompt.removeprefix(render(tokenizer, conversation.prompt(turn), generation_prompt=False))
        return _behind_mark(text, through(_changed(message)), mark, thought)
    if "reasoning_content" in message or not thought:
        thought = f"{THINK}\n{_without_tags(thought)}\n{END_THINK}\n\n"
    written = TAG.sub("", thought)
    return (written if opening else f"{THINK}\n{written}") + bare[len(head) :]


def _behind_mark(text: str, changed: str, mark: str, thought: str) -> str:
    """The reply in a rendering whose history differs from the prompt's, since the template drops the thought
    before a call once an answer follows (gpt-oss): what stands behind the last generation prompt before the
    first character that another reply would change. Raises :class:`Unusable` where there is none."""
    common = next((i for i, (one, other) in enumerate(zip(text, changed, strict=False)) if one != other), 0)
    start = text.rfind(mark, 0, common)
    if not mark or start < 0 or _without_tags(thought) not in text[start:]:
        raise Unusable("the chat template does not render the reply behind its generation prompt")
    return text[start + len(mark) :]


def _changed(message: Message) -> Message:
    """Another reply of the same form."""
    texts = {name: f"~{message[name]}" for name in ("content", "reasoning_content") if message.get(name)}
    calls = [
        call | {"function": call["function"] | {"name": f"~{call['function']['name']}"}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **texts} | ({"tool_calls": calls} if calls else {})


def _split(message: Message) -> tuple[str, Message]:
    """The thought of a reply, from its own field or the beginning of the text (with its tags), and the reply
    without it."""
    plain = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "reasoning_content" in message:
        return message["reasoning_content"], plain
    found = THOUGHT.match(message["content"])
    if found is None:
        return "", message
    return found.group(), {**plain, "content": message["content"][found.end() :]}


def _without_tags(thought: str) -> str:
    return thought.strip().removeprefix(THINK).removesuffix(END_THINK).strip()


def _encode(tokenizer: Any, row: _Row, max_length: int | None = None) -> TokenizedChat | None:
    """Tokens of a row; None where one of them, among the first ``max_length``, has characters of a prompt and
    of its reply."""
    encoded = tokenizer(row.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    reply = np.full(len(ids), -1, dtype=np.int32)
    prefixes = _Prefixes(tokenizer, row.text, ids, starts)
    for number, (start, stop) in enumerate(row.spans):
        first, last = np.searchsorted(starts, (start, stop)).tolist()
        reply[first:last] = number
        if max_length is not None and first >= max_length:
            continue
        if not prefixes.are_tokens(start, first):
            return None
    return TokenizedChat(ids, reply, tuple(row.turns))


class _Prefixes:
    """Tells whether the tokens of the beginning of a text are the first tokens of the text.

    A tokenizer cuts a text at added tokens before anything else, so that what lies in front of one does not
    depend on what follows. The beginning is therefore tokenised from its last added token on.
    """

    def __init__(self, tokenizer: Any, text: str, ids: np.ndarray, starts: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._ids = ids
        self._starts = starts
        self._names = cut_tokens(tokenizer, len(tokenizer))
        numbers = np.fromiter(self._names, dtype=np.int64, count=len(self._names))
        self._cuts = np.flatnonzero(np.isin(ids, numbers))
        self._pieces: dict[str, list[int]] = {}

    def are_tokens(self, stop: int, num_tokens: int) -> bool:
        """True where ``text[:stop]`` has the first ``num_tokens`` tokens of the text."""
        cut = self._cut_before(num_tokens)
        start = int(self._starts[cut]) if cut else 0
        piece = self._text[start:stop]
        if piece not in self._pieces:
            self._pieces[piece] = text_token_ids(self._tokenizer, piece)
        return np.array_equal(self._pieces[piece], self._ids[cut:num_tokens])

    def _cut_before(self, num_tokens: int) -> int:
        """Number of the last added token among the first ``num_tokens``; 0 where there is none."""
        place = int(np.searchsorted(self._cuts, num_tokens)) - 1
        if place < 0:
            return 0
        cut = int(self._cuts[place])
        name = self._names[int(self._ids[cut])]
        return cut if self._text.startswith(name, int(self._starts[cut])) else 0


def _encode_turn(tokenizer: Any, text: str, start: int, stop: int, turn: int) -> TokenizedChat:
    """Tokens of one turn of a row, whose prompt and reply are tokenised apart where a token would join them:
    a server feeds the prompt's own. Raises :class:`Unusable` for a tokenizer that writes a text apart
    differently."""
    chat = _encode(tokenizer, _Row(text[:stop], [(start, stop)], [turn]))
    if chat is not None:
        return chat
    given, said = (text_token_ids(tokenizer, part) for part in (text[:start], text[start:stop]))
    ids = np.asarray([*given, *said], dtype=np.int32)
    if tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False) != text[:stop]:
        raise Unusable("tokens merge across the start of a reply")
    reply = np.repeat(np.array([-1, 0], dtype=np.int32), [len(given), len(said)])
    return TokenizedChat(ids, reply, (turn,))
