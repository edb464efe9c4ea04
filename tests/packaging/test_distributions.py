"""A wheel and a source distribution have what they need, and the wheel nothing of the laboratory."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from versions import needs

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
NOT_COPIED = ("model.safetensors", "tuning.json")
"""Large files that no distribution depends on."""


pytestmark = needs("setuptools", "77", "pyproject.toml has the licence in the form of PEP 639")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git has, in which a build may leave files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    copy = tmp_path_factory.mktemp("checkout")
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if source.is_file() and source.name not in NOT_COPIED:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy / name)
    return copy


def build(checkout, hook, out):
    """Build without an environment of its own, so that no network is needed."""
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def test_a_wheel_has_the_configs_and_nothing_of_the_laboratory(checkout, tmp_path):
    wheel = zipfile.ZipFile(build(checkout, "build_wheel", tmp_path))
    names = wheel.namelist()
    inside = {name.split("/")[0] for name in names}
    assert {name for name in inside if not name.endswith(".dist-info")} == {"eagle_kit"}
    for config in (ROOT / "configs").glob("*.yaml"):
        assert wheel.read(f"eagle_kit/configs/{config.name}") == config.read_bytes()
    for file in (checkout / "eagle_kit").rglob("*"):
        name = str(file.relative_to(checkout))
        if file.is_file() and "__pycache__" not in name:
            assert name in names, name
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.nightly
def test_a_source_distribution_is_whole(checkout, tmp_path):
    with tarfile.open(build(checkout, "build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for file in checkout.rglob("*"):
        name = str(file.relative_to(checkout))
        is_ours = not name.startswith(("build/", "dist/")) and ".egg-info" not in name
        if file.is_file() and is_ours and name != ".gitignore":
            assert name in names, name
