"""`eagle-kit study FILE`: make its data, train every arm with every seed, measure all heads together."""

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.cli.jobs import Job, run_jobs
from eagle_kit.config.command_line import add_config
from eagle_kit.config.study import StudyConfig
from eagle_kit.core.errors import UserError


@dataclass(frozen=True)
class Preparation:
    """A file that the runs read, and the command that makes it.

    Attributes:
        path: of the file.
        command: of ours, without ``--out PATH``.
        out: folder of the study.
    """

    path: Path
    command: str
    out: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)

    @property
    def log(self) -> Path:
        """What the command says."""
        return self.out / "logs" / f"{self.path.name}.log"

    @property
    def begun(self) -> Path:
        """A mark that is there while the command has not ended well."""
        return self.out / "logs" / f"{self.path.name}.begun"

    @property
    def is_done(self) -> bool:
        """Whether the file is there and whole: made here to the end, or brought along."""
        return self.path.is_file() and not self.begun.exists()

    def words(self) -> list[str]:
        """The command, which goes on where it was broken off."""
        self.begun.parent.mkdir(parents=True, exist_ok=True)
        self.begun.touch()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return [sys.executable, "-m", "eagle_kit.cli", *shlex.split(self.command), "--out", str(self.path)]

    def finish(self) -> None:
        """Take the mark away."""
        self.begun.unlink()


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study.

    Attributes:
        arm, seed: which one it is.
        config: the training config.
        overrides: ``section.key=value``.
        folder: of the run.
        head: where its head is exported to; a head that is there was trained to the end.
    """

    arm: str
    seed: int
    config: Path
    overrides: tuple[str, ...]
    folder: Path
    head: Path

    @property
    def name(self) -> str:
        """What its head is called in the evaluation."""
        return f"{self.arm} s{self.seed}"

    @property
    def log(self) -> Path:
        """What it says."""
        return self.head.parent.parent / "logs" / f"{self.folder.name}.log"

    @property
    def is_done(self) -> bool:
        """Whether it was trained to the end."""
        return (self.head / "config.json").is_file()

    def words(self) -> list[str]:
        """The command, which goes on behind the last save."""
        resumes = ["--resume"] if any(self.folder.glob("step-*")) else []
        if not resumes:  # broken off before its first save
            shutil.rmtree(self.folder, ignore_errors=True)
        return [sys.executable, "-m", "eagle_kit.train", str(self.config), *self.overrides, *resumes]

    def finish(self) -> None:
        """Export the head."""
        from eagle_kit.checkpoints.export import export_draft

        export_draft(self.folder, self.head)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``study``."""
    add_config(parser)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, on a CPU")
    parser.add_argument("--stop-after", metavar="TIME", help="stop and save after this long, e.g. 9m")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and what they differ in")


def run(args: argparse.Namespace) -> int:
    """Prepare and train what is not there yet, measure, compare; exit code 130 when it was stopped."""
    from eagle_kit.config.load import load_config
    from eagle_kit.train.__main__ import parse_duration

    if args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}.", "Give at least one.")
    seconds = None if args.stop_after is None else parse_duration(args.stop_after)
    study = load_config(StudyConfig, args.config, args.overrides)
    runs = plan(study, Path(args.config).parent)
    check(runs)
    print(f"{len(study.arms)} arms x {len(study.seeds)} seeds in {study.output_dir}", flush=True)
    out = Path(study.output_dir)
    data = [Preparation(Path(path), command, out) for path, command in study.prepare.items()]
    if args.dry_run:
        for file in data:
            print(f"{file.path}: {'there' if file.is_done else f'eagle-kit {file.command}'}")
        for one in runs:
            print(f"{one.name}: {one.config} {' '.join(one.overrides)}")
        return 0
    deadline = None if seconds is None else time.monotonic() + seconds
    for what, jobs in (("prepare", data), ("train", runs)):
        missing: list[Job] = [job for job in jobs if not job.is_done]
        if missing and not run_jobs(missing, args.jobs, deadline, what, len(jobs) - len(missing)):
            return 130
    return _measure(study, runs)


def plan(study: StudyConfig, folder: Path) -> list[StudyRun]:
    """Every arm with every seed, seed by seed, so that a study that is broken off has whole comparisons.

    Args:
        folder: of the study's file, which its configs are relative to.
    """
    out = Path(study.output_dir)
    runs = []
    for seed in study.seeds:
        for name, arm in study.arms.items():
            settings = {**study.common, **arm.set, "seed": seed}
            run_folder = out / "runs" / f"{name}-s{seed}"
            words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
            runs.append(
                StudyRun(
                    name,
                    seed,
                    folder / (arm.config or study.base),
                    (*words, f"output_dir={json.dumps(str(run_folder))}"),
                    run_folder,
                    out / "heads" / f"{name}-s{seed}",
                )
            )
    return runs


def check(runs: Sequence[StudyRun]) -> None:
    """Raise UserError when one of the configs is wrong, before any has run, or when a run that is there, done
    or not, had other settings."""
    from eagle_kit.config.load import load_config
    from eagle_kit.config.train import TrainConfig
    from eagle_kit.train.run_folder import RunFolder

    configs = [load_config(TrainConfig, one.config, one.overrides) for one in runs]
    for one, config in zip(runs, configs, strict=True):
        if any(one.folder.glob("step-*")):
            RunFolder(one.folder).check_resumable(config)


def _measure(study: StudyConfig, runs: Sequence[StudyRun]) -> int:
    from eagle_kit.config.load import load_config
    from eagle_kit.config.train import TrainConfig
    from eagle_kit.eval.runner import run_eval
    from eagle_kit.eval.study import compare

    out, measure = Path(study.output_dir), study.measure
    summary = run_eval(
        load_config(TrainConfig, runs[0].config, runs[0].overrides).target,
        [one.head for one in runs],
        measure.tasks,
        measure.shapes,
        out=out / "eval",
        max_tokens=measure.max_tokens,
        limit=measure.limit,
        batch_size=measure.batch_size,
        max_context=measure.max_context,
        seed=measure.seed,
        draft_names=[one.name for one in runs],
        plots=False,
    )
    members: dict[str, list[str]] = {name: [] for name in study.arms}
    trained: dict[str, dict[str, Any]] = {}
    for one in runs:
        members[one.arm].append(one.name)
        trained[one.name] = json.loads((one.head / "eagle_kit.json").read_text(encoding="utf-8"))
    about = {name: arm.about for name, arm in study.arms.items()}
    print(compare(summary, members, about, trained, out))
    return 1 if summary["greedy_identical"] is False else 0
