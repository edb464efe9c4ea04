"""The draft vocabulary: the tokens that responses use most.

Legend: V / Vd target / draft vocabulary.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import replacing

MOST_BYTES = 1 << 26
"""Most bytes of a map's arrays; a compressed file may be much smaller."""


@dataclass
class VocabMap:
    """Target tokens that a draft can propose.

    Attributes:
        d2t: int64 ``[Vd]``, offsets (target id = draft id + ``d2t[draft id]``), target ids ascending.
        t2d: bool ``[V]``, True for tokens that the draft can propose.
        coverage: share of the tokens of responses that the draft can propose.
        num_distinct: number of distinct tokens in the responses.
        num_seen: number of tokens of the map that are in the responses.
        fingerprint: of the data from which the map was made.
        tokenizer: :func:`tokenizer_hash` of the tokenizer of these ids.
    """

    d2t: np.ndarray
    t2d: np.ndarray
    coverage: float
    fingerprint: str
    tokenizer: str
    num_distinct: int = 0
    num_seen: int = 0

    def count(self, counts: np.ndarray) -> None:
        """Set the coverage on responses. ``counts`` int64 ``[V]``: how often each token is in them."""
        tokens = np.flatnonzero(self.t2d)
        total = int(counts.sum())
        covered = int(counts[tokens].sum())
        self.coverage = covered / total if total else 0.0
        self.num_distinct = int((counts > 0).sum())
        self.num_seen = int((counts[tokens] > 0).sum())

    @property
    def contents(self) -> str:
        """Description of the map: how many of its tokens are in the responses."""
        text = f"the responses have {self.num_distinct} distinct tokens, of which it has {self.num_seen}"
        num_unseen = len(self.d2t) - self.num_seen
        if num_unseen:
            text += f"; its other {num_unseen} are in no response"
        return text

    def save(self, path: Path) -> None:
        """Write one file in numpy's ``.npz`` form. Raises UserError if it cannot be written."""
        try:
            # numpy would add an ending to a name, so it gets the open file.
            with replacing(path) as work, work.open("wb") as file:
                np.savez(file, **vars(self))
        except OSError as error:
            raise UserError(
                f"The vocabulary map could not be written to {path}: {error.strerror or error}.",
                "Give another file.",
            ) from error


def read_vocab_map(path: Path) -> VocabMap:
    """Read a saved map, without its coverage. Raises ValueError for any other file."""
    if not path.is_file():
        raise ValueError("it is not a file")
    try:
        # The arrays of a small compressed file may not fit into the memory.
        with ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > MOST_BYTES:
            raise ValueError(f"its arrays have more than {MOST_BYTES >> 20} MiB")

        with np.load(path, allow_pickle=False) as file:
            found = VocabMap(
                d2t=file["d2t"],
                t2d=file["t2d"],
                coverage=0.0,
                fingerprint=str(file["fingerprint"]),
                tokenizer=str(file["tokenizer"]),
            )
    except (OSError, EOFError, KeyError, TypeError, BadZipFile, RuntimeError, MemoryError) as error:
        raise ValueError(str(error)) from error

    # Both arrays must name the same tokens.
    if found.d2t.ndim != 1 or found.d2t.dtype != np.int64 or found.t2d.ndim != 1:
        raise ValueError("d2t is not a list of whole numbers")
    tokens = found.d2t + np.arange(len(found.d2t))
    if not np.array_equal(np.flatnonzero(found.t2d), tokens):
        raise ValueError("d2t and t2d name different tokens")
    return found


def load_vocab_map(path: Path, tokenizer: str, draft_vocab_size: int, counts: np.ndarray) -> VocabMap:
    """Read a saved map, for a head of ``draft_vocab_size`` tokens.

    Args:
        tokenizer: :func:`tokenizer_hash` of the target's tokenizer.
        counts: int64 ``[V]``, how often each token is in the responses of the data that will be trained on,
            which may be other data than the map was made of. The coverage is computed from them.

    Raises:
        UserError: the map cannot be read, or is of another tokenizer or size.
    """
    try:
        found = read_vocab_map(path)
    except ValueError as error:
        raise UserError(
            f"The vocabulary map {path} cannot be read ({error}).",
            "Make one with eagle-kit data vocab CONFIG --out FILE.",
        ) from None
    if found.tokenizer != tokenizer or len(found.t2d) != len(counts):
        raise UserError(
            f"The vocabulary map {path} was made for another tokenizer than the target's.",
            "Make one for this target with eagle-kit data vocab CONFIG --out FILE.",
        )
    if len(found.d2t) != draft_vocab_size:
        raise UserError(
            f"The vocabulary map {path} has {len(found.d2t)} tokens, but head.draft_vocab_size is "
            f"{draft_vocab_size}.",
            f"Set head.draft_vocab_size={len(found.d2t)}, or give another map.",
        )
    found.count(counts)
    return found


def build_vocab_map(counts: np.ndarray, draft_vocab_size: int, fingerprint: str, tokenizer: str) -> VocabMap:
    """The map of the ``draft_vocab_size`` most frequent tokens, equal counts in the order of their ids.

    A target may have more rows than its tokenizer has tokens. With as many as ``draft_vocab_size``, the map
    ends with the ids beyond the tokenizer's.

    Args:
        counts: int64 ``[V]``, how often each token is in the responses.
        fingerprint: see :class:`VocabMap`.
        tokenizer: see :class:`VocabMap`.
    """
    counts = np.pad(counts, (0, max(0, draft_vocab_size - len(counts))))
    most_frequent = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab_size])
    return vocab_map_of(most_frequent, counts, fingerprint, tokenizer)


def vocab_map_of(tokens: np.ndarray, counts: np.ndarray, fingerprint: str, tokenizer: str) -> VocabMap:
    """The map of given tokens, for example those of an existing head. They may be beyond the tokenizer's.

    Args:
        tokens: int64 target ids, ascending.
        counts: see :func:`build_vocab_map`.
        fingerprint: see :class:`VocabMap`.
        tokenizer: see :class:`VocabMap`.
    """
    counts = np.pad(counts, (0, max(0, int(tokens.max(initial=-1)) + 1 - len(counts))))
    t2d = np.zeros(len(counts), dtype=bool)
    t2d[tokens] = True
    offsets = tokens.astype(np.int64) - np.arange(len(tokens))
    found = VocabMap(offsets, t2d, 0.0, fingerprint, tokenizer)
    found.count(counts)
    return found


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of a fast tokenizer: vocabulary, merges and rules."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
