"""Figures of benchmarks show what they are given."""

import pytest

from benchmarks.plots import plot_cycles, plot_roofline


def points_of(area):
    """Points of every series of an area."""
    return [list(map(tuple, series.get_offsets())) for series in area.collections]


def row(group, **values):
    """A row of a record that was timed against a floor."""
    return {"group": group, "floor_us": 1e3, **values}


def drawn(monkeypatch, plot, record, path):
    """The axes of a figure that a benchmark draws."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def note(self, *args, **options):
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    plot(record, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return figures[0].axes


CEILINGS = {"flops_per_s": 8e12, "copy_bytes_per_s": 2e11, "launch_s": 1e-6}


def test_a_roofline_has_the_knee_of_the_machine_and_a_point_a_case(monkeypatch, tmp_path):
    rows = {
        "a": row("norm", flops=100, bytes=50, tflop_per_s=0.2, share=0.5),
        "b": row("norm", flops=0, bytes=50, tflop_per_s=0.0, share=0.25),
        "c": row("matmul", flops=900, bytes=3, tflop_per_s=6.0, share=0.75),
        "d": {"group": "left out"},
    }

    # The roof: its slope, its knee and its points.
    record = {"ceilings": CEILINGS, "settings": {"device": "CPU"}, "cases": rows}
    roof, shares = drawn(monkeypatch, plot_roofline, record, tmp_path / "new" / "r.png")
    (line,) = roof.lines
    across = line.get_xdata()
    up = line.get_ydata()
    assert (across[1], up[1], up[2]) == pytest.approx((40.0, 8.0, 8.0))
    assert up[0] == pytest.approx(0.2 * across[0])
    assert points_of(roof) == [[(2.0, 0.2)], [(300.0, 6.0)]]
    assert points_of(shares) == [[(50.0, 0.0), (25.0, 0.0)], [(75.0, 1.0)]]
    assert [label.get_text() for label in shares.get_yticklabels()] == ["norm", "matmul"]


def test_cycles_are_drawn_over_their_floors_and_rates_over_the_batch(monkeypatch, tmp_path):
    def cycle(shape, mode, batch, context, milliseconds, rate, **more):
        times = {"cycle": {"median": 1e3 * milliseconds}}
        values = {"shape": shape, "mode": mode, "batch": batch, "context": context}
        return row("cycle", **values, times_us=times, figures={"tokens/s": rate}, **more)

    rows = {
        "a": cycle("none", "cycle", 8, 64, 2.0, 40.0, sheet_floor_us=500.0),
        "b": cycle("none", "cycle", 1, 64, 3.0, 10.0),
        "c": cycle("none", "cycle", 1, 1024, 4.0, 5.0),
        "d": cycle("none", "off", 1, 64, 5.0, 1.0),
    }
    record = {"ceilings": {**CEILINGS, "sheet_bytes_per_s": 3e11}, "settings": {}, "cases": rows}
    times, rates = drawn(monkeypatch, plot_cycles, record, tmp_path / "c.png")
    assert points_of(times) == [[(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)], [(0.5, 2.0)], [(1.0, 5.0)]]
    (line,) = rates.lines
    assert list(line.get_xdata()) == [1, 8] and list(line.get_ydata()) == [10.0, 40.0], "shortest context"
    slopes = [line.get_ydata()[0] / line.get_xdata()[0] for line in times.lines]
    assert slopes == pytest.approx([1.0, 1.25, 1.4])
    assert "data sheet" in times.get_title("left")
