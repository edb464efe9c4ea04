"""Heads of other projects as files of full size: config and table of tensors, as their projects write them.

A fixture (``tests/drafts/peers/heads/*.json``) has names, shapes and dtypes, and no weights. The file
that is made of it is sparse: it has its real size and no blocks on the disk, and what nobody reads is in no
memory. Only maps of tokens are written, since readers check them; every other tensor is zeros.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEADS = Path(__file__).parents[1] / "drafts" / "peers" / "heads"
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1, "BOOL": 1}
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NUMBERS = re.compile(r"\{([\d.,]+)\}")

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype, as safetensors names it, and shape, by name of the tensor."""


@dataclass(frozen=True)
class PeerHead:
    """A fixture.

    Attributes:
        name: of the file, without its suffix.
        provenance: project, commit or version, files; ``copied`` are facts as they stand there, and
            ``reconstructed`` what was concluded from the code that reads or writes the head.
        target: a name of the table of known targets; None where the target is not in it.
        kind: of head, by our name.
        format: the layout, by our name.
        config: ``config.json``.
        header: tensors.
    """

    name: str
    provenance: dict[str, Any]
    target: str | None
    kind: str
    format: str
    config: dict[str, Any]
    header: Header


def peer_names() -> list[str]:
    """Names of all fixtures."""
    return sorted(path.stem for path in HEADS.glob("*.json"))


def read_peer(name: str) -> PeerHead:
    """Read a fixture."""
    raw = json.loads((HEADS / f"{name}.json").read_text(encoding="utf-8"))
    return PeerHead(name=name, header=read_header(raw.pop("tensors")), **raw)


def read_header(tensors: dict[str, Any]) -> Header:
    """The table of a fixture's tensors. ``{0..255}`` in a name means one tensor for each of these numbers,
    ``{0..8..4,1..9..4}`` one for each of 0, 4, 8, 1, 5, 9."""
    header: Header = {}
    for pattern, (dtype, shape) in tensors.items():
        for tensor in _numbered(pattern):
            assert tensor not in header, tensor
            header[tensor] = (dtype, tuple(shape))
    return header


def _numbered(pattern: str) -> list[str]:
    found = NUMBERS.search(pattern)
    if found is None:
        return [pattern]
    names = []
    for part in found[1].split(","):
        first, last, *step = (int(number) for number in part.split(".."))
        for number in range(first, last + 1, *step):
            name = pattern[: found.start()] + str(number) + pattern[found.end() :]
            names += _numbered(name)
    return names


def write_peer(head: PeerHead, folder: Path) -> Path:
    """Make the head's folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(head.config), encoding="utf-8")
    write_sparse(folder / "model.safetensors", head.header, token_maps(head.header))
    return folder


def token_maps(header: Header) -> dict[str, bytes]:
    """Contents of the maps of a reduced vocabulary: draft token i is target token 2 i."""
    maps = {}
    (rows,) = header["d2t"][1] if "d2t" in header else (0,)
    if rows:
        numbers = torch.arange(rows)
        ids = numbers * 2
        maps["d2t"] = (ids - numbers).numpy().tobytes()
    if "t2d" in header:
        in_draft = torch.zeros(header["t2d"][1], dtype=torch.bool)
        in_draft[ids] = True
        maps["t2d"] = in_draft.numpy().tobytes()
    return maps


def write_sparse(path: Path, header: Header, contents: dict[str, bytes]) -> None:
    """Write a safetensors file of zeros that takes no room, but for the tensors with ``contents``."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in header.items():
        begin = end
        end = begin + BYTES[dtype] * math.prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        first = file.tell()
        file.truncate(first + end)
        for name, value in contents.items():
            begin, stop = table[name]["data_offsets"]
            assert len(value) == stop - begin, name
            os.pwrite(file.fileno(), value, first + begin)


def header_of(tensors: dict[str, torch.Tensor]) -> Header:
    """The table of tensors in memory."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {name: (names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
