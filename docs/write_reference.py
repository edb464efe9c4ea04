"""Write the reference pages of this folder from schemas, code and docstrings: ``make reference``.

The text of an option stands under its field (``eagle_kit/config``, ``eagle_kit/cli``, ``eagle_kit/server``).
The text of a module is its docstring. A test compares the pages with the output of this program.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from generate.commands import COLUMNS, commands_page
from generate.http_api import http_page
from generate.metrics import metrics_page
from generate.modules import modules_page
from generate.operations import operations_page
from generate.options import options_page
from generate.other_engines import other_engines_page
from generate.python_api import python_page
from generate.targets import targets_page

FOLDER = Path(__file__).with_name("reference")
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "http.md": http_page,
    "metrics.md": metrics_page,
    "modules.md": modules_page,
    "operations.md": operations_page,
    "options.md": options_page,
    "other-engines.md": other_engines_page,
    "python.md": python_page,
    "targets.md": targets_page,
}
"""File -> function that makes its text."""


def main() -> int:
    """Write the pages."""
    os.environ["COLUMNS"] = str(COLUMNS)
    FOLDER.mkdir(exist_ok=True)
    for name, make_page in PAGES.items():
        (FOLDER / name).write_text(make_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
