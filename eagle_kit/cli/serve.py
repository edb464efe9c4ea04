"""`eagle-kit serve DRAFT_OR_TARGET`: OpenAI's API over HTTP."""

import argparse
import os
import re
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.cli.arguments import DEFAULT_TARGET, check_positive
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import ShapeTable, SpecShape

if TYPE_CHECKING:
    from eagle_kit.serve.api.startup import ServedModel

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NEXTN", "NONE")
SHAPE_DEFAULTS = SpecShape(5, 4, 8)
"""SGLang's for Llama-like models: what complements a shape that was given in part."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
KEY_VARIABLE = "EAGLE_KIT_API_KEY"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``serve``."""
    parser.add_argument(
        "model",
        metavar="DRAFT_OR_TARGET",
        help="a draft, which names its target, or a target, served plainly",
    )
    parser.add_argument("--target", help="folder, hub id or known name, if not the draft's own")
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    http.add_argument(
        "--api-key", metavar="KEY", help=f"demanded of clients; default ${KEY_VARIABLE}, or none"
    )
    http.add_argument("--served-model-name", metavar="NAME", help="default the last part of the model's path")
    http.add_argument(
        "--max-queued-requests", type=int, default=256, metavar="N", help="more get 503 (default %(default)s)"
    )
    http.add_argument("--max-parallel-per-client", type=int, metavar="N", help="replies; more get 429")
    http.add_argument("--max-requests-per-minute", type=int, metavar="N", help="per client; more get 429")
    http.add_argument(
        "--grace-period",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for running replies at SIGTERM (default %(default)s)",
    )
    spec = parser.add_argument_group("speculation")
    spec.add_argument(
        "--speculative-algorithm", choices=ALGORITHMS, metavar="NAME", help=f"of {', '.join(ALGORITHMS)}"
    )
    spec.add_argument(
        "--shape",
        help="steps,topk,tokens such as 4,1,5, in place of the next three; several by batch size: "
        "'5,4,16 8:4,1,5 32:none'",
    )
    spec.add_argument("--speculative-num-steps", type=int, metavar="S", help="depth of the draft")
    spec.add_argument(
        "--speculative-eagle-topk", type=int, metavar="K", help="candidates per depth; 1 is a chain"
    )
    spec.add_argument("--speculative-num-draft-tokens", type=int, metavar="N", help="verified, root included")
    spec.add_argument(
        "--speculative-token-map", type=Path, metavar="FILE", help="target ids a draft may propose"
    )
    spec.add_argument(
        "--speculative-tree",
        choices=("dynamic", "static"),
        default="dynamic",
        help="EAGLE-2's, or EAGLE-1's fixed one of 26 nodes (default %(default)s)",
    )
    spec.add_argument(
        "--speculative-sampled-drafts",
        action="store_true",
        help="sample drafts from the draft's own distribution where requests sample (chains, static trees)",
    )
    for name in ("single", "acc"):
        spec.add_argument(
            f"--speculative-accept-threshold-{name}",
            type=float,
            default=1.0,
            metavar="P",
            help="LOSSY below 1: keep more drafts than the target's distribution allows (default %(default)s)",
        )
    for name, value in (
        ("min-match-window-size", 1),
        ("max-match-window-size", 12),
        ("min-bfs-breadth", 1),
        ("max-bfs-breadth", 10),
        ("branch-length", 18),
        ("capacity", 10_000_000),
    ):
        spec.add_argument(
            f"--speculative-ngram-{name}",
            type=int,
            default=value,
            metavar="N",
            help="NGRAM (default %(default)s)",
        )
    spec.add_argument(
        "--speculative-ngram-match-type",
        choices=("BFS", "PROB"),
        default="BFS",
        help="NGRAM: by recency or by probability (default %(default)s)",
    )
    spec.add_argument(
        "--no-self-test", action="store_true", help="do not compare with plain decoding at start"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-running-requests",
        type=int,
        default=8,
        metavar="B",
        help="decoded together (default %(default)s)",
    )
    engine.add_argument(
        "--seed", type=int, metavar="N", help="of requests that bring none (default: another at every start)"
    )
    engine.add_argument("--max-context", type=int, metavar="N", help="most tokens of prompt and reply")
    engine.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens (default %(default)s)")
    engine.add_argument("--no-prefix-cache", action="store_true", help="do not share common beginnings")
    engine.add_argument("--prefill-tokens", type=int, metavar="N", help="most prompt tokens of one step")
    engine.add_argument("--kv-memory", metavar="SIZE", help="of the key-value pool, such as 4G or 512Mi")
    engine.add_argument(
        "--kv-dtype",
        choices=("auto", "fp8_e4m3"),
        default="auto",
        help="of the key-value pool: the model's, or LOSSY fp8, half of bf16 (default %(default)s)",
    )
    engine.add_argument(
        "--graph-mode",
        choices=("cycle", "phases", "off"),
        help="graphs of whole cycles (default), on a GPU also of their parts, or none",
    )
    engine.add_argument("--disable-cuda-graph", action="store_true", help="the same as --graph-mode off")
    engine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    engine.add_argument("--device", default="auto", help="auto, cpu or cuda")


