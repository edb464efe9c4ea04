"""Prompts of the responses of a conversation, in time that grows with the number of its turns.

The prompt of a late turn is the prompt of the turn before and the text that the chat template adds. The
addition is rendered from the last turns alone (a *window*). Whole renderings at turns 1, 2, 4, 8 and so on,
and at the last one, check the result; if one differs, all prompts are rendered whole.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eagle_kit.data.chat.arguments import MARKS
from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.messages import ChatPrompt, Message

WINDOW = 8
"""Messages of a window; a conversation of at most twice as many is rendered whole."""
TESTS = ("startswith", "endswith", "find", "count", "index")
"""Methods with which a template searches for another text in a text."""
RenderPrompt = Callable[[ChatPrompt], str]
"""Renders messages with the generation prompt."""


@dataclass(frozen=True)
class TurnPrompt:
    """The prompt of one response.

    Attributes:
        text: the whole prompt, as a server renders it.
        conversation: the window, whose last message is the response.
        window_text: the prompt of the window.
    """

    text: str
    conversation: Conversation
    window_text: str

    @property
    def turn(self) -> int:
        """Index of the response among the messages of the window."""
        return len(self.conversation.messages) - 1


def whole_prompt(render: RenderPrompt, conversation: Conversation, turn: int) -> TurnPrompt:
    """Render the prompt of message ``turn`` from all messages before it, which are its window. Raises as
    ``render``."""
    text = render(conversation.prompt(turn))
    return TurnPrompt(text, replace(conversation, messages=conversation.messages[: turn + 1]), text)


class WindowedPrompts:
    """Prompts of one conversation, in the order of its responses, rendered from windows.

    Args:
        render: the chat template.
        conversation: one for which :func:`can_be_windowed` is True.
    """

    def __init__(self, render: RenderPrompt, conversation: Conversation) -> None:
        self._render = render
        self._conversation = conversation
        self._leading: tuple[Message, ...] = ()  # messages before the window's own
        self._start = 0  # index of the first message of the window's own
        self._previous: TurnPrompt | None = None

    def at(self, turn: int) -> TurnPrompt:
        """Prompt of the assistant's message ``turn``. Raises as ``render``."""
        window = self._window(turn)
        window_text = self._render_window(window)

        # The prompt is the previous one and the text that the window adds to it.
        text = window_text
        previous = self._previous
        if self._start > 0:
            assert previous is not None, "the first window is the whole conversation"
            if window_text.startswith(previous.window_text):
                text = previous.text + window_text[len(previous.window_text) :]
            else:  # the template renders earlier turns otherwise later on
                text = self._render(self._conversation.prompt(turn))
        found = TurnPrompt(text, window, window_text)

        # The next prompt continues this one, in a later window if this one has grown long.
        self._previous = found
        if turn - self._start > WINDOW and self._move(turn):
            window = self._window(turn)
            self._previous = TurnPrompt(text, window, self._render_window(window))
        return found

    def _window(self, turn: int) -> Conversation:
        """The window up to message ``turn``."""
        messages = (*self._leading, *self._conversation.messages[self._start : turn + 1])
        return replace(self._conversation, messages=messages)

    def _render_window(self, window: Conversation) -> str:
        """The prompt of the window's last message."""
        return self._render(window.prompt(len(window.messages) - 1))

    def _move(self, turn: int) -> bool:
        """Begin the window with a later message that a conversation can begin with. False if there is none.

        It is a user turn at an even distance from the first one, since templates count turns. Within a long
        chain of calls the window is the last user turn and the last calls.
        """
        # A user turn before the last exchange but one.
        messages = self._conversation.messages
        num_system = num_leading_system(messages)
        system = messages[:num_system]
        latest = turn - 3
        users = [i for i in range(self._start, latest + 1) if messages[i]["role"] == "user"]
        even = [i for i in users if (i - num_system) % 2 == 0]
        if even and even[-1] > self._start and turn - even[-1] <= WINDOW:
            self._leading = system
            self._start = even[-1]
            return True

        # The last user turn and the last calls.
        calls = [i for i in range(self._start + 1, latest + 1) if messages[i]["role"] == "assistant"]
        if not calls:
            return False
        earlier_users = [i for i in range(calls[-1]) if messages[i]["role"] == "user"]
        if not earlier_users:
            return False
        self._leading = (*system, messages[earlier_users[-1]])
        self._start = calls[-1]
        return True


def can_be_windowed(template: str, conversation: Conversation) -> bool:
    """True for a long conversation whose middle does not change how a template renders its end: system
    messages are at the beginning only, and no message holds a text that the template searches for."""
    messages = conversation.messages
    if len(messages) <= 2 * WINDOW:
        return False
    num_system = num_leading_system(messages)
    if any(message["role"] in ("system", "developer") for message in messages[num_system:]):
        return False
    sought = sought_texts(template)
    for message in messages:
        for name in ("content", "reasoning_content"):
            if any(text in message.get(name, "") for text in sought):
                return False
    return True


def num_leading_system(messages: Sequence[Message]) -> int:
    """Number of system and developer messages before any other."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    return count


@functools.lru_cache
def sought_texts(template: str) -> frozenset[str]:
    """Texts that a template searches for in other texts, such as ``/no_think``."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(MARKS.sub("", template))
    found: set[str] = set()

    # 'text' in content
    for comparison in tree.find_all(nodes.Compare):
        operators = {operand.op for operand in comparison.ops}
        if operators & {"in", "notin"} and isinstance(comparison.expr, nodes.Const):
            found.add(str(comparison.expr.value))

    # content.startswith('text')
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in TESTS:
            found.update(str(one.value) for one in call.args if isinstance(one, nodes.Const))
    return frozenset(found - {""})
