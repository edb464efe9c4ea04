"""Prompts of a comparison: tasks, and texts that are made to be hard to draft."""

import random
import string
from collections.abc import Sequence
from typing import Any

from eagle_kit.data.tasks.sets import load_tasks
from eagle_kit.engine.llm import LLM

NOISE, LANGUAGES, MIXED = "noise", "languages", "mixed"
OWN_TASKS = NOISE, LANGUAGES, MIXED
SENTENCES = (
    "Kerro minulle, miten leipää leivotaan uunissa.",
    "Wie baut man ein Fahrrad auseinander und wieder zusammen?",
    "Explique por qué el cielo se ve rojo al atardecer.",
    "日本の四季について短く説明してください。",
    "Quels sont les avantages d'un jardin en ville ?",
    "Почему зимой дни короче, чем летом?",
    "Come si prepara un buon caffè con la moka?",
    "Hvordan lærer man at spille klaver som voksen?",
)
NUM_PROMPTS = 64
"""Of a task. Rounds of 32 meet them again after two, with their prefixes cached; smaller ones do not."""
MAX_CONTEXT = 1024


def make_prompts(llm: LLM, task: str, seed: int) -> list[list[int]]:
    """Tokenise :data:`NUM_PROMPTS` prompts of a task in an order drawn by ``seed``, without those longer than
    half the context, whose number is printed."""
    rng = random.Random(f"{task}:{seed}")
    texts: list[Any]
    if task == NOISE:
        letters = string.ascii_letters + string.digits + string.punctuation + " "
        texts = ["".join(rng.choices(letters, k=160)) for _ in range(64)]
    elif task == LANGUAGES:
        texts = list(SENTENCES)
    elif task == MIXED:
        parts = [make_prompts(llm, each, seed) for each in ("human_eval", "ours", NOISE)]
        return [prompt for group in zip(*parts, strict=False) for prompt in group][:NUM_PROMPTS]
    else:
        texts = [prompt.given() for prompt in load_tasks([task])[0].prompts]
    rng.shuffle(texts)
    ids = [llm.tokenize_task(text) for text in texts]
    kept = [each for each in ids if len(each) <= MAX_CONTEXT // 2]
    if len(kept) < len(ids):
        print(
            f"{task}: {len(ids) - len(kept)} of {len(ids)} prompts have more than {MAX_CONTEXT // 2} tokens"
        )
    return kept[:NUM_PROMPTS]


def part_of(prompts: Sequence[list[int]], number: int, batch: int) -> list[list[int]]:
    """Prompts of a round, those of the next round behind them."""
    return [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
