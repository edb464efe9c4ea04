"""Measurements on disk: what is written comes back, what is damaged is told and made anew."""

import json
import re
from dataclasses import replace

import pytest

from eagle_kit.autotune import files
from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.costs import CostTable, Timing
from eagle_kit.autotune.files import Costs, MeasuredAcceptance
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

CHAIN = SpecShape(4, 1, 5)
KEY = {"device": "a CPU", "dtype": "float32", "versions": {"torch": "2.13"}}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "folder", lambda: tmp_path / "tuning")
    return tmp_path


def make_costs(key=KEY):
    timings = (Timing(1, NO_SPECULATION, 64, 0.02), Timing(1, CHAIN, 64, 0.04), Timing(8, CHAIN, 64, 0.2))
    return Costs(key, CostTable.fit(timings), timings, "2026-01-02T03:04:05", 8)


def make_acceptance(draft="abc"):
    return MeasuredAcceptance(draft, AcceptanceTable.even([CHAIN], 0.6), {"positions": 10})


def test_what_was_measured_here_is_found_again():
    costs = make_costs()
    files.save_costs(costs)
    found = files.find_costs(KEY, None)
    assert (found.timings, found.date) == (costs.timings, costs.date)
    assert (found.tuned_to, found.is_quick) == (8, False)
    assert files.find_acceptance("abc", None) is None
    assert found.table.seconds(1, CHAIN, 64) == costs.table.seconds(1, CHAIN, 64)
    assert files.find_costs({**KEY, "dtype": "bfloat16"}, None) is None
    files.save_acceptance(make_acceptance())
    assert files.find_acceptance("abc", None).table.length(CHAIN) == pytest.approx(
        1 + 0.6 + 0.36 + 0.216 + 0.1296
    )
    assert files.find_acceptance("abc", None).about == {"positions": 10}
    assert files.find_acceptance("another", None) is None


def test_a_shipped_table_serves_other_versions_and_not_other_devices_or_weights(place):
    files.ship(place, make_acceptance(), make_costs())
    assert files.find_costs({**KEY, "versions": {"torch": "2.14"}}, place) is not None
    assert files.find_costs({**KEY, "device": "another CPU"}, place) is None
    assert files.find_acceptance("abc", place) is not None
    with pytest.warns(UserWarning, match="other weights"):
        assert files.find_acceptance("trained on", place) is None


def test_costs_of_cycles_of_another_form_are_not_used_and_not_kept(place):
    files.ship(place, make_acceptance(), make_costs({**KEY, "cycles": 1}))
    files.ship(place, None, make_costs({**KEY, "device": "another CPU", "cycles": 1}))
    assert files.find_costs({**KEY, "cycles": 1}, place) is not None
    assert files.find_costs({**KEY, "cycles": 2}, place) is None
    files.ship(place, None, make_costs({**KEY, "cycles": 2}))
    assert files.find_costs({**KEY, "cycles": 2}, place) is not None
    assert files.find_costs({**KEY, "cycles": 1}, place) is None
    assert files.find_costs({**KEY, "device": "another CPU", "cycles": 1}, place) is None


def test_a_short_measurement_does_not_outweigh_a_shipped_table(place):
    files.save_costs(replace(make_costs(), tuned_to=0, date="quick"))
    assert files.find_costs(KEY, place).date == "quick"
    files.ship(place, make_acceptance(), make_costs())
    assert files.find_costs(KEY, place).date == make_costs().date
    files.save_costs(replace(make_costs(), date="whole"))
    assert files.find_costs(KEY, place).date == "whole"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timings", [[0, "4,1,5", 64, 0.04]]),
        ("timings", [[1, "4,1,5", -2, 0.04]]),
        ("timings", [[1, "4,1,5", -1, 0.04]]),
        ("timings", [[1, "4,1,5", 64, 0.0]]),
        ("format", 2),
        ("timings", [[1, "4,1,5", 64, 1e400]]),
        ("timings", None),
        ("costs", None),
        ("costs", {}),
    ],
)
def test_damaged_costs_are_told_and_not_used(name, value):
    path = files.save_costs(make_costs())
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}), encoding="utf-8")
    with pytest.warns(UserWarning, match="eagle-kit tune"):
        assert files.find_costs(KEY, None) is None


def test_costs_of_several_machines_are_shipped_together(place):
    files.ship(place, make_acceptance(), make_costs())
    other = {**KEY, "device": "a GPU"}
    files.ship(place, None, make_costs(other))
    assert files.find_costs(KEY, place) is not None
    assert files.find_costs(other, place) is not None
    assert files.find_acceptance("abc", place) is not None


def test_costs_that_are_shipped_again_take_the_place_of_those_before(place):
    files.ship(place, None, make_costs())
    later = replace(make_costs(), date="2026-02-03T04:05:06")
    files.ship(place, None, later)
    assert files.find_costs(KEY, place).date == later.date


def test_shipped_costs_that_are_no_list_are_told_and_replaced(place):
    (place / files.SHIPPED).write_text(json.dumps({"format": 1, "costs": 5}), encoding="utf-8")
    with pytest.warns(UserWarning, match="no list of costs"):
        assert files.find_costs(KEY, place) is None
    (place / files.SHIPPED).write_text(json.dumps({"format": 1, "costs": [7]}), encoding="utf-8")
    with pytest.warns(UserWarning, match="no measurement"):
        assert files.find_costs(KEY, place) is None
    files.ship(place, None, make_costs())
    assert files.find_costs(KEY, place) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: text.replace("0.6", "7.0"),
        lambda text: text.replace('"4,1,5"', '"4,1,9"'),
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace("0.6", "-0.6"),
        lambda text: text.replace("0.6,", ""),
        lambda text: text.replace('"edges": []', '"edges": [0.5]'),
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: "[]",
        lambda text: re.sub(r'("shares": \[\s*)[\d.]+', r"\1NaN", text),
        lambda text: json.dumps({"format": 1, "draft": "abc", "about": [], "edges": 3, "shapes": {}}),
    ],
)
def test_a_damaged_file_is_told_and_not_used(damage):
    path = files.save_acceptance(make_acceptance())
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.warns(UserWarning, match="eagle-kit tune"):
        assert files.find_acceptance("abc", None) is None


def test_an_average_head_is_known():
    table = files.average_acceptance().table
    assert 1.2 < table.length(SpecShape(1, 1, 2)) < table.length(CHAIN) < 3
    sure, unsure = table.reach[CHAIN][-1, 0], table.reach[CHAIN][0, 0]
    assert sure > 0.8 > 0.2 > unsure
