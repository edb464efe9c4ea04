"""Chat messages as prompts, and as rows of tokens with a loss mask.

The server, evaluation, regeneration and data preparation use one class, :class:`ChatRenderer`. The tokens
before a learned response are therefore those that a server would be given for it.

Legend: n tokens of a row.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from eagle_kit.core.errors import UserError, cut, shown
from eagle_kit.core.files import is_unicode
from eagle_kit.data.chat.arguments import WrongArgument, check_arguments
from eagle_kit.data.chat.forms import Conversation, RawText, Record, TokenRow
from eagle_kit.data.chat.messages import (
    ChatPrompt,
    Message,
    Tool,
    Unusable,
    is_empty,
    read_message,
    with_text_arguments,
)
from eagle_kit.data.chat.response.tags import END_THINK, OPENED, THINK, opens_thought
from eagle_kit.data.chat.template import has_chat_template
from eagle_kit.data.chat.token_prefixes import TokenPrefixes, splitting_tokens
from eagle_kit.data.chat.turns import TurnPrompt, WindowedPrompts, can_be_windowed, whole_prompt

PromptEnding = Literal["response", "messages", "final message"]
"""Where the text of a prompt ends: with the beginning of a response, behind its messages, or within the last
one."""
END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
)
"""Names of tokens that end a turn. Harmony's ``<|end|>`` ends a message within a turn."""
PROBE = "eaglekitprobe"
"""Beginning of names that are put into messages and searched for in their rendering. A name that is missing
was in a part that the chat template does not read."""
THOUGHT = re.compile(r"\A(?:\s*<think>)?.*?</think>\s*", re.DOTALL)
TAG = re.compile(r"\A\s*<think>\n?")

# Remarks on parts of a conversation that are left out.
NO_PLACE = "reasoning that the chat template has no place for is left out"
ENDED = "reasoning is left out where the prompt has ended it, as with thinking off"
TOO_LATE = "responses beyond max_length are left out"
CUT = "a response is cut at max_length"
OTHERWISE = "regenerated responses that the chat template renders otherwise are left out"
NO_SYSTEM = "a system message that the chat template has no place for is left out"
LITERAL_END = "a response that holds the text of an end token is cut there"
EMPTY_END = "empty responses at the end are left out"


class PromptError(UserError):
    """Messages that a chat template cannot render whole."""


class NoPlace(Unusable):
    """A part of a prompt that the chat template does not read."""


class Segment(NamedTuple):
    """A piece of the text of a row.

    Attributes:
        text: the piece, special tokens included.
        turn: index of the message whose response the piece is; None for text that the model is given.
    """

    text: str
    turn: int | None = None


@dataclass
class TokenizedChat:
    """Tokens of a row.

    Attributes:
        ids: int32 ``[n]``.
        response: int32 ``[n]``, the number of the response that must produce the token, counted from 0 in the
            row; -1 for tokens that are given.
        turns: index of the message of each response; empty where the row is not made of messages.
    """

    ids: np.ndarray
    response: np.ndarray
    turns: tuple[int, ...] = ()

    @property
    def num_responses(self) -> int:
        """Number of the last response that has a token, and one."""
        return int(self.response.max()) + 1


