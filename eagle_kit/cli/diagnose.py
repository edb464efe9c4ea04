"""`eagle-kit diagnose DRAFT --target T --base-url URL`: find out why few tokens of a draft are accepted."""

import argparse
import json
import os
import sys

from eagle_kit.cli.arguments import DEFAULT_TARGET, LOADING, add_flags, options_of
from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError

FLAGS = {
    "task": "--task",
    "limit": "--limit",
    "max_tokens": "--max-tokens",
    "context": "--context",
    "seed": "--seed",
}
ENGINE_FLAGS = {"max_batch_size": "--batch-size", **LOADING}
KEY_VARIABLES = ("EAGLE_KIT_API_KEY", "OPENAI_API_KEY")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``diagnose``."""
    parser.add_argument("draft", metavar="DRAFT", help="a draft head: folder, hub id or known name")
    parser.add_argument(
        "--target", help=f"folder, hub id or known name (default the draft's own, else {DEFAULT_TARGET})"
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="running server of vLLM, SGLang or ours with the same draft, asked the same prompts; "
        f"its key is read from ${KEY_VARIABLES[0]} or ${KEY_VARIABLES[1]}",
    )
    parser.add_argument(
        "--shape",
        metavar="S,K,N",
        help="the server's speculation shape (default: the one that it says or counts)",
    )
    add_flags(parser, DiagnoseConfig, FLAGS)
    add_flags(parser, EngineConfig, ENGINE_FLAGS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the causes; exit code 1 when a fault was found."""
    if args.shape is not None and args.base_url is None:
        raise UserError("--shape was given without a server.", "Give --base-url, or leave --shape out.")
    engine = options_of(args, EngineConfig, {**ENGINE_FLAGS, "shape": "--shape"})
    config = options_of(args, DiagnoseConfig, FLAGS, engine=engine)
    from eagle_kit.eval.diagnose.report import as_record, as_text
    from eagle_kit.eval.diagnose.run import diagnose
    from eagle_kit.eval.diagnose.server import Server
    from eagle_kit.serve.api.startup import find_model

    key = next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), "")
    server = None if args.base_url is None else Server(args.base_url, key)
    model = find_model(args.draft, args.target, DEFAULT_TARGET)
    if model.draft is None:
        raise UserError(
            f"{args.draft} is a whole model, not a draft head.", "Give the draft, and the model as --target."
        )
    found = diagnose(model.draft, model.target, config, server=server, is_quiet=not sys.stderr.isatty())
    print(json.dumps(as_record(found)) if args.json else as_text(found, args.draft))
    if found.failure is not None:
        raise found.failure
    return 0 if found.is_healthy else 1
