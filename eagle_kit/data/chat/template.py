"""Prompts by the tokenizer's own chat template: the one way in which the server, data preparation,
regeneration and evaluation render messages."""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError, cut, shown
from eagle_kit.core.files import expand, is_unicode, read_text
from eagle_kit.data.chat.arguments import check_arguments, names_read
from eagle_kit.data.chat.messages import (
    ChatPrompt,
    Message,
    Tool,
    Unusable,
    read_message,
    with_text_arguments,
)

END_NAMES = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>"),
    *("<|return|>", "<|call|>", "<｜end▁of▁sentence｜>"),
)
"""Names of tokens that end a turn. Harmony's ``<|end|>`` ends a message within a turn."""
PROBE = "eaglekitprobe"


class PromptError(UserError):
    """Messages that a chat template cannot render, or of which it would leave something out."""


class NoPlace(Unusable):
    """A part of a prompt that the chat template does not read."""


def render(tokenizer: Any, prompt: ChatPrompt, *, generation_prompt: bool) -> str:
    """The chat template as text. A developer is the system of templates that do not know developers, and
    reasoning is ``thinking`` for those that call it so.

    Raises:
        UserError: there is no template.
        Unusable: it rejects the turns.
    """
    template = chat_template(tokenizer, prompt.tools)
    messages = [_named_for(template, message) for message in prompt.messages]
    try:
        return _apply(tokenizer, messages, prompt, generation_prompt)
    except TypeError as error:  # some templates join arguments to a text, most take an object
        if not any("tool_calls" in message for message in messages):
            raise _refused(error) from None
        messages = [with_text_arguments(message) for message in messages]
    except Exception as error:  # a template is a foreign program
        raise _refused(error) from None
    try:
        return _apply(tokenizer, messages, prompt, generation_prompt)
    except Exception as error:
        raise _refused(error) from None


def _apply(tokenizer: Any, messages: list[Message], prompt: ChatPrompt, generation_prompt: bool) -> str:
    text = tokenizer.apply_chat_template(
        messages,
        tools=list(prompt.tools) or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        **prompt.chat_template_kwargs,
    )
    if not is_unicode(text):
        raise Unusable("half a character (a lone surrogate)")
    return text


def _refused(error: Exception) -> Unusable:
    if isinstance(error, Unusable):
        return error
    kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
    return Unusable(f"the chat template refuses it: {kind}{cut(str(error))}")


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template; those of base models have none."""
    return bool(getattr(tokenizer, "chat_template", None))


def read_chat_template(path: str | Path) -> str:
    """Read a chat template from a file of Jinja.

    Raises:
        UserError: the file cannot be read, is no Jinja, or never reads the messages.
    """
    remedy = "Give a file with the Jinja source of a chat template."
    path = expand(path)
    template = read_text(path, remedy)
    if _is_json(template):
        raise UserError(f"{path} is JSON, which would be rendered as it stands.", remedy)
    try:
        names = names_read(template)
    except Unusable as reason:
        raise UserError(f"{path} cannot be used: {reason}.", remedy) from None
    if "messages" not in names:
        raise UserError(f"{path} is no chat template, since it does not read messages.", remedy)
    return template


def _is_json(text: str) -> bool:
    """Whether a text is JSON, as ``tokenizer_config.json`` and ``chat_template.json`` are."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def set_chat_template(tokenizer: Any, path: str | Path | None) -> None:
    """Give ``tokenizer`` the chat template of a file in place of its own; None leaves it as it is. Raises as
    :func:`read_chat_template`."""
    if path is not None:
        tokenizer.chat_template = read_chat_template(path)


def chat_template(tokenizer: Any, tools: Sequence[Tool] = ()) -> str:
    """Source of the template that is used with ``tools`` or without. Raises UserError where there is none."""
    if not has_chat_template(tokenizer):
        raise UserError(
            "The tokenizer has no chat template.",
            "Give one with --chat-template FILE (a training: data.chat_template), or texts without turns "
            "(a server: /v1/completions; a training: text records).",
        )
    try:
        return tokenizer.get_chat_template(None, list(tools) or None)
    except ValueError:
        names = ", ".join(map(shown, tokenizer.chat_template))
        raise UserError(
            f"The tokenizer has the chat templates {cut(names)}, and none of them is the default.",
            "Name one of them default in tokenizer_config.json.",
        ) from None


def _named_for(template: str, message: Message) -> Message:
    """The message in the words of a template."""
    if message["role"] == "developer" and "developer" not in template:
        message = {**message, "role": "system"}
    if (
        "reasoning_content" in message
        and "reasoning_content" not in template
        and re.search(r"\bthinking\b", template)
    ):
        message = {**message, "thinking": message["reasoning_content"]}
    return message


