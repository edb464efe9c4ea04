"""`eagle-kit export RUN --out DIR`: a servable draft with a model card, for this engine or another."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError

FORMATS = ("eagle-kit", "sglang", "vllm", "speculators", "eagle")
DTYPES = ("bfloat16", "float16", "float32", "keep")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``."""
    parser.add_argument(
        "source", metavar="RUN_OR_DRAFT", help="run folder (its best), checkpoint, or folder or id of a draft"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the draft goes")
    parser.add_argument(
        "--format", choices=FORMATS, default="eagle-kit", help="layout of the files (default %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default %(default)s)"
    )
    parser.add_argument("--target", help="folder, hub id or known name; default the one it was trained for")
    parser.add_argument(
        "--eval", type=Path, metavar="DIR", help="results of an eagle-kit eval whose figures go into the card"
    )
    parser.add_argument("--license", default="", metavar="ID", help="of the card, as apache-2.0")
    parser.add_argument("--push", metavar="ORG/NAME", help="upload the folder to this repository of the hub")
    parser.add_argument("--private", action="store_true", help="a repository that --push makes is private")


def run(args: argparse.Namespace) -> int:
    """Export and say where."""
    if args.eval is not None and not args.eval.exists():
        raise UserError(
            f"The folder {args.eval} does not exist.", "Give the result folder of an eagle-kit eval."
        )
    if args.private and args.push is None:
        raise UserError("--private was given without --push.", "Give --push ORG/NAME, or leave it out.")
    import torch

    from eagle_kit.checkpoints.export import Facts, export_draft
    from eagle_kit.checkpoints.publish import Repository

    repository = None if args.push is None else Repository(args.push, args.private)
    export_draft(
        args.source,
        args.out,
        target=args.target,
        format=args.format,
        dtype=None if args.dtype == "keep" else getattr(torch, args.dtype),
        facts=Facts(args.eval, args.license, args.push or ""),
    )
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    uses = {
        "sglang": "its README.md has SGLang's command",
        "vllm": "its README.md has vLLM's command",
        "speculators": "load it with speculators, or serve it with vLLM",
        "eagle": "load it with EAGLE's EaModel",
    }
    use = uses.get(args.format, f"try it with eagle-kit generate --draft {args.out}")
    print(f"{args.out}: {size / 1e6:.1f} MB; {use}")
    if repository is not None:
        print(f"{args.push}: {repository.upload(args.out)}")
    return 0
