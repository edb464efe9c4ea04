"""Texts that are nearly the same, and texts that hold a prompt of an evaluation set.

Both count n-grams of words, in lower case and without punctuation; a Chinese, Japanese or Korean character is
a word. Nothing is drawn by chance: hashes are fixed, so the same texts in the same order give the same
verdicts.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
SHINGLE = 3
"""Words of the n-grams that near duplicates share."""
MINIMA = 128
"""Minima of a text."""
MOST_ROWS = 4
"""Most minima in a band."""
FOUND = 0.995
"""Least probability to compare two texts that are as similar as the threshold."""
LEAST_SIMILARITY = 0.05
"""Lowest threshold: there bands of one minimum find 99.8 %; below 0.041 they find less than ``FOUND``."""
CONTAMINATED = "it holds a prompt of an evaluation set"
"""Why a conversation is left out."""
NGRAM = 13
"""Words of the n-grams that a contaminated text shares with a prompt (GPT-3, arXiv 2005.14165, appendix
C)."""
FEWEST = 8
"""Words of the shortest prompt that is looked for inside a text; a shorter one must be the whole of it."""


def words(text: str) -> list[str]:
    """Words of a text."""
    return WORD.findall(text.casefold())


def ngrams(found: Sequence[str], n: int) -> set[str]:
    """The n-grams of words; of fewer words all of them together."""
    return {" ".join(found[i : i + n]) for i in range(max(1, len(found) - n + 1))} if found else set()


def rows_per_band(threshold: float) -> int:
    """Most minima in a band with which texts of Jaccard similarity s = ``threshold`` agree in some band with
    the probability ``FOUND``: 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive Datasets, 3.4.2),
    0.998 at 0.3 with 2 rows, 0.99988 at 0.7 with 4."""
    enough = (
        rows for rows in range(MOST_ROWS, 1, -1) if 1 - (1 - threshold**rows) ** (MINIMA // rows) >= FOUND
    )
    return next(enough, 1)


WORDING = 20
"""Prompts that share an n-gram from which on it is the wording of a set, such as the instruction before each
of HumanEval's functions, and shows no contamination."""


class NearDuplicates:
    """Texts so far, by MinHash with banding (Broder 1997); candidates are compared exactly.

    Args:
        threshold: Jaccard similarity of the sets of n-grams from which on a text is a duplicate, in
            [``LEAST_SIMILARITY``, 1].
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rows = rows_per_band(threshold)
        num_minima = MINIMA // self._rows * self._rows
        self._seeds = _mixed(np.arange(1, num_minima + 1, dtype=np.uint64))[:, None]
        self._shingles: list[frozenset[int]] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = {}

    def is_new(self, text: str) -> bool:
        """True where no text before is as similar; it is then one of them."""
        # Hash the text.
        shingles = frozenset(_hash(gram) for gram in ngrams(words(text), SHINGLE))
        if not shingles:
            return True
        values = np.fromiter(sorted(shingles), dtype=np.uint64)[None]
        minima = _mixed(values ^ self._seeds).min(1).reshape(-1, self._rows)
        keys = [(band, row.tobytes()) for band, row in enumerate(minima)]

        # Compare it with the texts that share a band.
        for number in sorted({number for key in keys for number in self._buckets.get(key, ())}):
            other = self._shingles[number]
            shared = len(shingles & other)
            if shared >= self._threshold * (len(shingles) + len(other) - shared):
                return False

        # Keep it.
        for key in keys:
            self._buckets.setdefault(key, []).append(len(self._shingles))
        self._shingles.append(shingles)
        return True


def _hash(gram: str) -> int:
    return int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big")


def _mixed(values: np.ndarray) -> np.ndarray:
    """Hash uint64 numbers (the finaliser of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TestPrompts:
    """Prompts of evaluation sets, which training texts should not hold."""

    __test__ = False  # no test of pytest's

    def __init__(self, prompts: Iterable[str]) -> None:
        found = [words(prompt) for prompt in prompts]
        grams = Counter(
            gram for each in set(map(tuple, found)) if len(each) >= NGRAM for gram in ngrams(each, NGRAM)
        )
        self._grams = {gram for gram, count in grams.items() if count < WORDING}
        short = [each for each in found if each and len(each) < NGRAM]
        self._whole = {" ".join(each) for each in short}
        self._inside: dict[int, set[str]] = {}
        for each in short:
            if len(each) >= FEWEST:
                self._inside.setdefault(len(each), set()).add(" ".join(each))

    def are_in(self, text: str) -> bool:
        """True for a text that shares 13 words in a row with a prompt, but for the wording of a set, holds a
        whole one of 8 to 12 words, or is a shorter one."""
        found = words(text)
        if " ".join(found) in self._whole:
            return True
        if len(found) >= NGRAM and not self._grams.isdisjoint(ngrams(found, NGRAM)):
            return True
        return any(
            len(found) >= size and not each.isdisjoint(ngrams(found, size))
            for size, each in self._inside.items()
        )
