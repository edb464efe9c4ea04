"""Choice of the documents that are held out of training."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_kit.data.chat.documents import Prompt


@dataclass(frozen=True)
class Candidate:
    """A document that may be held out.

    Attributes:
        part: index of its source.
        keys: uint64, keys of all its prompts, in order.
        prompts: prompts that validation may decode; empty if the document may not be held out.
    """

    part: int
    keys: array  # type: ignore[type-arg]
    prompts: tuple[Prompt, ...]


def choose_held_out(documents: Sequence[Candidate], shares: Sequence[int]) -> list[dict[int, Prompt]]:
    """Choose documents to hold out, each with the prompt that validation decodes.

    The prompt of a document is the one with which the fewest other documents begin, the shortest of several.
    Documents are chosen in the order of that number, then of the turn, then as they were read. Other
    documents that begin with a prompt that is held out cannot be trained on, so a set whose conversations all
    begin with "Hello" loses only those that are held out.

    Args:
        shares: number of documents to hold out of each part.

    Returns:
        For each part, prompts by the number of their document.
    """
    # Count how many documents begin with each prompt.
    keys = [np.frombuffer(document.keys, dtype=np.uint64) for document in documents]
    different, counts = np.unique(np.concatenate(keys or [np.zeros(0, np.uint64)]), return_counts=True)

    # Order documents by the rarest of their prompts.
    order: list[tuple[int, int, int]] = []  # (count, turn, number of the document)
    for number, document in enumerate(documents):
        if not document.prompts or not shares[document.part]:
            continue
        prompt_keys = np.array([prompt.key for prompt in document.prompts], np.uint64)
        prompt_counts = counts[np.searchsorted(different, prompt_keys)]
        turn = int(np.argmin(prompt_counts))
        order.append((int(prompt_counts[turn]), turn, number))
    order.sort()

    # Hold out the first ones of each part, unless they hold a prompt that is held out.
    held: set[int] = set()
    chosen: list[dict[int, Prompt]] = [{} for _ in shares]
    for _, turn, number in order:
        document = documents[number]
        if len(chosen[document.part]) < shares[document.part] and held.isdisjoint(document.keys):
            chosen[document.part][number] = document.prompts[turn]
            held.add(document.prompts[turn].key)
    return [dict(sorted(part.items())) for part in chosen]
