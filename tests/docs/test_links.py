"""Links of the documentation lead somewhere, files that it names exist, and pages keep their length."""

import fnmatch
import re
from functools import cache
from pathlib import Path

import pytest
from pages import DOCS, FOLDERS, ROOT, all_pages, anchors, code_words, links, name_of, other_pages

OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:")
"""Beginning of a link to another place, such as ``https:``."""


@pytest.mark.parametrize("page", [*all_pages(), *other_pages()], ids=name_of)
def test_every_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    wrong = []
    for link in links(page.read_text(encoding="utf-8")):
        if OUTSIDE.match(link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            wrong.append(f"{link}: no file")
        elif not path.is_relative_to(ROOT):
            wrong.append(f"{link}: outside the repository")
        elif anchor and path.suffix == ".md" and anchor not in anchors_of(path):
            wrong.append(f"{link}: no anchor")
    assert wrong == []


@cache
def anchors_of(path: Path) -> set[str]:
    return anchors(path.read_text(encoding="utf-8"))


def test_anchors_are_those_of_github() -> None:
    text = "# A `b_c` & d/e\n## Twice\n## Twice\n```\n# no heading\n```\n### [In a link](x.md): yes"
    assert anchors(text) == {"a-b_c--de", "twice", "twice-1", "in-a-link-yes"}


# Files that pages name

SUFFIXES = (".py", ".md", ".toml", ".cpp", ".h", ".sh")
"""Endings by which a name without a folder is taken as a file of the repository."""
NOT_HERE = {"best/"}
"""Folders that a command writes."""
PLACEHOLDER = re.compile(r"<\w+>")


@cache
def tree() -> tuple[set[str], set[str]]:
    """Paths of all files and folders of the repository, and the names of the folders of its first two
    levels."""
    hidden = {".ci", ".pre-commit-config.yaml"}
    paths = set()
    for top in ROOT.iterdir():
        if top.name.startswith(".") and top.name not in hidden:
            continue
        for path in (top, *top.rglob("*")):
            paths.add(path.relative_to(ROOT).as_posix())
    folders = {path.name for root in (ROOT, ROOT / "eagle_kit") for path in root.iterdir() if path.is_dir()}
    return paths, folders


def is_path(word: str) -> bool:
    """True if inline code is the name of a file or folder."""
    if word in NOT_HERE or not re.fullmatch(r"[\w.*/<>-]+", word) or word.startswith(("-", "/")):
        return False
    if "/" not in word:
        return word.endswith(SUFFIXES)
    return word.endswith(("/", *SUFFIXES)) or word.partition("/")[0] in tree()[1]


def exists(word: str) -> bool:
    """True if a path of the repository ends with these folders and this name; ``<op>`` and ``*`` are any."""
    pattern = PLACEHOLDER.sub("*", word).rstrip("/")
    paths, _ = tree()
    if "*" not in pattern:
        return any(path == pattern or path.endswith(f"/{pattern}") for path in paths)
    return any(fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"*/{pattern}") for path in paths)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "docs/explanation/architecture.md"])
def test_every_file_that_a_page_names_exists(name: str) -> None:
    words = code_words((ROOT / name).read_text(encoding="utf-8"))
    assert sorted(word for word in words if is_path(word) and not exists(word)) == []


PAGE_IN_TEXT = re.compile(r"\bdocs/[\w/-]+\.md\b")
WITH_TEXT = {".py", ".yaml", ".yml", ".toml", ".sh", ".cfg", ".md", ".cpp", ".h"}


@pytest.mark.parametrize("folder", [each for each in FOLDERS if each != "docs"])
def test_every_page_that_a_file_names_exists(folder: str) -> None:
    """Messages, comments and docstrings name pages of docs/, too."""
    missing = set()
    for path in (ROOT / folder).rglob("*"):
        if path.suffix not in WITH_TEXT or not path.is_file():
            continue
        for page in PAGE_IN_TEXT.findall(path.read_text(encoding="utf-8", errors="replace")):
            if not (ROOT / page).exists():
                missing.add(f"{name_of(path)}: {page}")
    assert sorted(missing) == []


# Length

KB = 1024
LONGEST = {"docs/tutorials": 8 * KB, "docs/how-to": 5 * KB, "docs/explanation": 6 * KB}
README_LONGEST = 3 * KB + 512


def test_pages_keep_their_length() -> None:
    too_long = {}
    for folder, longest in LONGEST.items():
        for page in (ROOT / folder).glob("*.md"):
            size = len(page.read_bytes())
            if size > longest:
                too_long[name_of(page)] = size
    assert too_long == {}
    assert len((ROOT / "README.md").read_bytes()) <= README_LONGEST


def test_no_output_is_left_to_be_filled_in() -> None:
    pages = [page for page in all_pages() if re.search(r"^OUTPUT-", page.read_text("utf-8"), re.MULTILINE)]
    assert pages == []


def test_pages_of_every_kind_are_there() -> None:
    for folder in LONGEST:
        assert list((ROOT / folder).glob("*.md")), folder
    for picture in DOCS.glob("explanation/pictures/*.svg"):
        assert len(picture.read_bytes()) <= 8 * KB, picture.name