class ChatRenderer:
    """Renders messages by the chat template of a tokenizer, and tokenises the text.

    Tools and arguments of the template come with every prompt. Texts of the end tokens are computed once for
    a template.

    Args:
        tokenizer: of the target. Its chat template may be replaced later; no tokens may be added.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._end_names: dict[str, tuple[str, ...]] = {}

    # Rendering.

    def template(self, tools: Sequence[Tool] = ()) -> str:
        """Source of the chat template that is used with ``tools`` or without. Raises UserError if there is
        none."""
        if not has_chat_template(self.tokenizer):
            raise UserError(
                "The tokenizer has no chat template.",
                "Give one with --chat-template FILE (a training: data.chat_template; LLM: chat_template), or "
                "texts without turns (a server: /v1/completions; a training: text records; LLM: generate).",
            )
        try:
            return self.tokenizer.get_chat_template(None, list(tools) or None)
        except ValueError:
            names = ", ".join(map(shown, self.tokenizer.chat_template))
            raise UserError(
                f"The tokenizer has the chat templates {cut(names)}, and none of them is the default.",
                "Name one of them default in tokenizer_config.json.",
            ) from None

    def render(
        self, prompt: ChatPrompt, *, generation_prompt: bool, continues_final_message: bool = False
    ) -> str:
        """Render messages as text.

        Args:
            prompt: the messages.
            generation_prompt: end with the beginning of a response.
            continues_final_message: end within the last message.

        The role developer becomes system for templates that do not have it, and reasoning becomes
        ``thinking`` for templates that name it so.

        Raises:
            UserError: there is no template.
            Unusable: the template rejects the messages.
        """
        template = self.template(prompt.tools)
        messages = [_named_for(template, message) for message in prompt.messages]

        # Most templates take the arguments of calls as an object. A template is a foreign program and may
        # raise anything.
        try:
            return self._apply_template(messages, prompt, generation_prompt, continues_final_message)
        except TypeError as error:
            if not any("tool_calls" in message for message in messages):
                raise _refused(error) from None
        except Exception as error:
            raise _refused(error) from None

        # Some take them as JSON text.
        messages = [with_text_arguments(message) for message in messages]
        try:
            return self._apply_template(messages, prompt, generation_prompt, continues_final_message)
        except Exception as error:
            raise _refused(error) from None

    def _apply_template(
        self,
        messages: list[Message],
        prompt: ChatPrompt,
        generation_prompt: bool,
        continues_final_message: bool,
    ) -> str:
        """Render messages that are in the words of the template; tools and arguments are those of
        ``prompt``."""
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=list(prompt.tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            continue_final_message=continues_final_message,
            **prompt.chat_template_kwargs,
        )
        if not is_unicode(text):
            raise Unusable("half a character (a lone surrogate)")
        return text

    def token_ids(self, text: str) -> list[int]:
        """Tokenise a rendered text, which has its special tokens already."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    # Prompts.

    def prompt_text(self, prompt: ChatPrompt | Sequence[Message], ending: PromptEnding = "response") -> str:
        """Render messages for a model that goes on with them.

        Args:
            prompt: the messages.
            ending: the text ends with the beginning of a response, behind the messages, or within the last
                message.

        Raises:
            UserError: there is no template.
            PromptError: the template refuses the messages or does not read all of the prompt, or their
                content is not text.
        """
        try:
            if not isinstance(prompt, ChatPrompt):
                prompt = ChatPrompt([read_message(message) for message in prompt])
            self.check_prompt(prompt)
            return self.render(
                prompt,
                generation_prompt=ending == "response",
                continues_final_message=ending == "final message",
            )
        except NoPlace as reason:
            raise PromptError(
                f"The messages cannot be rendered: {reason}.",
                "Leave it out, or give another template with --chat-template FILE.",
            ) from None
        except WrongArgument as reason:
            raise PromptError(
                f"The messages cannot be rendered: {reason}.", "Leave it out of chat_template_kwargs."
            ) from None
        except Unusable as reason:
            raise PromptError(
                f"The messages cannot be rendered: {reason}.",
                "Give turns of text, in the order that the chat template asks for.",
            ) from None

    def prompt_token_ids(self, prompt: ChatPrompt | Sequence[Message]) -> list[int]:
        """Tokenise :meth:`prompt_text`, with its errors."""
        return self.token_ids(self.prompt_text(prompt))

    def check_prompt(self, prompt: ChatPrompt) -> None:
        """Raise :class:`Unusable` for tools, calls, results or arguments that the chat template does not
        read."""
        template = self.template(prompt.tools)
        check_arguments(self.tokenizer, template, prompt.chat_template_kwargs)

        # Put a probe in place of the names of tools and calls, and of results.
        probes: dict[str, str] = {}

        def probe(what: str) -> str:
            name = f"{PROBE}{len(probes)}x"
            probes[name] = what
            return name

        tools = [tool | {"function": tool["function"] | {"name": probe("tools")}} for tool in prompt.tools]
        messages = [_probed(message, probe) for message in prompt.messages]
        if not probes:
            return

        # Look for the probes in the rendering.
        probed = ChatPrompt(messages, tools, prompt.chat_template_kwargs)
        text = self.render(probed, generation_prompt=True)
        for name, what in probes.items():
            if name not in text:
                raise NoPlace(f"the chat template has no place for {what}")

    def drops_system(self, prompt: ChatPrompt) -> bool:
        """True if the chat template leaves out a system's or a developer's message, as some do after the
        first message. Raises as :meth:`render`."""
        messages: list[Message] = []
        names: list[str] = []
        for message in prompt.messages:
            if message["role"] in ("system", "developer") and message["content"].strip():
                names.append(f"{PROBE}{len(names)}x")
                message = {**message, "content": f"{message['content']} {names[-1]}"}
            messages.append(message)
        if not names:
            return False
        text = self.render(replace(prompt, messages=messages), generation_prompt=True)
        return not all(name in text for name in names)

    # Ends of turns.

    @property
    def end_names(self) -> tuple[str, ...]:
        """Texts of the tokens that end a turn: the tokenizer's end token, the end tokens of the model's
        generation config, added tokens that are in ``END_NAMES``, and the token that the chat template puts
        directly after every response."""
        template = str(getattr(self.tokenizer, "chat_template", None))
        if template not in self._end_names:
            self._end_names[template] = self._find_end_names()
        return self._end_names[template]

    @property
    def end_token_ids(self) -> set[int]:
        """Ids of :attr:`end_names`."""
        return set(self.tokenizer.convert_tokens_to_ids(list(self.end_names)))

    def _find_end_names(self) -> tuple[str, ...]:
        # End tokens of the tokenizer.
        added = self.tokenizer.get_added_vocab()
        names = [name for name in END_NAMES if name in added]
        if "<|return|>" in added and "<|end|>" in added:
            names.remove("<|end|>")
        if self.tokenizer.eos_token:
            names.append(self.tokenizer.eos_token)

        # End tokens of the model's generation config.
        decoder = self.tokenizer.added_tokens_decoder
        ids = getattr(self.tokenizer, "end_token_ids", ())
        names += [decoder[token].content for token in ids if token in decoder]

        # The special token that the chat template puts after every response.
        special = [token.content for token in decoder.values() if token.special and token.content.strip()]
        texts = self._texts_after_response()
        for name in special:
            if texts and all(text.startswith(name) for text in texts):
                names.append(name)
        return tuple(dict.fromkeys(names))

    def _texts_after_response(self) -> list[str]:
        """Texts that the chat template writes after the last response, and after one that a turn follows.
        Empty if there is no template, or it refuses a plain conversation."""
        question: Message = {"role": "user", "content": "Hi"}
        conversation: list[Message] = [question, {"role": "assistant", "content": PROBE}]
        texts = []
        for messages in (conversation, [*conversation, question]):
            try:
                text = self.render(ChatPrompt(messages), generation_prompt=False)
            except (Unusable, UserError):
                return []
            if PROBE in text:
                texts.append(text.rpartition(PROBE)[2])
        return texts

    # Rows of a record.

    def tokenize(self, record: Record, max_length: int, remarks: Counter[str]) -> list[TokenizedChat]:
        """Tokenise one record of any form, with the arguments and errors of :meth:`tokenize_chat`."""
        if isinstance(record, RawText):
            return self._tokenize_text(record, max_length)
        if isinstance(record, TokenRow):
            return self._cut_tokens(record, max_length, remarks)
        return self.tokenize_chat(record, max_length, remarks)

    def tokenize_chat(
        self, conversation: Conversation, max_length: int, remarks: Counter[str]
    ) -> list[TokenizedChat]:
        """Tokenise one conversation into rows, each cut at ``max_length`` tokens.

        Args:
            remarks: counter of remarks about parts of conversations that are left out; it is increased.

        Raises:
            Unusable: no response within ``max_length``, an empty response before another, something that the
                template leaves out, or a rendering that serving would not have produced.
            UserError: the tokenizer has no chat template.
        """
        # Tokenise the rows.
        found: Counter[str] = Counter()
        chats: list[TokenizedChat] = []
        for row in self.segments(conversation, found):
            chats += self.tokenize_segments(row, max_length)

        # Cut them, and leave out rows that have no response any more.
        cut_chats = []
        for chat in chats:
            if len(chat.ids) > max_length and chat.response[max_length] >= 0:
                found[CUT] = 1
            cut_chat = TokenizedChat(chat.ids[:max_length], chat.response[:max_length], chat.turns)
            if (cut_chat.response >= 0).any():
                cut_chats.append(cut_chat)
        if not cut_chats:
            raise Unusable("no response within the length limit")
        if sum(chat.num_responses for chat in chats) > sum(chat.num_responses for chat in cut_chats):
            found[TOO_LATE] = 1

        # Every remark is counted once for each conversation.
        remarks.update(found.keys())
        return cut_chats

    def _tokenize_text(self, record: RawText, max_length: int) -> list[TokenizedChat]:
        """Rows of a text, cut every ``max_length`` tokens; it begins as a prompt of the completions API."""
        bos = self.tokenizer.bos_token
        has_bos = bool(bos) and record.text.startswith(bos)
        found = self.tokenizer(record.text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
        ids = np.asarray(found, dtype=np.int32)

        # The first token of a row is given.
        rows = []
        for start in range(0, len(ids), max_length):
            row = ids[start : start + max_length]
            if len(row) > 1:
                response = np.zeros(len(row), dtype=np.int32)
                response[0] = -1
                rows.append(TokenizedChat(row, response))
        if not rows:
            raise Unusable("a text of one token")
        return rows

    def _cut_tokens(self, record: TokenRow, max_length: int, remarks: Counter[str]) -> list[TokenizedChat]:
        """The row of a record of tokens, cut at ``max_length``."""
        if max(record.ids, default=0) >= len(self.tokenizer):
            raise Unusable(f"a token id above the tokenizer's last, {len(self.tokenizer) - 1}")
        ids = np.asarray(record.ids, dtype=np.int32)
        is_learned = np.asarray(record.is_learned, dtype=bool)

        # Learned tokens side by side are one response.
        begins = is_learned & ~np.concatenate(([False], is_learned[:-1]))
        response = np.where(is_learned, np.cumsum(begins) - 1, -1).astype(np.int32)

        # Cut the row.
        row = TokenizedChat(ids[:max_length], response[:max_length])
        if not (row.response >= 0).any():
            raise Unusable("no token to learn within the length limit")
        if len(ids) > max_length and (response[max_length:] >= 0).any():
            remark = CUT if response[max_length] >= 0 else TOO_LATE
            remarks[remark] += 1
        return [row]

    # Segments of a conversation.

    def segments(self, conversation: Conversation, remarks: Counter[str]) -> list[list[Segment]]:
        """Render a conversation as rows of segments: given text and a response by turns.

        Every assistant turn is rendered as a server renders its prompt. The response is the text that the
        template puts after the prompt, through the end-of-turn token. If the prompt of a turn begins with the
        row of the turn before, both share a row. A template that renders earlier turns differently later on
        (Qwen3 and DeepSeek-R1 drop earlier reasoning) gives the turn a row of its own.

        Args:
            remarks: counter of remarks about parts of conversations that are left out; it is increased.

        Raises:
            Unusable: no response, an empty response before another, something that the template leaves out,
                or a rendering that serving would not have produced.
            UserError: the tokenizer has no chat template.
        """
        # Leave out empty responses at the end.
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Unusable("no assistant turn")
        if turns[0] == 0:
            raise Unusable("it starts with a response")
        while turns and is_empty(messages[turns[-1]]) and not self._begun_thought(conversation, turns[-1]):
            turns.pop()
            conversation = replace(conversation, complete=True)
            remarks[EMPTY_END] = 1
        if not turns or any(is_empty(messages[turn]) for turn in turns[:-1]):
            raise Unusable("an empty response")

        # Check that the template renders everything; a generated last response is not rendered.
        last = turns[-1]
        is_generated = _generated(conversation, last) is not None
        self.check_prompt(conversation.prompt(last if is_generated else last + 1))
        if self.drops_system(conversation.prompt(last)):
            remarks[NO_SYSTEM] = 1

        # Leave out responses that are not learned; the last response that is learned has its end.
        if last in conversation.not_learned:
            conversation = replace(conversation, complete=True)
        turns = [turn for turn in turns if turn not in conversation.not_learned]
        if not turns:
            raise Unusable("no response that is to be learned")

        # Render the others.
        rows = self._rows_from_windows(conversation, turns, remarks)
        if rows is None:
            rows = self._rows_from_whole_prompts(conversation, turns, remarks)
        if not rows:
            raise Unusable("the chat template renders the regenerated responses otherwise")
        return rows

    def _rows_from_windows(
        self, conversation: Conversation, turns: list[int], remarks: Counter[str]
    ) -> list[list[Segment]] | None:
        """Rows of a long conversation, whose late prompts are rendered from windows of its messages. None if
        the conversation is short, or windows may give other prompts than whole renderings."""
        if not can_be_windowed(self.template(conversation.tools), conversation):
            return None
        render_prompt = partial(self.render, generation_prompt=True)
        prompts = WindowedPrompts(render_prompt, conversation)
        found: Counter[str] = Counter()
        rows = _Rows()
        for number, turn in enumerate(turns, 1):
            is_last = turn == turns[-1]
            prompt = prompts.at(turn)
            response = self._response(prompt, is_last, found)

            # Compare turns 1, 2, 4, 8 and so on, and the last one, with whole renderings.
            if is_last or number & (number - 1) == 0:
                whole = whole_prompt(render_prompt, conversation, turn)
                if prompt.text != whole.text or response != self._response(whole, is_last, Counter()):
                    return None
            rows.add(turn, prompt.text, response, found)
        remarks.update(found)
        return rows.rows

    def _rows_from_whole_prompts(
        self, conversation: Conversation, turns: list[int], remarks: Counter[str]
    ) -> list[list[Segment]]:
        """Rows of a conversation, each of whose prompts is rendered whole."""
        render_prompt = partial(self.render, generation_prompt=True)
        rows = _Rows()
        for turn in turns:
            prompt = whole_prompt(render_prompt, conversation, turn)
            response = self._response(prompt, turn == turns[-1], remarks)
            rows.add(turn, prompt.text, response, remarks)
        return rows.rows

    # The response to a prompt.

    def _response(self, prompt: TurnPrompt, is_last: bool, remarks: Counter[str]) -> str | None:
        """The response to a prompt, with its end; None for a regenerated one that the template renders
        otherwise."""
        conversation = prompt.conversation
        message = conversation.messages[prompt.turn]

        # A regenerated response, as it was generated, and one that was cut within its thought.
        generated = _generated(conversation, prompt.turn)
        if generated is not None:
            return generated
        if is_last:
            begun = self._begun_thought(conversation, prompt.turn)
            if begun:
                return _without_opening_tag(prompt, begun)

        # Any other one as the template renders it, up to the first end token, where a server stops.
        rendered = self._rendered_response(prompt, remarks)
        ends = self.end_names
        response, end = _split_end(rendered, ends)
        if any(message["content"].partition(name)[2].strip() for name in ends):
            remarks[LITERAL_END] += 1
        if not end:
            end = self._end_of_next(prompt, rendered)

        # Generated text has white space that templates strip.
        if conversation.regenerated and not message.keys() & {"tool_calls", "reasoning_content"}:
            text = _without_opening_tag(prompt, message["content"])
            if text.split() != response.split():
                return None
            response = text
        if is_last and not conversation.complete:
            return response
        return response + end

    def _rendered_response(self, prompt: TurnPrompt, remarks: Counter[str]) -> str:
        """Text that the model must write after a prompt for the message of its turn, by the chat template."""
        conversation = prompt.conversation
        given = conversation.prompt(prompt.turn)
        text = prompt.window_text

        def through(message: Message) -> str:
            """Render the messages through the response."""
            messages = [*given.messages, message]
            return self.render(replace(given, messages=messages), generation_prompt=False)

        # The template renders thought and answer after the prompt.
        message = conversation.messages[prompt.turn]
        thought, plain = _split_thought(message)
        whole = through(message)
        if whole.startswith(text) and _without_tags(thought) in whole[len(text) :]:
            return whole[len(text) :]

        # The template has no place for the thought, or the prompt has ended it.
        bare = through(plain)
        knows_thoughts = self._knows_thoughts(conversation)
        if bare.startswith(text) and (not knows_thoughts or text.rstrip().endswith(END_THINK)):
            remark = ENDED if knows_thoughts else NO_PLACE
            remarks[remark] += 1
            return bare[len(text) :]

        # The template renders the history otherwise once the response follows it (gpt-oss).
        opening = OPENED.search(text)
        head = text[: opening.start()] if opening else text
        if not knows_thoughts or not bare.startswith(head):
            mark = text.removeprefix(self.render(given, generation_prompt=False))
            return _response_after_mark(whole, through(_changed(message)), mark, thought)

        # The template drops the thought even of the last response (DeepSeek-R1): write it as the model does.
        if "reasoning_content" in message or not thought:
            thought = f"{THINK}\n{_without_tags(thought)}\n{END_THINK}\n\n"
        written = TAG.sub("", thought)
        if not opening:
            written = f"{THINK}\n{written}"
        return written + bare[len(head) :]

    def _end_of_next(self, prompt: TurnPrompt, response: str) -> str:
        """The end token with which a template begins the turn after a response, as GLM-4.5's does. Empty if
        there is none."""
        # Render another turn after the response.
        messages = prompt.conversation.messages
        role = "tool" if "tool_calls" in messages[-1] else "user"
        longer = replace(prompt.conversation, messages=(*messages, {"role": role, "content": "~"}))
        try:
            text = self.render(longer.prompt(len(longer.messages)), generation_prompt=False)
        except Unusable:
            return ""

        # Read the text between them.
        start = prompt.window_text + response
        if text.startswith(start):
            for name in self.end_names:
                if text.startswith(name, len(start)):
                    return name
        return ""

    def _begun_thought(self, conversation: Conversation, turn: int) -> str:
        """The last response, message ``turn``, as it was generated, if it was cut before its thought ended;
        empty for any other response. The template would end the thought, and render it as the answer."""
        message = conversation.messages[turn]
        text = message["content"]
        thought = message.get("reasoning_content")
        knows_thoughts = self._knows_thoughts(conversation)
        has_ended = END_THINK in text or "tool_calls" in message or (thought and text.strip())
        if conversation.complete or not knows_thoughts or has_ended:
            return ""
        return f"{THINK}\n{thought}" if thought else text

    def _knows_thoughts(self, conversation: Conversation) -> bool:
        """True if the chat template writes thoughts between tags."""
        return END_THINK in self.template(conversation.tools)

    # Tokens of a row.

    def tokenize_segments(self, row: Sequence[Segment], max_length: int | None = None) -> list[TokenizedChat]:
        """Tokenise a row of segments.

        Prompts and responses whose tokens would merge are tokenised apart, as a server does, which tokenises
        the prompt alone. Each response of such a row is a row of its own.

        Args:
            max_length: responses that begin after so many tokens are not checked; None checks all.

        Raises:
            Unusable: tokens merge, and the tokenizer writes the two texts apart differently.
        """
        chat = self._encode(row, max_length)
        if chat is not None:
            return [chat]
        chats = []
        given = ""
        for segment in row:
            if segment.turn is not None:
                chats.append(self._encode_response(given, segment))
            given += segment.text
        return chats

    def _encode(self, row: Sequence[Segment], max_length: int | None = None) -> TokenizedChat | None:
        """Tokens of a row. None if one of the first ``max_length`` tokens has characters of a prompt and of
        its response."""
        # Tokenise the text.
        text = "".join(segment.text for segment in row)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        starts = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
        prefixes = TokenPrefixes(self.token_ids, self._splitting_tokens, text, ids, starts)

        # Mark the tokens of each response.
        response = np.full(len(ids), -1, dtype=np.int32)
        turns: list[int] = []
        stop = 0
        for segment in row:
            start = stop
            stop += len(segment.text)
            if segment.turn is None:
                continue
            first, last = np.searchsorted(starts, (start, stop)).tolist()
            response[first:last] = len(turns)
            turns.append(segment.turn)
            is_checked = max_length is None or first < max_length
            if is_checked and not prefixes.are_tokens(start, first):
                return None
        return TokenizedChat(ids, response, tuple(turns))

    def _encode_response(self, given: str, response: Segment) -> TokenizedChat:
        """Tokens of a prompt and its response, tokenised apart if a token would join them."""
        assert response.turn is not None
        chat = self._encode([Segment(given), response])
        if chat is not None:
            return chat
        given_ids = self.token_ids(given)
        response_ids = self.token_ids(response.text)
        ids = [*given_ids, *response_ids]
        if self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) != given + response.text:
            raise Unusable("tokens merge across the start of a response")
        numbers = np.repeat(np.array([-1, 0], dtype=np.int32), [len(given_ids), len(response_ids)])
        return TokenizedChat(np.asarray(ids, dtype=np.int32), numbers, (response.turn,))

    @cached_property
    def _splitting_tokens(self) -> Mapping[int, str]:
        return splitting_tokens(self.tokenizer)


