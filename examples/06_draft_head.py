"""Decode with a draft head, and measure how many tokens the target accepts of it on prompts of yours.

Outside a checkout, give the head: `python 06_draft_head.py DRAFT`.
"""

import sys
from pathlib import Path

from eagle_kit import LLM

TARGET = "smollm2-135m-instruct"
DRAFT = str(Path(__file__).parents[1] / "checkpoints" / "smollm2-135m-eagle3")
QUESTIONS = ["Why is the sky blue?", "Write a haiku about rain.", "What is 7 times 8?"]


def main(target: str = TARGET, draft: str = DRAFT) -> None:
    llm = LLM(target, draft=draft)
    stats = llm.acceptance(QUESTIONS, max_tokens=48)
    print(f"accept length {stats.accept_length:.2f} in {stats.num_verifies} verifies")
    print("by position", [round(share, 2) for share in stats.acceptance_per_position])

    # The same for a shape of yours: a tree five deep, of whose nodes the best sixteen are verified.
    print(f"tree {llm.acceptance(QUESTIONS, max_tokens=48, shape='5,4,16').accept_length:.2f}")

    # The text is that of plain decoding, whatever the draft proposes.
    drafted = llm.chat(QUESTIONS, max_tokens=48)
    plain = llm.chat(QUESTIONS, max_tokens=48, shape="none")
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


if __name__ == "__main__":
    main(TARGET, *sys.argv[1:2])
