"""Door for people: `python kernels check` tries every operation, `compile` compiles them for other GPUs,
`bench` times them."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PATHS = [str(FOLDER.parent), str(FOLDER)]
"""Folders of ``benchmarks`` and of ``kernel_lab``."""
WRONG_LINE = 2
"""Exit code of a command line that cannot be read."""
sys.path[:0] = [path for path in PATHS if path not in sys.path]


def main() -> int:
    """Check (exit code 1 when an operation is wrong), compile, or measure (1 when one failed, 2 for a wrong
    line)."""
    parser = argparse.ArgumentParser(
        prog="python kernels",
        description="Check, compile or time the operations. `compile --help` and `bench --help`: options.",
    )
    parser.add_argument("action", choices=("check", "compile", "bench"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rest = args.rest
    if args.action == "bench":
        return bench(rest)
    if args.action == "compile":
        from eagle_kit.cli.app import report_errors

        return report_errors(lambda: compile_kernels(rest))
    if rest:
        parser.error(f"check takes no arguments, got {' '.join(rest)}")
    return check()


def check() -> int:
    """Every operation against fp64, its Triton form too (interpreted where no GPU is), what the compiler
    makes of each configuration for GPUs that need not be there, and the launches of a cycle."""
    from eagle_kit.ops.backend import triton_available
    from kernel_lab.selfcheck import Check, run_checks

    checks = run_checks()
    reports: list[dict[str, Any]] = []
    if triton_available():
        import torch

        interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        found = _lines("kernel_lab.selfcheck", interpret)
        checks += [Check(**line) for line in found]
    for one in checks:
        print(f"{one.operation:20}{one.form:60}{one.error:9.1e}  {'ok' if one.ok else 'WRONG'}")
    wrong = sum(not one.ok for one in checks)
    print(f"\n{len(checks) - wrong} of {len(checks)} are right: their errors are those of rounding.\n")
    if not triton_available():
        print("Triton is not installed: its kernels were neither run nor compiled.")
        return 1 if wrong else 0
    reports = _lines("kernel_lab.aot", {"TRITON_INTERPRET": "0"})
    faults = _print_reports(reports)

    from benchmarks.engine.launches import MODEL, table

    print(f"\nLaunches of a cycle of {MODEL} with an EAGLE-3 head, by phase:", *table(), sep="\n")
    return 1 if wrong or faults else 0


def compile_kernels(words: Sequence[str]) -> int:
    """Compile the configurations whose name contains a word, or all -> exit code: 1 when one has a fault, 2
    for a wrong line or a word that is in no name."""
    from eagle_kit.core.errors import UserError

    if {"-h", "--help"} & set(words):
        print(_run("kernel_lab.aot", {}, words).stdout, end="")
        return 0
    reports = _lines("kernel_lab.aot", {"TRITON_INTERPRET": "0"}, words)
    if not reports:
        raise UserError(
            f"No configuration fits {' '.join(words)}.",
            "Give a part of a name that `python kernels compile` lists.",
        )
    return 1 if _print_reports(reports) else 0


def _print_reports(reports: list[dict[str, Any]]) -> int:
    """Print what the compiler made of each configuration -> number of those with faults."""
    import triton

    width = max((len(report["name"]) for report in reports), default=0)
    print(f"{'compiled':{width}}   sm  registers  stack  shared  wgmma  programs")
    for report in reports:
        wgmma = "yes" if report["wgmma"] else "-"
        print(
            f"{report['name']:{width}}  {report['arch']:3}  {report['registers']:9}  "
            f"{report['stack_bytes']:5}  {report['shared_bytes']:6}  {wgmma:5}  {report['programs']:8}  "
            f"{'; '.join(report['faults']) or 'ok'}"
        )
    faults = sum(bool(report["faults"]) for report in reports)
    print(
        f"\n{len(reports) - faults} of {len(reports)} compile as they should (Triton {triton.__version__})."
    )
    return faults


def bench(words: list[str]) -> int:
    """Time every kernel against this machine's ceilings."""
    from benchmarks.kernels.suite import main as measure
    from eagle_kit.cli.app import report_errors

    return report_errors(lambda: measure(words))


def _lines(module: str, environment: dict[str, str], words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Objects that a module prints as JSON, one a line. Ends this process where the module fails."""
    done = _run(module, environment, words)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == WRONG_LINE:  # which the module has said
        raise SystemExit(WRONG_LINE)
    if done.returncode and not lines:
        raise SystemExit(f"error: {module} failed with exit code {done.returncode}.")
    return lines


def _run(module: str, environment: dict[str, str], words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, since Triton's interpreter and compiler exclude one another."""
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([*PATHS, before] if before else PATHS)
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main())
