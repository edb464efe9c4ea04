"""Prompts of the replies of a conversation, in time that grows with the number of its turns.

The prompt of a late turn is the prompt of the turn before and what the chat template adds behind it. The
addition is rendered from the last turns alone (a *window*). Whole renderings at turns 1, 2, 4, 8 and so on,
and at the last one, check the result; where one differs, all prompts are rendered whole.
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
"""Methods of a text by which a template looks for another text in it."""
RenderPrompt = Callable[[ChatPrompt], str]
"""Renders messages with the generation prompt."""


@dataclass(frozen=True)
class TurnPrompt:
    """The prompt of one reply.

    Attributes:
        text: the whole prompt, as a server renders it.
        conversation: the window, whose last message is the reply.
        window_text: the prompt of the window.
    """

    text: str
    conversation: Conversation
    window_text: str

    @property
    def turn(self) -> int:
        """Index of the reply among the messages of the window."""
        return len(self.conversation.messages) - 1


def whole_prompt(render: RenderPrompt, conversation: Conversation, turn: int) -> TurnPrompt:
    """Render the prompt of message ``turn`` from all messages before it, which are its window. Raises as
    ``render``."""
    text = render(conversation.prompt(turn))
    return TurnPrompt(text, replace(conversation, messages=conversation.messages[: turn + 1]), text)


class WindowedPrompts:
    """Prompts of one conversation, asked for in the order of its replies and rendered from windows.

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

        # The prompt is the previous one, and what the window has behind it.
        text = window_text
        previous = self._previous
        if self._start > 0:
            assert previous is not None, "the first window is the whole conversation"
            if window_text.startswith(previous.window_text):
                text = previous.text + window_text[len(previous.window_text) :]
            else:  # the template renders earlier turns otherwise later on
                text = self._render(self._conversation.prompt(turn))
        found = TurnPrompt(text, window, window_text)

        # The next prompt continues this one, in a later window where this one has grown long.
        self._previous = found
        if turn - self._start > WINDOW and self._move(turn):
            window = self._window(turn)
            self._previous = TurnPrompt(text, window, self._render_window(window))
        return found

    def _window(self, turn: int) -> Conversation:
        messages = (*self._leading, *self._conversation.messages[self._start : turn + 1])
        return replace(self._conversation, messages=messages)

    def _render_window(self, window: Conversation) -> str:
        return self._render(window.prompt(len(window.messages) - 1))

    def _move(self, turn: int) -> bool:
        """Begin the window with a later message, if there is one that a conversation can begin with.

        It begins with a user turn at an even distance from the first one, since templates count turns. Within
        a long chain of calls it is the last user turn and the last calls.
        """
        # A user turn, before the exchange that is the last but one.
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
        asked = max((i for i in range(calls[-1]) if messages[i]["role"] == "user"), default=None)
        if asked is None:
            return False
        self._leading = (*system, messages[asked])
        self._start = calls[-1]
        return True


def can_be_windowed(template: str, conversation: Conversation) -> bool:
    """True for a long conversation of which a chat template cannot know the middle: system messages lead it,
    and no message holds a text that the template looks for."""
    messages = conversation.messages
    if len(messages) <= 2 * WINDOW:
        return False
    num_system = num_leading_system(messages)
    if any(message["role"] in ("system", "developer") for message in messages[num_system:]):
        return False
    sought = sought_texts(template)
    texts = [
        message[name] for message in messages for name in ("content", "reasoning_content") if name in message
    ]
    return not any(one in text for one in sought for text in texts)


def num_leading_system(messages: Sequence[Message]) -> int:
    """Number of system and developer messages before any other."""
    number = 0
    while number < len(messages) and messages[number]["role"] in ("system", "developer"):
        number += 1
    return number


@functools.lru_cache
def sought_texts(template: str) -> frozenset[str]:
    """Texts that a template looks for in others, such as ``/no_think``."""
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
