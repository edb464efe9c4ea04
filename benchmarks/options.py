"""Options that all benchmarks share. Light: no benchmark is imported for its help."""

import argparse
import time
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

from eagle_kit.core.errors import UserError

MINUTES = 8.0
RESULTS = Path("kernels/results")


@dataclass(frozen=True)
class Options:
    """Options of a benchmark run.

    Attributes:
        out: the JSON file; None is a new one.
        resume: go on with the cases that ``out`` lacks.
        minutes: most time it may take; what is left is left out.
        seed: of the inputs.
        tiny: sizes that only try the benchmark.
        no_plot, no_progress: draw no picture, show no progress bar.
        command: the command line, for the record.
    """

    out: Path | None = None
    resume: bool = False
    minutes: float = MINUTES
    seed: int = 0
    tiny: bool = False
    no_plot: bool = False
    no_progress: bool = False
    command: str = ""

    @classmethod
    def of(cls, args: argparse.Namespace, command: str) -> "Options":
        """Options of parsed arguments.

        Raises:
            UserError: for what cannot be done.
        """
        names = {each.name for each in fields(cls)}
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
        options = cls(**{"seed": time.time_ns() % (1 << 31), **given, "command": command})
        if not options.minutes > 0:
            raise UserError(f"--minutes is {options.minutes:g}.", "Give a number above 0.")
        if options.resume and options.out is None:
            raise UserError("--resume needs a file to go on with.", "Give --out JSON too.")
        return options

    def path(self, kind: str, device: str, *, full: bool) -> Path:
        """``out``, or a new file named by date and device; ``full`` sizes on a GPU are results to keep."""
        words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
        name = f"{kind}-{datetime.now():%Y-%m-%d-%H%M%S}-{'-'.join(words)}.json"
        return self.out or (RESULTS if full else Path("results")) / name


def add_arguments(parser: argparse.ArgumentParser, *, grid: bool = False, minutes: float = MINUTES) -> None:
    """Declare the options, without defaults; ``grid`` has those of benchmarks of full and tiny sizes too, and
    ``minutes`` is what is said of the time."""
    parser.add_argument(
        *("--out", "--output"), dest="out", type=Path, metavar="JSON",
        help=f"file of the figures; default a new one in results/, of full sizes on a GPU in {RESULTS}/",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on with the cases that --out lacks")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"most time it may take ({minutes:g}); the rest is left out",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    parser.add_argument("--seed", type=int, metavar="N", help="of the inputs (default: the time)")
    if grid:
        parser.add_argument("--tiny", action="store_true", help="sizes that only try the benchmark")
        parser.add_argument("--no-plot", action="store_true", help="draw no picture beside the JSON file")
