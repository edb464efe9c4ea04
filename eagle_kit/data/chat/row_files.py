"""Token arrays of prepared rows, written to disk row by row, so that memory does not grow with them.

Legend: n tokens of all rows.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from eagle_kit.data.chat.renderer import TokenizedChat

RESPONSE = "reply.npy"
"""File of :attr:`TokenizedChat.response`. Caches and stores of states have had this name from the start."""
FILES = {"ids": "ids.npy", "response": RESPONSE}
"""Files of a row's fields."""
BLOCK = 1 << 22
"""Tokens that are read at a time."""


class RowFiles:
    """The files of :data:`FILES`, int32 ``[n]``, of a folder."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: (folder / file).open("w+b") for name, file in FILES.items()}
        for file in self._files.values():
            file.write(_header(0))
        self._starts = [0]

    def add(self, row: TokenizedChat) -> int:
        """Append a row; returns its number."""
        for name, file in self._files.items():
            file.write(getattr(row, name).astype(np.int32).tobytes())
        self._starts.append(self._starts[-1] + len(row.ids))
        return len(self._starts) - 2

    def ids(self, number: int) -> np.ndarray:
        """``ids`` of the row ``number``."""
        return np.frombuffer(self._read("ids", number), dtype=np.int32)

    def keep(self, numbers: Sequence[int]) -> list[int]:
        """Delete all rows but ``numbers``, ascending; returns their lengths."""
        # Move each row to the end of the one before.
        end = 0
        lengths = []
        for number in numbers:
            start = self._starts[number]
            if start != end:
                for name, file in self._files.items():
                    moved = self._read(name, number)
                    file.seek(_offset(end))
                    file.write(moved)
            length = self._starts[number + 1] - start
            end += length
            lengths.append(length)

        # Cut the files, and write their new length.
        for file in self._files.values():
            file.truncate(_offset(end))
            file.seek(0)
            file.write(_header(end))
        return lengths

    def close(self) -> None:
        """Close both files."""
        for file in self._files.values():
            file.close()

    def _read(self, name: str, number: int) -> bytes:
        """Bytes of the row ``number`` in one of the files, which is then at its end."""
        start, stop = self._starts[number : number + 2]
        file = self._files[name]
        file.seek(_offset(start))
        found = file.read(_offset(stop) - _offset(start))
        file.seek(0, io.SEEK_END)
        return found


def read_integers(path: Path) -> np.ndarray:
    """Read whole numbers ``[n]`` of a ``.npy`` file, mapped from the disk. Raises OSError or ValueError."""
    if not path.is_file():  # reading a named pipe would never end
        raise ValueError(f"{path.name} is not a file")
    found = np.lib.format.open_memmap(path, mode="r")
    if found.ndim != 1 or found.dtype.kind != "i":
        raise ValueError(f"{path.name} is not a list of whole numbers")
    return found


def token_blocks(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``ids`` and ``response`` of a folder's rows, :data:`BLOCK` tokens at a time."""
    ids = np.load(folder / "ids.npy", mmap_mode="r")
    response = np.load(folder / RESPONSE, mmap_mode="r")
    for start in range(0, len(ids), BLOCK):
        yield np.asarray(ids[start : start + BLOCK]), np.asarray(response[start : start + BLOCK])


def _header(num_tokens: int) -> bytes:
    """Header of an array of ``.npy``, of the same size for any number of tokens."""
    file = io.BytesIO()
    about = {"descr": "<i4", "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def _offset(num_tokens: int) -> int:
    """Byte at which the tokens after the first ``num_tokens`` begin."""
    return len(_header(0)) + 4 * num_tokens
