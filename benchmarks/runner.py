"""Runs the cases of a benchmark into a record: a progress bar, a table, a deadline; failures stop nothing."""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.case import Case, Machine, in_words
from benchmarks.ceilings import device_state
from benchmarks.options import Options
from benchmarks.record import Record, describe
from benchmarks.table import format_row, heading
from benchmarks.verdict import Rows, Verdict
from eagle_kit.core.errors import UserError
from eagle_kit.report.plots import require_matplotlib

FINISH_S = 20.0
"""Kept back of the time on a GPU for the last case, the plot and the report."""


def no_targets(rows: Rows, counts: bool) -> list[Verdict]:
    """Nothing to judge."""
    return []


@dataclass(frozen=True)
class Benchmark:
    """A kind of benchmark with its cases.

    Attributes:
        kind: first word of the record's file name.
        cases: in the order in which they run, the most telling first.
        settings: what must be equal for cases of two sessions to stand in one file.
        verdicts: rows, and True where they count -> targets.
        plot: record, path -> a picture; None draws none.
    """

    kind: str
    cases: Sequence[Case]
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: Callable[[Rows, bool], list[Verdict]] = no_targets
    plot: Callable[[dict[str, Any], Path], None] | None = None


def conduct(benchmark: Benchmark, machine: Machine, options: Options) -> int:
    """Measure, print and write -> exit code, 1 when a case failed.

    Raises:
        UserError: the file cannot be written or gone on with, or matplotlib is missing for a plot.
    """
    plot = None if options.no_plot else benchmark.plot
    if plot is not None:
        require_matplotlib("give --no-plot")
    full = machine.on_gpu and not options.tiny and machine.ceilings is not None
    settings = {**benchmark.settings, "device": machine.name, "dtype": str(machine.dtype)}
    path = options.path(benchmark.kind, machine.name, full=full)
    head = {"kind": benchmark.kind, **describe(str(machine.device), options.command)}
    record = Record(path, head, settings, resume=options.resume)
    say(f"{machine.name}, {machine.dtype}; results in {path}")
    state = {"before": device_state(machine.device)}
    record.put(seed=machine.seed, device_state=state)
    if machine.ceilings is not None:
        record.put(ceilings=asdict(machine.ceilings))
        say(f"ceilings: {machine.ceilings}")
    deadline = time.monotonic() + 60 * options.minutes - FINISH_S * full
    _run(benchmark.cases, machine, record, deadline, progress=not options.no_progress)
    verdicts = benchmark.verdicts(list(record.cases.values()), full or machine.ceilings is None)
    state["after"] = device_state(machine.device)
    record.put(targets=[verdict._asdict() for verdict in verdicts], device_state=state)
    for verdict in verdicts:
        say(f"target  {verdict}")
    if plot is not None:
        picture = path.with_suffix(".png")
        plot(record.data, picture)
        say(f"picture in {picture}")
    if failed := record.failed:
        say(f"failed: {'; '.join(failed)}")
    return 1 if record.failed else 0


def _run(cases: Sequence[Case], machine: Machine, record: Record, deadline: float, *, progress: bool) -> None:
    group = ""
    with tqdm(
        total=sum(case.key not in record.cases for case in cases),
        unit="case",
        disable=not progress,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 30.0,
    ) as bar:
        for case in cases:
            if not record.begin(case.key):
                continue
            bar.set_postfix_str(case.key, refresh=False)
            row = {"group": case.group, "case": case.name, **case.values}
            start = time.monotonic()
            if start > deadline:
                row |= {"status": "left out", "reason": "no time was left"}
            else:
                row |= _measured(case, machine)
            record.finish(case.key, {**row, "seconds": round(time.monotonic() - start, 3)})
            bar.update()
            if case.group != group:
                group = case.group
                bar.write(heading(group, row), file=sys.stdout)
            bar.write(format_row(row), file=sys.stdout)
            if row["status"] == "failed" and is_lost(machine.device):
                bar.write(f"The device was lost in {case.key}. A new process goes on.", file=sys.stderr)
                _start_anew(record.path, (deadline - time.monotonic()) / 60)


def _measured(case: Case, machine: Machine) -> dict[str, Any]:
    """The row's rest; a failure is recorded and stops nothing."""
    try:
        return {"status": "ok", **case.measure(machine)}
    except torch.OutOfMemoryError:
        return {"status": "left out", "reason": "it does not fit into the memory"}
    except UserError as error:
        return {"status": "left out", "reason": error.cause}
    except Exception as error:  # whatever a kernel, a compiler, the driver or another library raises
        return {"status": "failed", "error": in_words(error)}
    finally:
        gc.collect()
        if machine.on_gpu:
            with suppress(RuntimeError):  # the device may be lost, which the caller finds out
                torch.cuda.empty_cache()


def is_lost(device: torch.device) -> bool:
    """Return True if a device is of no more use to this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(8, device=device).sum().item() != 8)
    except RuntimeError:
        return True


def _start_anew(path: Path, minutes: float) -> None:
    """Replace this process by one that goes on: a device that was lost is lost to the whole process."""
    sys.stdout.flush()
    sys.stderr.flush()
    more = ["--out", str(path), "--resume", "--minutes", f"{max(minutes, 0.1):.2f}"]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)
