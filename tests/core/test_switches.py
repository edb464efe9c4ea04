"""Switches: names, what they include, and how commands and children read them."""

import subprocess
import sys

import pytest

from eagle_kit.cli import app
from eagle_kit.core import switches
from eagle_kit.core.errors import UserError
from eagle_kit.train import __main__ as train


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
        "triton": {"triton", *(f"triton:{name}" for name in switches.OPERATIONS)},
        "graphs": {"graphs", "prompt-graphs"},
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


def test_children_inherit_the_variable_and_the_module_needs_no_torch(disable):
    disable("lag")
    code = (
        "import sys; from eagle_kit.core.switches import is_disabled;"
        "sys.exit(not is_disabled('lag') or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
