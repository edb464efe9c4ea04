"""`eagle-kit report RUN ...`: curves of a run as a page, or of several in one picture and one table."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from eagle_kit.config.loading.flags import Flag, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError


class ReportOptions(Options):
    """Options of ``report``."""

    runs: Annotated[tuple[str, ...], Flag(metavar="RUN", is_positional=True)]
    """Run folder; of several, LABEL=FOLDER names one and LABEL=FOLDER,FOLDER,... are its seeds."""

    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Folder of the page; default the run's own, if it is one."""

    shape: Annotated[str | None, Flag(metavar="S,K,N")] = None
    """Shape that is compared; default what chose best/ in the first."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``report``."""
    add_options(parser, ReportOptions)


def run(args: argparse.Namespace) -> int:
    """Draw the page and print its path; of several runs, the table as well."""
    options = options_of(args, ReportOptions)
    from eagle_kit.train.run.report import compare_runs, write_report

    # One run.
    groups = groups_of(options.runs)
    folders = [folder for group in groups.values() for folder in group]
    if len(folders) == 1:
        if options.shape is not None:
            raise UserError("--shape is for several runs.", "Leave it out; one run shows all its shapes.")
        print(write_report(folders[0], options.out))
        return 0

    # Several runs, compared.
    if options.out is None:
        raise UserError("Several runs have no folder in common.", "Give --out DIR.")
    result = compare_runs(groups, options.out, options.shape)
    print(f"{result.table.markdown()}\n\n{result.png}\n{result.page}")
    return 0


def groups_of(words: Sequence[str]) -> dict[str, list[Path]]:
    """Folders by label, in the order given, of words such as ``base=a,b`` or ``a``. Raises
    UserError for a label that is given twice."""
    groups: dict[str, list[Path]] = {}
    for word in words:
        label, _, listed = word.partition("=")
        folders = [Path(part) for part in listed.split(",")]
        # A folder may have "=" or "," in its name.
        if Path(word).is_dir() or not listed:
            label = Path(word).name or word
            folders = [Path(word)]
        if label in groups:
            raise UserError(f"The label {label} is given twice.", "Name them: LABEL=FOLDER.")
        groups[label] = folders
    return groups
