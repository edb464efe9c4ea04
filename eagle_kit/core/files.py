"""Files and folders: text and JSON read within bounds; checked, locked and atomic writing."""

import errno
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.process import is_alive

CHOOSE_ANOTHER = "choose another folder"
ANOTHER_FOLDER = f"Free some space, or {CHOOSE_ANOTHER}."
COPY_AGAIN = "Copy it again from its source."
MAX_TEXT = 1 << 28
"""Bytes of the largest text file that is read whole."""
OS_ERROR = re.compile(r"os error (\d+)")
"""A system error's number in the message of a Rust library such as safetensors, whose errors have no
``errno``."""
NO_SPACE = {str(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
NOT_WRITABLE = {str(number) for number in (errno.EROFS, errno.EACCES, errno.EPERM)}


def cache_folder() -> Path:
    """Cache folder: ``EAGLE_KIT_CACHE``, or ``eagle_kit`` in the user's cache folder."""
    root = os.environ.get("EAGLE_KIT_CACHE")
    if root:
        return expand(root)
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "eagle_kit"


def expand(path: str | Path) -> Path:
    """``path`` with the home folder in place of ``~``. Raises UserError if no home folder is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"The home folder in {str(path)!r} is not known.",
            "Set HOME, or give the whole path; EAGLE_KIT_CACHE is that of the cache.",
        ) from None


def writing_remedy(error: Exception, otherwise: str) -> str:
    """Remedy for an ``error`` in writing a file, one sentence.

    Args:
        otherwise: what to do if nothing else helps, such as "choose another folder".
    """
    numbers = {str(getattr(error, "errno", None)), *OS_ERROR.findall(str(error))}
    if numbers & NO_SPACE:
        return f"Free some space, or {otherwise}."
    if numbers & NOT_WRITABLE:
        return f"Make it writable, or {otherwise}."
    return f"{otherwise[0].upper()}{otherwise[1:]}."


def read_text(path: Path, remedy: str = COPY_AGAIN, max_bytes: int = MAX_TEXT) -> str:
    """Read UTF-8 text of at most ``max_bytes``. Raises UserError."""
    # A named pipe has no end. That of a shell's <(command) has, and no name in the file system.
    if path.is_fifo() and os.path.exists(os.path.realpath(path)):
        raise UserError(f"{path} is a pipe, which may never end.", remedy)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise UserError(f"{path} has more than {max_bytes >> 20} MiB.", remedy)
        return data.decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.", remedy) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: byte {error.start} is not UTF-8.", remedy) from None


def parse_json(text: str | bytes, where: object, remedy: str = COPY_AGAIN) -> Any:
    """Parse JSON. Raises UserError, also for nesting and numbers that Python cannot hold.

    Args:
        where: names the text in the message.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({json_problem(error)}).", remedy) from None


def json_problem(error: Exception) -> str:
    """Reason for which a JSON decoder raised ``error``, as a clause."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).partition(";")[0]


def read_json(path: Path, remedy: str = COPY_AGAIN) -> Any:
    """Read a JSON file. Raises UserError as :func:`read_text` and :func:`parse_json`."""
    value = parse_json(read_text(path, remedy), path, remedy)
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{path} holds half a character (a lone surrogate).", remedy)
    return value


def check_name(name: str, where: Path) -> None:
    """Raise UserError unless ``name``, read from the file ``where``, is a plain file name without folders."""
    if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
        raise UserError(
            f"{where} names the file {shown(name)}, which is not a name of a file in its folder.", COPY_AGAIN
        )


def is_unicode(text: str) -> bool:
    """True if ``text`` can be written: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_object(path: Path, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises UserError, also for any other value."""
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object.", remedy)
    return value


def nearest_folder(path: Path) -> Path:
    """``path`` or the nearest of its parents that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def check_writable(folder: Path, remedy: str) -> None:
    """Raise UserError if ``folder`` could not be made or written to. Nothing is made."""
    existing = nearest_folder(folder)
    if not existing.is_dir():
        raise UserError(f"{existing} is a file, so there can be no folder {folder}.", remedy)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"The folder {existing} cannot be written to.", remedy)


def check_file_writable(path: Path, remedy: str) -> None:
    """Raise UserError if the file ``path`` could not be made or replaced. Nothing is made."""
    if path.is_dir():
        raise UserError(f"{path} is a folder.", remedy)
    check_writable(path.parent, remedy)


def why_unsafe(path: Path) -> str | None:
    """Reason for which another user may have written ``path``, as a clause; None if none could.

    Others could if one of them owns it, can write to it, or can rename a folder above it.
    """
    if not hasattr(os, "geteuid"):  # not a POSIX system
        return None
    path = path.resolve()
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it"
    for parent in path.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"any user can rename what is in {parent}"
    return None


def check_disk_space(folder: Path, num_bytes: int, remedy: str = ANOTHER_FOLDER) -> None:
    """Raise UserError if the disk of ``folder`` has less than ``num_bytes`` free."""
    free = shutil.disk_usage(nearest_folder(folder)).free
    if free < num_bytes:
        raise UserError(
            f"The disk of {folder} has {free / 1e6:.0f} MB free, and {num_bytes / 1e6:.0f} MB are needed.",
            remedy,
        )


@contextmanager
def sole_writer(of: Path, lock: Path) -> Iterator[None]:
    """Hold the file ``lock`` in the body, so that no other process that locks it writes to ``of``.

    The system releases the lock when this process ends in any way. After the body the file is deleted, and so
    are folders that were made for it and are still empty.

    Args:
        of: the folder or file that is written, for the message.

    Raises:
        UserError: another process holds the lock, or the file cannot be written.
    """
    made = [folder for folder in lock.parents if not folder.exists()]
    holder = FileLock(lock, timeout=0)
    try:
        # Take the lock, or refuse at once.
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            holder.acquire()
        except Timeout:
            raise UserError(f"Another process is writing to {of}.", "Wait for it, or stop it.") from None
        except OSError as error:
            raise UserError(
                f"{lock} cannot be written: {error.strerror or error}.",
                writing_remedy(error, CHOOSE_ANOTHER),
            ) from error

        # Run the body, and delete the file.
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not delete open files
                lock.unlink()
            holder.release()
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def taking_turns(path: Path) -> Iterator[None]:
    """Run the body in one process at a time for each ``path``; other processes wait.

    It is for files that several processes may find missing at once. The body must test again whether ``path``
    is there: replacing it (:func:`replacing`) would take the folder from processes that read it.

    Raises:
        OSError: the folder cannot be written.
    """
    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not delete open files
                lock.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` for a new file or folder, and rename it to ``path`` after the body.

    A reader sees the old file or all of the new one, whose bytes are on the disk before the rename. If the
    body raises, the old file stays and the new one is deleted. A killed process leaves
    ``.NAME.HOST.PID.partial``; killed between the two renames of a folder, it leaves the old folder as
    ``.NAME.HOST.PID.old``, which the next call restores. A symbolic link stays, and its target is replaced.
    Mode and owner of the old file are kept.

    Raises:
        UserError: ``path`` is a device, a pipe or a socket.
    """
    path = _link_target(path)
    tidy(path)
    work = _beside(path, "partial")
    old = _beside(path, "old")
    try:
        yield work
        _sync(work)
        _keep_modes(path, work)
        if work.is_dir() and path.is_dir():  # a file never takes the place of a folder
            path.rename(old)
        work.replace(path)
    finally:
        # An interrupt between the two renames must not lose the old folder.
        if old.exists() and not path.exists():
            old.rename(path)
        remove(work)

        # Delete the old folder under the other name: if that is interrupted, a part of it is not restored.
        if old.exists():
            old.rename(work)
            remove(work)


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield a path beside ``folder`` for a new folder, and rename it to ``folder`` after the body. If another
    process was first, its folder stays. A reader sees no folder or all of it."""
    folder = _link_target(folder)
    tidy(folder)
    work = _beside(folder, "partial")
    try:
        yield work
        _sync(work)
        try:
            work.rename(folder)  # raises if there is a folder that is not empty
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        remove(work)


def tidy(path: Path) -> None:
    """Clean up after processes of this machine that ended while they replaced ``path``.

    An old folder is restored if ``path`` does not exist. Everything else that they left is deleted.
    """
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return
    start = f".{path.name}.{socket.gethostname()}."
    for name in sorted(names):  # of each process, .old comes before .partial
        # Files of processes that have ended.
        process, _, kind = name.removeprefix(start).partition(".")
        if not (name.startswith(start) and process.isdecimal() and kind in ("old", "partial")):
            continue
        if int(process) != os.getpid() and is_alive(int(process)):
            continue

        # Restore or delete them. A folder to delete is renamed first, as in :func:`replacing`.
        left = path.with_name(name)
        if kind == "partial":
            remove(left)
        elif not path.exists():
            left.rename(path)
        else:
            deleted = _beside(path, "partial")
            remove(deleted)
            left.rename(deleted)
            remove(deleted)


def give_usual_mode(path: Path) -> None:
    """Give a file the mode that the umask gives to new files. Some libraries make files that only their owner
    can read."""
    new = path.with_name(f"{path.name}.mode")
    new.touch(mode=0o666)
    try:
        mode = stat.S_IMODE(new.stat().st_mode)
    finally:
        new.unlink()
    path.chmod(mode)


def _link_target(path: Path) -> Path:
    """``path`` with symbolic links resolved. Raises UserError for a device, a pipe or a socket."""
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is neither a file nor a folder.", "Give the path of a file or a folder.")
    return path


def _keep_modes(path: Path, work: Path) -> None:
    """Give ``work``, and files in it, the mode and owner of the files of the same name in ``path``."""
    for new in _with_contents(work):
        old = path / new.relative_to(work)
        if old.is_file() != new.is_file() or old.is_dir() != new.is_dir():
            continue
        before = old.stat()
        now = new.stat()
        if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            with suppress(OSError):  # only root can give a file to another user
                os.chown(new, before.st_uid, before.st_gid)
        new.chmod(stat.S_IMODE(before.st_mode))


def _with_contents(path: Path) -> list[Path]:
    """A file, or a folder and everything in it."""
    if path.is_dir():
        return [path, *path.rglob("*")]
    return [path]


def _beside(path: Path, kind: str) -> Path:
    """Name beside ``path`` that no other process uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{kind}")


def _sync(written: Path) -> None:
    """Write the bytes of a file, or of all files of a folder, to the disk."""
    for path in _with_contents(written):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Delete a file, or a folder with everything in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists() or path.is_symlink():
        path.unlink()


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that a reader sees the old file or the new one, never a part."""
    with replacing(path) as work:
        if path.is_file():  # it may be private, so the new file is, too, until it has the mode of the old one
            work.touch(0o600)
        work.write_bytes(data)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 so that a reader sees the old file or the new one, never a part."""
    write_bytes_atomically(path, text.encode())


def write_json_atomically(path: Path, value: Any, indent: int = 2) -> None:
    """Write ``value`` as JSON so that a reader sees the old file or the new one, never a part."""
    write_text_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
