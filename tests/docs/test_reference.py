"""The reference pages of docs are what the schemas and the command line say."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from eagle_kit.cli.app import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """The program that writes the pages."""
    spec = importlib.util.spec_from_file_location("write_reference", DOCS / "write_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_options_is_up_to_date(writer: ModuleType) -> None:
    page = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    assert page == writer.config_page(), "run make reference"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of argparse print other blanks")
def test_the_page_of_commands_is_up_to_date(writer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(writer.COLUMNS))
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    assert page == writer.command_page(), "run make reference"


def test_every_command_that_runs_by_itself_has_a_section(writer: ModuleType) -> None:
    headings = {line for line in writer.command_page().splitlines() if line.startswith("## ")}
    running = set(COMMANDS) - {"data"}  # which needs one of its actions
    assert {f"## `eagle-kit {name}`" for name in running} <= headings
    assert "## `eagle-kit bench serve`" in headings and "## `eagle-kit data mix`" in headings


def test_the_page_of_modules_is_up_to_date(writer: ModuleType) -> None:
    page = (DOCS / "reference" / "modules.md").read_text(encoding="utf-8")
    assert page == writer.module_page(), "run make reference"


def test_every_module_has_a_sentence(writer: ModuleType) -> None:
    empty = [line for line in writer.module_page().splitlines() if line.endswith(".py`:")]
    assert empty == []


def test_every_key_has_a_text(writer: ModuleType) -> None:
    schemas = [*writer.FILES.values(), *writer.KEYWORDS.values()]
    for schema in schemas:
        for line in writer.section_lines(schema, ""):
            assert not line.rstrip().endswith("):"), f"{schema.__name__} has a key without a text: {line}"
