"""`eagle-kit import DRAFT --out DIR`: a draft of another project in our layout, bit for bit."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError

FORMATS = ("sglang", "vllm", "speculators", "eagle")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``import``."""
    parser.add_argument("source", metavar="DRAFT", help="folder or hub id of a draft of any layout")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the draft goes")
    parser.add_argument(
        "--format", choices=FORMATS, help="layout of DRAFT, where it cannot be recognised by its files"
    )
    parser.add_argument(
        "--target", help="folder, hub id or known name; for drafts that do not say which layers they read"
    )
    parser.add_argument("--license", default="", metavar="ID", help="of the card, as apache-2.0")


def fitting_format(source: str, target: str) -> str | None:
    """The format by which a draft's layer ids fit its target, where its files do not say how they are meant;
    None where they say it, or where the fit does not decide it.

    Raises:
        UserError: a draft of speculators whose ids, which are inputs by its format, fit as outputs.
    """
    from eagle_kit.eval.diagnose.numbering import measure_numbering
    from eagle_kit.kinds.support.files import open_draft
    from eagle_kit.models.loading.source import resolve_model

    folder = resolve_model(source, "draft")
    found = measure_numbering(folder, target)
    if found is None:
        return None
    print(f"layer ids: {found.words}")
    if "speculators_model_type" not in open_draft(folder).config:
        return {"input": "vllm", "output": "sglang", None: None}[found.best]
    if found.best == "output":
        raise UserError(
            f"The layer ids of {source} are inputs of layers by its format, and they fit as outputs.",
            f"Write {list(found.layers['output'])} as eagle_aux_hidden_state_layer_ids into its config.json.",
        )
    return None


def run(args: argparse.Namespace) -> int:
    """Import and say what was recognised."""
    from eagle_kit.checkpoints.export import Facts, import_draft

    facts, format = Facts(licence=args.license), args.format
    if format is None and args.target is not None:
        format = fitting_format(args.source, args.target)
    seen = import_draft(args.source, args.out, format=format, target=args.target, facts=facts)
    print(f"{args.source}: {seen.kind.name} head, {seen.maker}")
    print(f"{args.out}: check it with eagle-kit validate {args.out} --target TARGET")
    return 0
