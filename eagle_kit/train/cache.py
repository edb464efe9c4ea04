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

from eagle_kit.core.errors import UserError
from eagle_kit.train.metrics import write_text_atomically
from eagle_kit.train.state import check_disk_space


class StateStore:
    """Tensors of packed rows by row number.

    Args:
        root: folder of all stores.
        identity: everything the states depend on: target, data fingerprint, layer ids and their convention,
            dtype. Another identity is another folder.
    """

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = root / key
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / "manifest.json"
        if not manifest.exists():
            write_text_atomically(manifest, json.dumps(identity, indent=1, sort_keys=True))

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
        """Store ``tensors``, rows of ``lengths`` tokens end to end. Raises UserError on a full disk."""
        split = {name: tensor.split(list(lengths)) for name, tensor in tensors.items()}
        for i, row in enumerate(rows):
            path = self._path(row)
            if path.exists():
                continue
            parts = {name: pieces[i].contiguous().cpu() for name, pieces in split.items()}
            check_disk_space(
                self.folder, 2 * sum(part.numel() * part.element_size() for part in parts.values())
            )
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            try:
                save_file(parts, partial)
                partial.replace(path)
            except (OSError, SafetensorError) as error:
                partial.unlink(missing_ok=True)
                raise UserError(
                    f"The captured states of row {row} could not be written to {self.folder}: {error}.",
                    "Free some space, or set training.cache_hidden_states=off.",
                ) from error

    def _path(self, row: int) -> Path:
        return self.folder / f"row-{row:07d}.safetensors"
