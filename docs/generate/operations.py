"""``operations.md``: every operation of ``eagle_kit/ops`` with its functions, backends and files."""

import ast
from collections.abc import Iterator
from pathlib import Path

from generate.markdown import PACKAGE, code, docstring, first_sentence, table, wrapped

OPS = PACKAGE / "ops"
CPP_IMPORTS = {
    "eagle_kit.ops.backend.copies_in_cpp",
    "eagle_kit.ops.backend.uses_cpp",
    "eagle_kit.ops.cpu.cpp",
}
"""Names of which an operation with an implementation in C++ imports one."""
NOT_OPERATIONS = ("attention", "cpu")
"""Folders without an operation: one holds five of them, the other holds the sources in C++."""


def operations_page() -> str:
    """A table of all operations, and a section for each."""
    written = (
        "Written by `make reference` from the docstrings of `eagle_kit/ops`. One folder is one operation. "
        "The function in its `__init__.py` chooses the backend: Triton for tensors on a GPU, C++ for fp32 on "
        "a CPU where there is an implementation, else torch. `eagle_kit.ops.backend.use` insists on one."
    )
    folders = list(_folders())
    rows = []
    for folder in folders:
        name = folder.relative_to(OPS).as_posix()
        about = first_sentence(docstring(folder / "__init__.py"))
        rows.append((f"[`{name}`](#{name.replace('/', '')})", about, ", ".join(_backends(folder))))
    lines = ["# Operations", "", *wrapped(written), ""]
    lines += table(("operation", "computes", "backends"), rows)
    for folder in folders:
        lines += ["", *_section(folder)]
    return "\n".join(lines) + "\n"


def _folders() -> Iterator[Path]:
    """Folders of operations, by name."""
    packages = sorted(path.parent for path in OPS.rglob("__init__.py"))
    for folder in packages:
        name = folder.relative_to(OPS).as_posix()
        if name != "." and name not in NOT_OPERATIONS and not name.endswith("/libraries"):
            yield folder


def _backends(folder: Path) -> list[str]:
    """Backends that the files of an operation have."""
    found = ["torch"]
    if any(folder.glob("triton*.py")):
        found.append("Triton")
    if any(_chooses_cpp(path) for path in folder.rglob("*.py")):
        found.append("C++")
    return found


def _chooses_cpp(path: Path) -> bool:
    """True if a file imports a choice of C++, or the library itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if names & CPP_IMPORTS:
                return True
    return False


def _section(folder: Path) -> list[str]:
    """Text, functions and files of an operation."""
    package = folder / "__init__.py"
    lines = [f"## `{folder.relative_to(OPS).as_posix()}`"]
    for paragraph in docstring(package).split("\n\n"):
        lines += ["", *wrapped(code(" ".join(paragraph.split())))]
    functions = list(_functions(package))
    if functions:
        lines += ["", "Functions:", ""]
        for name, text in functions:
            lines += wrapped(f"* `{name}`: {text}", indent="  ")
    lines += ["", f"Files in `{folder.relative_to(PACKAGE.parent).as_posix()}`:", ""]
    for path in sorted(folder.glob("*.py")):
        if path != package:
            lines += wrapped(f"* `{path.name}`: {first_sentence(docstring(path))}", indent="  ")
    if folder.name == "prefill":
        lines += wrapped(
            f"* `libraries/`: {first_sentence(docstring(folder / 'libraries/__init__.py'))}", "  "
        )
    return lines


def _functions(package: Path) -> Iterator[tuple[str, str]]:
    """Public functions of an operation, defined in its ``__init__.py`` or imported from its other files."""
    tree = ast.parse(package.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, first_sentence(ast.get_docstring(node) or "")
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            path = PACKAGE.parent / (node.module.replace(".", "/") + ".py")
            if path.parent == package.parent and path.exists():
                yield from _imported(path, [alias.name for alias in node.names])


def _imported(path: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Functions of a file, of the given names."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node.name, first_sentence(ast.get_docstring(node) or "")
