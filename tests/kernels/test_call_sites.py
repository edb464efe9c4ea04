"""Kernels are there to be called: every registered operation has a call site in the engine or the trainer.

References are followed backwards by name, from an operation through the functions of its kernel's folder to
modules outside ``eagle_kit/kernels``. A call that insists on ``backend="reference"`` leads to no operation.
"""

import ast
import importlib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import eagle_kit
from eagle_kit.kernels.aot import kernel_modules

ROOT = Path(eagle_kit.__file__).parent
WAITING: dict[str, str] = {
    "commit": "rows that a caller has worked out; the engine's rows are worked out in commit_path itself",
    "accept_greedy": "for predictions that a caller has; the engine has logits: accept_most_likely",
}
"""Operations without a call site, and why."""
CALLERS = ("kv", "models", "serve", "speculation", "train")
"""Packages of the engine and of the trainer; their benchmarks do not count."""


class Reference(NamedTuple):
    """``name``, a function or class ``module:name``, is mentioned by ``within`` in a line of ``path``."""

    name: str
    within: str
    path: Path
    line: int


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Reader(ast.NodeVisitor):
    """Collects the references and the registered operations of one module."""

    def __init__(self, path: Path) -> None:
        self.path, self.module = path, module_of(path)
        self.references: list[Reference] = []
        self.operations: dict[str, str] = {}
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._known: dict[str, str] = {}
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._known[node.name] = f"{self.module}:{node.name}"
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle_kit"):
                for alias in node.names:
                    self._known[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        for node in ast.walk(self._tree):  # form = triton
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Name)
                and node.value.id in self._known
            ):
                self._known.update(
                    {t.id: self._known[node.value.id] for t in node.targets if isinstance(t, ast.Name)}
                )
        self._within = f"{self.module}:"
        self.visit(self._tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        at_top = self._within == f"{self.module}:"
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "torch.library.custom_op":
                name = ast.literal_eval(decorator.args[0])
                assert name.startswith("eagle_kit::")
                self.operations[name.removeprefix("eagle_kit::")] = f"{self.module}:{node.name}"
        if at_top:
            self._within = f"{self.module}:{node.name}"
        for child in (*node.args.defaults, *node.body):
            self.visit(child)
        if at_top:
            self._within = f"{self.module}:"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        at_top = self._within == f"{self.module}:"
        if at_top:
            self._within = f"{self.module}:{node.name}"
        for child in node.body:
            self.visit(child)
        if at_top:
            self._within = f"{self.module}:"

    def visit_Call(self, node: ast.Call) -> None:
        insists = any(
            word.arg == "backend" and isinstance(word.value, ast.Constant) and word.value.value == "reference"
            for word in node.keywords
        )
        if not insists:
            self.visit(node.func)
        if ast.unparse(node.func).endswith(".register_autograd"):
            # Whoever calls the operation calls its backward.
            self._within, before = self._known[ast.unparse(node.func).split(".")[0]], self._within
            self.generic_visit(node)
            self._within = before
            return
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Name(self, node: ast.Name) -> None:
        self._mention(self._known.get(node.id), node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and (place := self._known.get(node.value.id)):
            module, _, name = place.partition(":")
            self._mention(f"{module}.{name}:{node.attr}", node.lineno)  # of an imported module
        self.visit(node.value)

    def _mention(self, name: str | None, line: int) -> None:
        if name is not None and name != self._within:
            self.references.append(Reference(name, self._within, self.path, line))


@cache
def read() -> tuple[dict[str, list[Reference]], dict[str, str], dict[str, str]]:
    """References by what they mention; registered operations -> their functions; names that a package's
    ``__init__`` hands on -> where they come from."""
    by_name, operations, handed_on = defaultdict(list), {}, {}
    for path in sorted(ROOT.rglob("*.py")):
        reader = Reader(path)
        operations.update(reader.operations)
        if path.name == "__init__.py":
            handed_on.update({f"{reader.module}:{name}": full for name, full in reader._known.items()})
        for reference in reader.references:
            by_name[reference.name].append(reference)
    return by_name, operations, handed_on


def call_sites(operation: str) -> list[str]:
    """``path:line`` of the places outside of the kernels that lead to an operation."""
    by_name, operations, handed_on = read()
    also_known = defaultdict(set)
    for alias, full in handed_on.items():
        also_known[full].add(alias)
    todo, seen, found = [operations[operation]], set(), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += also_known[name]
        for reference in by_name[name]:
            package, *inner = reference.within.partition(":")[0].removeprefix("eagle_kit.").split(".")
            if inner and inner[0].startswith("bench"):
                continue
            if package in CALLERS:
                found.add(f"{reference.path.relative_to(ROOT)}:{reference.line}")
            elif package == "kernels" and inner and (ROOT / "kernels" / inner[0]).is_dir():
                todo.append(reference.within)
    return sorted(found)


@pytest.mark.parametrize("operation", sorted(read()[1]))
def test_it_has_a_call_site(operation, record_property):
    sites = call_sites(operation)
    record_property("call sites", sites)
    if operation in WAITING:
        assert not sites, f"{operation} is called in {sites}, so it waits no more"
    else:
        assert sites, f"nobody calls torch.ops.eagle_kit.{operation}"


def test_the_list_is_what_is_registered():
    pytest.importorskip("triton")
    for module in kernel_modules():
        importlib.import_module(module)
    names = torch._C._dispatch_get_all_op_names()
    registered = {name.removeprefix("eagle_kit::") for name in names if name.startswith("eagle_kit::")}
    assert registered == set(read()[1]) and set(WAITING) <= registered


def test_every_kernel_folder_registers_something():
    folders = {module.split(".")[-2] for module in kernel_modules()}
    with_operations = {place.split(":")[0].split(".")[-2] for place in read()[1].values()}
    lent = {"packed_attention"}  # runs the operations of ttt_attention
    assert folders - lent == with_operations
