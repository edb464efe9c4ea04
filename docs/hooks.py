"""Hooks of mkdocs for this site.

* Links to files of the repository outside docs/ become plain text, because the site has no copy of these
  files and the repository has no public address. A link to a file that does not exist is a warning, which
  ``mkdocs build --strict`` makes an error.
* References in docstrings (``:meth:`generate```) become code.
* Headings get the anchors that GitHub gives them, so that a link works in both places.
"""

import logging
import re
from pathlib import Path
from typing import Any

from pymdownx.slugs import slugify

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FENCE = re.compile(r"^\s*(?P<marks>```+|~~~+)(?P<info>(?!.*`).*?)\s*$")
"""A line that opens or closes a block of code; other marks inside the block, or fewer, are its text."""
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?:#[^)\s]*)?(?: +\"[^\"]*\")?\)")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>[~.]*")
"""Beginning of a reference of a docstring, as Markdown renders it."""
log = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> Any:
    """Make anchors as GitHub does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Replace the links of a page that lead out of docs/."""
    folder = (DOCS / page.file.src_uri).parent
    # Text and fenced code in turn. A link may go over the end of a line.
    text: list[str] = []
    parts: list[str] = []

    def end_text() -> None:
        joined = "\n".join(text)
        parts.append(LINK.sub(lambda link: _inside_docs(link, folder, page.file.src_uri), joined))
        text.clear()

    fence = ""
    for line in markdown.split("\n"):
        found = FENCE.match(line)
        if not found and not fence:
            text.append(line)
            continue
        if text:
            end_text()
        parts.append(line)
        if found and not fence:
            fence = found["marks"]
        elif found and found["marks"].startswith(fence) and not found["info"]:
            fence = ""
    if text:
        end_text()
    return "\n".join(parts)


def on_page_content(html: str, **_others: Any) -> str:
    """Leave out the roles of references in docstrings."""
    return ROLE.sub("<code>", html)


def _inside_docs(link: re.Match[str], folder: Path, page: str) -> str:
    """A link as it is, or its text with the file's path if it leads to a file outside docs/."""
    target = link["target"]
    if not target or ":" in target:
        return link[0]
    path = (folder / target).resolve()
    if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT):
        return link[0]
    if not path.exists():
        log.warning("%s has a link to %s, which does not exist.", page, target)
        return link[0]

    name = path.relative_to(ROOT).as_posix()
    text = " ".join(link["text"].split())
    if text.strip("`") in (name, path.name, path.stem):
        return f"`{name}`"
    return f"{text} (`{name}`)"
