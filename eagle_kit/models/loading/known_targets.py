"""Architectures of public targets, to plan a run without their weights and without a network.

Every file of ``public_targets/`` repeats keys of the ``config.json`` of its names on the hub, and the
number of parameters in the model card or weight index. Loading a target reads its own config instead.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import expand
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import FP8Layout, read_fp8_layout
from eagle_kit.models.loading.loader import parse_target, read_raw_config, read_target_config
from eagle_kit.models.loading.source import (
    GGUF,
    PACKAGED_TARGETS,
    REPOSITORY,
    resolve_target,
    split_revision,
)

FOLDER = Path(__file__).with_name("public_targets")


@dataclass(frozen=True)
class KnownTarget:
    """A published target.

    Attributes:
        config: keys of its ``config.json``.
        num_parameters: published number of parameters of the text model, without layers for multi-token
            prediction.
    """

    config: dict[str, Any]
    num_parameters: int

    @cached_property
    def architecture(self) -> TargetConfig:
        """The config as parsed by the loader. It is kept, because a bridged config is read from a model
        that is built on the meta device."""
        return parse_target(self.config)


def _read_table() -> dict[str, KnownTarget]:
    """Entries of all files by hub id; a file has every id that is published with its architecture."""
    table: dict[str, KnownTarget] = {}
    for path in sorted(FOLDER.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        known = KnownTarget(entry["config"], entry["num_parameters"])
        table |= dict.fromkeys(entry["names"], known)
    return table


KNOWN_TARGETS = _read_table()
"""Known targets by hub id."""


def known_target(name: str) -> KnownTarget | None:
    """Entry of a hub id, case-insensitive; None for an unknown one."""
    for hub_id, known in KNOWN_TARGETS.items():
        if hub_id.lower() == name.lower():
            return known
    return None


def target_architecture(name: str) -> tuple[TargetConfig, str]:
    """Architecture of a target and the source it was found in, without weights and without a network.

    Args:
        name: a folder with ``config.json``, a packaged name, an id of the table, or another hub id whose
            ``config.json`` is in the hub's cache on this machine.

    Raises:
        UserError: ``name`` is none of these.
    """
    found, source = _find(name)
    if isinstance(found, Path):
        return read_target_config(found), source
    return found.architecture, source


def target_fp8_layout(name: str) -> FP8Layout | None:
    """Layout of the fp8 weights of a target, found as :func:`target_architecture` does; None for unquantised
    weights."""
    found, source = _find(name)
    if isinstance(found, Path):
        return read_fp8_layout(read_raw_config(found), source)
    return read_fp8_layout(found.config, source)


def _find(name: str) -> tuple[Path | KnownTarget, str]:
    """Find a folder with the ``config.json`` of a target, or an entry of the table.

    Returns:
        The folder or the entry, and its source in words.
    """
    from huggingface_hub import try_to_load_from_cache

    # On this machine: a GGUF file or a folder.
    path = expand(name)
    if path.suffix.lower() == GGUF and path.is_file():
        folder = resolve_target(path)
        return folder, f"{folder}/config.json"
    if name and path.is_dir():
        return path, f"{path}/config.json"

    # In the table, by the hub id.
    hub_id = name
    packaged = PACKAGED_TARGETS.get(name.lower())
    if packaged is not None:
        hub_id = packaged.hub_id
    repository, revision = split_revision(hub_id)
    known = known_target(repository)
    if known is not None:
        return known, "its published config.json"

    # In the hub's cache.
    if REPOSITORY.fullmatch(repository):
        cached = try_to_load_from_cache(repository, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent, "its config.json in the hub's cache"
    raise UserError(
        f"The sizes of the target {name!r} are not known without a network, and it is no folder here.",
        "Give a folder that holds its config.json, or one of the targets in configs/.",
    )
