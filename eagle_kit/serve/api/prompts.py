"""Tokenisation of messages and texts. A text that cannot fit is rejected before, since tokenising takes a
second per megabyte in a thread shared by all requests."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle_kit.core.errors import UserError
from eagle_kit.serve.api.protocol import Message, Tool

if TYPE_CHECKING:
    from eagle_kit.serve.llm import LLM


def max_chars(llm: "LLM") -> int:
    """Most characters that fit the context, with the longest token throughout."""
    return llm.max_context * max(map(len, llm.tokenizer.get_vocab()))


def chat_prompt(
    llm: "LLM", messages: Sequence[Message], tools: Sequence[Tool] | None, most: int
) -> list[int]:
    """Tokenise messages by the model's chat template, with the generation prompt.

    Raises:
        UserError: there is no template, it refuses these messages, it has no place for tools, or there are
            more than ``most`` characters.
    """
    check_length(llm, sum(map(_num_chars, messages)), most)
    turns = [as_template_message(message) for message in messages]
    if not tools:
        # The same way that `generate`, `eval` and training take.
        return _guarded(lambda: llm.tokenize(turns))
    given = [tool.model_dump(exclude_none=True) for tool in tools]
    plain, text = (_guarded(lambda tools=each: _render(llm, turns, tools)) for each in (None, given))
    if text == plain:
        raise UserError(
            "The model's chat template has no place for tools.", "Leave tools out, or serve another model."
        )
    check_length(llm, len(text), most)
    return llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def text_prompt(llm: "LLM", text: str, most: int, add_special_tokens: bool = True) -> list[int]:
    """Tokenise a text without a chat template. Raises UserError for more than ``most`` characters."""
    check_length(llm, len(text), most)
    return llm.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]


def check_length(llm: "LLM", num_chars: int, most: int) -> None:
    """Raise UserError for more than ``most`` characters."""
    if num_chars > most:
        raise UserError(
            f"The prompt has {num_chars} characters, but a context of {llm.max_context} tokens holds at most "
            f"{most}.",
            "Shorten the prompt.",
        )


def _num_chars(message: Message) -> int:
    content = message.content
    return sum(len(part.text) for part in content) if isinstance(content, list) else len(content or "")


def as_template_message(message: Message) -> dict[str, Any]:
    """Convert a message for chat templates: text as one string, a developer is the system, arguments are
    objects."""
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    turn["content"] = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError("The arguments of a tool call are no JSON object.", "Send back what the model wrote.")
    return value


def _render(llm: "LLM", turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    if not getattr(llm.tokenizer, "chat_template", None):
        raise UserError("The tokenizer has no chat template.", "Use /v1/completions.")
    return llm.tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)


def _guarded(render: Any) -> Any:
    """Run a chat template, a foreign program that may fail in any way. Raises UserError."""
    try:
        return render()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"The model's chat template cannot render these messages ({type(error).__name__}: {error}).",
            "Order and fill the turns as the template asks.",
        ) from error
