"""The draft vocabulary: the tokens that replies use most.

Legend: V / Vd target / draft vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from eagle_kit.core.errors import UserError


@dataclass
class VocabMap:
    """``d2t`` int64 ``[Vd]``, offsets (target id = draft id + ``d2t[draft id]``), target ids ascending;
    ``t2d`` bool ``[V]``; ``coverage``, share of reply tokens it can say; ``fingerprint`` of data and
    tokenizer."""

    d2t: np.ndarray
    t2d: np.ndarray
    coverage: float
    fingerprint: str

    def save(self, path: Path) -> None:
        """Write one ``.npz`` file."""
        np.savez(path, d2t=self.d2t, t2d=self.t2d, coverage=self.coverage, fingerprint=self.fingerprint)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> "VocabMap":
        """Read a map. Raises UserError when it was made of other data or another tokenizer."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found = cls(file["d2t"], file["t2d"], float(file["coverage"]), str(file["fingerprint"]))
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            raise UserError(
                f"The vocabulary map {path} cannot be read ({error}).", "Delete it to make it anew."
            ) from None
        if found.fingerprint != fingerprint:
            raise UserError(
                f"The vocabulary map {path} was made of other data or another tokenizer.",
                "Delete it to make it anew, or give the data it was made of.",
            )
        return found


def build_vocab_map(counts: np.ndarray, draft_vocab_size: int, fingerprint: str) -> VocabMap:
    """The ``draft_vocab_size`` most frequent tokens, equal counts in the order of their ids.

    Args:
        counts: int64 ``[V]``, how often each token is produced.
    """
    if draft_vocab_size > len(counts):
        raise UserError(
            f"A draft vocabulary of {draft_vocab_size} is larger than the target's {len(counts)}.",
            "Lower it.",
        )
    hot = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(len(counts), dtype=bool)
    t2d[hot] = True
    total = int(counts.sum())
    coverage = float(counts[hot].sum() / total) if total else 0.0
    return VocabMap(hot.astype(np.int64) - np.arange(draft_vocab_size), t2d, coverage, fingerprint)
