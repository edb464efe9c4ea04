"""The tiers: which cases each of them runs, and how the recorded seconds of a case are made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

CONFTEST = """
from pathlib import Path
import tiers
tiers.DURATIONS_FILE = Path(__file__).with_name("durations.json")
pytest_addoption = tiers.add_options
pytest_configure = tiers.register
"""

CASES = """
import time
import pytest

@pytest.fixture(scope="module")
def model():
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass

@pytest.mark.parametrize("number", (1, 2))
def test_with_a_model(model, number):
    assert number

@pytest.mark.essential
def test_essential(model):
    assert True

@pytest.mark.nightly
def test_nightly():
    assert True

def test_new():
    assert True
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of five cases, three of which share a fixture of 0.4 CPU seconds."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    marks = "markers = nightly\n  essential\n  timeout\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = .\n{marks}")
    return tmp_path


def run(project: Path, *options: str) -> set[str]:
    """Run the project's cases in a process of their own; return the names of those that passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-q",
        "-p",
        "no:schemathesis",
        "-p",
        "no:hypothesispytest",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(tiers.__file__).parent)}
    found = subprocess.run(
        [*command, *options], cwd=project, env=environment, capture_output=True, text=True, check=True
    )
    lines = found.stdout.splitlines()
    return {line.partition("::")[2] for line in lines if line.startswith("PASSED")}


ALL = {
    "test_with_a_model[1]",
    "test_with_a_model[2]",
    "test_essential",
    "test_nightly",
    "test_new",
}


def test_a_tier_runs_its_cases(project: Path) -> None:
    seconds = {"test_cases.py": {"test_with_a_model[1]": 0.6, "test_essential": 9.0}}
    (project / "durations.json").write_text(json.dumps({"quick_limit_s": 0.5, "seconds": seconds}))

    assert run(project, "--tier", "all") == ALL
    assert run(project, "--tier", "ci") == ALL - {"test_nightly"}
    assert run(project, "--tier", "quick") == ALL - {"test_nightly", "test_with_a_model[1]"}


def test_the_cost_of_a_shared_fixture_is_divided_among_its_cases(project: Path) -> None:
    run(project, "--tier", "ci", "--record-durations", "-n", "0")
    recorded = json.loads((project / "durations.json").read_text())

    seconds = recorded["seconds"]["test_cases.py"]
    assert set(seconds) == {"test_with_a_model[1]", "test_with_a_model[2]", "test_essential"}
    assert sum(seconds.values()) == pytest.approx(0.4, abs=0.2)
    assert max(seconds.values()) < 2 * min(seconds.values())
    assert recorded["quick_limit_s"] < tiers.QUICK_BUDGET_S


def test_workers_hand_their_durations_to_the_process_that_writes_them(project: Path) -> None:
    run(project, "--tier", "ci", "--record-durations", "-n", "2")
    recorded = json.loads((project / "durations.json").read_text())
    assert set(recorded["seconds"]["test_cases.py"]) >= {"test_with_a_model[1]", "test_essential"}


def test_the_limit_is_the_dearest_case_that_the_budget_admits() -> None:
    costs = [30.0, 60.0, 10.0]
    assert tiers.quick_limit(costs, essential_s=0.0) == 60.0
    assert tiers.quick_limit(costs, essential_s=70.0) == 30.0
    assert tiers.quick_limit(costs, essential_s=tiers.QUICK_BUDGET_S) == 0.0


def test_a_run_of_one_file_keeps_the_other_entries_and_the_limit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "DURATIONS_FILE", tmp_path / "durations.json")
    before = {"quick_limit_s": 0.35, "seconds": {"test_a.py": {"test_x": 1.0}, "test_b.py": {"test_y": 2.0}}}
    tiers.DURATIONS_FILE.write_text(json.dumps(before))
    case = {
        "id": "test_b.py::test_z",
        "cpu_s": 3.0,
        "fixtures": [],
        "is_nightly": False,
        "is_essential": False,
    }

    tiers.save_durations([case], [], is_whole_run=False)

    after = json.loads(tiers.DURATIONS_FILE.read_text())
    assert after["quick_limit_s"] == 0.35
    assert after["seconds"] == {"test_a.py": {"test_x": 1.0}, "test_b.py": {"test_z": 3.0}}


def test_a_quick_run_raises_recorded_costs_and_lowers_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "DURATIONS_FILE", tmp_path / "durations.json")
    before = {"quick_limit_s": 0.2, "seconds": {"test_a.py": {"test_x": 0.15}, "test_b.py": {"test_y": 2.0}}}
    tiers.DURATIONS_FILE.write_text(json.dumps(before))
    costs = {"test_a.py::test_x": 3.0, "test_b.py::test_y": 0.1, "test_b.py::test_new": 0.05}
    cases = [{"id": node_id, "cpu_s": cost, "fixtures": []} for node_id, cost in costs.items()]

    tiers.raise_durations(cases, [])

    after = json.loads(tiers.DURATIONS_FILE.read_text())
    assert after == before | {"seconds": {"test_a.py": {"test_x": 3.0}, "test_b.py": {"test_y": 2.0}}}
