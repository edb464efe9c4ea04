"""`eagle-kit study FILE`: make its data, train every arm with every seed, measure all heads together."""

import argparse
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.cli.jobs import Job, interruptible, run_jobs
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.loading.command_line import add_config
from eagle_kit.config.study import StudyConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_text_atomically
from eagle_kit.core.process import INTERRUPTED

if TYPE_CHECKING:
    from eagle_kit.config.train import TrainConfig


PREPARE = ("data regenerate", "data vocab")
"""Commands that make one file, with ``--out``."""


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
        return self.out / "logs" / f"{'-'.join(self.path.parts).replace('/', '')}.log"

    @property
    def mark(self) -> Path:
        """Beside a file that is whole: the command that made it."""
        return self.path.with_name(f"{self.path.name}.prepared")

    @property
    def is_brought_along(self) -> bool:
        """Whether the file is there and not of our making: it is taken as it is."""
        from eagle_kit.train.regenerate import settings_path

        return self.path.is_file() and not self.mark.is_file() and not settings_path(self.path).is_file()

    @property
    def is_done(self) -> bool:
        """Whether the file is there and whole."""
        return self.path.is_file() and (self.mark.is_file() or self.is_brought_along)

    def check(self) -> None:
        """Raise UserError for something that is no command, or when the file was made by another one."""
        from eagle_kit.cli.app import parse

        try:
            words = shlex.split(self.command)
            fits = " ".join(words[:2]) in PREPARE and "--out" not in words
            if fits:
                parse([*words, "--out", str(self.path)])
        except (ValueError, SystemExit):
            fits = False
        if not fits:
            raise UserError(
                f"{self.path} cannot be prepared by {self.command!r}.",
                f"Give a whole command that begins with {' or '.join(PREPARE)}, without --out.",
            )
        if self.path.is_file() and self.mark.is_file():
            before = self.mark.read_text(encoding="utf-8").strip()
            if before != self.command:
                raise UserError(
                    f"{self.path} was made by another command: {before}",
                    "Restore that one, or name another file.",
                )

    def words(self) -> list[str]:
        """The command, which goes on where it was broken off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return [sys.executable, "-m", "eagle_kit.cli", *shlex.split(self.command), "--out", str(self.path)]

    def finish(self) -> None:
        """Leave the mark."""
        write_text_atomically(self.mark, f"{self.command}\n")


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

    @cached_property
    def resolved(self) -> "TrainConfig":
        """The config with its overrides. Raises UserError for a wrong one."""
        from eagle_kit.config.loading.loader import load_config
        from eagle_kit.config.train import TrainConfig

        return load_config(TrainConfig, self.config, self.overrides)

    @property
    def log(self) -> Path:
        """What it says."""
        return self.head.parent.parent / "logs" / f"{self.folder.name}.log"

    @property
    def is_done(self) -> bool:
        """Whether it was trained to the end."""
        return (self.head / "config.json").is_file()

    def words(self) -> list[str]:
        """The command, which goes on behind the last save, if there is one."""
        return [sys.executable, "-m", "eagle_kit.train", str(self.config), *self.overrides, "--resume"]

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
    from eagle_kit.config.loading.loader import load_config
    from eagle_kit.train.__main__ import parse_duration

    if args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}.", "Give at least one.")
    seconds = None if args.stop_after is None else parse_duration(args.stop_after)
    study = load_config(StudyConfig, args.config, args.overrides)
    out = Path(study.output_dir)
    files = [Preparation(Path(path), command, out) for path, command in study.prepare.items()]
    runs = plan(study, Path(args.config).parent)
    check(study, files, runs)
    print(f"{len(study.arms)} arms x {len(study.seeds)} seeds in {study.output_dir}", flush=True)
    for file in files:
        state = "taken as it is" if file.is_brought_along else "there" if file.is_done else "to be made"
        print(f"{file.path}: {state}{'' if file.is_done else f', eagle-kit {file.command}'}", flush=True)
    if args.dry_run:
        for one in runs:
            print(f"{one.name}: {one.config} {' '.join(one.overrides)}")
        return 0
    deadline = None if seconds is None else time.monotonic() + seconds
    steps: list[tuple[str, Sequence[Preparation | StudyRun]]] = [("prepare", files), ("train", runs)]
    for what, jobs in steps:
        missing: list[Job] = [job for job in jobs if not job.is_done]
        if missing and not run_jobs(missing, args.jobs, deadline, what, len(jobs) - len(missing)):
            return INTERRUPTED
    try:
        with interruptible(deadline):
            return _measure(study, runs)
    except KeyboardInterrupt:
        print("Stopped; answers are kept. Give the command again to go on.")
        return INTERRUPTED


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


def check(study: StudyConfig, files: Sequence[Preparation], runs: Sequence[StudyRun]) -> None:
    """Raise UserError for what would be found wrong only after hours: a config, a command, a task, a missing
    package, or a run or head that is there, done or not, and had other settings."""
    from eagle_kit.eval.plots import require_matplotlib
    from eagle_kit.eval.tasks import load_tasks
    from eagle_kit.train.run.folder import RunFolder

    for file in files:
        file.check()
    load_tasks(study.measure.tasks)
    require_matplotlib()
    configs = [one.resolved for one in runs]  # all of them, before any folder is looked at
    for one, config in zip(runs, configs, strict=True):
        if any(one.folder.glob("step-*")):
            RunFolder(one.folder).check_resumable(config)
        elif one.is_done:  # its run was deleted
            _check_head(one)


def _check_head(one: StudyRun) -> None:
    """Raise UserError when the head's own record says that it was trained with other settings."""
    from eagle_kit.train.run.folder import differences, list_changes

    before = _about(one).get("config", {}).get("training", {})
    training = one.resolved.training.model_dump(mode="json")
    now = {name: value for name, value in training.items() if name in before}
    if changed := differences({"training": before}, {"training": now}):
        raise UserError(
            f"The head {one.head} was trained with other settings: {list_changes(changed)}.",
            "Restore them, or delete the head to train it anew.",
        )


