"""Tables in three forms, figures of hostile data, pages that need no network."""

import base64
import re
import sys

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.report.pages import Picture, write_page
from eagle_kit.report.plots import Bars, BarSeries, Curve, Curves, draw, require_matplotlib, shade
from eagle_kit.report.tables import Table, number

TABLE = Table(["name", "note", "value"], [["a<b", "x", "1.50"], [], ["longer", "", "10"]], ["name", "note"])


def test_a_table_is_aligned_as_text_with_gaps():
    assert TABLE.text().splitlines() == [
        "name    note  value",
        "------  ----  -----",
        "a<b     x      1.50",
        "",
        "longer           10",
    ]


def test_a_table_is_markdown_and_escaped_html():
    table = Table(TABLE.head, [TABLE.rows[0]])
    assert table.markdown().splitlines() == [
        "| name | note | value |",
        "| :-- | --: | --: |",
        "| a<b | x | 1.50 |",
    ]
    assert "<th>name</th>" in table.html() and "<td>a&lt;b</td>" in table.html()
    assert "<th>" not in Table(["", ""], [["a", "b"]]).html()
    assert (number(None), number(1.234), number(None, 3, "")) == ("-", "1.23", "")


def test_figures_of_hostile_data_are_drawn():
    pytest.importorskip("matplotlib")
    bars = [BarSeries("one", [1.5, None], dots=[[1.4, 1.6], []]), BarSeries("two", [0.0, 2.0])]
    nothing = Curves("x", "y", [Curve([], [])], limits=(0, None), legend="", whole=True)
    point = Curves("x", "y", [Curve([1], [2], "a", low=[2], high=[2], mark=(1, 2))], stacked=False)
    layers = Curves(
        "x", "y", [Curve([1, 2], [0, 0], "a"), Curve([1, 2], [1, 3], "b")], stacked=True, legend=""
    )
    panels = [Bars("x", ["g", "h"], bars, line=1.0, start=1.0), nothing, point, layers]
    for columns in (0, 2):
        assert draw("title\nand setup", panels, columns=columns, legend=True).startswith(b"\x89PNG")
    assert shade("#000000", 1.0) == (1.0, 1.0, 1.0)


def test_a_page_holds_its_pictures_and_is_whole(tmp_path):
    page = write_page(tmp_path / "out", "a & b", [TABLE, "some <text>", Picture("sub/p.png", b"\x89PNG")])
    text = page.read_text()
    assert "<h1>a &amp; b</h1>" in text and "<p>some &lt;text&gt;</p>" in text and "http" not in text
    (data,) = re.findall(r'base64,([^"]+)"', text)
    assert base64.b64decode(data) == (tmp_path / "out" / "sub" / "p.png").read_bytes() == b"\x89PNG"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be written"):
        write_page(tmp_path / "file", "t", [])


def test_a_missing_matplotlib_is_one_sentence_with_the_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"not installed\. Install it with .*, or give --no-plots\."):
        require_matplotlib("give --no-plots")
    with pytest.raises(UserError, match="not installed"):
        draw("t", [Curves("x", "y", [])])
