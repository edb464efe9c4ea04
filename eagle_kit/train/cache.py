"""Captured target states on disk: what a forward of the target gave for a packed row, so that it is run once.

One safetensors file per row beside a manifest. Tensors are stored in the target's own type, so training from
the store is bitwise the same as training online. About 9 MB per row of 1,024 tokens for a hidden size of 576
in fp32.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle_kit.checkpoints.disk import check_disk_space
from eagle_kit.core.errors import UserError
from eagle_kit.train.metrics import write_text_atomically

SAMPLE = 4096
"""Bytes of each tensor that tell two sets of weights apart."""
WITHOUT_STORE = "Free some space, set data.cache_dir to another disk or training.cache_hidden_states to off."


class StateStore:
    """Tensors of packed rows by row number. Nothing is made on disk before the first :meth:`save`.

    Args:
        root: folder of all stores.
        identity: everything the states depend on: weights and config of the target, data fingerprint, layer
            ids and their convention, precision. Another identity is another folder.
    """

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.folder, self.identity = root / key, identity

    def rows(self) -> set[int]:
        """The rows that are stored."""
        return {int(path.stem.removeprefix("row-")) for path in self.folder.glob("row-*.safetensors")}

    def load(self, rows: Sequence[int], device: torch.device) -> dict[str, torch.Tensor] | None:
        """The tensors of ``rows`` end to end along dimension 0; None unless every row is stored whole."""
        paths = [self._path(row) for row in rows]
        if not all(path.exists() for path in paths):
            return None
        try:
            parts = [load_file(path, device=str(device)) for path in paths]
        except (SafetensorError, OSError):
            return None
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def save(self, rows: Sequence[int], lengths: Sequence[int], tensors: dict[str, torch.Tensor]) -> None:
        """Store ``tensors``, rows of ``lengths`` tokens end to end. Raises UserError when the disk is full or
        cannot be written to."""
        split = {name: tensor.split(list(lengths)) for name, tensor in tensors.items()}
        for i, row in enumerate(rows):
            path = self._path(row)
            if path.exists():
                continue
            parts = {name: pieces[i].contiguous().cpu() for name, pieces in split.items()}
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            try:
                self._make_folder()
                num_bytes = sum(part.numel() * part.element_size() for part in parts.values())
                check_disk_space(self.folder, 2 * num_bytes, WITHOUT_STORE)
                save_file(parts, partial)
                partial.replace(path)
            except (OSError, SafetensorError) as error:
                _remove(partial)
                raise UserError(
                    f"The captured states of row {row} could not be written to {self.folder}: {error}.",
                    WITHOUT_STORE,
                ) from error

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / "manifest.json"
        if not manifest.exists():
            write_text_atomically(manifest, json.dumps(self.identity, indent=1, sort_keys=True))

    def _path(self, row: int) -> Path:
        return self.folder / f"row-{row:07d}.safetensors"


def target_fingerprint(folder: Path) -> str:
    """A hash of a model folder's config and weights: each file's table of tensors and the beginning of every
    tensor, so that a fine-tuned copy under the same names and sizes is another target."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            size = file.read(8)
            header = file.read(int.from_bytes(size, "little"))
            digest.update(header)
            tensors = {name: about for name, about in json.loads(header).items() if name != "__metadata__"}
            for name in sorted(tensors):
                start, stop = tensors[name]["data_offsets"]
                file.seek(8 + len(header) + start)
                digest.update(file.read(min(SAMPLE, stop - start)))
    return digest.hexdigest()[:16]


def _remove(path: Path) -> None:
    """Delete a file that may not be there, in a folder that may not be one."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