class _Rows:
    """Rows of segments, to which turns are added. A new row begins when the template has rewritten the turns
    of the last one."""

    def __init__(self) -> None:
        self.rows: list[list[Segment]] = []
        self._text = ""  # of the last row

    def add(self, turn: int, prompt: str, response: str | None, remarks: Counter[str]) -> None:
        """Add a prompt and its response. A response of None is counted in ``remarks`` and not added."""
        if response is None:
            remarks[OTHERWISE] += 1
            return
        if not self.rows or not prompt.startswith(self._text):
            self.rows.append([])
            self._text = ""
        self.rows[-1].append(Segment(prompt[len(self._text) :]))
        self.rows[-1].append(Segment(response, turn))
        self._text = prompt + response


def _refused(error: Exception) -> Unusable:
    """The error of a chat template as a reason to skip a record."""
    if isinstance(error, Unusable):
        return error
    reason = cut(str(error))
    if not type(error).__module__.startswith("jinja2"):
        reason = f"{type(error).__name__}: {reason}"
    return Unusable(f"the chat template refuses it: {reason}")


def _named_for(template: str, message: Message) -> Message:
    """The message with the role and the keys that a template reads."""
    if message["role"] == "developer" and "developer" not in template:
        message = {**message, "role": "system"}
    has_thought = "reasoning_content" in message
    if has_thought and "reasoning_content" not in template and re.search(r"\bthinking\b", template):
        message = {**message, "thinking": message["reasoning_content"]}
    return message


