"""`eagle-kit validate DRAFT --target T`: check a draft against its target."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from eagle_kit.cli.arguments import TEMPLATE, TargetFlag, chosen_target
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError

if TYPE_CHECKING:
    from eagle_kit.drafts.files.draft import DraftFolder


class ValidateOptions(TargetFlag):
    """Options of ``validate``."""

    draft: Annotated[str, Flag(metavar="DRAFT", is_positional=True)]
    """Folder, hub id or known name."""

    engine: Annotated[EngineConfig, FlagsOf(TEMPLATE)] = EngineConfig()

    decode: Annotated[int | None, Flag(alone=32)] = Field(default=None, ge=2)
    """Also decode a few questions, N tokens each, with the draft and plainly; 32 where no N is given."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``validate``."""
    add_options(parser, ValidateOptions)


def run(args: argparse.Namespace) -> int:
    """Print every finding; exit code 2 when one of them is an error."""
    options = options_of(args, ValidateOptions)
    template = options.engine.chat_template
    from eagle_kit.drafts.files.draft import DraftFolder
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.drafts.files.validate import unreadable, validate_draft
    from eagle_kit.models.loading.loader import read_target_config
    from eagle_kit.models.loading.source import resolve_target

    named = chosen_target(options.target, [options.draft])
    with naming(named):
        target = resolve_target(named.name)

    # Check the files.
    config = read_target_config(target)
    draft: DraftFolder | None = None
    try:
        draft = DraftFolder.open(options.draft, config)
    except UserError as error:
        findings = [unreadable(error)]
    else:
        findings = validate_draft(draft, target, template)
    for finding in findings:
        print(f"{finding.level:8}{finding.subject}: {finding.cause}")
        if finding.level != "ok":
            print(f"        -> {finding.remedy}")
    num_errors = sum(finding.level == "error" for finding in findings)

    # The weights, if the files are right.
    if draft is not None and num_errors == 0:
        print_numbering(draft, target)
        if options.decode is not None and not decodes_alike(draft, target, options.decode, template):
            num_errors += 1

    # The verdict.
    fit = "fits" if num_errors == 0 else "does not fit"
    unit = "error" if num_errors == 1 else "errors"
    print(f"\n{options.draft} {fit} {named.name}: {num_errors} {unit}.")
    return 2 if num_errors else 0


def print_numbering(draft: "DraftFolder", target: Path) -> None:
    """Print which numbering of layer ids fits the target, where the draft's files do not say it."""
    from eagle_kit.eval.diagnose.numbering import measure_numbering

    found = measure_numbering(draft, target)
    if found is None:
        return
    level = "ok" if found.best == "input" else "warning"
    print(f"{level:8}layer ids: {found.words}")
    if found.best == "output":
        print(f"        -> Convert it by eagle-kit import {draft} --format sglang --out DIR.")
    if found.best is None:
        print("        -> Look into its model card, and measure the accept length with eagle-kit eval.")


def decodes_alike(draft: "DraftFolder", target: Path, num_tokens: int, chat_template: Path | None) -> bool:
    """Decode with the draft and plainly, and print accept length and differences; returns False if
    greedy responses differ in float32, where they must not."""
    from eagle_kit.engine.llm import LLM
    from eagle_kit.server.api.startup import causes_of_low_acceptance, doubts, self_test, warnings_as_lines

    with warnings_as_lines(lambda line: None):  # they are among the findings above
        llm = LLM(target, draft, chat_template=chat_template)
    dtype = str(llm.target.embed_tokens.weight.dtype).removeprefix("torch.")
    exact = dtype == "float32"

    # Decode.
    test = self_test(llm, llm.default_shape, num_tokens)
    differs = test.differing is not None
    fails = exact and differs
    level = "ok"
    if fails:
        level = "error"
    elif differs or test.is_low:
        level = "warning"

    # Print what was found, with causes.
    print(f"{level:8}decode: accept length {test.accept_length:.2f} over {test.num_tokens} tokens.")
    causes = partial(causes_of_low_acceptance, draft, str(target), dtype, chat_template)
    for line in doubts(test, exact=exact, low_causes=causes):
        print(f"        {line}")
    return not fails