def check_prompt(tokenizer: Any, prompt: ChatPrompt) -> None:
    """Raise :class:`Unusable` where the chat template leaves something out: tools, calls, results or
    arguments that it does not read."""
    template = chat_template(tokenizer, prompt.tools)
    check_arguments(tokenizer, template, prompt.chat_template_kwargs)
    probes: dict[str, str] = {}

    def probe(what: str) -> str:
        probes[name := f"{PROBE}{len(probes)}x"] = what
        return name

    tools = [tool | {"function": tool["function"] | {"name": probe("tools")}} for tool in prompt.tools]
    messages = [_probed(message, probe) for message in prompt.messages]
    if not probes:
        return
    text = render(tokenizer, ChatPrompt(messages, tools, prompt.chat_template_kwargs), generation_prompt=True)
    for name, what in probes.items():
        if name not in text:
            raise NoPlace(f"the chat template has no place for {what}")


def drops_system(tokenizer: Any, prompt: ChatPrompt) -> bool:
    """True where the chat template leaves out a system's or a developer's message, as some do behind the
    first. Raises as :func:`render`."""
    messages: list[Message] = []
    names: list[str] = []
    for message in prompt.messages:
        if message["role"] in ("system", "developer") and message["content"].strip():
            names.append(f"{PROBE}{len(names)}x")
            message = {**message, "content": f"{message['content']} {names[-1]}"}
        messages.append(message)
    if not names:
        return False
    text = render(tokenizer, replace(prompt, messages=messages), generation_prompt=True)
    return not all(name in text for name in names)


def _probed(message: Message, probe: Any) -> Message:
    if message["role"] == "tool":
        return {**message, "content": probe("results of tools")}
    if "tool_calls" not in message:
        return message
    many = len(message["tool_calls"]) > 1
    what = "several calls of tools in a turn" if many else "calls of tools"
    calls = [call | {"function": call["function"] | {"name": probe(what)}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def prompt_text(tokenizer: Any, prompt: ChatPrompt | Sequence[Message]) -> str:
    """Render messages with the generation prompt, as a server does.

    Raises:
        UserError: there is no template.
        PromptError: it refuses the messages or leaves some of the prompt out, or they are no text.
    """
    try:
        if not isinstance(prompt, ChatPrompt):
            prompt = ChatPrompt([read_message(message) for message in prompt])
        check_prompt(tokenizer, prompt)
        return render(tokenizer, prompt, generation_prompt=True)
    except NoPlace as reason:
        raise PromptError(
            f"The messages cannot be rendered: {reason}.",
            "Leave it out, or give another template with --chat-template FILE.",
        ) from None
    except Unusable as reason:
        raise PromptError(
            f"The messages cannot be rendered: {reason}.", "Order and fill the turns as the template asks."
        ) from None


def prompt_token_ids(tokenizer: Any, prompt: ChatPrompt | Sequence[Message]) -> list[int]:
    """Tokenise :func:`prompt_text`; raises as that does."""
    return text_token_ids(tokenizer, prompt_text(tokenizer, prompt))


def text_token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a rendered text, which has its special tokens already."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def end_names(tokenizer: Any) -> list[str]:
    """Texts of the tokens that end a turn: the tokenizer's end token, those of the model's generation config,
    the added tokens that name one, and the token that the chat template puts right behind every reply."""
    return list(_end_names(tokenizer, len(tokenizer), str(getattr(tokenizer, "chat_template", None))))


@functools.lru_cache(maxsize=4)
def _end_names(tokenizer: Any, num_tokens: int, template: str) -> tuple[str, ...]:
    added = tokenizer.get_added_vocab()
    names = [name for name in END_NAMES if name in added and (name != "<|end|>" or "<|return|>" not in added)]
    if tokenizer.eos_token:
        names.append(tokenizer.eos_token)

    # Of the model's generation config.
    decoder = tokenizer.added_tokens_decoder
    ids = getattr(tokenizer, "end_token_ids", ())
    names += [decoder[number].content for number in ids if number in decoder]

    # Of the chat template.
    special = [token.content for token in decoder.values() if token.special and token.content.strip()]
    behind = [] if template == "None" else _texts_behind_reply(tokenizer)
    for name in special:
        if behind and all(text.startswith(name) for text in behind):
            names.append(name)
    return tuple(dict.fromkeys(names))


def _texts_behind_reply(tokenizer: Any) -> list[str]:
    """What the chat template writes behind a reply at the end, and behind one with a turn after it; nothing
    where it refuses a plain talk."""
    asked: Message = {"role": "user", "content": "Hi"}
    talk: list[Message] = [asked, {"role": "assistant", "content": PROBE}]
    try:
        texts = [
            render(tokenizer, ChatPrompt(messages), generation_prompt=False)
            for messages in (talk, [*talk, asked])
        ]
    except (Unusable, UserError):
        return []
    return [text.rpartition(PROBE)[2] for text in texts if PROBE in text]


def end_tokens(tokenizer: Any) -> set[int]:
    """Ids of :func:`end_names`."""
    return set(tokenizer.convert_tokens_to_ids(end_names(tokenizer)))


@functools.lru_cache(maxsize=4)
def cut_tokens(tokenizer: Any, num_tokens: int) -> Mapping[int, str]:
    """Added tokens, by id, at which a tokenizer cuts a text whatever stands around them.

    Args:
        num_tokens: ``len(tokenizer)``, since tokens may have been added.
    """
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    }


def template_hash(tokenizer: Any) -> str:
    """A short hash of a tokenizer's chat template; empty without one."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""
