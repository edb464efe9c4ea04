"""The checks of `eagle-kit doctor --gpu`, by name, and their results."""

import signal
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from eagle_kit.core.switches import OPERATIONS, of_operation
from eagle_kit.doctor.operations import case_runs
from eagle_kit.ops.capability import facts_of

State = Literal["passed", "failed", "crashed", "hung"]
ENGINE_DTYPES = ("float32", "bfloat16")
"""Dtypes that the small engine is checked in."""
NO_LAUNCH_AHEAD = ("programmatic-launch",)
REFERENCE_SWITCHES = ("triton", "graphs", "lag", "programmatic-launch")
"""Parts that the engine with the expected texts does without."""
ENGINE_SWITCHES = ("lag", "programmatic-launch", "prompt-graphs", "graphs", "triton")
"""Switches that may help an engine, the one that costs least first."""
SHOW_STACK = signal.SIGUSR1
"""Signal on which a process that runs checks writes the stacks of its threads to standard error."""


class TimeLimits(NamedTuple):
    """Seconds after which a process is ended: until it is ready, for a check of an operation, and for one of
    an engine. Kernels are compiled within them."""

    start: float = 180.0
    operation: float = 150.0
    engine: float = 400.0


class Check(NamedTuple):
    """A check that a process of its own may run.

    Attributes:
        name: what the user reads.
        group: checks of a group are repeated together when a switch is tried.
        switches: parts without which it may pass, the one that costs least first.
        disabled: parts that are disabled whenever it runs.
        is_long: it has the time limit of an engine.
    """

    name: str
    group: str
    switches: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    is_long: bool = False


class CheckOutcome(NamedTuple):
    """Outcome of a check in the process that ran it.

    Attributes:
        passed: whether all is as it should be.
        detail: one line.
        values: what else goes into the file, as JSON.
    """

    passed: bool
    detail: str
    values: Mapping[str, Any] = {}


class Result(NamedTuple):
    """Result of a check. ``seconds`` are without the start of a process."""

    check: Check
    state: State
    detail: str
    seconds: float
    values: Mapping[str, Any] = {}

    @property
    def passed(self) -> bool:
        """True if nothing is wrong."""
        return self.state == "passed"


def operation_checks(capability: int) -> list[Check]:
    """Checks of every operation in every dtype, for a GPU of ``capability`` (times 10)."""
    found = []
    for run in case_runs():
        operation = run.case.operation
        switches: tuple[str, ...] = ()
        if operation in OPERATIONS:
            switches = (of_operation(operation),)
            if facts_of(capability).starts_early:
                switches = (*NO_LAUNCH_AHEAD, *switches)
        found.append(Check(run.name, operation, switches))
    return found


REFERENCE_CHECK = Check(
    "engine, texts of the references", "engine of references", (), REFERENCE_SWITCHES, True
)
"""The engine whose texts the others are compared with: no Triton, no graphs, no lag."""


def engine_checks(capability: int) -> list[list[Check]]:
    """Lists of checks of the engine, each list for processes of the same switches."""
    variants: list[tuple[str, ...]] = [()]
    if facts_of(capability).starts_early:
        variants.append(NO_LAUNCH_AHEAD)
    found = []
    for disabled in variants:
        suffix = ", without programmatic launch" if disabled else ""
        switches = tuple(name for name in ENGINE_SWITCHES if name not in disabled)
        checks = []
        for dtype in ENGINE_DTYPES:
            for form in ("eager", "graphs, lag 0", "graphs, lag 1"):
                name = f"engine, {dtype}, {form}{suffix}"
                checks.append(Check(name, "engine", switches, disabled, True))
        found.append(checks)
    return found


DEVICES_CHECK = Check("GPUs and driver", "driver", NO_LAUNCH_AHEAD)
MEMORY_CHECK = Check("memory, planned and measured", "memory", (), (), True)
MODEL_MEMORY_CHECK = Check(
    "memory of the given models, planned and measured", "memory of models", (), (), True
)
