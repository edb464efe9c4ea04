"""`eagle-kit eval`: accept length and speed-up of drafts over tasks, beside plain decoding in one run."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from eagle_kit.cli.arguments import (
    TargetFlag,
    TrackingFlag,
    chosen_target,
    say_target,
    server_key,
    tracking_of,
)
from eagle_kit.cli.serve_flags import add_engine_flags, engine_values, parse_serve_flags
from eagle_kit.config.eval import AUTO, EvalConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError

if TYPE_CHECKING:
    from eagle_kit.config.engine import EngineConfig
    from eagle_kit.drafts.files.named_target import NamedTarget
    from eagle_kit.eval.engines import NamedSetting

FLAGS = {
    "tasks": "--tasks",
    "shapes": "--shapes",
    "max_tokens": "--max-tokens",
    "limit": "--limit",
    "temperatures": "--temperature",
    "top_p": "--top-p",
    "seeds": "--seed",
    "plots": "--no-plots",
    "chat_template_kwargs": "--chat-template-kwargs",
}
OF_SERVERS = {
    "target": "--target",
    "seed": "--seed",
    "plan": "--plan",
    "gpu": "--gpu",
    "port": "--port",
    "no_self_test": "--no-self-test",
}
"""Flags of ``serve`` that settings do not have, by their names among the parsed arguments."""


class EvalOptions(TrackingFlag, TargetFlag):
    """Options of ``eval`` beside those of the engine."""

    draft: Annotated[tuple[str, ...], Flag(metavar="DRAFT")] = ()
    """Folders, hub ids or known names; each is measured in every shape of --shapes."""

    name: Annotated[tuple[str, ...] | None, Flag(metavar="NAME")] = None
    """Names of the drafts, then of the servers."""

    setting: Annotated[tuple[str, ...], Flag(metavar="'NAME: FLAGS'", is_repeated=True)] = ()
    """A setting with flags of serve of its own, such as "ngram: --speculative-algorithm NGRAM --shape
    8,4,12"; may be given several times. The same flags outside of it hold for all settings.
    """

    base_url: Annotated[tuple[str, ...], Flag(metavar="URL", is_repeated=True)] = ()
    """Running server of vLLM, SGLang or ours with the same target, which gets the same prompts; may be given
    several times. Its key is read from $EAGLE_KIT_API_KEY or $OPENAI_API_KEY.
    """

    evaluation: Annotated[EvalConfig, FlagsOf(FLAGS)] = EvalConfig()

    batch_size: Annotated[int | None, Flag(metavar="N")] = None
    """Prompts decoded together, the same as --max-running-requests; default 1."""

    out: Annotated[Path, Flag(metavar="DIR")] = Path("results/eval")
    """Folder of the results."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``eval``: its own, and those of ``serve`` for speculation and the engine."""
    add_options(parser, EvalOptions)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; exit code 1 when an answer differs from the plain one that must not."""
    options = options_of(args, EvalOptions)
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.eval.runner import name_drafts, run_eval
    from eagle_kit.eval.servers.naming import name_servers
    from eagle_kit.eval.servers.server_checks import served_target
    from eagle_kit.eval.tracking import log_evaluation

    tracking = tracking_of(options)
    common = _common_values(args, options)

    # Names of drafts, then of servers.
    draft_names = options.name
    server_names = None
    if options.name is not None and options.base_url:
        draft_names = options.name[: len(options.draft)]
        server_names = options.name[len(options.draft) :]
    drafts = name_drafts(options.draft, draft_names)
    servers = name_servers(options.base_url, server_names, server_key())

    # The target: the one given, the drafts', or the servers'.
    if servers and options.target is None and not options.draft:
        target = served_target(servers)
        say_target(target)
    else:
        target = chosen_target(options.target, options.draft)

    # The engine's options, and the settings.
    engine = parse_serve_flags([target.name], **common).engine
    config = options.evaluation.replace(engine=engine)
    if engine.shape is not None and args.shapes is None:
        config = config.replace(shapes=(str(engine.shape),))
    with naming(target):
        settings = [read_setting(text, target, common) for text in options.setting]
        if not drafts and not settings and engine.algorithm != "auto":
            settings.append(_of_algorithm(engine, config.shapes))
        summary = run_eval(target.name, drafts, config, out=options.out, servers=servers, settings=settings)
    log_evaluation(summary, tracking, options.out)
    return 0 if summary["passed"] else 1


def _common_values(args: argparse.Namespace, options: EvalOptions) -> dict[str, Any]:
    """Values of the engine's flags, which hold for all settings. Raises UserError for two batch sizes."""
    common = engine_values(args)
    has_shape = any(name in common for name in ("shape", "steps", "topk", "tokens"))
    if has_shape and args.shapes is not None:
        raise UserError("--shapes was given beside a shape for all settings.", "Give one or the other.")
    given = common.get("max_batch_size")
    if None not in (given, options.batch_size) and given != options.batch_size:
        raise UserError("--batch-size was given beside --max-running-requests.", "Give one or the other.")
    return {"max_batch_size": 1 if options.batch_size is None else options.batch_size, **common}


def _of_algorithm(engine: "EngineConfig", shapes: tuple[str, ...]) -> "NamedSetting":
    """The setting of ``--speculative-algorithm`` alone, named after it: n-grams, or a draft in the target's
    folder."""
    from eagle_kit.eval.engines import NamedSetting

    return NamedSetting(engine.algorithm, None, engine, shapes)


def read_setting(text: str, target: "NamedTarget", common: dict[str, Any]) -> "NamedSetting":
    """Read a value of ``--setting``.

    Args:
        text: ``NAME: FLAGS``, quoted as a shell would read it.
        target: of all settings.
        common: values of flags that hold where the setting gives none
            (:func:`~eagle_kit.cli.serve_flags.engine_values`).

    Raises:
        UserError: there is no name, or a flag that serve does not have or that settings cannot change.
    """
    from eagle_kit.cli.serve_flags import SERVER_FLAGS, find_served_model
    from eagle_kit.eval.engines import NamedSetting

    # The name and the flags.
    example = 'Write it like "ngram: --speculative-algorithm NGRAM --shape 8,4,12".'
    name, colon, flags = text.partition(":")
    name = name.strip()
    if not colon or not name or name.startswith("-"):
        raise UserError(f"The setting {text!r} has no name.", example)
    try:
        words = shlex.split(flags)
        options = parse_serve_flags([target.name, *words], **common)
    except ValueError as error:
        raise UserError(f"The setting {name} cannot be read ({error}).", example) from None
    except UserError as error:
        raise UserError(f"The setting {name}: {error.cause}", error.remedy) from None

    # What belongs to servers, or holds for all settings.
    for dest, flag in {**OF_SERVERS, **SERVER_FLAGS}.items():
        if getattr(options.args, dest, None) is not None:
            raise UserError(f"The setting {name} has {flag}, which has no meaning there.", "Leave it out.")
    if options.engine.chat_template != common.get("chat_template"):
        raise UserError(
            f"The setting {name} has a chat template, and all settings get the same prompts.",
            "Give --chat-template outside of --setting.",
        )

    # The draft and the shape.
    model = find_served_model(options)
    engine = options.engine
    decodes_plainly = model.draft is None and engine.algorithm == "auto"
    shape = AUTO if engine.shape is None else str(engine.shape)
    if decodes_plainly and engine.shape is not None and engine.shape.steps:
        raise UserError(
            f"The setting {name} has a shape and no draft.", "Give --draft or --speculative-algorithm."
        )
    return NamedSetting(name, model.to_serve, engine, ("none" if decodes_plainly else shape,))
