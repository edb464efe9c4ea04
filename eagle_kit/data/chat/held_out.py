"""Which documents are held out of training, and which others begin like them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_kit.data.chat.documents import Prompt


@dataclass(frozen=True)
class Candidate:
    """A document as the choice sees it.

    Attributes:
        part: its source.
        keys: uint64, of all prompts that it holds, the first one first.
        prompts: those that validation may decode; none of a document that may not be held out.
    """

    part: int
    keys: array  # type: ignore[type-arg]
    prompts: tuple[Prompt, ...]


def choose_held_out(documents: Sequence[Candidate], shares: Sequence[int]) -> list[dict[int, Prompt]]:
    """Documents that are held out, each with the prompt that validation decodes.

    Of a document it is the prompt that the fewest others begin with, the shortest of several. Documents
    are taken in the order of that number of others, then of the turn, then as they were read. So a set whose
    conversations all begin with "Hello" loses none of them but the ones that are held out.

    Args:
        shares: number of documents to hold out of each part.

    Returns:
        For each part, prompts by the number of their document.
    """
    # Order documents by the number of others that begin with their prompt.
    keys = [np.frombuffer(document.keys, dtype=np.uint64) for document in documents]
    different, counts = np.unique(np.concatenate(keys or [np.zeros(0, np.uint64)]), return_counts=True)
    order: list[tuple[int, int, int]] = []
    for number, document in enumerate(documents):
        if not document.prompts or not shares[document.part]:
            continue
        prompt_keys = np.array([each.key for each in document.prompts], np.uint64)
        others = counts[np.searchsorted(different, prompt_keys)]
        turn = int(np.argmin(others))
        order.append((int(others[turn]), turn, number))
    order.sort()

    # Hold out the first ones of each part, unless they begin like one that is held out.
    held: set[int] = set()
    chosen: list[dict[int, Prompt]] = [{} for _ in shares]
    for _, turn, number in order:
        document = documents[number]
        if len(chosen[document.part]) < shares[document.part] and held.isdisjoint(document.keys):
            chosen[document.part][number] = document.prompts[turn]
            held.add(document.prompts[turn].key)
    return [dict(sorted(part.items())) for part in chosen]
