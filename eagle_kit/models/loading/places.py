"""Where targets lie on this machine, by a hash of their weights.

A draft that is pushed must not name folders of the machine that it was trained on, and a draft that is used
there must find its target. So the draft has the hash, and the cache of this machine has the folder.
"""

import json
from contextlib import suppress
from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import cache_folder, read_object, write_text_atomically
from eagle_kit.models.loading.loader import target_fingerprint


def remember_place(weights: str, folder: Path) -> None:
    """Note the folder of a target. Where the cache cannot be written, drafts need ``--target`` later.

    Args:
        weights: :func:`~eagle_kit.models.loading.loader.target_fingerprint` of ``folder``.
    """
    path = note_of(weights)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps({"folder": str(folder.resolve())}) + "\n")


def find_place(weights: str) -> Path | None:
    """Folder of the target with these weights; None where none is known, or it has other weights by now."""
    path = note_of(weights)
    if not path.is_file():
        return None
    with suppress(UserError, OSError):  # a damaged note, or a damaged target, is none
        folder = read_object(path).get("folder")
        if isinstance(folder, str) and target_fingerprint(Path(folder)) == weights:
            return Path(folder)
    return None


def note_of(weights: str) -> Path:
    """File of this machine with the folder; ``weights`` is from a draft's own file, and may be any text."""
    name = weights if weights.isalnum() else "unknown"
    return cache_folder() / "places" / f"{name}.json"
