"""The lines and the file of `eagle-kit doctor --gpu`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_kit.core.files import write_json_atomically
from eagle_kit.core.switches import VARIABLE
from eagle_kit.doctor.checks import Result
from eagle_kit.doctor.machine import has_nvlink, is_throttled, without_names
from eagle_kit.report.environment import command_line, now

FORMAT = 1
"""Version of the file's layout."""
WORDS = {"passed": "ok", "failed": "WRONG", "crashed": "DIED", "hung": "HANGS"}
NAME_COLUMNS = 58


@dataclass
class SwitchTrial:
    """A switch that was tried for checks that failed.

    Attributes:
        group: group of the checks.
        switches: parts that were disabled.
        helps: whether all of them passed.
    """

    group: str
    switches: Sequence[str]
    helps: bool


@dataclass
class Findings:
    """Results of an examination.

    Attributes:
        facts: of the machine.
        results: of the checks, in the order of their ends.
        trials: of switches.
        switches: parts to disable, with which the checks that failed pass.
        unhelped: groups of checks that no switch helps.
        lines: what was printed.
        is_complete: False if it was interrupted.
    """

    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    trials: list[SwitchTrial] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    unhelped: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def failed(self) -> list[Result]:
        """Results of the checks that did not pass."""
        return [result for result in self.results if not result.passed]

    def summary(self) -> list[str]:
        """The last lines: all is well, or what is wrong and what to export."""
        count = len(self.results)
        if not self.is_complete:
            return [f"interrupted behind {count} checks, {len(self.failed)} of them failed"]
        if not self.failed:
            return [f"all {count} checks passed"]
        lines = [f"{len(self.failed)} of {count} checks failed"]
        if self.switches:
            lines.append(f"export {VARIABLE}={','.join(self.switches)}")
        for group in self.unhelped:
            lines.append(f"no switch helps {group}: attach the file to a bug report")
        return lines

    def write(self, path: Path) -> None:
        """Write the file, without names of the host and the user."""
        # The checks.
        checks = []
        for result in self.results:
            checks.append(
                {
                    "check": result.check.name,
                    "state": result.state,
                    "detail": result.detail,
                    "seconds": round(result.seconds, 3),
                    "disabled": list(result.check.disabled),
                    **result.values,
                }
            )

        # All the rest.
        record = {
            "eagle_kit_doctor": FORMAT,
            "date": now(),
            "command": command_line(),
            "is_complete": self.is_complete,
            "summary": self.summary(),
            "facts": self.facts,
            "checks": checks,
            "trials_of_switches": [vars(trial) for trial in self.trials],
            "output": self.lines,
        }
        write_json_atomically(path, without_names(record))


def line_of(result: Result) -> str:
    """One line for a check that has ended."""
    word = WORDS[result.state]
    return f"{word:6}{result.check.name:{NAME_COLUMNS}}{result.seconds:6.1f} s  {result.detail}"


def lines_of_machine(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines of versions, and of what nvidia-smi says."""
    # Versions and environment variables.
    shown = [f"{name} {version}" for name, version in facts["versions"].items()]
    commit = f"; commit {facts['commit'][:12]}" if facts["commit"] else ""
    yield f"{'versions':10}{', '.join(shown)}{commit}"
    for name, value in facts["variables"].items():
        yield f"{'variable':10}{name}={value}"

    # The state of each GPU.
    state = facts["nvidia_smi"]
    if state is None:
        yield f"{'state':10}not known: nvidia-smi is not on PATH"
        return
    for gpu in state["gpus"]:
        clocks = "full clocks"
        if is_throttled(gpu["clocks_throttle_reasons.active"]):
            clocks = "clocks are lowered"
        parts = [
            f"driver {gpu['driver_version']}",
            f"persistence {gpu['persistence_mode']}",
            f"ECC {gpu['ecc.mode.current']}",
            f"MIG {gpu['mig.mode.current']}",
            clocks,
            f"{gpu['temperature.gpu']} C",
            f"PCIe {gpu['pcie.link.gen.current']} x {gpu['pcie.link.width.current']}",
        ]
        yield f"{'state':10}{gpu['index']}: {', '.join(parts)}"

    # Other programs, and connections.
    if state["memory_of_programs"]:
        yield f"{'programs':10}on the GPUs already: {', '.join(state['memory_of_programs'])}"
    if has_nvlink(state["topology"]) is not None:
        yield f"{'links':10}{'NVLink' if has_nvlink(state['topology']) else 'no NVLink between GPUs'}"


def lines_of_devices(values: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the GPUs that torch sees, and of peers."""
    for device in values["devices"]:
        free = device["memory_free"] / 2**30
        total = device["memory_total"] / 2**30
        yield (
            f"{'gpu':10}{device['number']}: {device['name']}, sm_{device['capability']}, "
            f"{free:.1f} of {total:.1f} GiB free"
        )
    if values["peers"]:
        direct = sum(peer["is_direct"] for peer in values["peers"])
        count = len(values["peers"])
        yield f"{'peers':10}{direct} of {count} pairs of GPUs read each other's memory directly"
