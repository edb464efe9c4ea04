"""Save, find and load a draft: folder of ``config.json``, ``model.safetensors`` and ``eagle_kit.json``."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from eagle_kit.autotune.files import SHIPPED
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    CHOOSE_ANOTHER,
    cache_folder,
    check_disk_space,
    give_usual_mode,
    replacing,
    writing_remedy,
)
from eagle_kit.drafts.files.convert import read_draft
from eagle_kit.drafts.files.draft_files import CONFIG, METADATA, WEIGHTS, open_draft
from eagle_kit.drafts.files.recognise import recognise
from eagle_kit.drafts.registry import find_head_kind, find_kind, kind_of
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.source import SET_CACHE, resolve_model, target_revision
from eagle_kit.models.targets.target import Target

CARD = "README.md"
CONVERSION_VERSION = 2
"""Version of what :func:`resolve_draft` writes; increase it to invalidate earlier conversions."""


def save_draft(
    head: DraftHead,
    folder: str | Path,
    *,
    metadata: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    card: str | None = None,
) -> None:
    """Write a servable draft: beside the folder first, then renamed to it.

    Args:
        head: on any device; it is not changed.
        folder: new, empty, or holding an older draft, which is replaced whole.
        metadata: goes into ``eagle_kit.json``: data, tokens seen, seconds, command, accept lengths.
        dtype: of the weights on disk; bf16 for export, fp32 to train on.
        card: text of ``README.md``.

    Raises:
        UserError: the folder holds something else, or the disk is full; what was there before stays as it
            was.
    """
    files = kind_of(head.config).write(head, dtype)
    name = str(dtype).removeprefix("torch.")
    config = files.config | {"dtype": name, "torch_dtype": name}
    write_draft(folder, files.tensors, config, metadata=metadata, card=card)


def write_draft(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any],
    card: str | None = None,
) -> None:
    """Write the files of a draft, as :func:`save_draft` does, whatever their layout is.

    Args:
        tensors: by the names they have in the file; none shares memory with another.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(os.path.realpath(folder))
    _check_replaceable(folder)
    texts = {
        CONFIG: json.dumps(dict(config), indent=2) + "\n",
        METADATA: json.dumps(dict(metadata), indent=2) + "\n",
    }
    if card is not None:
        texts[CARD] = card
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + (1 << 20)
        check_disk_space(folder.parent, need)
        with replacing(folder) as partial:
            partial.mkdir()
            save_file(dict(tensors), str(partial / WEIGHTS), metadata={"format": "pt"})
            give_usual_mode(partial / WEIGHTS)
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The draft could not be written to {folder} ({error}).", writing_remedy(error, CHOOSE_ANOTHER)
        ) from error


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that is more than a draft."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file.", "Choose a folder for the draft.")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if others := sorted(found - {CONFIG, WEIGHTS, METADATA, CARD, SHIPPED}):
        raise UserError(
            f"The folder {folder} holds other things than a draft ({', '.join(others[:4])}).",
            "Choose a new or empty folder.",
        )


def resolve_draft(name: str | Path, target: TargetConfig | None = None) -> Path:
    """Resolve a draft to its folder, as targets are resolved; one of the hub in another layout is converted
    to ours in the cache, once for each commit.

    Args:
        name: see :func:`~eagle_kit.models.loading.source.resolve_model`. A local folder stays as it is, and
            ``org/target/folder`` is a draft in its target's repository.
        target: gives the usual layer ids to a draft that names none.

    Raises:
        UserError: it cannot be obtained, or is not a draft or a model that we know.
    """
    folder = resolve_model(name, "draft")
    if (commit := target_revision(folder)) is None:
        return folder
    files = open_draft(folder)
    if find_kind(files).is_whole_model or recognise(files).format == "eagle-kit":
        return folder
    layers = () if target is None else target.default_aux_layer_ids
    version = "-".join(map(str, (commit, f"v{CONVERSION_VERSION}", *layers)))
    place = folder.resolve()
    inside = [place.name] if place.name != commit else []
    repository = place.parents[1 + len(inside)].name
    converted = cache_folder() / "drafts" / "--".join([repository, *inside]) / version
    if converted.is_dir():
        return converted
    try:
        converted.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{converted}.lock"):  # another process may be converting it
            if not converted.is_dir():
                print(f"Converting the draft {name} in {converted} (once)", file=sys.stderr, flush=True)
                ours, _ = read_draft(folder, target=target)
                tensors = {key: tensor.contiguous() for key, tensor in ours.tensors.items()}
                write_draft(converted, tensors, ours.config, metadata=ours.metadata)
    except OSError as error:
        raise UserError(
            f"The draft {name} could not be converted ({error}).", writing_remedy(error, SET_CACHE)
        ) from error
    return converted


def drafts_in_target(folder: str | Path, algorithm: str) -> list[Path]:
    """Folders in a target's that hold a draft head for ``algorithm``, as some are published."""
    found = []
    for config in sorted(Path(folder).glob(f"*/{CONFIG}")):
        try:
            kind = find_kind(open_draft(config.parent))
        except UserError:  # something else, or a head that is not ours
            continue
        if algorithm in kind.algorithms and not kind.is_whole_model:
            found.append(config.parent)
    return found


def load_draft(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    target: Target | None = None,
) -> DraftHead:
    """Load a draft head of ours or of another trainer, ready to be trained.

    Args:
        folder: see :func:`resolve_draft`.
        dtype: of the weights in memory; RoPE frequencies stay fp32.
        target: the head is bound to it. Needed only by drafts that name no layer ids, or have no ``lm_head``
            because they share the target's; heads without an output layer must be bound before they run.

    Raises:
        UserError: a corrupt file; missing, unexpected or misshapen tensors by name; an impossible vocabulary
            map; a whole model.
    """
    files = open_draft(resolve_draft(folder, None if target is None else target.config))
    return find_head_kind(files).read(files, target, dtype=dtype, device=device)
