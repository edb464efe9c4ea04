"""Door for people: `python serve DRAFT --target T` answers the lines typed into it, one prompt a line.

Every answer is followed by its accept length. The end of the input ends the session.
"""

import argparse
import sys
from pathlib import Path

from eagle_kit.cli.arguments import add_target
from eagle_kit.cli.generate import figures
from eagle_kit.core.errors import UserError
from eagle_kit.core.request import SamplingParams


def main() -> int:
    """Load target and draft once, then answer line by line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python serve", description="Answer prompts, one a line.")
    parser.add_argument("draft", nargs="?", type=Path, metavar="DRAFT", help="checkpoint; without it, plain")
    add_target(parser)
    parser.add_argument("--shape", help="speculation shape steps,topk,tokens")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="per reply (default %(default)s)"
    )
    args = parser.parse_args()
    try:
        return serve(args)
    except UserError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return 130


def serve(args: argparse.Namespace) -> int:
    """Read lines until the input ends; a refused prompt does not end the session."""
    from eagle_kit.serve.llm import LLM

    params = SamplingParams(max_tokens=args.max_tokens)
    llm = LLM(args.target, args.draft, shape=args.shape, max_batch_size=1)
    ask = "> " if sys.stdin.isatty() else ""
    print(ask, end="", flush=True)
    for line in sys.stdin:
        if line.strip():
            try:
                output = llm.generate([line.strip()], params)[0]
                print(f"{output.text}\n[{figures(output)}]\n")
            except UserError as error:
                refuse(error)
        print(ask, end="", flush=True)
    return 0


def refuse(error: UserError) -> int:
    """Print cause and remedy; returns exit code 2."""
    print(f"error: {error.cause}\n  -> {error.remedy}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
