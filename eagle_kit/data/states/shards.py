"""One shard of captured states: a safetensors file of some rows, with its checksums in its header.

Tensors are named ``ROW/NAME``. The metadata has the rows, their tokens, a SHA-256 of everything, and one of a
sample, for a quick look at many shards.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle_kit.core.files import replacing

SAMPLE, SAMPLED = 4096, 16
"""Bytes that the quick checksum takes of the beginning of a tensor, and of how many tensors of a shard."""

Parts = dict[str, torch.Tensor]
"""Encoded tensors of some rows, end to end along dimension 0."""


class Shard(NamedTuple):
    """A file, the rows in it, their tokens, its bytes, and checksums of all of it and of a sample."""

    path: Path
    rows: tuple[int, ...]
    tokens: int
    bytes: int
    sha256: str

    def record(self) -> dict[str, Any]:
        """As the manifest lists it."""
        return {**self._asdict(), "path": self.path.name, "rows": list(self.rows)}


class Damaged(Exception):
    """A shard is not what was written; the text says what is wrong with it."""


def write_shard(folder: Path, rows: dict[int, Parts]) -> Shard:
    """Write a shard into ``folder``. Raises OSError or SafetensorError."""
    tensors = {f"{row}/{name}": tensor for row, part in rows.items() for name, tensor in part.items()}
    numbers, sha256 = sorted(rows), _checksum(tensors)
    name = f"states-{numbers[0]:07d}-{sha256[:12]}.safetensors"
    metadata = {
        "rows": json.dumps(numbers),
        "tokens": str(sum(len(part["argmax"]) for part in rows.values())),
        "sha256": sha256,
        "sample": _sample_of({name: _bytes(tensor) for name, tensor in tensors.items()}),
    }
    with replacing(folder / name) as work:
        save_file(tensors, work, metadata)
    return read_shard(folder / name)


def read_row(shard: Shard, row: int) -> Parts:
    """The encoded tensors of a row. Raises OSError or SafetensorError."""
    with safe_open(shard.path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{row}/")]  # noqa: SIM118
        return {name.partition("/")[2]: file.get_tensor(name) for name in names}


def check_shard(shard: Shard) -> None:
    """Read every byte; raises :class:`Damaged` when they are not those that were written."""
    try:
        with safe_open(shard.path, "pt") as file:
            found = _checksum({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Damaged(f"cannot be read ({error})") from error
    if found != shard.sha256:
        raise Damaged("does not have the bytes that were captured")


def num_bytes(parts: Iterable[Parts]) -> int:
    """Of all their tensors."""
    return sum(t.numel() * t.element_size() for part in parts for t in part.values())


def read_shard(path: Path) -> Shard:
    """What the header of a shard says; raises :class:`Damaged` when size or sample say otherwise."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError("cut off")
            header = json.loads(file.read(length))
            about = header.pop("__metadata__")
            spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
            if 8 + length + max(stop for _, stop in spans.values()) != size:
                raise ValueError("cut off")
            pieces = {}
            for name in _chosen(spans):
                file.seek(8 + length + spans[name][0])
                pieces[name] = file.read(min(SAMPLE, spans[name][1] - spans[name][0]))
        if _hash_pieces(spans, pieces) != about["sample"]:
            raise Damaged("has other bytes than were captured")
        return Shard(path, tuple(json.loads(about["rows"])), int(about["tokens"]), size, about["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"is damaged ({error})") from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _checksum(tensors: Parts) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _sample_of(data: dict[str, memoryview]) -> str:
    spans = {name: (0, len(view)) for name, view in data.items()}
    return _hash_pieces(spans, {name: bytes(data[name][:SAMPLE]) for name in _chosen(data)})


def _hash_pieces(spans: Any, pieces: dict[str, bytes]) -> str:
    """Of the sampled bytes, and of the name and size of every tensor."""
    digest = hashlib.sha256()
    for name in sorted(spans):
        digest.update(f"{name} {spans[name][1] - spans[name][0]} ".encode())
        digest.update(pieces.get(name, b""))
    return digest.hexdigest()[:16]


def _chosen(names: Any) -> list[str]:
    ordered = sorted(names)
    return ordered[:: -(-len(ordered) // SAMPLED)]
