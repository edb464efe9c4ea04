"""`eagle-kit validate DRAFT --target T`: check a draft against its target."""

import argparse

from eagle_kit.cli.arguments import add_target


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``validate``."""
    parser.add_argument("draft", metavar="DRAFT", help="folder, hub id or known name")
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    """Print every finding; exit code 2 when one of them is an error."""
    from eagle_kit.checkpoints.validate import validate_draft
    from eagle_kit.models.loading.source import resolve_target

    findings = validate_draft(args.draft, resolve_target(args.target))
    for finding in findings:
        print(f"{finding.level:8}{finding.subject}: {finding.cause}")
        if finding.level != "ok":
            print(f"        -> {finding.remedy}")
    num_errors = sum(finding.level == "error" for finding in findings)
    fit = "fits" if num_errors == 0 else "does not fit"
    print(f"\n{args.draft} {fit} {args.target}: {num_errors} error{'' if num_errors == 1 else 's'}.")
    return 2 if num_errors else 0
