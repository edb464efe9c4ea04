"""Texts that are nearly the same, and texts that hold a prompt of an evaluation set.

Both count n-grams of words, in lower case and without punctuation; a Chinese, Japanese or Korean character is
a word. Hashes are fixed, so the same texts in the same order give the same results.
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
"""Minima of a text's hashes (MinHash)."""
MOST_ROWS = 4
"""Most minima in a band."""
FOUND = 0.995
"""Least probability that two texts as similar as the threshold share a band, and so are compared."""
LEAST_SIMILARITY = 0.05
"""Lowest threshold. Bands of one minimum find 99.8 % of texts as similar; below 0.041 they find less than
``FOUND``."""
CONTAMINATED = "it holds a prompt of an evaluation set"
"""Reason to skip a conversation."""
NGRAM = 13
"""Words of the n-grams that a contaminated text shares with a prompt (GPT-3, arXiv 2005.14165, appendix
C)."""
FEWEST = 8
"""Words of the shortest prompt that is searched for inside texts. A shorter prompt must be the whole text."""
WORDING = 20
"""Prompts that share an n-gram from which on it is the wording of a set, such as the instruction before each
of HumanEval's functions, and shows no contamination."""


def words(text: str) -> list[str]:
    """Words of a text."""
    return WORD.findall(text.casefold())


def ngrams(found: Sequence[str], n: int) -> set[str]:
    """The n-grams of words. Fewer than n words are one n-gram."""
    if not found:
        return set()
    return {" ".join(found[i : i + n]) for i in range(max(1, len(found) - n + 1))}


def rows_per_band(threshold: float) -> int:
    """Most minima in a band with which texts of Jaccard similarity s = ``threshold`` agree in some band with
    the probability ``FOUND``.

    The probability is 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive Datasets, 3.4.2): 0.998 at
    0.3 with 2 rows, 0.99988 at 0.7 with 4.
    """
    for rows in range(MOST_ROWS, 1, -1):
        num_bands = MINIMA // rows
        if 1 - (1 - threshold**rows) ** num_bands >= FOUND:
            return rows
    return 1


class NearDuplicates:
    """Texts so far, by MinHash with banding (Broder 1997). Texts that share a band are compared exactly.

    Args:
        threshold: least Jaccard similarity of the sets of n-grams of duplicates, in [``LEAST_SIMILARITY``,
            1].
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rows = rows_per_band(threshold)
        num_minima = MINIMA // self._rows * self._rows
        self._seeds = _mixed(np.arange(1, num_minima + 1, dtype=np.uint64))[:, None]
        self._shingles: list[frozenset[int]] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = {}

    def is_new(self, text: str) -> bool:
        """True if no text before is as similar as the threshold. The text is then added."""
        # Hash the text.
        shingles = frozenset(_hash(gram) for gram in ngrams(words(text), SHINGLE))
        if not shingles:
            return True
        values = np.fromiter(sorted(shingles), dtype=np.uint64)[None]
        minima = _mixed(values ^ self._seeds).min(1).reshape(-1, self._rows)
        keys = [(band, row.tobytes()) for band, row in enumerate(minima)]

        # Compare it with the texts that share a band.
        candidates: set[int] = set()
        for key in keys:
            candidates.update(self._buckets.get(key, ()))
        for number in sorted(candidates):
            other = self._shingles[number]
            shared = len(shingles & other)
            if shared >= self._threshold * (len(shingles) + len(other) - shared):
                return False

        # Add it.
        for key in keys:
            self._buckets.setdefault(key, []).append(len(self._shingles))
        self._shingles.append(shingles)
        return True


def _hash(gram: str) -> int:
    """64-bit hash of an n-gram."""
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
        different = {tuple(words(prompt)) for prompt in prompts}

        # N-grams of long prompts, but for the wording of a set.
        counts: Counter[str] = Counter()
        for prompt in different:
            if len(prompt) >= NGRAM:
                counts.update(ngrams(prompt, NGRAM))
        self._grams = {gram for gram, count in counts.items() if count < WORDING}

        # Short prompts: whole texts, and by their number of words those that are searched for inside texts.
        self._whole: set[str] = set()
        self._inside: dict[int, set[str]] = {}
        for prompt in different:
            if not prompt or len(prompt) >= NGRAM:
                continue
            self._whole.add(" ".join(prompt))
            if len(prompt) >= FEWEST:
                self._inside.setdefault(len(prompt), set()).add(" ".join(prompt))

    def are_in(self, text: str) -> bool:
        """True for a text that shares 13 consecutive words with a prompt, except the wording of a set, that
        holds a whole prompt of 8 to 12 words, or that is a shorter prompt."""
        found = words(text)
        if " ".join(found) in self._whole:
            return True
        if len(found) >= NGRAM and not self._grams.isdisjoint(ngrams(found, NGRAM)):
            return True
        for size, prompts in self._inside.items():
            if len(found) >= size and not prompts.isdisjoint(ngrams(found, size)):
                return True
        return False
