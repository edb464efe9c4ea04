"""Torch 2.11 and Triton 3.6 are enough: every name of theirs that the package uses is there, whatever is
installed. Needs no GPU; on the machine with one it looks at that machine's versions."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eagle_kit
from eagle_kit.ops.backend import uses_triton
from tests.gpu.place import DEVICE, ON_GPU

PACKAGES = ("torch", "triton")
LEAST = {"torch": (2, 11), "triton": (3, 6)}
ROOT = Path(eagle_kit.__file__).parent


def imported(tree: ast.Module) -> dict[str, str]:
    """Local names of what is imported from the two packages -> their full names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    found[alias.asname or alias.name.partition(".")[0]] = _bound(alias)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def _bound(alias: ast.alias) -> str:
    """What ``import a.b`` or ``import a.b as c`` binds."""
    return alias.name if alias.asname else alias.name.partition(".")[0]


def chain(node: ast.expr) -> list[str]:
    """``a.b.c`` -> its parts; empty for what does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def used_names() -> Iterator[tuple[str, str]]:
    """(full name, where it is used), the longest chain of attributes each."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = imported(tree)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if id(node) in inner or not isinstance(node, ast.Attribute | ast.Name):
                continue
            first, *rest = chain(node) or [""]
            if first in known:
                yield (
                    ".".join((known[first], *rest)),
                    f"{path.relative_to(ROOT)}:{node.lineno}",
                )


def resolve(name: str) -> object:
    """What a full name stands for: modules as far as they go, then attributes. Raises AttributeError."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if not hasattr(found, part) and type(found).__name__ == "module":
            try:
                importlib.import_module(".".join(parts[: i + 1]))
            except ImportError:
                raise AttributeError(name) from None
        found = getattr(found, part)
        if not isinstance(found, type) and type(found).__name__ != "module":
            break  # attributes of values, such as a decorated kernel's, are not the package's names
    return found


@pytest.mark.anywhere
def test_every_name_is_there():
    pytest.importorskip("triton")
    names: dict[str, str] = {}
    for name, place in used_names():
        names.setdefault(name, place)
    assert len(names) > 150
    missing = []
    for name, place in sorted(names.items()):
        try:
            resolve(name)
        except AttributeError:
            missing.append(f"{name} in {place}")
    assert not missing, "\n".join(missing)


@pytest.mark.anywhere
def test_versions_are_not_too_old():
    pytest.importorskip("triton")
    for package, least in LEAST.items():
        version = importlib.import_module(package).__version__
        assert tuple(int(part) for part in version.split(".")[:2]) >= least, f"{package} {version}"


def test_kernels_run_where_nobody_says_otherwise():
    assert uses_triton("norm", torch.empty(1, device=DEVICE)) == ON_GPU
