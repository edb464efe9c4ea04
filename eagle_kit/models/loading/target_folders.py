"""Folders of targets on this machine, by a hash of their weights.

A draft that is uploaded must not name folders of the machine on which it was trained, and a draft that is
used there must find its target. So the draft has the hash, and the cache of this machine has the folder.
"""

import json
from contextlib import suppress
from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import cache_folder, read_object, write_text_atomically
from eagle_kit.models.loading.loader import target_fingerprint


def remember_folder(weights: str, folder: Path) -> None:
    """Note the folder of a target. If the cache cannot be written, its drafts need ``--target`` later.

    Args:
        weights: :func:`~eagle_kit.models.loading.loader.target_fingerprint` of ``folder``.
    """
    path = note_path(weights)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps({"folder": str(folder.resolve())}) + "\n")


def find_folder(weights: str) -> Path | None:
    """Folder of the target with these weights; None if none is known, or if it has other weights by now."""
    path = note_path(weights)
    if not path.is_file():
        return None
    with suppress(UserError, OSError):  # a damaged note or target counts as unknown
        folder = read_object(path).get("folder")
        if isinstance(folder, str) and target_fingerprint(Path(folder)) == weights:
            return Path(folder)
    return None


def note_path(weights: str) -> Path:
    """File in the cache with the folder of a target. ``weights`` comes from a draft's file and may be any
    text."""
    name = "unknown"
    if weights.isalnum():
        name = weights
    return cache_folder() / "places" / f"{name}.json"
