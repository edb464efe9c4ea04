"""The examination of a GPU by `eagle-kit doctor --gpu`: facts, checks, switches, and the file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.process import INTERRUPTED, num_cores
from eagle_kit.doctor.check_processes import COMMAND, CheckProcesses, Lane
from eagle_kit.doctor.checks import (
    DEVICES_CHECK,
    MEMORY_CHECK,
    MODEL_MEMORY_CHECK,
    REFERENCE_CHECK,
    Check,
    Result,
    TimeLimits,
    engine_checks,
    operation_checks,
)
from eagle_kit.doctor.findings import Findings, SwitchTrial, line_of, lines_of_devices, lines_of_machine
from eagle_kit.doctor.machine import machine_facts

MOST_PROCESSES = 4
"""Most processes that check at once: each has a context, and compiles kernels on a core."""
CORES_OF_PROCESS = 2


@dataclass(frozen=True)
class ExaminationOptions:
    """Options of an examination.

    Attributes:
        out: file to write.
        target, draft: models whose memory is measured too, as ``LLM`` takes them.
        only: words of the names of the checks to run; all if it is empty.
        command: command of a process that runs checks.
        limits: seconds of a check.
        num_processes: most processes at once; None is chosen by the number of cores.
    """

    out: Path
    target: str | None = None
    draft: str | None = None
    only: tuple[str, ...] = ()
    command: Sequence[str] = COMMAND
    limits: TimeLimits = TimeLimits()  # noqa: RUF009
    num_processes: int | None = None


def check_gpu_is_there() -> None:
    """Raise UserError where torch has no GPU."""
    import torch

    if torch.version.cuda is None:
        raise UserError(
            "torch is a build without CUDA, so there is no GPU to check.",
            "Install torch's CUDA build, for example with `make install` where nvidia-smi finds a GPU.",
        )
    if not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU.",
            "Make `nvidia-smi -L` list one, and look at CUDA_VISIBLE_DEVICES and at the driver's version.",
        )


def examine(options: ExaminationOptions, say: Callable[[str], None]) -> int:
    """Examine the current GPU and write the file.

    Args:
        say: prints a line.

    Returns:
        0 if all checks passed, 1 if one failed, 130 where it was interrupted.

    Raises:
        UserError: there is no GPU.
    """
    # Facts of the machine.
    check_gpu_is_there()
    findings = Findings(machine_facts())

    def note(line: str) -> None:
        findings.lines.append(line)
        say(line)

    # Checks.
    num_processes = options.num_processes
    if num_processes is None:
        num_processes = max(1, min(MOST_PROCESSES, num_cores() // CORES_OF_PROCESS))
    processes = CheckProcesses(options.command, options.limits, num_processes)
    examination = _Examination(options, findings, processes, note)
    is_interrupted = False
    try:
        examination.run()
        findings.is_complete = True
    except KeyboardInterrupt:
        is_interrupted = True

    # The summary and the file, behind an interruption too.
    for line in findings.summary():
        note(line)
    findings.write(options.out)
    say(f"written to {options.out}")
    if is_interrupted:
        return INTERRUPTED
    return 1 if findings.failed else 0


class _Examination:
    """The steps of an examination, which fill the findings."""

    def __init__(
        self,
        options: ExaminationOptions,
        findings: Findings,
        processes: CheckProcesses,
        note: Callable[[str], None],
    ) -> None:
        self.options = options
        self.findings = findings
        self.processes = processes
        self.note = note

    def run(self) -> None:
        """Run all checks, then try switches for those that failed.

        Raises:
            UserError: no check has a word of ``only``.
        """
        for line in lines_of_machine(self.findings.facts):
            self.note(line)
        [devices] = self._check([Lane([DEVICES_CHECK])])
        if "devices" not in devices.values:
            self.findings.unhelped.append(DEVICES_CHECK.group)
            return  # no process can use the GPU
        self.findings.facts["devices"] = devices.values["devices"]
        for line in lines_of_devices(devices.values):
            self.note(line)
        capability = devices.values["devices"][0]["capability"]

        # A misspelled word must not read as a GPU without a fault.
        known = [*operation_checks(capability), MEMORY_CHECK]
        for checks in engine_checks(capability):
            known.extend(checks)
        if not self._chosen(known) and self.options.target is None:
            words = ", ".join(shown(word) for word in self.options.only)
            raise UserError(
                f"No check has the word {words} in its name.",
                "Leave --only out: the names are in the lines of the checks.",
            )

        # Operations, and beside them the texts that engines should give.
        operations = self._chosen(operation_checks(capability))
        count = self.processes.num_processes
        lanes = [Lane(operations[first::count]) for first in range(count)]
        engines = [self._chosen(checks) for checks in engine_checks(capability)]
        if any(engines):
            lanes.append(Lane([REFERENCE_CHECK]))
        results = self._check(lanes)
        expected = {}
        for result in results:
            if result.check == REFERENCE_CHECK:
                expected = result.values.get("texts", {})

        # Engines.
        given = {"expected": expected}
        self._check([Lane(checks, given=given) for checks in engines])

        # Memory, with no other process of ours on the GPU.
        self._check([Lane(self._chosen([MEMORY_CHECK]))])
        if self.options.target is not None:
            models = {"target": self.options.target, "draft": self.options.draft}
            self._check([Lane([MODEL_MEMORY_CHECK], given=models)])
        self._try_switches(given)

    def _chosen(self, checks: list[Check]) -> list[Check]:
        """Checks whose name has a word of ``only``."""
        words = self.options.only
        return [check for check in checks if not words or any(word in check.name for word in words)]

    def _check(self, lanes: Iterable[Lane]) -> list[Result]:
        """Run lanes, and note each result."""

        def on_result(result: Result) -> None:
            self.findings.results.append(result)
            self.note(line_of(result))

        return self.processes.run(lanes, on_result)

    def _try_switches(self, given: Mapping[str, object]) -> None:
        """Find for each group of checks that failed the switch that costs least and helps."""
        groups: dict[str, list[Check]] = {}
        for result in self.findings.failed:
            groups.setdefault(result.check.group, []).append(result.check)

        # Operations first: an engine may fail because one of them does.
        for group in sorted(groups, key=lambda group: group == "engine"):
            checks = groups[group]
            found = self._switch_for(group, checks, given)
            if found is None:
                self.findings.unhelped.append(group)
            else:
                new = [name for name in found if name not in self.findings.switches]
                self.findings.switches.extend(new)

        # All of them together, where there are several.
        helped: list[Check] = []
        for group, checks in groups.items():
            if group not in self.findings.unhelped:
                helped.extend(checks)
        if len({check.group for check in helped}) > 1:
            self._helps("all of these", helped, self.findings.switches, given)

    def _switch_for(self, group: str, checks: list[Check], given: Mapping[str, object]) -> list[str] | None:
        """Parts without which the checks of a group pass; None if there are none."""
        # What helps others may help an engine, too.
        tried: list[list[str]] = []
        base = list(self.findings.switches) if group == "engine" else []
        if base:
            tried.append(base)
        most = max((check.switches for check in checks), key=len)
        tried.extend([*base, name] for name in most)
        for switches in tried:
            if self._helps(group, checks, switches, given):
                return switches
        return None

    def _helps(
        self, group: str, checks: list[Check], switches: list[str], given: Mapping[str, object]
    ) -> bool:
        """Run the checks of a group again with parts disabled; return whether all pass."""
        # Checks in which other parts are disabled need a process of their own.
        lanes = []
        for disabled in dict.fromkeys(check.disabled for check in checks):
            same = [check for check in checks if check.disabled == disabled]
            lanes.append(Lane(same, switches, given))
        results = self.processes.run(lanes, lambda result: None)
        helps = len(results) == len(checks) and all(result.passed for result in results)
        self.findings.trials.append(SwitchTrial(group, switches, helps))
        word = "helps" if helps else "does not help"
        self.note(f"      {group}: EAGLE_KIT_DISABLE={','.join(switches)} {word}")
        return helps
