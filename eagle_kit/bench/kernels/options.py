"""What both benchmarks may be told. Light: nothing of the work is imported for its help."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError

MINUTES = 8.0
RESULTS = Path("kernels/results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--tiny", action="store_true", default=False, help="sizes that only try the benchmark"
    )
    parser.add_argument(
        *("--output", "--out"),
        dest="output",
        type=Path,
        default=None,
        metavar="JSON",
        help=f"default a new file in {RESULTS}/, of tiny sizes in results/",
    )
    parser.add_argument(
        "--resume", action="store_true", default=False, help="go on with the parts that --output lacks"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M", help=f"most time it may take ({MINUTES:g})"
    )
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="of the inputs (default: the time)"
    )
    parser.add_argument(
        "--no-plot", action="store_true", default=False, help="draw no picture beside the JSON file"
    )
    parser.add_argument("--no-progress", action="store_true", default=False, help="show no progress bar")


def check_arguments(args: argparse.Namespace) -> None:
    """Raises UserError for what cannot be done."""
    from eagle_kit.bench.kernels.plot import require_matplotlib

    if not args.minutes > 0:
        raise UserError(f"--minutes is {args.minutes:g}.", "Give a number above 0.")
    if args.resume and args.output is None:
        raise UserError("--resume needs a file to go on with.", "Give --output JSON too.")
    if not args.no_plot:
        require_matplotlib()
