"""Replacing of files and folders: links, modes, leftovers of killed processes, and what is no file."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    cache_folder,
    check_name,
    expand,
    making,
    read_text,
    remove,
    replacing,
    write_text_atomically,
    writing_remedy,
)

DEAD = 2**22 + 1
"""Number that no process has: Linux has none above 2**22."""

KILLED_BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from eagle_kit.core.files import replacing

Path.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
with replacing(Path(sys.argv[1])) as work:
    work.mkdir()
    (work / "new").touch()
"""


def write_folder(path, name):
    with replacing(path) as work:
        work.mkdir()
        (work / name).touch()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def leftover(path, kind, process=DEAD):
    return path.with_name(f".{path.name}.{socket.gethostname()}.{process}.{kind}")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_to_a_folder_stays_and_its_target_is_replaced(tmp_path, is_there):
    (tmp_path / "disk").mkdir()
    if is_there:
        write_folder(tmp_path / "disk" / "draft", "old")
    link = tmp_path / "draft"
    link.symlink_to("disk/draft")
    write_folder(link, "new")
    assert link.is_symlink() and names(tmp_path / "disk" / "draft") == ["new"]
    assert names(tmp_path) == ["disk", "draft"] and names(tmp_path / "disk") == ["draft"]


def test_a_link_to_a_link_to_a_file_stays_and_the_file_is_written(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "one").symlink_to("file")
    (tmp_path / "two").symlink_to("one")
    write_text_atomically(tmp_path / "two", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "one").is_symlink() and (tmp_path / "two").is_symlink()
    assert names(tmp_path) == ["file", "one", "two"]


def test_a_folder_is_made_where_a_link_to_nothing_points(tmp_path):
    (tmp_path / "link").symlink_to("made")
    with making(tmp_path / "link") as work:
        work.mkdir()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "made").is_dir()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_replaced_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    write_text_atomically(path, "new")
    assert path.stat().st_mode & 0o7777 == mode and path.read_text() == "new"


def test_a_private_file_is_private_while_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / "file"
    modes = []
    path.write_text("old")
    path.chmod(0o600)
    write = Path.write_bytes

    def watched(work, data):
        done = write(work, data)
        modes.append(work.stat().st_mode & 0o777)
        return done

    monkeypatch.setattr(Path, "write_bytes", watched)
    write_text_atomically(path, "new")
    assert modes == [0o600]


def test_a_replaced_folder_and_its_files_keep_their_modes(tmp_path):
    folder = tmp_path / "draft"
    write_folder(folder, "weights")
    folder.chmod(0o700)
    (folder / "weights").chmod(0o600)
    with replacing(folder) as work:
        work.mkdir()
        (work / "weights").touch()
        (work / "card").touch()
        (work / "card").chmod(0o644)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"draft": 0o700, "weights": 0o600, "card": 0o644}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_file_that_root_replaces_stays_that_of_its_owner(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.chown(path, 65534, 65533)
    write_text_atomically(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)


@pytest.mark.essential
def test_what_a_process_killed_between_the_renames_left_is_put_right(tmp_path):
    folder = tmp_path / "draft"
    write_folder(folder, "old")
    done = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_THE_RENAMES, str(folder)])
    assert done.returncode == -signal.SIGKILL and not folder.exists()
    with pytest.raises(ZeroDivisionError), replacing(folder):
        assert names(tmp_path) == ["draft"] and names(folder) == ["old"]
        raise ZeroDivisionError
    assert names(tmp_path) == ["draft"] and names(folder) == ["old"]


@pytest.mark.parametrize("is_leftover", [False, True])
def test_what_was_deleted_in_part_is_not_put_back(tmp_path, monkeypatch, is_leftover):
    """The process is killed while it deletes the older folder, and then the newer one is moved elsewhere."""
    folder = tmp_path / "draft"
    write_folder(folder, "old")
    if is_leftover:
        write_folder(leftover(folder, "old"), "older")

    def killed(going, **options):
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr("shutil.rmtree", killed)
        write_folder(folder, "new")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(KeyError), replacing(folder):
        raise KeyError
    assert names(tmp_path) == ["elsewhere"]


@pytest.mark.parametrize("has_our_number", [False, True])
def test_leftovers_of_processes_that_ended_are_removed(tmp_path, has_our_number):
    """A process of ours can have the number of one that ended, as in a container that is started again."""
    process = os.getpid() if has_our_number else DEAD
    folder = tmp_path / "a[b]*"
    write_folder(folder, "old")
    for kind in ("old", "partial"):
        leftover(folder, kind, process).mkdir()
        (leftover(folder, kind, process) / "half").touch()
    write_folder(folder, "new")
    assert names(tmp_path) == ["a[b]*"] and names(folder) == ["new"]


def test_what_others_have_is_left_alone(tmp_path):
    folder = tmp_path / "draft"
    host = socket.gethostname()
    others = [
        f".draft.{host}.{os.getppid()}.partial",  # of a process that lives
        f".draft.other-host.{DEAD}.partial",
        f".draft.{host}.{DEAD}.notes",
        f".draft.{host}.x.partial",
        f".draft2.{host}.{DEAD}.partial",
        f"draft.{host}.{DEAD}.partial",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    write_folder(folder, "new")
    assert names(tmp_path) == sorted(["draft", *others])


def test_a_pipe_is_neither_replaced_nor_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        write_text_atomically(tmp_path / "pipe", "text")
    with pytest.raises(UserError, match="is a pipe"):
        read_text(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_the_pipe_of_a_shell_is_read():
    """As in ``eagle-kit train <(command)``."""
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_text(Path(f"/dev/fd/{reading}")) == "text"
    os.close(reading)


def test_a_device_is_not_replaced():
    with pytest.raises(UserError, match="neither a file nor a folder"), replacing(Path("/dev/null")):
        pass


def test_a_link_is_removed_without_what_it_leads_to(tmp_path):
    write_folder(tmp_path / "folder", "file")
    for place in ("folder", "nowhere"):
        (tmp_path / "link").symlink_to(place)
        remove(tmp_path / "link")
        assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["file"]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/a", "a/b", "a\\b", "a\0b", "../" * 99 + "a"])
def test_a_name_that_leaves_its_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="not a name of a file"):
        check_name(name, tmp_path / "index.json")


def test_a_home_that_is_not_known_is_one_sentence(monkeypatch):
    """As for a number of a user without a name, and no HOME."""

    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.delenv("EAGLE_KIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(UserError, match="Set HOME"):
        cache_folder()


def test_the_home_of_a_user_who_is_not_there_is_one_sentence():
    with pytest.raises(UserError, match="home folder in '~no-such-user/model'"):
        expand("~no-such-user/model")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "x"), "Free some space, or choose another folder."),
        (OSError(errno.EDQUOT, "x"), "Free some space, or choose another folder."),
        (RuntimeError("I/O error: no room (os error 28)"), "Free some space, or choose another folder."),
        (OSError(errno.EROFS, "x"), "Make it writable, or choose another folder."),
        (PermissionError(errno.EACCES, "x"), "Make it writable, or choose another folder."),
        (RuntimeError("I/O error (os error 30)"), "Make it writable, or choose another folder."),
        (OSError(errno.ENOTDIR, "x"), "Choose another folder."),
        (RuntimeError("x"), "Choose another folder."),
    ],
)
def test_the_remedy_is_that_of_the_error(error, remedy):
    assert writing_remedy(error, "choose another folder") == remedy
