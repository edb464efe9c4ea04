"""`eagle-kit report RUN ...`: curves of a run as a page, or of several in one picture and one table."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder; of several, LABEL=FOLDER names one and LABEL=FOLDER,FOLDER,... are its seeds",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default the run's own folder, if it is one")
    parser.add_argument("--shape", metavar="S,K,N", help="compared; default what chose best/ in the first")


def run(args: argparse.Namespace) -> int:
    """Draw the page and print its path; of several runs, the table as well."""
    from eagle_kit.train.run.report import compare_runs, write_report

    groups = groups_of(args.runs)
    folders = [folder for group in groups.values() for folder in group]
    if len(folders) == 1:
        if args.shape is not None:
            raise UserError("--shape is for several runs.", "Leave it out; one run shows all its shapes.")
        print(write_report(folders[0], args.out))
        return 0
    if args.out is None:
        raise UserError("Several runs have no folder in common.", "Give --out DIR.")
    result = compare_runs(groups, args.out, args.shape)
    print(f"{result.table.markdown()}\n\n{result.png}\n{result.page}")
    return 0


def groups_of(words: list[str]) -> dict[str, list[Path]]:
    """``base=a,b`` or a folder -> folders by label, in the order given."""
    groups: dict[str, list[Path]] = {}
    for word in words:
        label, _, rest = word.partition("=")
        if Path(word).is_dir() or not rest:
            label, rest = Path(word).name or word, word
        if label in groups:
            raise UserError(f"The label {label} is given twice.", "Name them: LABEL=FOLDER.")
        groups[label] = [Path(word)] if rest == word else [Path(part) for part in rest.split(",")]
    return groups
