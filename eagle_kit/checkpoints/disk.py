"""Writing without surprises: the folder and its room before, the bytes on the disk after."""

import os
import shutil
from pathlib import Path

from eagle_kit.core.errors import UserError

ANOTHER_FOLDER = "Free some space or choose another folder."


def nearest_folder(path: Path) -> Path:
    """``path`` or the nearest of its parents that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def check_writable(folder: Path, remedy: str) -> None:
    """Raise UserError when ``folder`` could not be made or written to; nothing is made."""
    place = nearest_folder(folder)
    if not place.is_dir():
        raise UserError(f"{place} is a file, so there can be no folder {folder}.", remedy)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"The folder {place} cannot be written to.", remedy)


def check_disk_space(folder: Path, num_bytes: int, remedy: str = ANOTHER_FOLDER) -> None:
    """Raise UserError when the disk of ``folder`` has less than ``num_bytes`` free."""
    free = shutil.disk_usage(nearest_folder(folder)).free
    if free < num_bytes:
        raise UserError(
            f"The disk of {folder} has {free / 1e6:.0f} MB free, and {num_bytes / 1e6:.0f} MB are needed.",
            remedy,
        )


def sync_files(folder: Path) -> None:
    """Return when the bytes of every file in ``folder`` are on the disk."""
    for path in folder.iterdir():
        sync_file(path)


def sync_file(path: Path) -> None:
    """Return when the bytes of ``path`` are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
