"""`eagle-kit diagnose DRAFT --target T --base-url URL`: find out why few tokens of a draft are accepted."""

import argparse
import json
import sys
from typing import Annotated

from pydantic import model_validator

from eagle_kit.cli.arguments import LOADING, TargetFlag, chosen_model, server_key
from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError

FLAGS = {
    "task": "--task",
    "limit": "--limit",
    "max_tokens": "--max-tokens",
    "context": "--context",
    "seed": "--seed",
}
ENGINE_FLAGS = {"max_batch_size": "--batch-size", **LOADING}


class DiagnoseOptions(TargetFlag):
    """Options of ``diagnose``."""

    draft: Annotated[str, Flag(metavar="DRAFT", is_positional=True)]
    """Draft head: folder, hub id or known name."""

    base_url: str | None = None
    """Running server of vLLM, SGLang or ours with the same draft, which gets the same prompts; its key is
    read from $EAGLE_KIT_API_KEY or $OPENAI_API_KEY.
    """

    diagnosis: Annotated[DiagnoseConfig, FlagsOf(FLAGS)] = DiagnoseConfig()

    engine: Annotated[EngineConfig, FlagsOf(ENGINE_FLAGS, "engine")] = EngineConfig()

    shape: Annotated[str | None, Flag(metavar="S,K,N")] = None
    """The server's speculation shape; default the one that it says or counts."""

    json_object: Annotated[bool, Flag("--json")] = False
    """Print one JSON object."""

    @model_validator(mode="after")
    def _go_together(self) -> "DiagnoseOptions":
        if self.shape is not None and self.base_url is None:
            raise UserError("--shape was given without a server.", "Give --base-url, or leave --shape out.")
        return self


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``diagnose``."""
    add_options(parser, DiagnoseOptions)


def run(args: argparse.Namespace) -> int:
    """Print the causes; exit code 1 when a fault was found."""
    options = options_of(args, DiagnoseOptions)
    engine = options.engine.replace(shape=options.shape)
    config = options.diagnosis.replace(engine=engine)
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.eval.diagnose.report import as_record, as_text
    from eagle_kit.eval.diagnose.run import diagnose
    from eagle_kit.eval.diagnose.server import ServerClient

    # The server, the draft and its target.
    server = None
    if options.base_url is not None:
        server = ServerClient(options.base_url, server_key())
    model = chosen_model(options.draft, options.target)
    draft = model.to_serve
    if draft is None:
        raise UserError(
            f"{options.draft} is a whole model, not a draft head.",
            "Give the draft, and the model as --target.",
        )

    # Diagnose, and print what was found even if the server failed.
    with naming(model.named):
        found = diagnose(draft, model.target, config, server=server, is_quiet=not sys.stderr.isatty())
    if options.json_object:
        print(json.dumps(as_record(found)))
    else:
        print(as_text(found, options.draft))
    if found.failure is not None:
        raise found.failure
    return 0 if found.is_healthy else 1
