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
"""Number of a system's error in the text of one from Rust, as safetensors raises it."""
NO_SPACE = {str(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
NOT_WRITABLE = {str(number) for number in (errno.EROFS, errno.EACCES, errno.EPERM)}


def cache_folder() -> Path:
    """Cache folder: ``EAGLE_KIT_CACHE``, or ``eagle_kit`` in the user's cache folder."""
    root = os.environ.get("EAGLE_KIT_CACHE")
    if root:
        return expand(root)
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "eagle_kit"


def expand(path: str | Path) -> Path:
    """``path`` with the home folder in place of ``~``. Raises UserError where no such folder is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"The home folder in {str(path)!r} is not known.",
            "Set HOME, or give the whole path; EAGLE_KIT_CACHE is that of the cache.",
        ) from None


def writing_remedy(error: Exception, otherwise: str) -> str:
    """What to do where ``error`` kept a file from being written.

    Args:
        otherwise: the other way out, such as "choose another folder".
    """
    numbers = {str(getattr(error, "errno", None)), *OS_ERROR.findall(str(error))}
    if numbers & NO_SPACE:
        return f"Free some space, or {otherwise}."
    if numbers & NOT_WRITABLE:
        return f"Make it writable, or {otherwise}."
    return f"{otherwise[0].upper()}{otherwise[1:]}."


def read_text(path: Path, remedy: str = COPY_AGAIN, max_bytes: int = MAX_TEXT) -> str:
    """Read UTF-8 text of at most ``max_bytes``. Raises UserError."""
    if path.is_fifo() and os.path.exists(os.path.realpath(path)):  # not that of a shell's <(command)
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
    """Say why a decoder raised ``error``."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def read_json(path: Path, remedy: str = COPY_AGAIN) -> Any:
    """Read a JSON file. Raises UserError as :func:`read_text` and :func:`parse_json`."""
    value = parse_json(read_text(path, remedy), path, remedy)
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{path} holds half a character (a lone surrogate).", remedy)
    return value


def check_name(name: str, where: Path) -> None:
    """Raise UserError unless ``name``, which the file ``where`` gives, is that of a file beside it."""
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
    return next(place for place in (path, *path.parents) if place.exists())


def check_writable(folder: Path, remedy: str) -> None:
    """Raise UserError when ``folder`` could not be made or written to; nothing is made."""
    place = nearest_folder(folder)
    if not place.is_dir():
        raise UserError(f"{place} is a file, so there can be no folder {folder}.", remedy)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"The folder {place} cannot be written to.", remedy)


def check_file_writable(path: Path, remedy: str) -> None:
    """Raise UserError when the file ``path`` could not be made or replaced; nothing is made."""
    if path.is_dir():
        raise UserError(f"{path} is a folder.", remedy)
    check_writable(path.parent, remedy)


def why_unsafe(path: Path) -> str | None:
    """Why code in ``path`` may be that of another user, as a clause; None where it cannot be.

    Others can write to it, own it, or can rename a folder above it.
    """
    if not hasattr(os, "geteuid"):
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
                f"{lock} cannot be written: {error.strerror or error}.",
                writing_remedy(error, CHOOSE_ANOTHER),
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


@contextmanager
def taking_turns(path: Path) -> Iterator[None]:
    """Be the only process inside for ``path``, which several may find missing at once: others wait, and are
    to look again whether it is there, since :func:`replacing` it would take it from those who read it.

    Raises OSError where the folder cannot be written.
    """
    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows keeps open files
                lock.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write a file or a folder to, and put it in its place at the end.

    A reader sees what was there before or all of the new, whose bytes are on the disk first. When the body
    raises, what was there stays and the new is deleted; a killed process leaves ``.NAME.HOST.PID.partial``,
    and between two renames of a folder what was there before as ``.NAME.HOST.PID.old``, which the next call
    puts back. A link stays, and its target is replaced. Modes and owners of what was there are kept.

    Raises:
        UserError: ``path`` is a device, a pipe or a socket.
    """
    path = _link_target(path)
    tidy(path)
    work, old = _beside(path, "partial"), _beside(path, "old")
    try:
        yield work
        _sync(work)
        _keep_modes(path, work)
        if work.is_dir() and path.is_dir():  # a file never takes the place of a folder
            path.rename(old)
        work.replace(path)
    finally:  # an interrupt between the two renames must not cost the older folder either
        if old.exists() and not path.exists():
            old.rename(path)
        remove(work)
        if old.exists():  # killed meanwhile, it is half of what was there, and is not put back
            old.rename(work)
            remove(work)


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield a path beside ``folder`` to make a folder at, and put it in its place at the end, unless another
    process was first: its folder stays, whole at any moment."""
    folder = _link_target(folder)
    tidy(folder)
    work = _beside(folder, "partial")
    try:
        yield work
        _sync(work)
        try:
            work.rename(folder)  # which never takes the place of a folder with something in it
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        remove(work)


def tidy(path: Path) -> None:
    """Put right what processes of this machine left that ended while they replaced ``path``.

    What was there before them is put back where nothing is now; anything else of them is deleted.
    """
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return
    start = f".{path.name}.{socket.gethostname()}."
    for name in sorted(names):  # of a process, .old comes before .partial
        process, _, kind = name.removeprefix(start).partition(".")
        if not (name.startswith(start) and process.isdecimal() and kind in ("old", "partial")):
            continue
        if int(process) != os.getpid() and is_alive(int(process)):
            continue
        left = path.with_name(name)
        if kind == "old" and not path.exists():
            left.rename(path)
        elif kind == "old":
            going = _beside(path, "partial")
            remove(going)
            left.rename(going)
            remove(going)
        else:
            remove(left)


def give_usual_mode(path: Path) -> None:
    """Give a file the mode that the umask gives to new ones; some libraries make files for their owner
    alone."""
    usual = path.with_name(f"{path.name}.mode")
    usual.touch(mode=0o666)
    try:
        mode = stat.S_IMODE(usual.stat().st_mode)
    finally:
        usual.unlink()
    path.chmod(mode)


def _link_target(path: Path) -> Path:
    """``path``, or what it is a link to. Raises UserError for what is neither a file nor a folder."""
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is neither a file nor a folder.", "Give the path of a file or a folder.")
    return path


def _keep_modes(path: Path, work: Path) -> None:
    """Give ``work``, and files in it, mode and owner of what is at their places in ``path``."""
    for new in (work, *work.rglob("*")) if work.is_dir() else (work,):
        before = path / new.relative_to(work)
        if before.is_file() != new.is_file() or before.is_dir() != new.is_dir():
            continue
        found = before.stat()
        made = new.stat()
        if (found.st_uid, found.st_gid) != (made.st_uid, made.st_gid):
            with suppress(OSError):  # only root can give a file to another user
                os.chown(new, found.st_uid, found.st_gid)
        new.chmod(stat.S_IMODE(found.st_mode))


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{kind}")


def _sync(written: Path) -> None:
    """Put the bytes of a file, or of all files of a folder, on the disk."""
    for path in written.rglob("*") if written.is_dir() else (written,):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Delete a file, or a folder with all in it; one that is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists() or path.is_symlink():
        path.unlink()


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that a reader sees the old file or the new one, never a part."""
    with replacing(path) as work:
        if path.is_file():  # what is private is private from the first byte on
            work.touch(0o600)
        work.write_bytes(data)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 so that a reader sees the old file or the new one, never a part."""
    write_bytes_atomically(path, text.encode())


def write_json_atomically(path: Path, value: Any, indent: int = 2) -> None:
    """Write ``value`` as JSON so that a reader sees the old file or the new one, never a part."""
    write_text_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
