"""`eagle-kit serve DRAFT_OR_TARGET`: OpenAI's API over HTTP."""

import argparse
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import eagle_kit
from eagle_kit.cli.arguments import DEFAULT_TARGET
from eagle_kit.cli.serve_flags import (
    SERVER_FLAGS,
    ServeFlags,
    add_serve_flags,
    engine_config,
    find_served_model,
    read_serve_flags,
)
from eagle_kit.config.engine import SERVER_UTILIZATION, EngineConfig
from eagle_kit.config.loading.flags import options_of
from eagle_kit.config.server import LogLevel, ServerConfig, WarmUpExtent
from eagle_kit.core.errors import RankLost
from eagle_kit.core.files import check_writable, expand
from eagle_kit.core.gpus import PLANNED_GPU
from eagle_kit.core.process import end_at_once
from eagle_kit.core.switches import VARIABLE, disabled_parts
from eagle_kit.report.stages import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle_kit.engine.llm import LLM
    from eagle_kit.server.api.startup import ServedModel

KEY_VARIABLE = "EAGLE_KIT_API_KEY"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``serve``."""
    add_serve_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check, load, test, serve; returns when the server was told to stop."""
    if args.plan:
        return plan(args)
    options = read_serve_flags(args)
    flags = options.flags
    config = options.engine
    from eagle_kit.data.chat.response.choice import check_names
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.engine.llm import LLM
    from eagle_kit.engine.options import choose_device
    from eagle_kit.engine.tensor_parallel.ranks import launched_rank
    from eagle_kit.server.api.app import check_packages, create_app
    from eagle_kit.server.api.hosts import is_loopback
    from eagle_kit.server.api.server import bind, run_forever
    from eagle_kit.server.api.startup import warnings_as_lines

    # Read the options of the server.
    check_packages()
    server_config = options_of(args, ServerConfig, SERVER_FLAGS, **_server_defaults(args, flags))
    check_names(server_config.reasoning_parser, server_config.tool_call_parser)

    if server_config.profile_dir is not None:
        check_writable(expand(server_config.profile_dir), "Give another --profile-dir.")

    # A server takes the GPU.
    if choose_device(config.device.partition(",")[0]).startswith("cuda"):
        config = of_whole_gpu(config)

    # Take the address before anything is loaded; other ranks have none.
    is_first = config.tensor_parallel == 1 or not launched_rank()
    sock = bind(server_config.host, flags.port) if is_first else None
    if is_first and server_config.api_key is None and not is_loopback(server_config.host):
        say(f"warning: whoever reaches this machine may use the server; set a key as ${KEY_VARIABLE}.")

    # Find the model, and the names that requests may give.
    model = find_served_model(options)
    names = names_of(model)
    if args.model_name is None:
        server_config = server_config.replace(model_name=names[0])
    server_config = server_config.replace(model_aliases=(*server_config.model_aliases, *names))

    # Load, prepare, answer.
    show_log(server_config.log_level)
    try:
        with warnings_as_lines(say), naming(model.named):
            llm = LLM(model.target, model.to_serve, config)  # where other ranks of torchrun end
        assert sock is not None
        try:
            engine = llm.engine()
            introduce(flags, model, llm, server_config.warm_up)
            app = create_app(llm, engine, server_config)
            say(f"responses  {app.state.service.response_forms}")
            show_stats_log()
            app.state.service.engine.on_stuck = partial(leave, llm)
            llm.on_lost(app.state.service.engine.fail)
            return run_forever(app, sock)
        finally:
            llm.close()
    except RankLost as error:
        print_rank_lost(error)
        end_at_once(1)


