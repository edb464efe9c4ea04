"""Which cases run in `make test`, `make test-ci` and `make test-all`, and what each case costs.

A case is *nightly* if it has that mark. It is *quick* if it is not nightly and either cheap, by the CPU
seconds in `tests/durations.json`, or marked `essential`. `--tier quick` runs the quick cases, `--tier ci`
all that are not nightly, `--tier all` everything. `--record-durations` writes the CPU seconds of the cases
that ran into the file.
"""

import json
import resource
from collections import defaultdict
from collections.abc import Generator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

DURATIONS_FILE = Path(__file__).parents[1] / "durations.json"
QUICK_BUDGET_S = 125.0
"""CPU seconds of all quick cases together, without collection, on the machine that recorded them.

That machine is up to three times faster than the slow ones on which `make test` may take ten CPU minutes.
"""
LEAST_RECORDED_S = 0.1
"""Cheaper cases are not listed in the file. A case that is not listed is quick, so a new test is quick."""
NIGHTLY_TIMEOUT_S = 3600
"""Time limit of a nightly case; the other cases have the `timeout` of pyproject.toml."""


def add_options(parser: pytest.Parser) -> None:
    """Add the command-line options that choose and record."""
    group = parser.getgroup("tiers of eagle_kit")
    group.addoption(
        "--tier", choices=("quick", "ci", "all"), default="all", help="cases to run (default: all)"
    )
    group.addoption(
        "--record-durations",
        action="store_true",
        help=f"write the CPU seconds of the cases that run to {DURATIONS_FILE.name}",
    )


def register(config: pytest.Config) -> None:
    """Register the plugin that selects cases and, where it is asked for, the one that records their costs."""
    config.pluginmanager.register(TierSelection(config.getoption("--tier")), "tier selection")
    if config.getoption("--record-durations"):
        config.pluginmanager.register(DurationRecorder(config), "duration recorder")


class TierSelection:
    """Deselects the cases that are not of the tier, and gives nightly cases a longer time limit."""

    def __init__(self, tier: str) -> None:
        self.tier = tier

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        durations = Durations.read()
        selected = []
        deselected = []
        for item in items:
            is_nightly = item.get_closest_marker("nightly") is not None
            if is_nightly and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))

            if self.tier == "all":
                is_selected = True
            elif self.tier == "ci":
                is_selected = not is_nightly
            else:
                is_selected = not is_nightly and durations.is_quick(item)
            (selected if is_selected else deselected).append(item)

        items[:] = selected
        if deselected:
            config.hook.pytest_deselected(items=deselected)


class Durations:
    """The recorded CPU seconds of cases, by file and name, and the limit up to which a case is quick.

    Attributes:
        recorded: when the limit was chosen, and from how many cases; empty if that is unknown.
    """

    def __init__(self, limit_s: float, seconds: dict[str, dict[str, float]], recorded: str = "") -> None:
        self.limit_s = limit_s
        self.seconds = seconds
        self.recorded = recorded

    @classmethod
    def read(cls) -> "Durations":
        """Read the file; without one, every case is quick."""
        if not DURATIONS_FILE.exists():
            return cls(QUICK_BUDGET_S, {})
        content = json.loads(DURATIONS_FILE.read_text(encoding="utf-8"))
        return cls(content["quick_limit_s"], content["seconds"], content.get("recorded", ""))

    def write(self) -> None:
        """Write the file, with files and cases in the order of their names."""
        content: dict[str, Any] = {"recorded": self.recorded} if self.recorded else {}
        content["quick_limit_s"] = round(self.limit_s, 2)
        content["seconds"] = {
            file: dict(sorted(found.items())) for file, found in sorted(self.seconds.items()) if found
        }
        DURATIONS_FILE.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")

    def is_quick(self, item: pytest.Item) -> bool:
        """True for cases of at most `limit_s` CPU seconds and for those marked essential."""
        if item.get_closest_marker("essential"):
            return True
        file, name = split_node_id(item.nodeid)
        return self.seconds.get(file, {}).get(name, 0.0) <= self.limit_s


