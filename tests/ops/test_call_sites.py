"""Every operation is used by the engine or the trainer."""

import re
from pathlib import Path

import eagle_kit

ROOT = Path(eagle_kit.__file__).parent
CALLERS = ("kv", "models", "engine", "drafts", "verify", "objective", "train")
"""Packages of the engine and of the trainer; their benchmarks do not count."""
GROUPS = ("attention", "cpu")
"""Folders that hold operations or parts of them, and are none themselves."""


def folder_of(operation: str) -> Path:
    """Folder of an operation by its dotted name in ``ops``."""
    return ROOT.joinpath("ops", *operation.split("."))


def imported_by(folder: Path) -> set[str]:
    """Dotted names in ``eagle_kit.ops`` that modules of ``folder`` import, and those of their groups'
    parts."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for name in re.findall(r"from eagle_kit\.ops\.([\w.]+) import", path.read_text(encoding="utf-8")):
            parts = name.split(".")
            found.add(".".join(parts[:2]) if parts[0] in GROUPS else parts[0])
    return found


def test_every_operation_is_imported_by_the_engine_the_trainer_or_an_operation_of_theirs():
    folders = [*(ROOT / "ops").glob("*/__init__.py"), *(ROOT / "ops" / "attention").glob("*/__init__.py")]
    operations = {".".join(path.parent.relative_to(ROOT / "ops").parts) for path in folders} - {*GROUPS}
    used: set[str] = set()
    new = set().union(*(imported_by(ROOT / package) for package in CALLERS)) & operations
    while new:
        used |= new
        new = set().union(*(imported_by(folder_of(name)) for name in new)) & operations - used
    assert operations
    assert operations - used == set()
