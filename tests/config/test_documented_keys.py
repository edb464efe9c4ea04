"""Config keys that a page lists are those of the code; the table of all keys is generated."""

import re
from pathlib import Path

from eagle_kit.train.run.folder import FREE_TO_CHANGE

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "resume-and-debug.md").read_text(encoding="utf-8")


def test_the_page_lists_every_setting_that_a_resumed_run_may_change() -> None:
    listed = PAGE.partition("Free to change: ")[2].partition("\n\n")[0]
    names = {name.rpartition(".")[2] for name in re.findall(r"`([^`]+)`", listed)}
    assert {key.rpartition(".")[2] for key in FREE_TO_CHANGE} <= names
