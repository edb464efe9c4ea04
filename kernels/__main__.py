"""Door for people: `python kernels check` tries every operation, `python kernels bench` times decoding."""

import argparse
import sys

from eagle_kit.cli import main as eagle_kit


def main() -> int:
    """Check (exit code 1 when an operation is wrong), or pass the rest of the line to `eagle-kit bench`."""
    parser = argparse.ArgumentParser(prog="python kernels", description="Check or time the operations.")
    parser.add_argument("action", choices=("check", "bench"))
    args, rest = parser.parse_known_args()
    if args.action == "bench":
        return eagle_kit(["bench", *rest])
    if rest:
        parser.error(f"check takes no arguments, got {' '.join(rest)}")
    return check()


def check() -> int:
    """One line per operation and form: its error against fp64 and whether that is rounding."""
    from eagle_kit.kernels.selfcheck import TOLERANCE, run_checks

    checks = run_checks()
    for found in checks:
        print(f"{found.kernel:20}{found.form:16}{found.error:9.1e}  {'ok' if found.ok else 'WRONG'}")
    wrong = sum(not found.ok for found in checks)
    print(f"\n{len(checks) - wrong} of {len(checks)} are right (largest relative error <= {TOLERANCE:.0e}).")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
