"""`eagle-kit COMMAND`: find the command and run it; a mistake of the user is two lines and exit code 2."""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from eagle_kit import __version__
from eagle_kit.config.loading.command_line import print_error
from eagle_kit.config.loading.flags import UNRECOGNIZED, Parser
from eagle_kit.core.errors import RankLost, UserError, shown
from eagle_kit.core.files import CHOOSE_ANOTHER, writing_remedy
from eagle_kit.core.process import INTERRUPTED, end_at_once
from eagle_kit.core.switches import disabled_parts


class Command(NamedTuple):
    """A line of help, and the module with ``configure(parser)`` and ``run(args) -> int``."""

    help: str
    module: str


COMMANDS = {
    "doctor": Command("show this machine, its speed, and missing packages", "eagle_kit.cli.doctor"),
    "demo": Command("train a head for a few minutes, serve it and measure it", "eagle_kit.cli.demo"),
    "data": Command("preview, prepare or regenerate conversations", "eagle_kit.cli.data"),
    "train": Command("train a draft head from a YAML config", "eagle_kit.train.__main__"),
    "make-draft": Command("from prompts to a measured draft within a time", "eagle_kit.cli.make_draft"),
    "report": Command("draw the curves of runs as a page, a picture and a table", "eagle_kit.cli.report"),
    "export": Command("make a servable draft with a model card from a run", "eagle_kit.cli.export"),
    "import": Command("bring a draft of another project into our layout", "eagle_kit.cli.import_"),
    "validate": Command("check a draft against its target", "eagle_kit.cli.validate"),
    "diagnose": Command("find out why few tokens of a draft are accepted", "eagle_kit.cli.diagnose"),
    "generate": Command("decode prompts, with a draft or plainly", "eagle_kit.cli.generate"),
    "serve": Command("OpenAI's API over HTTP, with a draft or plainly", "eagle_kit.cli.serve"),
    "tune": Command("measure a draft and this machine, to choose shapes by", "eagle_kit.cli.tune"),
    "eval": Command("measure accept length and speed-up over tasks", "eagle_kit.cli.evaluate"),
    "bench": Command("measure a head's speed and acceptance by batch size", "eagle_kit.cli.bench"),
}

DELEGATED = ("train",)
"""Commands whose module has a command line of its own, ``main(argv)``, which its own launchers use too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of :func:`report_errors`."""
    words = list(sys.argv[1:] if argv is None else argv)
    _show_notices()
    return report_errors(lambda: _run(words))


def _run(words: list[str]) -> int | None:
    if words and words[0] in DELEGATED:
        exit_code: int | None = import_module(COMMANDS[words[0]].module).main(words[1:])
        return exit_code
    args = parse(words)
    exit_code = args.run(args)
    return exit_code


def report_errors(run: Callable[[], int | None]) -> int:
    """Run a command, and print a mistake of the user on two lines.

    Where another rank is lost the process ends with 1. Unknown names in ``EAGLE_KIT_DISABLE`` are a mistake
    of the user in every command.

    Returns:
        The exit code: that of ``run`` or 0 for None; 2 for a mistake of the user; 130 where it was
        interrupted.
    """
    try:
        disabled_parts()  # raises UserError for an unknown name
        return run() or 0
    except UserError as error:
        print_error(error)
        return 2
    except RankLost as error:
        print_error(UserError(str(error), "Start it again."))
        end_at_once(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `| head` has read enough. Python must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # An error of the system, such as a name that is too long.
        where = "" if error.filename is None else f" {shown(str(error.filename))}"
        cause = f"The system refuses{where}: {error.strerror or error}."
        print_error(UserError(cause, _remedy(error)))
        return 2


def _remedy(error: OSError) -> str:
    """What to do about an error of the system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return writing_remedy(error, CHOOSE_ANOTHER)
    return "Check names, rights and space."


def _show_notices() -> None:
    """Print notices of the library about work that takes seconds to standard error."""
    logger = logging.getLogger("eagle_kit.engine.calibrate.policies")
    handler = logging.StreamHandler()
    if not logger.handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line of `eagle-kit`; see :func:`parse_with_overrides`."""
    return parse_with_overrides(build_parser(argv[:1]), argv)


def parse_with_overrides(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ``key=value`` overrides, where a command takes them, may also follow options."""
    args, rest = parser.parse_known_args(argv)
    takes_overrides = hasattr(args, "overrides")
    unknown = []
    for word in rest:
        is_override = "=" in word and not word.startswith("-")
        if not (takes_overrides and is_override):
            unknown.append(word)
    if unknown:
        command_parser = getattr(args, "parser", parser)
        command_parser.error(f"{UNRECOGNIZED}{' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def build_parser(names: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Build the parser of all commands.

    Args:
        names: commands whose own arguments are declared; their modules are imported, and no others.
    """
    parser = Parser(prog="eagle-kit", description="Train an EAGLE-3 draft head, serve it, and measure it.")
    parser.add_argument("--version", action="version", version=f"eagle-kit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = f"{command.help[:1].upper()}{command.help[1:]}."
        sub = commands.add_parser(name, help=command.help, description=text)
        if name in names and name not in DELEGATED:
            module = import_module(command.module)
            module.configure(sub)
            sub.set_defaults(run=module.run, parser=sub)
    return parser
