"""The configs that ship with the package, found by name where the working folder has no such file."""

from fnmatch import fnmatch
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
PLACES = (PACKAGE / "configs", PACKAGE.parent / "configs")
"""Folder of the configs in an installed wheel, and in a checkout."""
FOLDER = "configs"


def shipped_configs() -> dict[str, Path]:
    """The configs that ship, by file name."""
    for place in PLACES:
        if place.is_dir():
            return {path.name: path for path in sorted(place.glob("*.yaml"))}
    return {}


def find_config(path: Path) -> Path:
    """The file at ``path``, or, if there is none, the config that ships under this name.

    ``configs/NAME.yaml``, ``NAME.yaml`` and ``NAME`` are such names. Other paths are returned as they are.
    """
    if path.exists() or path.parent not in (Path(), Path(FOLDER)):
        return path
    name = path.name
    if path.suffix != ".yaml":
        name += ".yaml"
    return shipped_configs().get(name, path)


def config_files(word: str) -> list[str]:
    """Files that a word of the command line names. A pattern that the shell did not replace, because no file
    matches it, names configs that ship."""
    path = Path(word)
    if not any(mark in path.name for mark in "*?[") or path.parent != Path(FOLDER) or path.exists():
        return [word]
    found = [str(file) for name, file in shipped_configs().items() if fnmatch(name, path.name)]
    return found or [word]