class DurationRecorder:
    """Adds the CPU seconds of every case up, in each worker, and writes them when the session ends.

    The set-up of a fixture of class, module or session scope is divided among the cases that request it, so
    that the case that happens to run first is not the dear one.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.measured: list[dict[str, Any]] = []
        self.shared_setups: list[dict[str, Any]] = []
        self.nested_s: list[float] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        start = cpu_seconds()
        self.nested_s.append(0.0)
        try:
            return (yield)
        finally:
            total = cpu_seconds() - start
            own = total - self.nested_s.pop()
            if fixturedef.scope != "function":
                self.shared_setups.append(
                    {"base": fixturedef.baseid, "name": fixturedef.argname, "cpu_s": own}
                )
                if self.nested_s:
                    self.nested_s[-1] += total

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        first_setup = len(self.shared_setups)
        start = cpu_seconds()
        try:
            return (yield)
        finally:
            shared_s = sum(setup["cpu_s"] for setup in self.shared_setups[first_setup:])
            self.measured.append(
                {
                    "id": item.nodeid,
                    "cpu_s": cpu_seconds() - start - shared_s,
                    "fixtures": list(getattr(item, "fixturenames", ())),
                    "is_nightly": item.get_closest_marker("nightly") is not None,
                    "is_essential": item.get_closest_marker("essential") is not None,
                }
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand a worker's measurements to the controller, which writes the file."""
        if self.is_worker:
            self.config.workeroutput["durations"] = {  # type: ignore[attr-defined]
                "measured": self.measured,
                "shared_setups": self.shared_setups,
            }
        elif self.measured and self.config.getoption("--tier") == "quick":
            raise_durations(self.measured, self.shared_setups)
        elif self.measured:
            is_whole_run = self.config.args_source is pytest.Config.ArgsSource.TESTPATHS
            save_durations(self.measured, self.shared_setups, is_whole_run)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Take in what a worker measured."""
        output = getattr(node, "workeroutput", {}).get("durations")
        if output:
            self.measured += output["measured"]
            self.shared_setups += output["shared_setups"]


def cpu_seconds() -> float:
    """User and system seconds of this process, all its threads, and its children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def split_node_id(node_id: str) -> tuple[str, str]:
    """Split `tests/room/test_x.py::test_y[case]` into the file and the rest."""
    file, _, name = node_id.partition("::")
    return file, name


def cost_of_cases(measured: list[dict[str, Any]], shared_setups: list[dict[str, Any]]) -> dict[str, float]:
    """Return the CPU seconds of every case by node id: its own, and its share of every shared set-up."""
    setup_s: dict[tuple[str, str], float] = defaultdict(float)
    for setup in shared_setups:
        setup_s[setup["base"], setup["name"]] += setup["cpu_s"]
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in measured:
        for base, name in setup_s:
            if name in case["fixtures"] and case["id"].startswith(base):
                users[base, name].append(case["id"])

    costs = {case["id"]: case["cpu_s"] for case in measured}
    for fixture, total in setup_s.items():
        for node_id in users[fixture]:
            costs[node_id] += total / len(users[fixture])
    return costs


def quick_limit(costs: list[float], essential_s: float) -> float:
    """Return the largest cost, in steps of 0.05 s, such that all cases up to it fit into the budget."""
    left = QUICK_BUDGET_S - essential_s
    limit = 0.0
    for cost in sorted(costs):
        left -= cost
        if left < 0:
            break
        limit = cost
    return int(limit / 0.05) * 0.05


def raise_durations(measured: list[dict[str, Any]], shared_setups: list[dict[str, Any]]) -> None:
    """Write the costs of a run of the quick tier where they are larger than the recorded ones.

    What a case costs depends on the cases before it in its process: imports and models that are made once
    are paid by the first that needs them. So the quick tier is measured once more, by itself, and cases that
    pay for others there are not quick from then on.
    """
    durations = Durations.read()
    for node_id, cost in cost_of_cases(measured, shared_setups).items():
        file, name = split_node_id(node_id)
        of_file = durations.seconds.setdefault(file, {})
        if cost >= LEAST_RECORDED_S and cost > of_file.get(name, 0.0):
            of_file[name] = round(cost, 2)
    durations.write()


def save_durations(
    measured: list[dict[str, Any]], shared_setups: list[dict[str, Any]], is_whole_run: bool
) -> None:
    """Replace the entries of every file of which cases ran, and print what the tiers cost.

    Args:
        measured: a record for every case that ran, as `DurationRecorder` makes them.
        shared_setups: a record for every set-up of a fixture that several cases share.
        is_whole_run: True if no files were named on the command line; only then the limit of quick cases is
            chosen again, and the entries of files that are gone are dropped.
    """
    costs = cost_of_cases(measured, shared_setups)
    durations = Durations.read()
    if is_whole_run:
        durations.seconds = {}
    costs_by_file: dict[str, dict[str, float]] = defaultdict(dict)
    for node_id, cost in costs.items():
        file, name = split_node_id(node_id)
        costs_by_file[file][name] = cost
    for file, found in costs_by_file.items():
        durations.seconds[file] = {
            name: round(cost, 2) for name, cost in found.items() if cost >= LEAST_RECORDED_S
        }

    not_nightly = [case for case in measured if not case["is_nightly"]]
    essential = [case for case in not_nightly if case["is_essential"]]
    others = [case for case in not_nightly if not case["is_essential"]]
    essential_s = sum(costs[case["id"]] for case in essential)
    if is_whole_run:
        durations.limit_s = quick_limit([costs[case["id"]] for case in others], essential_s)
        durations.recorded = f"{date.today()}, {len(measured)} cases"
    durations.write()

    limit_s = durations.limit_s
    cheap = [case for case in others if costs[case["id"]] <= limit_s]
    all_s = sum(costs[case["id"]] for case in not_nightly)
    cheap_s = sum(costs[case["id"]] for case in cheap)
    print(f"\nNot nightly: {len(not_nightly)} cases, {all_s:.0f} CPU s.")
    print(f"Essential: {len(essential)} cases, {essential_s:.0f} CPU s.")
    print(f"Quick by their cost, up to {limit_s:.2f} s: {len(cheap)} cases, {cheap_s:.0f} CPU s.")
