"""``python kernels bench``: the ceilings of this machine, then every kernel against them."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle_kit.bench.kernels.case import FULL, TINY, RandomInputs, Sizes
from eagle_kit.bench.kernels.options import RESULTS, add_arguments, check_arguments
from eagle_kit.bench.kernels.plot import plot_roofline
from eagle_kit.bench.kernels.record import Record
from eagle_kit.bench.kernels.report import format_kernel, kernel_targets
from eagle_kit.bench.kernels.run import KERNELS, DeviceLost, count_cases, run_kernels
from eagle_kit.core.errors import UserError
from eagle_kit.kernels.ceilings import Ceilings, device_state, measure_ceilings
from eagle_kit.kernels.timing import Timer

FINISH_S = 20.0
"""Kept back of the time for the last case, the plot and the report."""


def main(
    argv: Sequence[str], describe: Callable[[str], dict[str, Any]], kernels: Sequence[str] = tuple(KERNELS)
) -> int:
    """Measure and write.

    Args:
        argv: the words behind ``bench``.
        describe: the device's name -> date, command, machine and versions.
        kernels: all that may be asked for.

    Returns:
        0, or 1 when a kernel failed.

    Raises:
        UserError: for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python kernels bench", description="Measure this machine, then every kernel against it."
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"of {', '.join(kernels)}; may be repeated",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(args)
    asked = [name for text in args.only for name in text.split(",")]
    if unknown := [name for name in asked if name not in kernels]:
        raise UserError(f"There is no kernel {unknown[0]!r}.", f"Choose of {', '.join(kernels)}.")
    names = [name for name in kernels if name in asked or not asked]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = choose_sizes(device, args.tiny)
    path = args.output or default_path("kernels", device, sizes.name)
    settings = {"sizes": sizes.name, "device": device_name(device), "dtype": str(dtype_of(device))}
    record = Record(path, describe(str(device)), settings, resume=args.resume)
    say(f"device  {device_name(device)}, {dtype_of(device)}, {sizes.name} sizes; results in {path}")
    return _run(args, names, sizes, device, record)


def _run(
    args: argparse.Namespace, names: list[str], sizes: Sizes, device: torch.device, record: Record
) -> int:
    deadline = time.monotonic() + max(0.0, 60 * args.minutes - FINISH_S * (sizes.name == "full"))
    seed = args.seed if args.seed is not None else time.time_ns() % (1 << 31)
    timer = make_timer(device, tiny=sizes.name == "tiny")
    before = device_state(device)
    ceilings = measure_ceilings(timer, dtype_of(device), tiny=sizes.name == "tiny")
    record.put(ceilings=ceilings.to_dict(), seed=seed, device_state={"before": before})
    say(f"ceilings  {ceilings}\n")
    rng = RandomInputs(device, dtype_of(device), seed)
    with tqdm(
        total=sum(count_cases(name, sizes) for name in names if name not in record.parts),
        unit="case",
        disable=args.no_progress,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 30.0,
    ) as bar:

        def progress(text: str, done: int) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(done)

        for name in names:
            try:
                run_kernels(
                    [name],
                    sizes,
                    rng,
                    timer,
                    ceilings,
                    record,
                    deadline=deadline,
                    progress=progress,
                    say=lambda text: bar.write(text, file=sys.stderr),
                )
            except DeviceLost as error:
                bar.write(f"{error} A new process goes on with the others.", file=sys.stderr)
                _start_anew(record.path, (deadline - time.monotonic()) / 60)
            bar.write(format_kernel(name, record.parts[name]) + "\n", file=sys.stdout)
    return _finish(args, sizes, device, ceilings, record)


def _finish(
    args: argparse.Namespace, sizes: Sizes, device: torch.device, ceilings: Ceilings, record: Record
) -> int:
    counts = device.type == "cuda" and sizes.name == "full"
    verdicts = kernel_targets(record.parts, counts=counts)
    state = {**record.data.get("device_state", {}), "after": device_state(device)}
    record.put(
        targets=[verdict._asdict() for verdict in verdicts],
        device_state=state,
    )
    say("targets" + ("" if counts else " (judged on a GPU and at full sizes only)"))
    for verdict in verdicts:
        say(f"  {verdict}")
    if not args.no_plot:
        picture = record.path.with_suffix(".png")
        title = f"{device_name(device)}, {sizes.name} sizes, {record.data.get('date', '')}"
        plot_roofline(record.parts, ceilings, title, picture)
        say(f"\nresults in {record.path}, picture in {picture}")
    if failed := record.failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if record.failed else 0


def _start_anew(path: Path, minutes: float) -> None:
    """Replace this process by one that goes on: a device that was lost is lost to the whole process."""
    sys.stdout.flush()
    sys.stderr.flush()
    more = ["--output", str(path), "--resume", "--minutes", f"{max(minutes, 0.1):.2f}"]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])


def choose_sizes(device: torch.device, tiny: bool) -> Sizes:
    """Full sizes on a GPU; tiny ones on a CPU, which is said."""
    if device.type == "cuda" and not tiny:
        return FULL
    if not tiny:
        say("There is no CUDA device: tiny sizes and torch forms on the CPU, to try the benchmark only.")
    return TINY


def make_timer(device: torch.device, *, tiny: bool) -> Timer:
    """Few repetitions where nothing is to be learnt from them."""
    return Timer(device, budget_s=0.005, least=3, most=10) if tiny else Timer(device)


def default_path(kind: str, device: torch.device, size: str) -> Path:
    """A new file named by date, device and size, in the folder of results; tiny sizes give none."""
    folder = RESULTS if size == "full" else Path("results")
    words = "".join(c if c.isalnum() else " " for c in device_name(device).lower()).split()
    return folder / f"{kind}-{datetime.now():%Y-%m-%d-%H%M%S}-{'-'.join(words)}-{size}.json"


def device_name(device: torch.device) -> str:
    """The GPU's name, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def dtype_of(device: torch.device) -> torch.dtype:
    """bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
