"""`eagle-kit demo`: train a head for a few minutes, export it, measure it beside the shipped one."""

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from eagle_kit.config.eval import AUTO, EvalConfig
from eagle_kit.core.errors import UserError

CONFIG = Path("configs/smollm2-135m-eagle3.yaml")
SHIPPED = Path("checkpoints/smollm2-135m-eagle3")
TASKS = ("human_eval", "ours")
SHAPES = ("4,1,5", "5,4,16", AUTO)
CONVERSATIONS = 1200
"""Conversations to learn from."""
PROMPTS = 6
"""Prompts of each task to measure on."""
MAX_TOKENS = 64
"""Most tokens of a response to measure on."""
MARKER = ".demo"
"""File in a demo's folder, which the next demo replaces; any other run's folder is refused."""
ROW_TOKENS = 512
"""Tokens of a packed row."""
FLOPS_PER_STEP = 2.8e11
"""Arithmetic of a training step on one row."""
EFFICIENCY = 0.5
"""Share of the machine's matmul rate that a step reaches. It gives the length of the learning-rate
schedule, which is to end when the minutes do."""
MOST_STEPS_PER_MINUTE = 300
DAY = 24 * 60
"""Minutes of a day, the longest training."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``demo``."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="replaced; default %(default)s"
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0, metavar="M", help="of training (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Fetch, train, export, evaluate; exit code 1 when a speculative answer differs from the plain one."""
    from eagle_kit.config import load_config
    from eagle_kit.config.train import TrainConfig
    from eagle_kit.drafts.files.export import export_draft
    from eagle_kit.eval.runner import run_eval
    from eagle_kit.models.loading.source import resolve_target

    # Fetch.
    if not 0 < args.minutes <= DAY:
        raise UserError(f"--minutes is {args.minutes:g}.", f"Train for more than zero and at most {DAY}.")
    started = time.monotonic()
    config = load_config(TrainConfig, CONFIG)
    _say(started, f"target {config.target}")
    target = resolve_target(config.target)

    # Train and export.
    _say(started, f"training for {args.minutes:g} minutes into {args.out}")
    _train(args)
    head = args.out / "draft"
    _say(started, f"exporting to {head}")
    export_draft(args.out, head, target=str(target))

    # Measure, beside the shipped head where there is one.
    drafts = {"demo": head}
    if SHIPPED.is_dir():
        drafts["shipped"] = SHIPPED
    _say(started, f"measuring the heads {' and '.join(drafts)} on {', '.join(TASKS)}")
    measured = EvalConfig(tasks=TASKS, shapes=SHAPES, max_tokens=MAX_TOKENS, limit=PROMPTS)
    summary = run_eval(target, drafts, measured, out=args.out / "eval")
    _say(started, "done")
    print(last_line(summary, list(drafts)[-1]))
    return 0 if summary["greedy_identical"] else 1


def _train(args: argparse.Namespace) -> None:
    """Train from nothing until the schedule or the time ends. An earlier demo's folder is removed, any other
    one is refused."""
    from eagle_kit.config import load_config
    from eagle_kit.config.train import TrainConfig
    from eagle_kit.train.run.loop import Ending, RunOptions, train

    # The config.
    if (args.out / MARKER).is_file():
        shutil.rmtree(args.out)
    steps = num_steps(args.minutes)
    overrides = {
        "output_dir": args.out,
        "data.limit": CONVERSATIONS,
        "data.max_length": ROW_TOKENS,
        "data.preview": "false",
        "data.eval_conversations": 4,
        "training.sequences_per_step": 1,
        "training.max_steps": steps,
        "training.warmup_steps": max(steps // 10, 1),
        "training.save_every": steps,
        "validation.every": 0,
        "validation.patience": "null",
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    config = load_config(TrainConfig, CONFIG, words)

    # Train. The marker is written for a training that failed too.
    seconds = 60 * args.minutes
    try:
        ending = train(config, RunOptions(stop_after_s=seconds, arguments=(str(CONFIG), *words)))
    finally:
        if (args.out / "run.yaml").is_file():
            (args.out / MARKER).touch()
    if ending is Ending.SIGNAL:
        raise SystemExit(ending.exit_code)


def num_steps(minutes: float) -> int:
    """Optimiser steps that this machine is expected to make in ``minutes``."""
    import torch

    from eagle_kit.train.plan.estimate import measure_matmul_rate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = measure_matmul_rate(device)
    per_minute = min(60 * EFFICIENCY * rate / FLOPS_PER_STEP, MOST_STEPS_PER_MINUTE)
    return max(int(minutes * per_minute), 4)


def last_line(summary: dict[str, Any], draft: str) -> str:
    """The line for machines: ``draft`` on HumanEval in the shapes that it is served with, and where plot and
    summary are."""
    from eagle_kit.eval.summary import find_row

    row = find_row(summary, draft, AUTO, TASKS[0])
    paths = summary["paths"]
    is_identical = "yes" if summary["greedy_identical"] else "no"
    accept_length = row["accept_length"] or 0
    speedup = row["speedup"] or 0
    return (
        f"demo: greedy_identical={is_identical} accept_length={accept_length:.2f} speedup={speedup:.2f} "
        f"plot={paths['plot']} summary={paths['summary']}"
    )


def _say(started: float, text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    print(f"== demo {minutes}:{seconds:02d} {text}", flush=True, file=sys.stdout)
