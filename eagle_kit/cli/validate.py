"""`eagle-kit validate DRAFT --target T`: check a draft against its target."""

import argparse
from functools import partial
from pathlib import Path

from eagle_kit.cli.arguments import TEMPLATE, add_flags, add_target, chosen_target
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``validate``."""
    parser.add_argument("draft", metavar="DRAFT", help="folder, hub id or known name")
    add_target(parser)
    add_flags(parser, EngineConfig, TEMPLATE)
    parser.add_argument(
        "--decode",
        type=int,
        nargs="?",
        const=32,
        metavar="N",
        help="also decode a few questions, N tokens each (default %(const)s), with the draft and plainly",
    )


def run(args: argparse.Namespace) -> int:
    """Print every finding; exit code 2 when one of them is an error."""
    from eagle_kit.checkpoints.validate import validate_draft
    from eagle_kit.models.loading.source import resolve_target

    if args.decode is not None and args.decode < 2:
        raise UserError(f"--decode is {args.decode}.", "Give at least 2 tokens.")
    name = chosen_target(args.target, [args.draft])
    target = resolve_target(name)
    findings = validate_draft(args.draft, target, args.chat_template)
    for finding in findings:
        print(f"{finding.level:8}{finding.subject}: {finding.cause}")
        if finding.level != "ok":
            print(f"        -> {finding.remedy}")
    num_errors = sum(finding.level == "error" for finding in findings)
    if num_errors == 0:
        print_numbering(args.draft, target)
    if args.decode is not None and num_errors == 0:
        num_errors += not decodes_alike(args.draft, target, args.decode, args.chat_template)
    fit = "fits" if num_errors == 0 else "does not fit"
    print(f"\n{args.draft} {fit} {name}: {num_errors} error{'' if num_errors == 1 else 's'}.")
    return 2 if num_errors else 0


def print_numbering(draft: str, target: Path) -> None:
    """Print which numbering of layer ids fits the target, where the draft's files do not say it."""
    from eagle_kit.checkpoints.draft import resolve_draft
    from eagle_kit.eval.diagnose.numbering import measure_numbering
    from eagle_kit.models.loading.loader import read_target_config

    found = measure_numbering(resolve_draft(draft, read_target_config(target)), target)
    if found is None:
        return
    print(f"{'ok' if found.best == 'input' else 'warning':8}layer ids: {found.words}")
    if found.best == "output":
        print(f"        -> Convert it by eagle-kit import {draft} --format sglang --out DIR.")
    if found.best is None:
        print("        -> Look into its model card, and measure the accept length with eagle-kit eval.")


def decodes_alike(draft: str, target: Path, num_tokens: int, chat_template: Path | None) -> bool:
    """Decode with the draft and plainly and print accept length and differences; False when greedy replies
    differ that must not."""
    from eagle_kit.serve.api.startup import causes_of_low_acceptance, doubts, self_test, warnings_as_lines
    from eagle_kit.serve.llm import LLM

    with warnings_as_lines(lambda line: None):  # of findings that are printed above
        llm = LLM(target, draft, chat_template=chat_template)
    dtype = str(llm.target.embed_tokens.weight.dtype).removeprefix("torch.")
    test, exact = self_test(llm, llm.default_shape, num_tokens), dtype == "float32"
    differs, fails = test.differing is not None, exact and test.differing is not None
    level = "error" if fails else "warning" if differs or test.is_low else "ok"
    print(f"{level:8}decode: accept length {test.accept_length:.2f} over {test.num_tokens} tokens.")
    causes = partial(causes_of_low_acceptance, draft, str(target), dtype, chat_template)
    for line in doubts(test, exact=exact, low_causes=causes):
        print(f"        {line}")
    return not fails
