"""A draft as files, whatever its layout: nothing is built, cast or left out."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from eagle_kit.checkpoints.draft import CONFIG, read_draft_tensors, read_metadata
from eagle_kit.core.errors import UserError
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import IGNORED_SUFFIXES, read_json

Format = Literal["eagle-kit", "sglang", "vllm", "speculators", "eagle"]
FORMATS: tuple[Format, ...] = ("eagle-kit", "sglang", "vllm", "speculators", "eagle")
PEERS = {"sglang": "SGLang", "vllm": "vLLM", "speculators": "speculators", "eagle": "EAGLE's repository"}
CHECKED_VERSIONS = {"sglang": "0.5.23", "vllm": "0.32.0", "speculators": "0.9.0"}
"""Of the sources that the rules in this folder were read from."""
OWN = "eagle_kit"
"""Our key in every ``config.json``. Its ``format`` names the layout, where that is not ours."""


@dataclass(frozen=True)
class DraftFiles:
    """``config`` and ``metadata`` as in the JSON files, ``tensors`` by the names and in the dtypes of the
    file; ``where`` is the folder, for messages."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = "the draft"


@dataclass(frozen=True)
class Served:
    """What a layout wants to know of the target.

    Attributes:
        config: its sizes; None when it is not at hand.
        name: a hub id or a name.
        architectures: as in its config.json; empty when unknown.
    """

    config: TargetConfig | None = None
    name: str = ""
    architectures: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """``model_type``; empty when unknown."""
        return "" if self.config is None else self.config.model_type


def read_files(folder: str | Path) -> DraftFiles:
    """Read a draft's folder. Raises UserError when it is none, or a file is corrupt."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"The draft folder {folder} does not exist.", "Give a folder with config.json and weights."
        )
    tensors = {
        name: tensor
        for name, tensor in read_draft_tensors(folder).items()
        if not name.endswith(IGNORED_SUFFIXES)
    }
    return DraftFiles(read_json(folder / CONFIG), tensors, read_metadata(folder), str(folder))


def refuse(peer: Format, reason: str, remedy: str = "Export it in another format.") -> NoReturn:
    """Raise UserError: this draft cannot be written for ``peer`` because ``reason``."""
    raise UserError(f"This draft cannot be written for {PEERS[peer]}: {reason}.", remedy)


def zeros_for(tensors: dict[str, torch.Tensor], name: str, rows: int) -> dict[str, torch.Tensor]:
    """A zero vector ``[rows]`` in the dtype of the draft's ``fc``, as a table of one tensor."""
    dtype = next(tensor.dtype for key, tensor in tensors.items() if key.endswith("fc.weight"))
    return {name: torch.zeros(rows, dtype=dtype)}


def without_keys(config: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """``config`` without some of its keys."""
    return {key: value for key, value in config.items() if key not in set(keys)}


def config_hash(config: dict[str, Any]) -> str:
    """A short hash of a ``config.json`` that the order of its keys does not change."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
