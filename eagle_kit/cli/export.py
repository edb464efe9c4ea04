"""`eagle-kit export RUN --out DIR`: a servable draft in bfloat16 with a model card."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``."""
    parser.add_argument(
        "source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder (its best) or checkpoint"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the draft goes")
    parser.add_argument("--target", help="folder, hub id or known name; default the one it was trained for")
    parser.add_argument(
        "--eval", type=Path, metavar="SUMMARY", help="summary.json whose figures go into the card"
    )


def run(args: argparse.Namespace) -> int:
    """Export and say where."""
    if args.eval is not None and not args.eval.is_file():
        raise UserError(
            f"The file {args.eval} does not exist.", "Give the summary.json of an eagle-kit eval."
        )
    from eagle_kit.checkpoints.export import export_draft

    export_draft(args.source, args.out, target=args.target, eval_summary=args.eval)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB; serve it with eagle-kit generate --draft {args.out}")
    return 0
