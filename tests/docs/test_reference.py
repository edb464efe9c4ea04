"""The generated pages of the reference are what the schemas, the command line and the code say."""

import sys
from importlib.metadata import version
from typing import Any

import pytest
from pages import DOCS, ROOT
from write_reference import PAGES

from eagle_kit.cli.app import COMMANDS
from generate import commands, http_api, modules, options

PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
CONSTRAINTS = dict(line.split("==") for line in PINS if "==" in line)


def is_of_ci(package: str) -> bool:
    """True if the installed version has the first two numbers of the version in constraints.txt."""
    return version(package).split(".")[:2] == CONSTRAINTS[package].split(".")[:2]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "commands.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("other versions of argparse print other blanks")
    if name == "http.md" and not (is_of_ci("fastapi") and is_of_ci("pydantic")):
        pytest.skip("other versions describe a schema in another way")
    monkeypatch.setenv("COLUMNS", str(commands.COLUMNS))
    page = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run make reference"


def test_every_command_that_runs_by_itself_has_a_section() -> None:
    headings = {line for line in commands.commands_page().splitlines() if line.startswith("## ")}
    running = set(COMMANDS) - {"data"}  # which needs one of its actions
    assert {f"## `eagle-kit {name}`" for name in running} <= headings
    assert "## `eagle-kit bench serve`" in headings and "## `eagle-kit data mix`" in headings


def test_every_module_has_a_sentence() -> None:
    empty = [line for line in modules.modules_page().splitlines() if line.endswith(".py`:")]
    assert empty == []


def test_every_key_has_a_text() -> None:
    schemas = [*options.FILES.values(), *options.KEYWORDS.values()]
    for schema in schemas:
        for line in options.section_lines(schema, ""):
            assert not line.rstrip().endswith("):"), f"{schema.__name__} has a key without a text: {line}"


def test_every_parameter_of_a_request_has_a_text() -> None:
    description = http_api.server_description()
    schemas = description["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", "AbortRequest"):
        without = [key for key, value in schemas[name]["properties"].items() if not described(value)]
        assert without == [], name


def described(schema: dict[str, Any]) -> bool:
    return bool(schema.get("description", "").strip())