def _probed(message: Message, probe: Callable[[str], str]) -> Message:
    """The message with a probe in place of a tool's result, and of the name of every call."""
    if message["role"] == "tool":
        return {**message, "content": probe("results of tools")}
    if "tool_calls" not in message:
        return message
    has_several = len(message["tool_calls"]) > 1
    what = "several calls of tools in a turn" if has_several else "calls of tools"
    calls = []
    for call in message["tool_calls"]:
        function = call["function"] | {"name": probe(what)}
        calls.append(call | {"function": function})
    return {**message, "tool_calls": calls}


def _generated(conversation: Conversation, turn: int) -> str | None:
    """The regenerated response of message ``turn`` as it was generated, with its end. None for other
    responses, and for those that were not read into parts."""
    if not conversation.regenerated:
        return None
    return conversation.messages[turn].get("generated")


def _without_opening_tag(prompt: TurnPrompt, response: str) -> str:
    """A generated response. If the prompt has opened its thought, the opening tag is left out."""
    if not opens_thought(prompt.window_text):
        return response
    return TAG.sub("", response)


def _split_end(text: str, ends: Sequence[str]) -> tuple[str, str]:
    """A response up to the first end-of-turn token, and that token; the whole text and an empty text if there
    is none."""
    stops = [text.index(end) + len(end) for end in ends if end in text]
    if not stops:
        return text, ""
    text = text[: min(stops)]
    end = next(end for end in ends if text.endswith(end))
    return text.removesuffix(end), end


