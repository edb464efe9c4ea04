"""`eagle-kit import DRAFT --out DIR`: a draft of another project in our layout, bit for bit."""

import argparse
from pathlib import Path

FORMATS = ("sglang", "vllm", "speculators", "eagle")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``import``."""
    parser.add_argument("source", metavar="DRAFT", help="folder or hub id of a draft of any layout")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the draft goes")
    parser.add_argument(
        "--format", choices=FORMATS, help="layout of DRAFT, where it cannot be recognised by its files"
    )
    parser.add_argument("--target", help="folder, hub id or known name; for drafts that name no layers")
    parser.add_argument("--license", default="", metavar="ID", help="of the card, as apache-2.0")


def run(args: argparse.Namespace) -> int:
    """Import and say what was recognised."""
    from eagle_kit.checkpoints.export import Facts, import_draft

    facts = Facts(licence=args.license)
    seen = import_draft(args.source, args.out, format=args.format, target=args.target, facts=facts)
    print(f"{args.source}: {seen.kind.name} head, {seen.maker}")
    print(f"{args.out}: check it with eagle-kit validate {args.out} --target TARGET")
    return 0
