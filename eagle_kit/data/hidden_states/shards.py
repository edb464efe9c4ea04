"""One shard of captured states: a safetensors file of some rows, with its checksums in its header.

Tensors are named ``ROW/NAME``. The metadata has the rows, the number of their tokens, and a SHA-256 of the
tensors.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle_kit.core.files import give_usual_mode, replacing

Parts = dict[str, torch.Tensor]
"""Encoded tensors of some rows, end to end along dimension 0."""


class Shard(NamedTuple):
    """A file of captured states.

    Attributes:
        rows: packed sequences in it, ascending.
        tokens: number of their tokens.
        bytes: size of the file.
        sha256: checksum of its tensors.
    """

    path: Path
    rows: tuple[int, ...]
    tokens: int
    bytes: int
    sha256: str

    def record(self) -> dict[str, Any]:
        """Entry of the manifest."""
        return {**self._asdict(), "path": self.path.name, "rows": list(self.rows)}


class Damaged(Exception):
    """A shard is not as it was written. The message is a predicate, such as "is not a file": callers put the
    path before it."""


def write_shard(folder: Path, rows: dict[int, Parts]) -> Shard:
    """Write the encoded tensors of some rows as a shard into ``folder``.

    Raises:
        OSError, SafetensorError: the file cannot be written.
        Damaged: the file that was written cannot be read back.
    """
    # Name the tensors.
    tensors = {}
    num_tokens = 0
    for row, part in rows.items():
        for name, tensor in part.items():
            tensors[f"{row}/{name}"] = tensor
        num_tokens += len(part["argmax"])

    # Write them; the name is unique to the rows and their contents.
    numbers = sorted(rows)
    sha256 = _checksum(tensors)
    path = folder / f"states-{numbers[0]:07d}-{sha256[:12]}.safetensors"
    metadata = {"rows": json.dumps(numbers), "tokens": str(num_tokens), "sha256": sha256}
    with replacing(path) as work:
        save_file(tensors, work, metadata)
        give_usual_mode(work)
    return read_shard(path)


def read_row(shard: Shard, row: int) -> Parts:
    """The encoded tensors of a row. Raises OSError or SafetensorError."""
    with safe_open(shard.path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{row}/")]  # noqa: SIM118
        return {name.partition("/")[2]: file.get_tensor(name) for name in names}


def check_shard(shard: Shard) -> None:
    """Read every byte. Raises :class:`Damaged` if the checksum is not that of the header."""
    try:
        with safe_open(shard.path, "pt") as file:
            found = _checksum({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Damaged(f"cannot be read ({error})") from error
    if found != shard.sha256:
        raise Damaged("does not have the bytes that were captured")


def num_bytes(parts: Iterable[Parts]) -> int:
    """Bytes of all tensors of ``parts``."""
    return sum(t.numel() * t.element_size() for part in parts for t in part.values())


def read_shard(path: Path) -> Shard:
    """The shard in ``path``, from its header. Raises :class:`Damaged` if it cannot be read or the file
    is shorter or longer than it says."""
    if not path.is_file():  # reading a named pipe would never end
        raise Damaged("is not a file")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata()
        rows = tuple(json.loads(about["rows"]))
        return Shard(path, rows, int(about["tokens"]), path.stat().st_size, about["sha256"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"is damaged ({error})") from error


def _checksum(tensors: Parts) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()
