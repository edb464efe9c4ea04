"""Writing without surprises: folder and room before, one writer at a time, the bytes on the disk after."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

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


@contextmanager
def sole_writer(of: Path, lock: Path) -> Iterator[None]:
    """Hold the file ``lock`` while inside: no other process that asks for it writes to ``of`` meanwhile.

    The system lets go of it when this process ends, however it does. Afterwards the file is taken away, and
    so are folders that were made for it and are still empty.

    Raises:
        UserError: another process has it, or it cannot be written.
    """
    made = [folder for folder in lock.parents if not folder.exists()]
    holder = FileLock(lock, timeout=0)
    try:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            holder.acquire()
        except Timeout:
            raise UserError(f"Another process is writing to {of}.", "Wait for it, or stop it.") from None
        except OSError as error:
            raise UserError(
                f"{lock} cannot be written: {error.strerror or error}.", ANOTHER_FOLDER
            ) from error
        try:
            yield
        finally:
            with suppress(OSError):  # Windows keeps open files
                lock.unlink()
            holder.release()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


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