def _about(one: StudyRun) -> dict[str, Any]:
    return json.loads((one.head / "eagle_kit.json").read_text(encoding="utf-8"))


def check_data(runs: Sequence[StudyRun]) -> None:
    """Raise UserError when heads that name the same data learned from files that have changed meanwhile."""
    learned: dict[str, tuple[StudyRun, object]] = {}
    for one in runs:
        data = one.resolved.data.model_dump(mode="json", exclude={"cache_dir", "preview"})
        named = json.dumps([data, one.resolved.head.draft_vocab_size])
        fingerprint = _about(one).get("data", {}).get("fingerprint")
        first, other = learned.setdefault(named, (one, fingerprint))
        if other != fingerprint:
            raise UserError(
                f"The heads {first.name} and {one.name} learned from different data under the same name.",
                f"Delete {first.head.parent} and {first.folder.parent} to train all of them anew.",
            )


def _measure(study: StudyConfig, runs: Sequence[StudyRun]) -> int:
    from eagle_kit.eval.runner import run_eval
    from eagle_kit.eval.study import compare

    out, measure = Path(study.output_dir), study.measure
    check_data(runs)
    about_eval = json.dumps([[one.name for one in runs], measure.model_dump(mode="json")])
    config = EvalConfig(
        **measure.model_dump(exclude={"batch_size", "max_context"}),
        engine=EngineConfig(max_batch_size=measure.batch_size, max_context=measure.max_context),
        plots=False,
    )
    summary = run_eval(
        runs[0].resolved.target,
        {one.name: one.head for one in runs},
        config,
        out=out / f"eval-{hashlib.sha256(about_eval.encode()).hexdigest()[:8]}",  # one for each set of heads
    )
    members: dict[str, list[str]] = {name: [] for name in study.arms}
    trained: dict[str, dict[str, Any]] = {}
    for one in runs:
        members[one.arm].append(one.name)
        trained[one.name] = _about(one)
    about = {name: arm.about for name, arm in study.arms.items()}
    print(compare(summary, members, about, trained, out))
    return 1 if summary["greedy_identical"] is False else 0
