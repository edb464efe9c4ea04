"""Torch files: a disk that is full is an error of the system, by which callers tell it."""

import errno
from pathlib import Path

import pytest
import torch

import eagle_kit
from eagle_kit.drafts.files.torch_file import save_torch_file

PACKAGE = Path(eagle_kit.__file__).parent


def test_a_saved_value_comes_back(tmp_path):
    save_torch_file({"a": torch.arange(5)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_is_an_error_of_the_system(size):
    """``torch.save`` with a path raises a RuntimeError about positions, which no caller expects."""
    with pytest.raises(OSError) as caught:
        save_torch_file({"a": torch.zeros(size)}, Path("/dev/full"))
    assert caught.value.errno == errno.ENOSPC


def test_a_value_that_cannot_be_saved_is_an_error_of_its_own(tmp_path):
    with pytest.raises(AttributeError):
        save_torch_file(lambda: None, tmp_path / "x.pt")


def test_nothing_else_writes_torch_files():
    found = [path.name for path in PACKAGE.rglob("*.py") if "torch.save(" in path.read_text()]
    assert found == ["torch_file.py"]
