"""Pages of the documentation: their links, anchors, code blocks and the paths that they name."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>.*)$")
INLINE_CODE = re.compile(r"(?P<marks>`+)(?P<code>.+?)(?P=marks)")
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(?P<text>.*?) *#*$")
NAMED_ANCHOR = re.compile(r"<a (?:id|name)=\"(?P<name>[^\"]+)\"")
FOLDERS = (
    "benchmarks",
    "checkpoints",
    "configs",
    "docs",
    "eagle_kit",
    "examples",
    "kernels",
    "recipes",
    "serve",
    "tests",
    "train",
)
"""Folders of the checkout."""


def all_pages() -> list[Path]:
    """README, CONTRIBUTING and all pages of docs/, by name."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def other_pages() -> list[Path]:
    """CHANGELOG, and the READMEs of other folders."""
    found = [ROOT / "CHANGELOG.md"]
    for folder in FOLDERS:
        if folder != "docs":
            found += sorted((ROOT / folder).rglob("README.md"))
    return found


def name_of(page: Path) -> str:
    """Path of a page from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """Fenced block of a page.

    Attributes:
        language: first word behind the fence, such as ``bash``; empty without one.
        code: text of the block.
        line: number of the line of its fence, from 1.
    """

    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Fenced blocks of a page, in order."""
    found = []
    opening: re.Match[str] | None = None
    start = 0
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if opening is None and match:
            opening = match
            start = number
            lines = []
        elif opening is not None and match and match["fence"] == opening["fence"] and not match["info"]:
            language = opening["info"].strip().partition(" ")[0]
            found.append(Block(language, "\n".join(lines) + "\n", start))
            opening = None
        elif opening is not None:
            lines.append(line.removeprefix(opening["indent"]))
    assert opening is None, f"the block of line {start} has no end"
    return found


def prose_lines(text: str) -> Iterator[str]:
    """Lines of a page that are in no fenced block."""
    fence = None
    for line in text.splitlines():
        match = FENCE.match(line)
        if match and fence is None:
            fence = match["fence"]
        elif match and match["fence"] == fence and not match["info"]:
            fence = None
        elif fence is None:
            yield line


def links(text: str) -> list[str]:
    """Targets of the links and pictures of a page."""
    prose = "\n".join(prose_lines(text))
    return [match["target"] for match in LINK.finditer(INLINE_CODE.sub("code", prose))]


def anchors(text: str) -> set[str]:
    """Anchors of a page: of its headings, as GitHub makes them, and those that it names."""
    counts: Counter[str] = Counter()
    found = set(NAMED_ANCHOR.findall(text))
    for line in prose_lines(text):
        heading = HEADING.match(line)
        if heading:
            anchor = anchor_of(heading["text"])
            found.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
            counts[anchor] += 1
    return found


def anchor_of(heading: str) -> str:
    """GitHub's anchor of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = [letter for letter in text.lower() if letter.isalnum() or letter in "-_ "]
    return "".join(kept).strip().replace(" ", "-")


def code_words(text: str) -> set[str]:
    """Contents of the inline code of a page."""
    prose = "\n".join(prose_lines(text))
    return {match["code"].strip() for match in INLINE_CODE.finditer(prose)}
