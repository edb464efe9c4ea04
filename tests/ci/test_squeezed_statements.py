"""The help that names squeezed statements of a change (``.ci/squeezed_statements.py``)."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "squeezed_statements.py"
SPEC = importlib.util.spec_from_file_location("squeezed_statements", SCRIPT)
module = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(module)


@pytest.mark.parametrize(
    ("source", "num_found"),
    [
        ("a, b = 1, 2", 1),
        ("a.x, b[0] = f(), g()", 1),
        ("a, b = b, a", 0),
        ("a, b = pair", 0),
        ("a = 1, 2", 0),
        ("f(*(a, b), c)", 1),
        ("f(**{'a': 1})", 1),
        ("f(*rest, **options)", 0),
        ("x = (*a, b)", 0),
    ],
)
def test_forms(source, num_found):
    assert len(list(module.squeezed(source))) == num_found


def test_only_added_lines_are_named(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    file = tmp_path / "code.py"
    file.write_text("a, b = 1, 2\nc = 3\n")
    git("add", ".")
    git("commit", "-qm", "one")
    file.write_text("a, b = 1, 2\nc = 3\nd, e = 4, 5\n")
    git("commit", "-qam", "two")

    command = [sys.executable, str(SCRIPT), "HEAD~1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ran.returncode == 0
    assert "code.py:3: assignment of several values" in ran.stdout
    assert "code.py:1:" not in ran.stdout
    assert "new since HEAD~1: 1; in all: 2" in ran.stdout