def run(args: argparse.Namespace) -> int:
    """Check, load, test, serve; returns when the server was told to stop."""
    shape, kv_bytes = shape_of(args), parse_size(args.kv_memory)
    check_positive(args, "max_running_requests", "max_context", "page_size", "prefill_tokens")
    if args.disable_cuda_graph and args.graph_mode not in (None, "off"):
        raise UserError("--graph-mode was given beside --disable-cuda-graph.", "Give one or the other.")
    from eagle_kit.serve.api.app import check_packages, create_app
    from eagle_kit.serve.api.server import bind, run_forever
    from eagle_kit.serve.api.settings import ServerSettings
    from eagle_kit.serve.api.startup import find_model

    check_packages()
    model = check_algorithm(args, find_model(args.model, args.target, DEFAULT_TARGET))
    settings = ServerSettings(
        model_name=args.served_model_name or Path(args.model).resolve().name,
        api_key=args.api_key or os.environ.get(KEY_VARIABLE) or None,
        max_queued=args.max_queued_requests,
        max_parallel_per_client=args.max_parallel_per_client,
        max_requests_per_minute=args.max_requests_per_minute,
        grace_period_s=args.grace_period,
    )
    sock = bind(args.host, args.port)
    llm = load(args, model, shape, kv_bytes)
    engine = llm.engine()
    introduce(args, model, llm)
    return run_forever(create_app(llm, engine, settings), sock)


def check_algorithm(args: argparse.Namespace, model: "ServedModel") -> "ServedModel":
    """The model without a draft that the algorithm has no use for.

    Raises:
        UserError: an algorithm without the draft it needs.
    """
    name = args.speculative_algorithm
    if name in ("NONE", "NGRAM"):
        model = type(model)(model.target, None)
    if model.draft is None and name not in (None, "NONE", "NGRAM", "NEXTN"):
        raise UserError(f"The algorithm {name} needs a draft.", "Give the draft first and its --target.")
    if model.draft is None and name != "NEXTN" and args.speculative_token_map is not None:
        raise UserError("A token map was given without a draft.", "Give a draft, or leave the map out.")
    return model