def _split_thought(message: Message) -> tuple[str, Message]:
    """The thought of a response and the response without it. The thought is that of its own field, or, with
    its tags, the beginning of the text."""
    plain = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "reasoning_content" in message:
        return message["reasoning_content"], plain
    found = THOUGHT.match(message["content"])
    if found is None:
        return "", message
    return found.group(), {**plain, "content": message["content"][found.end() :]}


def _without_tags(thought: str) -> str:
    """A thought without its tags and the white space around it."""
    return thought.strip().removeprefix(THINK).removesuffix(END_THINK).strip()


def _response_after_mark(text: str, changed: str, mark: str, thought: str) -> str:
    """The response in a rendering whose history differs from the prompt's. gpt-oss's template drops the
    thought before a call once an answer follows.

    Args:
        text: the rendering.
        changed: the rendering with another response.
        mark: the generation prompt. The response begins after the last one of them before the first character
            at which the renderings differ.
        thought: of the response; the response must hold it.

    Raises:
        Unusable: there is no such response.
    """
    common = 0
    for i, (one, other) in enumerate(zip(text, changed, strict=False)):
        if one != other:
            common = i
            break
    start = text.rfind(mark, 0, common)
    if not mark or start < 0 or _without_tags(thought) not in text[start:]:
        raise Unusable("the chat template does not render the response behind its generation prompt")
    return text[start + len(mark) :]


def _changed(message: Message) -> Message:
    """Another response of the same form: each of its texts begins with another character."""
    changed = dict(message)
    for name in ("content", "reasoning_content"):
        if message.get(name):
            changed[name] = f"~{message[name]}"
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            calls.append(call | {"function": function | {"name": f"~{function['name']}"}})
        changed["tool_calls"] = calls
    return changed
