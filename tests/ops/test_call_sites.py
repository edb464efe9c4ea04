"""Every operation is used by the engine or the trainer."""

import re
from pathlib import Path

import eagle_kit

ROOT = Path(eagle_kit.__file__).parent
CALLERS = ("kv", "models", "serve", "speculation", "train")
"""Packages of the engine and of the trainer; their benchmarks do not count."""


def imported_by(folder: Path) -> set[str]:
    """Operations that modules of ``folder`` import."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        found.update(re.findall(r"from eagle_kit\.kernels\.(\w+)[. ]", path.read_text(encoding="utf-8")))
    return found


def test_every_operation_is_imported_by_the_engine_the_trainer_or_an_operation_of_theirs():
    operations = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    used: set[str] = set()
    new = set().union(*(imported_by(ROOT / package) for package in CALLERS)) & operations
    while new:
        used |= new
        new = set().union(*(imported_by(ROOT / "kernels" / name) for name in new)) & operations - used
    assert operations
    assert operations - used == set()