class _SayHandler(logging.Handler):
    """Handler of the log that prints as the rest of the command does.

    Records of loggers that have a handler of their own are left to that handler.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        handlers = logging.getLogger(record.name).handlers
        if not handlers or self in handlers:
            say(self.format(record))


def show_log(level: LogLevel) -> None:
    """Print the lines of the package from ``level`` on to standard error, each with its time and logger."""
    logger = logging.getLogger(eagle_kit.__name__)
    if not logger.handlers:
        handler = _SayHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)
    logger.setLevel("DEBUG" if level == "trace" else level.upper())


def show_stats_log() -> None:
    """Print the lines about traffic to standard error, each with its time."""
    from eagle_kit.server.stats_log import LOGGER_NAME

    logger = logging.getLogger(LOGGER_NAME)
    if logger.handlers:
        return
    handler = _SayHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _server_defaults(args: argparse.Namespace, flags: ServeFlags) -> dict[str, str]:
    """The server's name and key, where flags or the environment have them in place of the server's flags."""
    defaults = {}
    if args.model_name is None:
        defaults["model_name"] = flags.model
    if args.api_key is not None:
        say(f"warning: other users of this machine see the --api-key; set ${KEY_VARIABLE} instead.")
    elif KEY_VARIABLE in os.environ:
        defaults["api_key"] = os.environ[KEY_VARIABLE]
    return defaults


def names_of(model: "ServedModel") -> tuple[str, ...]:
    """Names that requests may give. The first one is the name in answers.

    They are the target's without its folders, the target's as it was given, and the same of the
    draft.
    """
    names = []
    for given in (model.target, model.draft):
        if given is not None:
            names += [_short_name(given), given]
    return tuple(dict.fromkeys(names))


def _short_name(given: str) -> str:
    """Name of a model without its folders or revision; of a target read from a GGUF, that of the file."""
    from eagle_kit.drafts.files.findings import target_name

    path = Path(given)
    if path.is_dir():
        return target_name(path)
    if path.suffix == ".gguf":
        return path.name
    return given.partition("@")[0]


def plan(args: argparse.Namespace) -> int:
    """Print the memory that the engine would need. Raises UserError."""
    from eagle_kit.cli.serve_plan import print_plan
    from eagle_kit.server.api.startup import find_model

    flags = options_of(args, ServeFlags)

    # All compared numbers of ranks have these kinds of parallelism. The options of the engine are
    # of one rank, which refuses them.
    expert_parallel = bool(args.expert_parallel)
    data_parallel_attention = bool(args.data_parallel_attention)
    if args.tensor_parallel in (None, 1):
        args.expert_parallel = None
        args.data_parallel_attention = None
    config = engine_config(args)

    # A draft alone names its target.
    draft = flags.draft
    target = flags.model
    is_alone = draft is None and Path(flags.model).exists()
    if flags.target is not None or is_alone:
        model = find_model(flags.model, flags.target, DEFAULT_TARGET)
        draft = model.draft
        target = model.target
    if flags.speculative_algorithm == "NONE":
        draft = None
    print_plan(
        target,
        draft,
        of_whole_gpu(config),
        flags.gpu or PLANNED_GPU,
        expert_parallel=expert_parallel,
        data_parallel_attention=data_parallel_attention,
    )
    return 0


def of_whole_gpu(config: EngineConfig) -> EngineConfig:
    """Options of a server on a GPU: it takes the default share of the memory, unless another is given."""
    share = config.gpu_memory_utilization
    return config.replace(gpu_memory_utilization=SERVER_UTILIZATION if share is None else share)


def print_rank_lost(error: RankLost) -> None:
    """Print why the server has ended."""
    say(f"error: {error} The server has ended.\n  -> Start it again.")


def leave(llm: "LLM", error: RankLost) -> None:
    """End this process and the other ranks at once: a step waits for one that is lost."""
    print_rank_lost(error)
    if llm.group is not None and llm.group.workers is not None:
        llm.group.workers.kill()
    end_at_once(1)


def introduce(flags: ServeFlags, model: "ServedModel", llm: "LLM", extent: WarmUpExtent = "all") -> None:
    """Print the served model and its options, test it, and prepare it for all that may come."""
    # Print the options.
    config = llm.config
    dtype = str(llm.target.embed_tokens.weight.dtype).removeprefix("torch.")
    if llm.chooses_shapes:
        shapes = "shapes by measurements"
    elif config.shape.steps:
        shapes = f"shape {config.shape}"
    else:
        shapes = "ordinary decoding"
    say(f"seed       {config.seed}, of requests that bring none")
    say(f"target     {model.target}, {model.origin}")
    weights = llm.target.weight_format
    say(f"engine     {weights}, {context_of(llm)}, batch {config.max_batch_size}")
    say(f"draft      {model.draft or flags.speculative_algorithm or 'none'}, {shapes}")
    say(f"prefill    {llm.engine().runner.prefill_backends}")
    say(f"chat       {describe_template(llm)}")
    if disabled_parts():
        say(f"disabled   {', '.join(sorted(disabled_parts()))}, by {VARIABLE}")
    if llm.memory_plan is not None:
        say(str(llm.memory_plan))

    # Test and prepare.
    if llm.default_shape.steps and not flags.no_self_test:
        say_self_test(model, llm, dtype)
    engine = llm.engine()
    prepared = llm.warm_up(extent, progress("warm-up"))
    if str(prepared):
        say(str(prepared))

    # Print what the preparation measured and chose.
    for name, backends in (
        ("linear", engine.runner.linear_backends),
        ("prefill", engine.runner.prefill_backends),
    ):
        for line in [*backends.report(), *backends.origin()]:
            say(f"{name:10s} {line}")
    for line in engine.reasons():
        say(f"shape      {line}")


def context_of(llm: "LLM") -> str:
    """The context in words, and why it is shorter than the target's where nobody has asked for that."""
    context = llm.config.max_context
    of_target = llm.target.config.max_position_embeddings
    if context == of_target or not llm.has_context_of_pool:
        return f"context {context}"
    return f"context {context} of the target's {of_target}, which is what the pool holds for one request"


def describe_template(llm: "LLM") -> str:
    """Where the chat template comes from, in words."""
    from eagle_kit.data.chat.template import has_chat_template

    if llm.config.chat_template is not None:
        return f"the template of {llm.config.chat_template}"
    if not has_chat_template(llm.tokenizer):
        return "no template, /v1/completions only"
    return "the target's template"


def say_self_test(model: "ServedModel", llm: "LLM", dtype: str) -> None:
    """Run the self-test and print its findings."""
    from eagle_kit.server.api.startup import causes_of_low_acceptance, report, self_test

    def causes() -> list[str]:
        if model.to_serve is not None:
            template = llm.config.chat_template
            return causes_of_low_acceptance(model.to_serve, model.target, dtype, template)
        if llm.config.algorithm == "NEXTN":
            return ["The modules in the target's folder may be those of another release of it."]
        return ["The text repeats nothing that could be proposed; NGRAM is for texts that do."]

    exact = dtype == "float32" and llm.config.kv_dtype == "auto"
    test = self_test(llm, llm.default_shape)
    for line in report(test, exact=exact, is_given=not llm.chooses_shapes, low_causes=causes):
        say(line)


def progress(name: str) -> "Callable[[int, int], None]":
    """Make a progress bar; returns the function that sets the number of steps done and their
    total."""
    from tqdm import tqdm

    bar = tqdm(desc=name, unit="step", dynamic_ncols=True, leave=False, disable=None, delay=1.0)

    def show(num_done: int, total: int) -> None:
        bar.total = total
        bar.update(num_done - bar.n)
        if num_done == total:
            bar.close()

    return show
