"""HTML pages that hold their figures themselves and read nothing from a network."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_bytes_atomically, write_text_atomically, writing_remedy
from eagle_kit.report.tables import Table

STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2rem;color:#222}"
    "img{max-width:100%;display:block;margin:1rem 0}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}th:first-child,td:first-child{text-align:left}"
)


class Picture(NamedTuple):
    """A PNG of a page.

    Attributes:
        path: below the page's folder, where the picture is written as well.
        png: contents of the file.
    """

    path: str
    png: bytes


def write_page(folder: Path, title: str, parts: Sequence[Table | Picture | str]) -> Path:
    """Write ``report.html`` and its pictures into ``folder``, which is made if it does not exist.
    Each file is written atomically.

    Args:
        parts: of the page, in their order; a string is a paragraph.

    Returns:
        The path of the page.

    Raises:
        UserError: the folder cannot be written to.
    """
    page = folder / "report.html"
    head = f'<!doctype html><meta charset="utf-8"><title>eagle_kit</title><style>{STYLE}</style>'
    lines = [head, f"<h1>{html.escape(title)}</h1>"]
    try:
        for part in parts:
            if isinstance(part, Picture):
                path = folder / part.path
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes_atomically(path, part.png)
                data = base64.b64encode(part.png).decode()
                lines.append(f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">')
            elif isinstance(part, Table):
                lines.append(part.html())
            else:
                lines.append(f"<p>{html.escape(part)}</p>")
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(page, "\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(
            f"The report could not be written to {folder}: {error.strerror or error}.",
            writing_remedy(error, "name another folder with --out"),
        ) from error
    return page
