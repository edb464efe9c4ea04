"""Tables in three forms, figures that show what they are given, pages that need no network."""

import base64
import re
import sys

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.report.pages import Picture, write_page
from eagle_kit.report.plots import (
    HUES,
    Bars,
    BarSeries,
    Curve,
    Curves,
    HeatMap,
    draw,
    hue,
    require_matplotlib,
    shade,
)
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


def area_of(panel):
    """Axes into which a panel was drawn."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    area = Figure().subplots()
    panel.draw(area)
    return area


def texts_of(area):
    return [text.get_text() for text in area.texts]


def test_bars_are_as_long_as_their_values_the_first_on_top():
    series = [BarSeries("one", [1.5, None], "red", [[1.4, 1.6], []]), BarSeries("two", [0.5, 2.0], "blue")]
    area = area_of(Bars("x", ["g", "h"], series, "title", line=1.25, start=1.0))
    bars = [(bar.get_x(), bar.get_width(), bar.get_facecolor()[:3]) for bar in area.patches]
    red = (1.0, 0.0, 0.0)
    blue = (0.0, 0.0, 1.0)
    assert bars == [(1.0, 0.5, red), (1.0, -0.5, blue), (1.0, 1.0, blue)]
    first, second, third = (bar.get_y() + bar.get_height() / 2 for bar in area.patches)
    assert first < 0 < second < 0.5 < third and third == pytest.approx(1.2)
    bottom, top = area.get_ylim()
    assert bottom > 1 > 0 > top, "the axis points down"
    assert [label.get_text() for label in area.get_yticklabels()] == ["g", "h"]
    assert texts_of(area) == ["1.50", "no data", "0.50", "2.00"]
    dots, *_ = area.lines
    assert list(dots.get_xdata()) == [1.4, 1.6] and area.texts[0].xy[0] == 1.6, "the value is behind the dots"
    assert list(area.lines[-1].get_xdata()) == [1.25, 1.25] and area.get_xlim()[0] == 1.0
    assert area.get_title("left") == "title" and area.get_xlabel() == "x"


def test_curves_have_their_bands_marks_and_limits():
    # Lines, band and mark.
    curve = Curve([1, 2], [3.0, 4.0], "a", "red", low=[2.5, 3.5], high=[3.5, 6.0], mark=(2, 4.0))
    pale = Curve([1, 2], [1.0, 1.5], "", "blue", faint=True)
    area = area_of(Curves("x", "y", [curve, pale], "title", limits=(0, None), legend="kinds", whole=True))
    first, star, faint = area.lines
    assert list(first.get_ydata()) == [3.0, 4.0] and list(faint.get_ydata()) == [1.0, 1.5]
    assert first.get_alpha() == 1.0 > faint.get_alpha() and first.get_linewidth() > faint.get_linewidth()
    assert (star.get_marker(), list(star.get_xdata()), texts_of(area)) == ("*", [2], ["4.000"])
    (band,) = area.collections
    edges = band.get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == (2.5, 6.0)
    assert area.get_ylim()[0] == 0 and area.get_ylim()[1] > 6.0

    # Legend, names and ticks.
    legend = area.get_legend()
    assert legend.get_title().get_text() == "kinds"
    assert [text.get_text() for text in legend.get_texts()] == ["a"], "without a label it is left out"
    assert (area.get_xlabel(), area.get_ylabel(), area.get_title("left")) == ("x", "y", "title")
    assert all(tick == int(tick) for tick in area.get_xticks())
    bounded = area_of(Curves("x", "y", [curve], limits=(0, 100)))
    assert bounded.get_ylim() == (0, 100) and bounded.get_legend() is None


def test_stacked_layers_lie_on_each_other_and_are_named_from_the_top():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb

    layers = [Curve([1, 2], [1.0, 2.0], "low", "red"), Curve([1, 2], [3.0, 4.0], "high", "blue")]
    area = area_of(Curves("x", "y", layers, stacked=True, legend=""))
    tops = [each.get_paths()[0].vertices[:, 1].max() for each in area.collections]
    assert tops == [2.0, 6.0]
    legend = area.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["high", "low"]
    colours = [to_rgb(handle.get_facecolor()) for handle in legend.legend_handles]
    assert colours == [(0.0, 0.0, 1.0), (1.0, 0.0, 0.0)]


def test_a_heat_map_has_its_numbers_in_their_cells_and_white_in_the_middle():
    area = area_of(HeatMap("x", ["a", "b"], ["r", "s"], [[1.0, 2.0], [2.5, 1.75]], "title", middle=1.5))
    cells = {text.get_position(): text.get_text() for text in area.texts}
    assert cells == {(0, 0): "1.00", (1, 0): "2.00", (0, 1): "2.50", (1, 1): "1.75"}
    (image,) = area.images
    assert image.norm(1.5) == 0.5 and image.norm(2.5) == 1.0 and image.norm(0.5) == 0.0
    assert [label.get_text() for label in area.get_xticklabels()] == ["a", "b"]
    assert [label.get_text() for label in area.get_yticklabels()] == ["r", "s"]


def test_colours_go_round_and_become_paler():
    assert [hue(i) for i in range(len(HUES) + 1)] == [*HUES, HUES[0]]
    assert shade("#804020", 0.0) == (0x80 / 255, 0x40 / 255, 0x20 / 255)
    assert shade("#000000", 0.25) == (0.25, 0.25, 0.25)


def test_a_page_holds_its_pictures_and_is_whole(tmp_path):
    page = write_page(
        tmp_path / "out", "a & b", [TABLE, "some <text>", Picture("sub/deep/p.png", b"\x89PNG")]
    )
    text = page.read_text()
    assert "<h1>a &amp; b</h1>" in text and "<p>some &lt;text&gt;</p>" in text and "http" not in text
    (data,) = re.findall(r'base64,([^"]+)"', text)
    assert base64.b64decode(data) == (tmp_path / "out" / "sub" / "deep" / "p.png").read_bytes() == b"\x89PNG"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be written"):
        write_page(tmp_path / "file", "t", [])


def test_a_missing_matplotlib_is_one_sentence_with_the_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"not installed\. Install it with .*, or give --no-plots\."):
        require_matplotlib("give --no-plots")
    with pytest.raises(UserError, match="not installed"):
        draw("t", [Curves("x", "y", [])])
