"""Switches: names, what they include, and how commands and children read them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_kit.cli import app
from eagle_kit.core import switches
from eagle_kit.core.errors import UserError
from eagle_kit.train import __main__ as train

OPS = Path(switches.__file__).parents[1] / "ops"
PAGE = OPS.parents[1] / "docs/how-to/work-around-a-fault.md"


@pytest.fixture
def disable(monkeypatch):
    """Function that sets the variable, as if the process began with it."""

    def set_variable(text):
        monkeypatch.setenv(switches.VARIABLE, text)
        switches.disabled_parts.cache_clear()

    yield set_variable
    switches.disabled_parts.cache_clear()


def test_nothing_is_disabled_without_the_variable(disable):
    disable("")
    assert not any(map(switches.is_disabled, switches.PARTS))


@pytest.mark.parametrize("part", switches.PARTS)
def test_a_part_is_disabled_with_those_that_it_includes(disable, part):
    disable(f" {part} ,")
    included = {
        "triton": {"triton", "prompt-graphs", *(f"triton:{name}" for name in switches.OPERATIONS)},
        "graphs": {"graphs", "prompt-graphs"},
        "triton:sampling": {"triton:sampling", "triton:accept"},
        "triton:attention/ttt": {"triton:attention/ttt", "triton:attention/packed"},
        "triton:attention/prefill": {"triton:attention/prefill", "prompt-graphs"},
    }.get(part, {part})
    assert {name for name in switches.PARTS if switches.is_disabled(name)} == included


def test_several_parts_are_separated_by_commas(disable):
    disable("lag, triton:norm")
    assert switches.disabled_parts() == {"lag", "triton:norm"}


def test_the_variable_is_read_once(disable, monkeypatch):
    disable("lag")
    assert switches.is_disabled("lag")
    monkeypatch.setenv(switches.VARIABLE, "")
    assert switches.is_disabled("lag")


@pytest.mark.parametrize("text", ["graph", "triton:relu", "triton:", "Lag", "lag graphs"])
def test_an_unknown_name_is_an_error_that_lists_the_names(disable, text):
    disable(f"lag,{text}")
    with pytest.raises(UserError) as caught:
        switches.is_disabled("lag")
    assert text in caught.value.cause
    assert all(name in caught.value.remedy for name in switches.PARTS)


@pytest.mark.parametrize(
    "words", [["doctor"], ["serve"], ["data", "preview"], ["train", "x.yaml"]], ids=" ".join
)
def test_every_command_refuses_an_unknown_name(disable, capsys, words):
    disable("cuda-graphs")
    assert app.main(words) == 2
    error = capsys.readouterr().err
    assert "cuda-graphs" in error and "programmatic-launch" in error


def test_a_launcher_of_the_trainer_refuses_an_unknown_name(disable, capsys):
    disable("cuda-graphs")
    assert train.main(["x.yaml"]) == 2
    assert "cuda-graphs" in capsys.readouterr().err


def test_operations_are_those_that_have_a_triton_kernel():
    folders = {path.parent.relative_to(OPS).as_posix() for path in OPS.rglob("triton.py")}
    assert {*switches.OPERATIONS} == folders


def test_operations_with_kernels_of_another_one_are_disabled_with_it():
    """Triton modules that import one of another folder."""
    borrowed = {}
    for path in OPS.rglob("triton*.py"):
        folder = path.parent.relative_to(OPS).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("eagle_kit.ops."):
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    lender, _, file = name.removeprefix("eagle_kit.ops.").replace(".", "/").rpartition("/")
                    if file.startswith("triton") and lender != folder:
                        borrowed[folder] = lender
    assert borrowed == switches.BORROWED


def test_every_choice_of_a_kernel_names_its_own_operation():
    """A folder's call of ``uses_triton`` has the folder's switch; layers and engine name one of the table."""
    found = {}
    for path in OPS.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "uses_triton":
                found.setdefault(path, set()).add(ast.literal_eval(node.args[0]))
    assert set().union(*found.values()) == {*switches.OPERATIONS}
    for path, operations in found.items():
        folder = path.parent.relative_to(OPS).as_posix() if OPS in path.parents else ""
        if folder in switches.OPERATIONS:
            assert operations == {folder}, path


def test_the_page_has_the_table():
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z:A-Z-]+)` \| ([A-Z].*) \|$", text, re.MULTILINE))
    of_all = rows.pop("triton:OPERATION")
    single = {name: does for name, does in switches.PARTS.items() if ":" not in name}
    assert rows == single and of_all == "This operation runs its reference in torch."
    (listed,) = re.findall(r"^OPERATION is (.*?)\.", text, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"`(.+?)`", listed)) == switches.OPERATIONS


def test_children_inherit_the_variable_and_the_module_needs_no_torch(disable):
    disable("lag")
    code = (
        "import sys; from eagle_kit.core.switches import is_disabled;"
        "sys.exit(not is_disabled('lag') or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
