"""File locks: one writer at a time, released with its process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    cache_folder,
    check_writable,
    give_usual_mode,
    making,
    read_object,
    read_text,
    replacing,
    sole_writer,
    taking_turns,
    write_json_atomically,
    write_text_atomically,
)

HOLDER = """
import sys, time
from pathlib import Path
from eagle_kit.core.files import replacing, sole_writer, write_json_atomically, write_text_atomically

lock = Path(sys.argv[1])
with sole_writer(lock.parent, lock):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_keeps_others_out_until_its_process_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        message = f"Another process is writing to {lock.parent}."
        with pytest.raises(UserError, match=message), sole_writer(lock.parent, lock):
            pass
        holder.kill()
    assert lock.exists()
    with sole_writer(lock.parent, lock), pytest.raises(UserError), sole_writer(lock.parent, lock):
        pass
    assert list(tmp_path.iterdir()) == [lock.parent] and not lock.exists()


def test_folders_made_for_a_lock_go_with_it_unless_they_were_used(tmp_path: Path) -> None:
    lock = tmp_path / "a" / "b" / ".lock"
    with pytest.raises(ValueError, match="mine"), sole_writer(lock.parent, lock):
        raise ValueError("mine")
    assert not list(tmp_path.iterdir())
    with sole_writer(lock.parent, lock):
        (tmp_path / "a" / "notes.txt").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes.txt"]


def test_a_lock_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lock = tmp_path / "file" / "deep" / ".lock"
    with pytest.raises(UserError, match="cannot be written"), sole_writer(lock.parent, lock):
        pass


def test_of_two_processes_that_make_a_folder_the_first_ones_stays_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with making(folder) as work:
        work.mkdir()
        (work / "rows").write_text("second")
        folder.mkdir()  # by another process, meanwhile
        (folder / "rows").write_text("first")
        before = folder.stat().st_ino
    assert (folder.stat().st_ino, (folder / "rows").read_text()) == (before, "first")
    with making(tmp_path / "new") as work:
        work.mkdir()
        (work / "rows").write_text("mine")
    assert (tmp_path / "new" / "rows").read_text() == "mine"
    with pytest.raises(ZeroDivisionError), making(tmp_path / "never") as work:
        work.mkdir()
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "new"]


def test_a_replaced_file_or_folder_is_the_old_one_or_all_of_the_new(tmp_path: Path) -> None:
    file, folder = tmp_path / "file.txt", tmp_path / "folder"
    write_text_atomically(file, "old")
    with replacing(folder) as work:
        work.mkdir()
        (work / "old").touch()
    for path in (file, folder):
        with pytest.raises(ValueError, match="broken off"), replacing(path) as work:
            work.write_text("half") if path == file else (work.mkdir(), (work / "half").touch())
            raise ValueError("broken off")
    assert file.read_text() == "old" and [path.name for path in folder.iterdir()] == ["old"]
    with replacing(folder) as work:
        work.mkdir()
        (work / "new").touch()
        assert [path.name for path in folder.iterdir()] == ["old"]
    write_json_atomically(file, {"ü": 1}, indent=0)
    assert [path.name for path in folder.iterdir()] == ["new"] and file.read_text() == '{\n"ü": 1\n}\n'
    with pytest.raises(OSError, match="folder"):
        write_text_atomically(folder, "a file in the place of a folder")
    assert (folder / "new").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "folder"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "is not JSON (it is nested too deeply)"),
        (b'{"a": ' * 100_000, "is not JSON (it is nested too deeply)"),
        (b"1" * 5000, "is not JSON (Exceeds the limit (4300 digits)"),
        (b'{"a":', "is not JSON (Expecting value"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b'"\\ud800"', "holds half a character"),
        (b"[1]", "does not hold a JSON object"),
    ],
)
def test_json_that_cannot_be_read_is_one_sentence(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        read_object(path)
    assert caught.value.cause.startswith(str(path)) and words in caught.value.cause


def test_a_text_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(UserError, match="more than 1 MiB"):
        read_text(Path("/dev/zero"), max_bytes=1 << 20)


def test_a_text_of_the_largest_size_is_read(tmp_path):
    (tmp_path / "text").write_text("12345")
    assert read_text(tmp_path / "text", max_bytes=5) == "12345"
    with pytest.raises(UserError):
        read_text(tmp_path / "text", max_bytes=4)


@pytest.mark.parametrize("put", [replacing, making])
def test_what_a_killed_process_of_the_same_number_left_is_not_mixed_in(tmp_path, put):
    folder = tmp_path / "folder"
    with pytest.raises(ZeroDivisionError), put(folder) as left:
        raise ZeroDivisionError
    left.mkdir()
    (left / "half").touch()
    with put(folder) as work:
        work.mkdir()
        (work / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "whole"]


def test_an_interrupt_between_the_renames_keeps_the_older_folder(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").touch()

    def interrupted(work, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing(folder) as work:
        work.mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "old"]


def test_a_turn_leaves_no_lock_and_others_wait_for_it(tmp_path):
    path = tmp_path / "made"
    order = []

    def take(number):
        with taking_turns(path):
            order.append(number)
            if number == 0:
                time.sleep(0.05)  # the others come meanwhile
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[::2] == order[1::2] and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_and_not_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, so there can be no folder"):
        check_writable(tmp_path / "file" / "deep" / "deeper", "Do this.")
    check_writable(tmp_path / "new" / "deep", "Do this.")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK or path != tmp_path)
    with pytest.raises(UserError, match=f"The folder {tmp_path} cannot be written to. Do this."):
        check_writable(tmp_path / "new" / "deep", "Do this.")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EAGLE_KIT_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("EAGLE_KIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "eagle_kit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "eagle_kit"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_of_another_library_gets_the_mode_of_any_new_one(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "made"
    path.touch(mode=0o600)
    before = os.umask(umask)
    try:
        give_usual_mode(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
