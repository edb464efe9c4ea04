"""``python kernels bench``: every kernel against the ceilings of this machine and against torch."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.case import Case, Cost, Form, Machine
from benchmarks.kernels import attention, decoding, training
from benchmarks.kernels.inputs import TINY, Cases, KernelCase, RandomInputs, Sizes, tensors_of
from benchmarks.options import Options, add_arguments
from benchmarks.plots import plot_roofline
from benchmarks.runner import Benchmark, conduct, say
from benchmarks.verdict import Rows, Verdict, at_least, at_most
from eagle_kit.core.errors import UserError
from eagle_kit.ops.backend import Backend, triton_available

KERNELS: Cases = attention.CASES | decoding.CASES | training.CASES
"""Cases of every kernel with a Triton form."""
MAX_DEVIATION = 0.05
"""Of a result from the torch form's, relative, in half types: beyond it a time is of no interest."""
LARGE = 64 * 1024
"""Tokens (batch x context) from which window attention is held to shares of the copy bandwidth."""


def main(words: Sequence[str]) -> int:
    """Measure what the command line behind ``bench`` asks for -> exit code, 1 when a case failed.

    Raises:
        UserError: for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python kernels bench", description="Measure this machine, then every kernel against it."
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help=f"of {', '.join(KERNELS)}"
    )
    add_arguments(parser, grid=True)
    args = parser.parse_args(words)
    options = Options.of(args, shlex.join(["python", "kernels", "bench", *words]))
    asked = [name for text in args.only for name in text.split(",")]
    if unknown := [name for name in asked if name not in KERNELS]:
        raise UserError(f"There is no kernel {unknown[0]!r}.", f"Choose of {', '.join(KERNELS)}.")
    tiny = options.tiny or not torch.cuda.is_available()
    if tiny and not options.tiny:
        say("There is no CUDA device: tiny sizes and torch forms on the CPU, to try the benchmark only.")
    sizes = TINY if tiny else Sizes()
    cases = [
        Case(name, each.name, partial(measure, each), each.values)
        for name, make in KERNELS.items()
        if name in asked or not asked
        for each in make(sizes)
    ]
    machine = Machine.here(options.seed, tiny=tiny, with_ceilings=True)
    return conduct(
        Benchmark("kernels", cases, {"sizes": sizes.name}, kernel_targets, plot_roofline), machine, options
    )


def measure(kernel: KernelCase, machine: Machine) -> dict[str, Any]:
    """Time all forms of a kernel's case, ours first, against its floor.

    Raises:
        AssertionError: the Triton form's result is not that of the torch form.
    """
    ours: Backend = "triton" if machine.on_gpu and triton_available() else "reference"
    names: dict[Backend, str] = {"triton": "triton", "reference": "torch"}
    with torch.enable_grad() if kernel.trains else torch.inference_mode():
        work = kernel.make(RandomInputs(machine.device, machine.dtype, machine.seed))
        result = work.op(ours)
        off = None if ours == "reference" else deviation(result, work.op("reference"))
        if off is not None and not off <= MAX_DEVIATION:
            raise AssertionError(f"its result is {off:.1e} from that of the torch form")
        cost = Cost(work.num_bytes(result), work.flops)
        del result

        def form(backend: Backend) -> Form:
            return Form(partial(work.op, backend), "eager" if backend in work.eager else "graph")

        forms: dict[str, Callable[[], Form]] = {
            names[backend]: partial(form, backend) for backend in dict.fromkeys((ours, "reference"))
        }
        if machine.on_gpu:
            forms |= {name: partial(_rival, make) for name, make in work.rivals.items()}
        return {**machine.compare(forms, cost), "deviation": off}


def _rival(make: Callable[[], Callable[[], Any]]) -> Form:
    return Form(make())


def deviation(one: Any, other: Any) -> float | None:
    """The largest relative distance between results of floats; None when there are none to compare."""
    pairs = zip(tensors_of(one), tensors_of(other), strict=False)
    found = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in ((mine.detach(), theirs.detach()) for mine, theirs in pairs)
        if a.is_floating_point() and a.shape == b.shape and a.dtype == b.dtype and a.numel()
    ]
    return max(found) if found else None


def kernel_targets(rows: Rows, counts: bool) -> list[Verdict]:
    """Targets of window attention; ``counts`` False, on a CPU or at tiny sizes, measures only."""
    found = [row for row in rows if row["group"] == "window_attention" and "times_us" in row]

    def median(row: dict[str, Any]) -> float:
        return next(iter(row["times_us"].values()))["median"]

    def shares(kind: str) -> list[tuple[float, str]]:
        return [
            (row["byte_floor_us"] / median(row), row["case"])
            for row in found
            if row["kind"] == kind and (row["batch"] * row["context"] >= LARGE or not counts)
        ]

    alone = {
        (row["nodes"], row["context"]): median(row)
        for row in found
        if row["batch"] == 1 and row["kind"] in ("decode", "verify") and not row["fp8"]
    }
    ratios = [
        (time / alone[1, context], f"batch 1, context {context}")
        for (nodes, context), time in alone.items()
        if nodes == 8 and (1, context) in alone
    ]
    large = "batch x context >= 64 K"
    decode = f"window attention, decode, {large}: >= 0.85 of copy bandwidth"
    verify = f"window attention, verify of 8 to 32 nodes, {large}: >= 0.80 of copy bandwidth"
    return [
        at_least(decode, 0.85, shares("decode"), counts=counts),
        at_least(verify, 0.80, shares("verify"), counts=counts),
        at_most(
            "window attention, verify of 8 nodes: <= 1.08 x decode, batch 1", 1.08, ratios, counts=counts
        ),
    ]
