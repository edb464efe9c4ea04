"""A draft as files, whatever its layout: nothing is built, cast or left out."""

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import COPY_AGAIN, check_name, read_object
from eagle_kit.models.config_values import read_architecture, read_table, wrong_value
from eagle_kit.models.loading.loader import IGNORED_SUFFIXES, open_safetensors, weight_files
from eagle_kit.models.loading.source import OLD_WEIGHTS

CONFIG, WEIGHTS, METADATA = "config.json", "model.safetensors", "eagle_kit.json"
EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"
OWN = "eagle_kit"
"""Our key in every ``config.json``. Its ``format`` names the layout, where that is not ours."""
WEIGHTS_KEY = "target_weights"
"""Key of ``eagle_kit.json``: hash of the files of the target that the draft was trained for."""
TABLES = (OWN, "eagle_config", "transformer_layer_config")
"""Keys of a ``config.json`` whose values are objects."""


@dataclass(frozen=True)
class DraftFiles:
    """Files of a draft.

    Attributes:
        config: as in ``config.json``.
        tensors: by the names and in the dtypes of the file; of a folder each is read when it is asked for,
            and asking may raise UserError.
        metadata: as in ``eagle_kit.json``; empty for drafts of other trainers.
        where: the folder, for messages.
    """

    config: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = "the draft"

    @property
    def architecture(self) -> str:
        """The first of its ``architectures``; a question mark when it has none."""
        return read_architecture(self.config, self.where)

    @property
    def own(self) -> dict[str, Any]:
        """Our own part of the config; empty for drafts of other trainers."""
        return read_table(self.config, OWN, self.where)

    @property
    def about(self) -> dict[str, Any]:
        """Target and chat template of its training, as fields of an architecture; empty when unknown.
        Raises UserError for what is no text."""
        about = {key: self.own.get(key) or "" for key in ("target", "template_hash")}
        for key, value in about.items():
            if not isinstance(value, str):
                raise wrong_value(key, value, self.where, "a text")
        return about

    @property
    def names(self) -> set[str]:
        """Names of the tensors; empty where they cannot be read, which reading them reports."""
        try:
            return set(self.tensors)
        except UserError:
            return set()

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, of a file without reading its values; None where it is not there."""
        if name not in self.names:
            return None
        if isinstance(self.tensors, FolderTensors):
            return self.tensors.shape_of(name)
        return tuple(self.tensors[name].shape)


def open_draft(folder: str | Path) -> DraftFiles:
    """Open the folder of a draft, or of a target whose MTP modules draft.

    Raises:
        UserError: it does not exist, or a JSON file of it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"The draft folder {folder} does not exist.", "Give a folder with config.json and weights."
        )
    config = read_object(folder / CONFIG)
    read_architecture(config, str(folder))
    for key in TABLES:
        read_table(config, key, str(folder))
    return DraftFiles(config, FolderTensors(folder), read_metadata(folder), str(folder))


def read_metadata(folder: str | Path) -> dict[str, Any]:
    """``eagle_kit.json`` of a draft; empty for drafts of other trainers."""
    path = Path(folder) / METADATA
    return read_object(path) if path.is_file() else {}


class FolderTensors(Mapping[str, torch.Tensor]):
    """Tensors of a folder, read one by one: of ``model.safetensors``, of shards with an index, or of a
    ``pytorch_model.bin`` or its shards. Frequencies of RoPE that old checkpoints have are left out.

    Raises:
        UserError: on first use, when a file is missing or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if isinstance(place, torch.Tensor):
            return place
        with open_safetensors(place) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, whose values are not read."""
        place = self._places[name]
        if isinstance(place, torch.Tensor):
            return tuple(place.shape)
        with open_safetensors(place) as file:
            return tuple(file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def _places(self) -> dict[str, torch.Tensor | Path]:
        """Every tensor by name, or the file that it is in."""
        whole = self.folder / WEIGHTS
        has_shards = any(self.folder.glob("*.safetensors.index.json"))
        has_shards |= not whole.is_file() and any(self.folder.glob("*-of-*.safetensors"))
        old = [] if whole.is_file() or has_shards else old_weight_files(self.folder)
        places: dict[str, torch.Tensor | Path] = {}
        for path in old:
            places |= _unpickled(path)
        if not old:
            for path in weight_files(self.folder) if has_shards else [whole]:
                with open_safetensors(path) as file:
                    places |= dict.fromkeys(file.keys(), path)
        return {name: place for name, place in places.items() if not name.endswith(IGNORED_SUFFIXES)}


def old_weight_files(folder: Path) -> list[Path]:
    """``pytorch_model.bin``, or the shards that its index names; empty where there are none. Raises UserError
    for an index that is no index, and for a shard that is missing."""
    whole = folder / OLD_WEIGHTS
    index = folder / f"{OLD_WEIGHTS}.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    shards = read_table(read_object(index), "weight_map", str(index))
    if not shards or not all(isinstance(file, str) for file in shards.values()):
        raise UserError(f"The index {index} names no shards.", COPY_AGAIN)
    for file in shards.values():
        check_name(file, index)
        if not (folder / file).is_file():
            raise UserError(f"The file {folder / file} is missing.", "Give a complete draft folder.")
    return [folder / file for file in sorted(set(shards.values()))]


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        is_mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are no archives, and are read whole
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise UserError(f"The file {path} is corrupt or truncated.", "Copy or download it again.") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"
        for value in tensors.values()
    ):
        raise UserError(f"The file {path} is not a table of tensors.", "Use the draft's published weights.")
    return tensors


def without_keys(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """``config`` without some of its keys."""
    return {key: value for key, value in config.items() if key not in set(keys)}
