"""File locks: one writer at a time, released with its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import sole_writer

HOLDER = """
import sys, time
from pathlib import Path
from eagle_kit.core.files import sole_writer

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