def load(
    args: argparse.Namespace, model: "ServedModel", shape: SpecShape | ShapeTable | None, kv_bytes: int | None
) -> Any:
    """The model as the command line wants it, an :class:`~eagle_kit.serve.llm.LLM`."""
    from eagle_kit.serve.api.startup import warnings_as_lines
    from eagle_kit.serve.llm import LLM

    options: dict[str, Any] = {}
    if args.speculative_algorithm not in (None, "NONE"):
        options["algorithm"] = args.speculative_algorithm
    if args.speculative_token_map is not None:
        options["token_map"] = args.speculative_token_map
    options |= drafting(args)
    options["seed"] = secrets.randbits(32) if args.seed is None else args.seed
    options["graph_mode"] = "off" if args.disable_cuda_graph else args.graph_mode
    with warnings_as_lines(say):
        llm = LLM(
            model.target,
            model.draft,
            shape=shape,
            max_batch_size=args.max_running_requests,
            max_context=args.max_context,
            page_size=args.page_size,
            prefix_cache=not args.no_prefix_cache,
            prefill_tokens=args.prefill_tokens,
            kv_dtype=args.kv_dtype,
            dtype=args.dtype,
            device=args.device,
            **options,
        )
    if kv_bytes is not None:
        from eagle_kit.serve.memory import plan_memory

        plan = plan_memory(
            llm.target,
            llm.draft,
            max_running=1,
            wanted_tokens=1,
            kv_tokens=None,
            kv_dtype=llm.kv_dtype,
        )
        llm.kv_tokens = max(1, kv_bytes // plan.bytes_per_token)
    return llm


def drafting(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :class:`~eagle_kit.serve.llm.LLM` that say how drafts are made and judged.

    Raises:
        UserError: a threshold outside 0..1, or thresholds for sampled drafts.
    """
    from eagle_kit.speculation.propose.ngram import NgramOptions
    from eagle_kit.speculation.verify.proposal import Relaxed

    single, acc = args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc
    for value in (single, acc):
        if not 0.0 <= value <= 1.0:
            raise UserError(f"An accept threshold is {value}.", "Give a number from 0 to 1; 1 is lossless.")
    options: dict[str, Any] = {"sampled_drafts": args.speculative_sampled_drafts}
    options["tree"] = args.speculative_tree
    if (single, acc) != (1.0, 1.0):
        if args.speculative_sampled_drafts:
            raise UserError("Accept thresholds were given for sampled drafts.", "Leave one of the two out.")
        say(
            "warning: accept thresholds below 1 are LOSSY: sampled text does not follow the target's distribution."
        )
        options["verifier"] = Relaxed(single, acc)
    prefix = "speculative_ngram_"
    names = [name for name in vars(args) if name.startswith(prefix)]
    options["ngram"] = NgramOptions(**{name.removeprefix(prefix): getattr(args, name) for name in names})
    return options


def introduce(args: argparse.Namespace, model: "ServedModel", llm: Any) -> None:
    """Print what is served, and test it."""
    dtype = str(llm.target.embed_tokens.weight.dtype).removeprefix("torch.")
    shape = llm.default_shape
    say(f"seed       {llm.seed}, of requests that bring none")
    say(f"target     {model.target}, {dtype}, context {llm.max_context}, batch {llm.max_batch_size}")
    shapes = llm.default_shapes
    drafts = f"shape {shapes}" if shapes.steps else "ordinary decoding"
    say(f"draft      {model.draft or args.speculative_algorithm or 'none'}, {drafts}")
    if llm.memory_plan is not None:
        say(str(llm.memory_plan))
    if shape.steps and not args.no_self_test:
        say_self_test(args, model, llm, dtype)
    from eagle_kit.kernels.linear.choice import MACHINE

    started = time.perf_counter()
    if num_graphs := llm.engine().runner.warm_up():
        say(f"graphs     {num_graphs} captured in {time.perf_counter() - started:.1f} s")
    for line in MACHINE.report():
        say(f"linear     {line}")


def say_self_test(args: argparse.Namespace, model: "ServedModel", llm: Any, dtype: str) -> None:
    """Run the self-test and print what it found."""
    from eagle_kit.serve.api.startup import causes_of_low_acceptance, report, self_test

    def causes() -> list[str]:
        if args.speculative_algorithm == "NEXTN" and model.draft is None:
            return ["The modules in the target's folder may be those of another release of it."]
        if model.draft is None:
            return ["The text repeats nothing that could be proposed; NGRAM is for texts that do."]
        return causes_of_low_acceptance(model.draft, model.target, dtype)

    exact = dtype == "float32" and llm.kv_dtype is None
    for line in report(self_test(llm, llm.default_shape), exact=exact, low_causes=causes):
        say(line)


def shape_of(args: argparse.Namespace) -> SpecShape | ShapeTable | None:
    """``--shape`` or the three numbers as a shape; None lets the engine choose.

    Raises:
        UserError: both, numbers that do not go together, or speculation that was switched off.
    """
    given = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    some = any(value is not None for value in given)
    if args.shape is not None and some:
        raise UserError("--shape was given beside its single numbers.", "Give one or the other.")
    if args.speculative_algorithm == "NONE" and (some or ShapeTable.parse(args.shape).steps):
        raise UserError("A shape was given for the algorithm NONE.", "Leave one of them out.")
    if not some:
        return ShapeTable.parse(args.shape) if args.shape is not None else None
    steps, topk, tokens = (
        default if value is None else value for value, default in zip(given, SHAPE_DEFAULTS, strict=True)
    )
    if topk == 1 and tokens != steps + 1:
        if given[2] is not None:
            say(f"warning: a chain of {steps} steps verifies {steps + 1} tokens, so {tokens} is ignored.")
        tokens = steps + 1
    return SpecShape.parse(f"{steps},{topk},{tokens}")


def parse_size(text: str | None) -> int | None:
    """``"4G"``, ``"512Mi"``, ``"2.5GB"`` as bytes. Raises UserError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"The size {text!r} cannot be read.", "Write it like 4G, 512Mi or 1000000000.")
    return int(float(match[1]) * UNITS[match[2] or ""])


def say(line: str) -> None:
    """One line for the person who started the server; the standard output stays free."""
    print(line, file=sys.stderr, flush=True)
