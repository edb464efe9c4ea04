"""`eagle-kit eval`: accept length and speed-up of drafts over tasks, beside plain decoding in one run."""

import argparse
from pathlib import Path

from eagle_kit.cli.arguments import add_target


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``eval``."""
    add_target(parser)
    parser.add_argument(
        "--draft", nargs="+", action="extend", type=Path, default=[], metavar="DIR", help="checkpoints"
    )
    parser.add_argument("--name", nargs="+", action="extend", metavar="NAME", help="what to call the drafts")
    parser.add_argument(
        "--tasks", nargs="+", default=["human_eval", "ours"], metavar="TASK", help="names or JSONL files"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["4,1,5", "5,4,16"],
        metavar="S,K,N",
        help="steps,topk,tokens of each setting",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="per reply (default %(default)s)"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="prompts of each task, drawn evenly over categories"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="prompts decoded together")
    parser.add_argument("--max-context", type=int, metavar="N", help="most tokens of prompt and reply")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts of --limit")
    parser.add_argument("--no-plots", action="store_true", help="draw no plots")
    parser.add_argument(
        "--out", type=Path, default=Path("results/eval"), metavar="DIR", help="default %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; exit code 1 when an answer with speculation differs from the plain one."""
    from eagle_kit.eval.runner import run_eval

    summary = run_eval(
        args.target,
        args.draft,
        args.tasks,
        args.shapes,
        out=args.out,
        max_tokens=args.max_tokens,
        limit=args.limit,
        batch_size=args.batch_size,
        max_context=args.max_context,
        seed=args.seed,
        draft_names=args.name,
        dtype=args.dtype,
        device=args.device,
        plots=not args.no_plots,
    )
    return 1 if summary["greedy_identical"] is False else 0
