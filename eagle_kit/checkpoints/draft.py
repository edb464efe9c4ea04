"""Save and load a draft: a folder with ``config.json``, ``model.safetensors`` and ``eagle_kit.json``."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import ANOTHER_FOLDER, check_disk_space, replacing
from eagle_kit.kinds.registry import find_head_kind, kind_of
from eagle_kit.kinds.support.files import CONFIG, METADATA, WEIGHTS, open_draft
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.targets.llama import LlamaModel

CARD = "README.md"


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

    folder = Path(os.path.abspath(folder))
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
            (partial / WEIGHTS).chmod(0o644)
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(f"The draft could not be written to {folder} ({error}).", ANOTHER_FOLDER) from error


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that is more than a draft."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file.", "Choose a folder for the draft.")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if others := sorted(found - {CONFIG, WEIGHTS, METADATA, CARD}):
        raise UserError(
            f"The folder {folder} holds other things than a draft ({', '.join(others[:4])}).",
            "Choose a new or empty folder.",
        )


def load_draft(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    target: LlamaModel | None = None,
) -> DraftHead:
    """Load a draft head of ours or of another trainer, ready to be trained.

    Args:
        dtype: of the weights in memory; RoPE frequencies stay fp32.
        target: the head is bound to it. Needed only by drafts that name no layer ids, or have no ``lm_head``
            because they share the target's; heads without an output layer must be bound before they run.

    Raises:
        UserError: a corrupt file; missing, unexpected or misshapen tensors by name; an impossible vocabulary
            map; a whole model.
    """
    files = open_draft(folder)
    return find_head_kind(files).read(files, target, dtype=dtype, device=device)
