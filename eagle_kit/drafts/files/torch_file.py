"""Writing of torch files, whose failures are those of the system."""

from pathlib import Path
from typing import Any

import torch


def save_torch_file(value: Any, path: Path) -> None:
    """Write ``value`` by ``torch.save``. Raises OSError where the disk refuses it.

    Given a path, ``torch.save`` raises a RuntimeError about positions in a file instead.
    """
    try:
        with path.open("wb") as file:
            torch.save(value, file)
    except RuntimeError as error:
        refused = error.__context__
        if isinstance(refused, OSError):
            raise refused from error
        raise
