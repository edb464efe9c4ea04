"""The id of a folder's run of wandb, which later sessions of the folder go on with."""

import secrets
from pathlib import Path

from eagle_kit.core.files import write_text_atomically

RUN_ID = "wandb-run-id.txt"


def run_id(folder: Path) -> str:
    """The id of the folder's run of wandb, which is made and written there the first time.

    Raises:
        OSError: it can neither be read nor be written.
    """
    path = folder / RUN_ID
    known = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if known:
        return known
    made = secrets.token_hex(8)
    write_text_atomically(path, made + "\n")
    return made
