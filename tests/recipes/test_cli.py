"""The recipes' own command line: help, and one cause and one remedy for mistakes."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("door", ["recipes", "benchmarks", "kernels"])
def test_a_door_has_help_from_any_folder(door, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / door), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"usage: python {door}" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["study", "pretrain"])
@pytest.mark.parametrize(
    ("content", "cause"), [(b"\xff\xfe\x00", "UTF-8"), (b"a: [", "YAML"), (b"nope: 1\n", "nope")]
)
def test_a_file_that_is_none_is_refused(command, content, cause, tmp_path, capsys):
    file = tmp_path / "file.yaml"
    file.write_bytes(content)
    assert main([command, str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and cause in error and "\n  -> " in error


def test_a_number_of_jobs_below_one_is_refused(capsys):
    assert main(["study", str(ROOT / "recipes" / "studies" / "smollm2-135m.yaml"), "--jobs", "0"]) == 2
    assert "--jobs is 0" in capsys.readouterr().err


def test_settings_may_follow_options(capsys):
    file = ROOT / "recipes" / "studies" / "smollm2-135m.yaml"
    assert main(["study", str(file), "--dry-run", "nonsense=1"]) == 2
    assert "nonsense" in capsys.readouterr().err
