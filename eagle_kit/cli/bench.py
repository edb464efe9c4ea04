"""`eagle-kit bench`: decoding and training on this machine; `bench engine`: cycles with random weights;
`bench serve`: costs of serving, and acceptance that a server counts; `bench tune`: shapes chosen by
measurements; `bench soak`: hostile clients."""

import argparse
import os
from dataclasses import replace
from typing import Any

from eagle_kit.bench.options import Options, add_arguments
from eagle_kit.cli.arguments import DEFAULT_TARGET, check_positive
from eagle_kit.core.errors import UserError
from eagle_kit.report.environment import command_line

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it on import; its profiler chatters without

TUNE_MINUTES = 600
MODEL = "random weights of llama-3.1-8b, qwen3-30b-a3b, smollm2-135m or tiny"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench`` and of its sub-commands. None has a default here, so that those of
    a sub-command leave what was given before its name."""
    parser.set_defaults(kind=None)
    _models(parser)
    _compare(parser)
    kinds = parser.add_subparsers(dest="kind", metavar="{decode,train,engine,serve,tune,soak}")

    def add(kind: str, text: str) -> argparse.ArgumentParser:
        return kinds.add_parser(kind, help=text, description=text, argument_default=argparse.SUPPRESS)

    decode = add("decode", "Windows, cycles and plain decoding of a target and a draft.")
    _models(decode)
    _compare(decode)
    decode.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="cycles of N ranks beside those of one process, and nothing else",
    )
    _train(add("train", "Time and memory of a training step against doing it the plain way."))
    engine = add("engine", "Whole cycles against their floor, with random weights.")
    engine.add_argument("--model", metavar="NAME", help=f"{MODEL} (default llama-3.1-8b; tiny on a CPU)")
    engine.add_argument(
        "--host", action="store_true", help="the host's time a step of a small model, on a GPU"
    )
    add_arguments(engine, grid=True)
    serve = add(
        "serve",
        "Without --base-url: host work of a step, batching, prefix hits and n-gram look-ups in this process. "
        "With it: tokens and acceptance that a running server counts until Ctrl-C, or while COMMAND runs.",
    )
    _models(serve)
    serve.add_argument(
        "--base-url", metavar="URL", help="server with /metrics, such as http://127.0.0.1:8000"
    )
    serve.add_argument("driver", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="drives the server")
    tune = add("tune", "Shapes chosen by measurements against plain decoding and every fixed shape.")
    tune.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    tune.add_argument("--draft", nargs="+", metavar="DRAFT", help="folders, hub ids or known names")
    tune.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="names or JSONL files; also noise, languages and mixed"
    )
    tune.add_argument("--batches", nargs="+", type=int, metavar="B", help="batch sizes (1 4 8 32)")
    tune.add_argument("--shapes", nargs="+", metavar="SHAPE", help="fixed shapes to compare with")
    tune.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds (7)")
    tune.add_argument("--max-tokens", type=int, metavar="N", help="per reply (64)")
    tune.add_argument(
        "--whole-windows", action="store_true", help="also decode with chosen shapes that are not packed"
    )
    tune.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM, to compare with")
    tune.add_argument("--no-plot", action="store_true", help="draw no picture beside the JSON file")
    _compare(tune)
    add_arguments(tune, minutes=TUNE_MINUTES)
    soak = add(
        "soak", "A running server under hostile, slow, leaving and ordinary clients, and its judgement."
    )
    soak.add_argument("--base-url", metavar="URL", help="server that nobody else uses (default %(default)s)")
    soak.set_defaults(base_url="http://127.0.0.1:8000")
    soak.add_argument("--no-plot", action="store_true", help="draw no picture beside the JSON file")
    add_arguments(soak)


def _models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    parser.add_argument("--draft", help="folder, hub id or known name, to time whole cycles too")
    add_arguments(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-compare", action="store_true", help="leave out transformers' own generate")


def _train(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench train``: the row on which ways to compute a step are compared."""
    parser.add_argument("--target", help=f"folder, hub id or known name (default {DEFAULT_TARGET})")
    parser.add_argument("--model", metavar="NAME", help=MODEL)
    parser.add_argument("--length", type=int, metavar="T", help="tokens of the packed row (2048)")
    parser.add_argument(
        "--supervised-share", type=float, metavar="R", help="of made-up conversations (0.75, as ShareGPT's)"
    )
    parser.add_argument("--ttt-length", type=int, metavar="K", help="steps of training-time test (7)")
    parser.add_argument("--draft-vocab-size", type=int, metavar="N", help="8192, or the model's")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="float32 by default")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu)")
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the figures."""
    options = Options.of(args, command_line())
    target = args.target or DEFAULT_TARGET
    if args.kind == "engine":
        from eagle_kit.bench.engine.suite import main as engine

        _refuse(args, "engine, whose weights are random", "target", "draft", "no_compare")
        if getattr(args, "host", False):
            from eagle_kit.bench.engine.host import main as host

            _refuse(args, "engine --host, which has a model of its own", "model")
            return host(options)
        return engine(getattr(args, "model", None), options)
    if args.kind == "soak":
        from eagle_kit.bench.soak.run import main as soak

        if options.resume:
            raise UserError("A soak cannot be resumed.", "Leave --resume out.")
        return soak(args.base_url, os.environ.get("EAGLE_KIT_API_KEY", ""), options)
    if args.kind == "tune":
        return _tune(args, target, options)
    if args.kind == "serve":
        return _serve(args, target, options)
    if args.kind == "train":
        _refuse(args, "train", "draft", "no_compare")
    return _models_here(args, target, options)


def _models_here(args: argparse.Namespace, target: str, options: Options) -> int:
    """Measure decoding, training, or both."""
    from eagle_kit.bench.case import Machine
    from eagle_kit.bench.decode import make_cases
    from eagle_kit.bench.runner import Benchmark, conduct, no_targets
    from eagle_kit.bench.train.step import cases, training_targets
    from eagle_kit.models.loading.source import resolve_target

    # A case that cannot run is left out; a named target that is not there is a mistake.
    if args.target is not None:
        resolve_target(target)
    if (size := getattr(args, "tensor_parallel", None)) is not None:
        from eagle_kit.bench import ranks

        _refuse(args, "decode --tensor-parallel", "no_compare")
        if size < 2:
            raise UserError(f"--tensor-parallel is {size}.", "Give two or more ranks, or leave it out.")
        settings = {"target": target, "draft": args.draft, "ranks": size}
        benchmark = Benchmark("ranks", ranks.make_cases(target, args.draft, size), settings)
        return conduct(benchmark, Machine.here(options.seed), options)
    made = [] if args.kind == "train" else make_cases(target, args.draft, not args.no_compare)
    if args.kind != "decode":
        made += cases(target, _ratio_options(args) if args.kind == "train" else None)
    settings = {"target": target, "draft": args.draft}
    targets = training_targets if args.kind == "train" else no_targets
    benchmark = Benchmark(args.kind or "bench", made, settings, targets)
    return conduct(benchmark, Machine.here(options.seed), options)


def _tune(args: argparse.Namespace, target: str, options: Options) -> int:
    from eagle_kit.bench.tune.sizes import Sizes
    from eagle_kit.bench.tune.suite import main as tune

    if not args.draft:
        raise UserError("bench tune compares drafts, and none was given.", "Give --draft.")
    given = {name: getattr(args, name) for name in Sizes.__dataclass_fields__ if hasattr(args, name)}
    check_positive(args, *(name for name in ("rounds", "max_tokens") if name in args))
    if getattr(args, "minutes", None) is None:
        options = replace(options, minutes=TUNE_MINUTES)
    return tune(target, args.draft, Sizes(**given, compare=not getattr(args, "no_compare", False)), options)


def _serve(args: argparse.Namespace, target: str, options: Options) -> int:
    driver = args.driver[1:] if args.driver[:1] == ["--"] else args.driver
    if url := getattr(args, "base_url", None):
        from eagle_kit.bench.acceptance import main as count

        _refuse(args, "serve --base-url", "target", "draft", "no_compare")
        return count(url, driver, options)
    if driver:
        raise UserError(
            f"The command {driver[0]} drives a server, and none was given.", "Give --base-url URL."
        )
    from eagle_kit.bench.serving import main as serving

    _refuse(args, "serve", "no_compare")
    return serving(target, args.draft, options)


def _ratio_options(args: argparse.Namespace) -> Any:
    from eagle_kit.bench.train.ratios import RatioOptions

    given = {name: getattr(args, name) for name in RatioOptions.__dataclass_fields__ if name in args}
    check_positive(args, *(name for name in ("length", "ttt_length", "draft_vocab_size") if name in args))
    return RatioOptions(**given)


def _refuse(args: argparse.Namespace, kind: str, *names: str) -> None:
    """Raise UserError for an option that was given and does not apply."""
    given: list[Any] = [name for name in names if getattr(args, name, None)]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{option} does not apply to bench {kind}.", "Leave it out.")
