"""Kernels are there to be called: each with a Triton form has a caller in the engine or the trainer."""

import ast
from pathlib import Path

import eagle_kit
from eagle_kit.kernels.aot import kernel_modules

ROOT = Path(eagle_kit.__file__).parent
WAITING = {
    "small_linear": "only called where a measurement on the machine shows that it beats cuBLAS",
}


def imported_kernels() -> set[str]:
    found = set()
    for path in ROOT.rglob("*.py"):
        if path.is_relative_to(ROOT / "kernels"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle_kit.kernels."):
                found.add(node.module.split(".")[2])
    return found


def test_every_kernel_has_a_caller():
    kernels = {module.split(".")[-2] for module in kernel_modules()}
    assert kernels - imported_kernels() - set(WAITING) == set()
    assert not set(WAITING) & imported_kernels(), "it is called now, so it waits no more"
