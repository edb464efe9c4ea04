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
        return compile_kernels(rest)
    if rest:
        parser.error(f"check takes no arguments, got {' '.join(rest)}")
    return check()


def check() -> int:
    """Every operation against fp64, its Triton form too (interpreted where no GPU is), what the compiler
    makes of each configuration for GPUs that need not be there, the launches of a cycle, and the waits of the
    host in a trainer's step and a prefill, with their budgets."""
    from eagle_kit.kernels.backend import triton_available
    from kernel_lab.selfcheck import TOLERANCE, Check, run_checks

    checks = run_checks()
    reports: list[dict[str, Any]] = []
    if triton_available():
        import torch

        interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        found = _lines("kernel_lab.selfcheck", interpret)
        checks += [Check(**line) for line in found]
    for one in checks:
        print(f"{one.kernel:20}{one.form:24}{one.error:9.1e}  {'ok' if one.ok else 'WRONG'}")
    wrong = sum(not one.ok for one in checks)
    print(
        f"\n{len(checks) - wrong} of {len(checks)} are right (largest relative error <= {TOLERANCE:.0e}).\n"
    )
    if not triton_available():
        print("Triton is not installed: its kernels were neither run nor compiled.")
        return 1 if wrong else 0
    reports = _lines("kernel_lab.aot", {"TRITON_INTERPRET": "0"})
    faults = _print_reports(reports)

    from benchmarks.engine.launches import MODEL, table

    print(f"\nLaunches of a cycle of {MODEL} with an EAGLE-3 head, by phase:", *table(), sep="\n")
    waits = _lines("benchmarks.waits", {"TRITON_INTERPRET": "1"})
    print("\nWaits of the host for a GPU, counted without one:")
    print(f"{'in':16}{'part':18}{'waits':>7}{'budget':>8}")
    for wait in waits:
        verdict = "" if wait["waits"] <= wait["budget"] else "  EXCEEDED"
        print(f"{wait['what']:16}{wait['part']:18}{wait['waits']:7}{wait['budget']:8}{verdict}")
    exceeded = any(wait["waits"] > wait["budget"] for wait in waits)
    return 1 if wrong or faults or exceeded else 0


def compile_kernels(words: Sequence[str]) -> int:
    """Compile the configurations whose name contains a word, or all -> exit code, 1 when one has a fault."""
    reports = _lines("kernel_lab.aot", {"TRITON_INTERPRET": "0"}, words)
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
    """What a module prints as JSON lines, in a process of its own: interpreter and compiler exclude one
    another."""
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([*PATHS, before] if before else PATHS)
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if words and done.returncode == 0 and not done.stdout.startswith("{"):  # its help
        raise SystemExit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode and not lines:
        raise SystemExit(f"error: {module} failed with exit code {done.returncode}.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
