"""Tokenisation of messages and texts. A text that cannot fit is rejected before, since tokenising takes a
second per megabyte in a thread shared by all requests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.arguments import names_read
from eagle_kit.data.chat.messages import ChatPrompt, Tool, Unusable, read_message, read_tools
from eagle_kit.data.chat.renderer import PromptEnding
from eagle_kit.server.api.protocol import ChatMessages, ChatRequest, Message

if TYPE_CHECKING:
    from eagle_kit.engine.llm import LLM

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments that switch reasoning on: of Qwen's and GLM's templates, and of DeepSeek's and Kimi's."""


def max_chars(llm: "LLM") -> int:
    """Most characters that fit the context, with the longest token throughout."""
    return llm.max_context * max(map(len, llm.tokenizer.get_vocab()))


def chat_tools(chat: ChatMessages) -> tuple[Tool, ...]:
    """Definitions of the tools of a request. Raises UserError for those that are none."""
    try:
        return read_tools([tool.model_dump(exclude_none=True) for tool in chat.tools or ()])
    except Unusable as reason:
        raise UserError(f"The tools have {reason}.", "Correct them.") from None


def chat_prompt(llm: "LLM", chat: ChatMessages, tools: Sequence[Tool], most: int) -> list[int]:
    """Tokenise messages by the model's chat template, with the generation prompt, as data preparation does.

    Raises:
        UserError: there is no template, it refuses these messages, it has no place for tools, their calls or
            results, or does not read an argument, or there are more than ``most`` characters.
    """
    check_length(llm, sum(map(_num_chars, chat.messages)), most)
    try:
        messages = [read_message(message.model_dump(exclude_none=True)) for message in chat.messages]
    except Unusable as reason:
        raise UserError(f"The messages have {reason}.", "Send back what the model wrote.") from None

    # How the response begins, and arguments of the template.
    kwargs = dict(chat.chat_template_kwargs or {})
    ending: PromptEnding = "response"
    if isinstance(chat, ChatRequest):
        if chat.continue_final_message:
            ending = "final message"
        elif chat.add_generation_prompt is False:
            ending = "messages"
        if chat.reasoning_effort is not None:
            template = llm.renderer.template(tools)
            kwargs |= _effort_arguments(template, chat.reasoning_effort, kwargs)

    text = llm.renderer.prompt_text(ChatPrompt(messages, tools, kwargs), ending)
    check_length(llm, len(text), most)
    return llm.renderer.token_ids(text)


def _effort_arguments(template: str, effort: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a chat template for an effort of reasoning.

    Raises:
        UserError: the template reads none, or ``kwargs`` give another value.
    """
    read = names_read(template)
    arguments: dict[str, Any] = {}
    if "reasoning_effort" in read:
        arguments["reasoning_effort"] = effort

    # Switches of templates: vLLM and SGLang set them by the effort, too.
    for switch in THINKING_SWITCHES:
        if switch in read:
            arguments[switch] = effort != "none"

    if not arguments:
        raise UserError(
            f"reasoning_effort is {effort!r}; the chat template reads neither it nor a switch of thinking.",
            "Leave it out.",
        )
    for name, value in arguments.items():
        if kwargs.get(name, value) != value:
            raise UserError(
                f"chat_template_kwargs have {name}, which reasoning_effort sets too.", "Give one of them."
            )
    return arguments


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
    said = sum(len(part.text) for part in content) if isinstance(content, list) else len(content or "")
    return said + len(message.reasoning_content or message.reasoning or "")
