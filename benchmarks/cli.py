"""`python benchmarks NAME ...`: the figures of this repository, on this machine.

A user's head is measured by ``eagle-kit eval`` and ``eagle-kit bench``; nothing in the package imports this.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.options import Options, add_arguments
from eagle_kit.cli.app import report_errors
from eagle_kit.cli.arguments import DEFAULT_TARGET
from eagle_kit.core.errors import UserError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it on import; its profiler prints without

TUNE_MINUTES = 600
MODEL = "random weights of llama-3.1-8b, qwen3-30b-a3b, smollm2-135m or tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code: 0 done, 1 a case failed, 2 a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    command = shlex.join(["python", "benchmarks", *words])
    return report_errors(lambda: _run(args, command))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all benchmarks. No benchmark is imported for its help."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description="Measure this repository's figures on this machine."
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return names.add_parser(name, help=text, description=text)

    _declare_decode(add("decode", "Windows, cycles and plain decoding of a target and a draft."))
    _declare_train(add("train", "Time and memory of a training step against doing it the plain way."))
    _declare_engine(add("engine", "Whole cycles against their floor, with random weights."))
    _declare_serve(add("serve", "Host work of a step, batching, prefix hits and n-gram look-ups."))
    _declare_tune(add("tune", "Shapes chosen by measurements against plain decoding and every fixed shape."))
    _declare_soak(add("soak", "A running server under hostile, slow, leaving and ordinary clients."))
    _declare_tokenising(add("tokenising", "Time of rendering and tokenising chats, by number of turns."))
    return parser


def _declare_decode(parser: argparse.ArgumentParser) -> None:
    _declare_models(parser)
    parser.add_argument("--no-compare", action="store_true", help="leave out transformers' own generate")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="cycles of N ranks beside those of one process, and nothing else",
    )


def _declare_train(parser: argparse.ArgumentParser) -> None:
    """Declare the row on which ways to compute a training step are compared."""
    parser.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    parser.add_argument("--model", metavar="NAME", help=MODEL)
    parser.add_argument("--length", type=int, metavar="T", help="tokens of the packed sequence (2048)")
    parser.add_argument(
        "--supervised-share", type=float, metavar="R", help="of made-up conversations (0.75, as ShareGPT's)"
    )
    parser.add_argument("--ttt-length", type=int, metavar="K", help="steps of training-time test (7)")
    parser.add_argument("--draft-vocab-size", type=int, metavar="N", help="8192, or the model's")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="float32 by default")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu)")
    add_arguments(parser)


def _declare_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help=f"{MODEL} (default llama-3.1-8b; tiny on a CPU)")
    parser.add_argument(
        "--host", action="store_true", help="the host's time a step of a small model, on a GPU"
    )
    add_arguments(parser, grid=True)


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    _declare_models(parser)


def _declare_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    parser.add_argument(
        "--draft", nargs="+", required=True, metavar="DRAFT", help="folders, hub ids or known names"
    )
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="names or JSONL files; also noise, languages and mixed"
    )
    parser.add_argument("--batches", nargs="+", type=int, metavar="B", help="batch sizes (1 4 8 32)")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="fixed shapes to compare with")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds (7)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="per response (64)")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM, to compare with")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture beside the JSON file")
    parser.add_argument("--no-compare", action="store_true", help="leave out transformers' own generate")
    add_arguments(parser, minutes=TUNE_MINUTES)


def _declare_soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="server that nobody else uses (default %(default)s)",
    )
    parser.add_argument("--no-plot", action="store_true", help="draw no picture beside the JSON file")
    add_arguments(parser)


def _declare_tokenising(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 5, 20, 100, 200], metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default %(default)s")


def _declare_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    parser.add_argument("--draft", help="folder, hub id or known name, to time whole cycles too")
    add_arguments(parser)


def _run(args: argparse.Namespace, command: str) -> int:
    """Measure, print, and write the figures."""
    if args.name == "tokenising":
        from benchmarks.tokenising import main as tokenising

        return tokenising(args.target or DEFAULT_TARGET, args.turns, args.repeats)

    options = Options.of(args, command)
    if args.name == "engine":
        return _engine(args, options)
    if args.name == "soak":
        from benchmarks.soak.run import main as soak

        if options.resume:
            raise UserError("A soak cannot be resumed.", "Leave --resume out.")
        return soak(args.base_url, os.environ.get("EAGLE_KIT_API_KEY", ""), options)

    target = args.target or DEFAULT_TARGET
    if args.name == "tune":
        return _tune(args, target, options)
    if args.name == "serve":
        from benchmarks.serving import main as serving

        return serving(target, args.draft, options)
    if args.name == "train":
        return _train(args, target, options)
    return _decode(args, target, options)


def _engine(args: argparse.Namespace, options: Options) -> int:
    if not args.host:
        from benchmarks.engine.suite import main as engine

        return engine(args.model, options)

    from benchmarks.engine.host import main as host

    if args.model is not None:
        raise UserError(
            "--model does not apply to engine --host, which has a model of its own.", "Leave it out."
        )
    return host(options)


def _decode(args: argparse.Namespace, target: str, options: Options) -> int:
    """Time decoding of a target and a draft, in one process or on several ranks."""
    from benchmarks import ranks
    from benchmarks.case import Machine
    from benchmarks.decode import make_cases
    from benchmarks.runner import Benchmark, conduct

    _check_named(args)
    size = args.tensor_parallel
    if size is None:
        cases = make_cases(target, args.draft, not args.no_compare)
        benchmark = Benchmark("decode", cases, {"target": target, "draft": args.draft})
        return conduct(benchmark, Machine.here(options.seed), options)

    if args.no_compare:
        raise UserError("--no-compare does not apply to decode --tensor-parallel.", "Leave it out.")
    if size < 2:
        raise UserError(f"--tensor-parallel is {size}.", "Give two or more ranks, or leave it out.")
    settings = {"target": target, "draft": args.draft, "ranks": size}
    benchmark = Benchmark("ranks", ranks.make_cases(target, args.draft, size), settings)
    return conduct(benchmark, Machine.here(options.seed), options)


def _train(args: argparse.Namespace, target: str, options: Options) -> int:
    from benchmarks.case import Machine
    from benchmarks.runner import Benchmark, conduct
    from benchmarks.train.ratios import RatioOptions
    from benchmarks.train.step import cases, training_targets

    _check_positive(args, "length", "ttt_length", "draft_vocab_size")
    _check_named(args)
    ratios = RatioOptions(**_given(args, RatioOptions))
    settings = {"target": target, "draft": None}
    benchmark = Benchmark("train", list(cases(target, ratios)), settings, training_targets)
    return conduct(benchmark, Machine.here(options.seed), options)


def _tune(args: argparse.Namespace, target: str, options: Options) -> int:
    from benchmarks.tune.sizes import Sizes
    from benchmarks.tune.suite import main as tune

    _check_positive(args, "rounds", "max_tokens")
    if args.minutes is None:
        options = replace(options, minutes=TUNE_MINUTES)
    sizes = Sizes(**_given(args, Sizes), compare=not args.no_compare)
    return tune(target, args.draft, sizes, options)


def _check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UserError when one of the named numbers was given and is below one."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least one.")


def _check_named(args: argparse.Namespace) -> None:
    """Raise UserError for a target that was named and is not there; a case that cannot run is left out."""
    from eagle_kit.models.loading.source import resolve_target

    if args.target is not None:
        resolve_target(args.target)


def _given(args: argparse.Namespace, schema: Any) -> dict[str, Any]:
    """Values of the fields of a dataclass that were given on the command line."""
    values = {name: getattr(args, name, None) for name in schema.__dataclass_fields__}
    return {name: value for name, value in values.items() if value is not None}
