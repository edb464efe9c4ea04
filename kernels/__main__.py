"""Door for people: `python kernels check` tries every operation, `python kernels bench` times it."""

import argparse
import json
import os
import subprocess
import sys
from typing import Any


def main() -> int:
    """Check (exit code 1 when an operation is wrong) or measure (1 when one failed, 2 for a wrong line)."""
    parser = argparse.ArgumentParser(
        prog="python kernels", description="Check or time the operations. `bench --help` has its options."
    )
    parser.add_argument("action", choices=("check", "bench"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rest = args.rest
    if args.action == "bench":
        return bench(rest)
    if rest:
        parser.error(f"check takes no arguments, got {' '.join(rest)}")
    return check()


def check() -> int:
    """Every operation against fp64, its Triton form too (interpreted where no GPU is), what the compiler
    makes of each configuration for GPUs that need not be there, and the launches of a cycle."""
    from eagle_kit.kernels.backend import triton_available
    from eagle_kit.kernels.selfcheck import TOLERANCE, Check, run_checks

    checks = run_checks()
    reports: list[dict[str, Any]] = []
    if triton_available():
        import torch

        interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        found = _lines("eagle_kit.kernels.selfcheck", interpret)
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
    reports = _lines("eagle_kit.kernels.aot", {"TRITON_INTERPRET": "0"})
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
    import triton

    from eagle_kit.bench.engine.launches import MODEL, table

    print(
        f"\n{len(reports) - faults} of {len(reports)} compile as they should (Triton {triton.__version__})."
    )
    print(f"\nLaunches of a cycle of {MODEL} with an EAGLE-3 head, by phase:", *table(), sep="\n")
    return 1 if wrong or faults else 0


def bench(words: list[str]) -> int:
    """Time every kernel against this machine's ceilings."""
    from eagle_kit.bench.kernels.suite import main as measure
    from eagle_kit.config.loading.command_line import print_error
    from eagle_kit.core.errors import UserError

    try:
        return measure(words)
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _lines(module: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What a module prints as JSON lines, in a process of its own: interpreter and compiler exclude one
    another."""
    done = subprocess.run(
        [sys.executable, "-m", module], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode and not lines:
        raise SystemExit(f"error: {module} failed with exit code {done.returncode}.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
