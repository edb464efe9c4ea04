"""The site: every page is in the navigation, and links to files outside docs/ become text."""

import logging
from types import SimpleNamespace

import pytest
import yaml
from pages import DOCS, ROOT

pytest.importorskip("pymdownx")
import hooks

NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def pages_of(part: object) -> set[str]:
    """Pages of a part of the navigation."""
    if isinstance(part, str):
        return {part}
    parts = part.values() if isinstance(part, dict) else part
    return set().union(*map(pages_of, parts))


def test_every_page_is_in_the_navigation() -> None:
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    reports = {name for name in there if name.startswith("results/")}
    in_navigation = pages_of(NAVIGATION)
    assert in_navigation <= there
    assert there - reports <= in_navigation


def on_a_page(markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/page.md"))
    return hooks.on_page_markdown(markdown, page)


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[CONTRIBUTING](../../CONTRIBUTING.md#tests)", "`CONTRIBUTING.md`"),
        ("[`pyproject.toml`](../../pyproject.toml)", "`pyproject.toml`"),
        ("[the tests](../../tests)", "the tests (`tests`)"),
        ("[the\ntests](../../tests)", "the tests (`tests`)"),
        ("[a page](../index.md#top)", "[a page](../index.md#top)"),
        ("[here](#below)", "[here](#below)"),
        ("[far](https://example.org/a)", "[far](https://example.org/a)"),
        (
            "```\n[CONTRIBUTING](../../CONTRIBUTING.md)\n```",
            "```\n[CONTRIBUTING](../../CONTRIBUTING.md)\n```",
        ),
        (
            "~~~md\n```\n[a](../../tests)\n~~~\n[b](../../tests)",
            "~~~md\n```\n[a](../../tests)\n~~~\nb (`tests`)",
        ),
        (
            "````\n```py\n[a](../../tests)\n```\n````\n[b](../../tests)",
            "````\n```py\n[a](../../tests)\n```\n````\nb (`tests`)",
        ),
        ("```` one line ````\n[b](../../tests)", "```` one line ````\nb (`tests`)"),
        ('| [b](../../tests "All") | [c](../index.md) |', "| b (`tests`) | [c](../index.md) |"),
    ],
)
def test_a_link_out_of_the_docs_becomes_text(link: str, shown: str) -> None:
    assert on_a_page(link) == shown


def test_a_link_to_a_missing_file_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mkdocs.hooks"):
        on_a_page("[gone](../../gone.py)")
    assert "gone.py" in caplog.text


def test_nothing_of_the_site_comes_from_the_network() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in text and "://" not in text
