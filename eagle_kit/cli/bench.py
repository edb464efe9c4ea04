"""`eagle-kit bench`: what decoding and training reach, beside ceilings measured in the same run."""

import argparse
import json
from pathlib import Path
from typing import Any

from eagle_kit.cli.arguments import add_target

PARTS = ("decode", "train")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench``."""
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    add_target(parser)
    parser.add_argument("--draft", metavar="DIR", help="draft checkpoint, to time whole cycles too")
    parser.add_argument("--no-compare", action="store_true", help="leave out transformers' own generate")
    parser.add_argument("--out", type=Path, metavar="JSON", help="also write the figures there")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the figures when asked."""
    from eagle_kit.core.errors import UserError

    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise UserError(f"There is no benchmark {unknown[0]!r}.", f"Choose of {', '.join(PARTS)}.")
    parts, result = args.parts or PARTS, dict[str, Any]()
    if "decode" in parts:
        from eagle_kit.serve.bench import benchmark_decoding, format_decoding

        result["decode"] = benchmark_decoding(args.target, args.draft, compare=not args.no_compare)
        print(format_decoding(result["decode"]), flush=True)
    if "train" in parts:
        from eagle_kit.train.bench import benchmark_training, format_training

        result["train"] = benchmark_training(args.target)
        print(format_training(result["train"]), flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0
