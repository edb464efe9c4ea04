"""`python recipes study FILE`: make its data, train every arm with every seed, measure all heads together."""

import argparse
import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.loading.flags import ConfigFlags, Flag, add_options, options_of
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object
from eagle_kit.core.process import INTERRUPTED, interruptible
from recipes.jobs import Following, Job, run_jobs
from recipes.study_config import Arm, StudyConfig

if TYPE_CHECKING:
    from eagle_kit.config.train import TrainConfig

PREPARE = ("data prompts", "data regenerate", "data vocab", "data capture")
"""Commands that make one file or folder, with ``--out``."""


@dataclass(frozen=True)
class Preparation:
    """A file or folder that the runs read, and the command of ours that makes it, without ``--out PATH``.

    A file that is there is taken as it is, unless a mark beside it says that it is being made.
    """

    path: Path
    command: str

    @property
    def mark(self) -> Path:
        """Path of the mark."""
        return self.path.with_name(f".{self.path.name}.preparing")

    @property
    def is_done(self) -> bool:
        """True when the file is there and whole."""
        return self.path.exists() and not self.mark.exists()

    @property
    def kind(self) -> str:
        """The command's name, such as ``data capture``."""
        return " ".join(self.words[:2])

    @property
    def words(self) -> list[str]:
        """The command's words. Raises ValueError where a quotation has no end."""
        return shlex.split(self.command)

    def check(self) -> None:
        """Raise UserError for something that is no such command, or has a wrong config or evaluation set."""
        from eagle_kit.cli.app import parse
        from eagle_kit.config.loading.loader import load_config
        from eagle_kit.config.train import TrainConfig
        from eagle_kit.data.tasks.sets import load_tasks

        args = argparse.Namespace()
        try:
            fits = self.kind in PREPARE and "--out" not in self.words
            if fits:
                args = parse([*self.words, "--out", str(self.path)])
        except (ValueError, SystemExit):
            fits = False
        if not fits:
            raise UserError(
                f"{self.path} cannot be prepared by {self.command!r}.",
                f"Give a whole command that begins with {' or '.join(PREPARE)}, without --out.",
            )
        if hasattr(args, "config"):
            load_config(TrainConfig, args.config, args.overrides)
        if tasks := getattr(args, "decontaminate", None):
            load_tasks(tasks)

    def job(self, out: Path) -> Job:
        """The command, which goes on where it was broken off; ``out`` is the folder of the study."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.mark.touch()
        words = [sys.executable, "-m", "eagle_kit.cli", *self.words, "--out", str(self.path)]
        log = out / "logs" / f"{'-'.join(self.path.parts).replace('/', '')}.log"
        return Job(str(self.path), words, log, self.mark.unlink)


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study.

    Attributes:
        arm, seed, value: its place in the study, ``value`` being that of the setting that the arm chooses.
        config: the training config.
        overrides: ``section.key=value``.
        out: folder of the study.
    """

    arm: str
    seed: int
    config: Path
    overrides: tuple[str, ...]
    out: Path
    value: Any = None

    @property
    def name(self) -> str:
        """Name of its head in the evaluation."""
        return " ".join(self._place)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / "runs" / "-".join(self._place)

    @property
    def head(self) -> Path:
        """Folder that the head is exported to; a head that is there was trained to the end."""
        return self.out / "heads" / "-".join(self._place)

    @property
    def _place(self) -> list[str]:
        value = [] if self.value is None else [str(self.value)]
        return [self.arm, *value, f"s{self.seed}"]

    @property
    def validated(self) -> float:
        """Accept length of the best validation, which is that of ``head``, in its first shape.

        Raises:
            UserError: there is no validation.
        """
        from eagle_kit.train.run.folder import RunFolder

        rows = RunFolder(self.folder).validations.rows()
        if not rows:
            raise UserError(
                f"{self.folder} has no validation by which {self.arm} could be chosen.",
                f"Delete {self.head} as well, to train the run anew.",
            )
        shape = self.resolved.validation.shapes[0]
        return max(float(row["accept_length"][shape]) for row in rows)

    @property
    def is_done(self) -> bool:
        """True when it was trained to the end."""
        return (self.head / "config.json").is_file()

    @property
    def about(self) -> dict[str, Any]:
        """The metadata that the head was exported with."""
        return read_object(self.head / "eagle_kit.json")

    @property
    def num_parameters(self) -> int:
        """Number of weights of the exported head."""
        from eagle_kit.drafts.files.draft_files import FolderTensors

        tensors = FolderTensors(self.head).values()
        return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())

    @cached_property
    def resolved(self) -> "TrainConfig":
        """The config with its overrides. Raises UserError for a wrong one."""
        from eagle_kit.config.loading.loader import load_config
        from eagle_kit.config.train import TrainConfig
        from eagle_kit.train.parallel.processes import with_precision

        words = (*self.overrides, f"output_dir={json.dumps(str(self.folder))}")
        return with_precision(load_config(TrainConfig, self.config, words))

    def check(self) -> None:
        """Raise UserError when the run, or a head whose run was deleted, had other settings."""
        from eagle_kit.train.run.folder import RunFolder, differences, list_changes

        if any(self.folder.glob("step-*")):
            RunFolder(self.folder).check_resumable(self.resolved)
        elif self.is_done:
            before = self.about.get("config", {}).get("training", {})
            training = self.resolved.training.model_dump(mode="json")
            common = before.keys() & training.keys()
            then = {name: before[name] for name in common}
            now = {name: training[name] for name in common}
            if changed := differences({"training": then}, {"training": now}):
                raise UserError(
                    f"The head {self.head} was trained with other settings: {list_changes(changed)}.",
                    "Restore them, or delete the head to train it anew.",
                )

    def job(self) -> Job:
        """The training command, which goes on behind the last save; the head is exported at its end."""
        from eagle_kit.drafts.files.export import export_draft

        words = [str(self.config), *self.overrides, f"output_dir={json.dumps(str(self.folder))}", "--resume"]
        log = self.out / "logs" / f"{self.folder.name}.log"
        command = [sys.executable, "-m", "eagle_kit.train", *words]
        return Job(self.name, command, log, lambda: export_draft(self.folder, self.head))


class StudyFlags(ConfigFlags):
    """Options of ``study``."""

    jobs: int = Field(default=1, ge=1)
    """Runs at a time, on a CPU."""

    stop_after: Annotated[str | None, Flag(metavar="TIME")] = None
    """Stop and save after this long, such as 9m."""

    dry_run: bool = False
    """Print the runs and what they differ in."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``study``."""
    add_options(parser, StudyFlags)


def run(args: argparse.Namespace) -> int:
    """Prepare and train what is not there yet, measure, compare; exit code 130 when it was stopped."""
    from eagle_kit.config.loading.loader import load_config
    from eagle_kit.train.__main__ import parse_duration

    flags = options_of(args, StudyFlags)
    seconds = None if flags.stop_after is None else parse_duration(flags.stop_after)
    study = load_config(StudyConfig, flags.config, flags.overrides)
    out = Path(study.output_dir)
    files = [Preparation(Path(path), command) for path, command in study.prepare.items()]
    folder = Path(flags.config).parent
    runs = plan(study, folder)
    check(study, files, runs)
    print(f"{len(study.arms)} arms x {len(study.seeds)} seeds in {out}, logs in {out / 'logs'}")
    for file in files:
        state = "taken as it is" if file.is_done else f"to be made, eagle-kit {file.command}"
        print(f"{file.path}: {state}")
    if flags.dry_run:
        for one in runs:
            print(f"{one.name}: {one.config} {' '.join(one.overrides)}")
        for name, arm in study.arms.items():
            if arm.choose:
                seeds = ", ".join(f"s{seed}" for seed in study.seeds[1:]) or "no other seed"
                print(f"{name}: {seeds} with the best {next(iter(arm.choose))}")
        return 0
    try:
        with interruptible(seconds):
            _prepare(files, out, flags.jobs)
            _train(study, folder, runs, flags.jobs)
            if choices := choose(study, runs):
                runs = plan(study, folder, choices)
                check(study, files, runs)
            return _measure(study, runs, choices)
    except KeyboardInterrupt:
        print("Stopped; what was done is kept. Give the command again to go on.")
        return INTERRUPTED


def plan(
    study: StudyConfig, folder: Path, choices: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> list[StudyRun]:
    """List every arm with every seed, seed by seed: a study that is broken off has whole comparisons.

    Args:
        folder: of the study's file, which its configs are relative to.
        choices: of :func:`choose`; arms that choose and are not among them have the first seed only, and each
            value.
    """
    runs = []
    for seed in study.seeds:
        for name, arm in study.arms.items():
            values: Sequence[Any] = (None,)
            if arm.choose and name in choices:
                values = (choices[name]["best"],)
            elif arm.choose:
                values = next(iter(arm.choose.values())) if seed == study.seeds[0] else ()
            for value in values:
                settings = {**study.common, **arm.set, "seed": seed}
                settings |= {key: value for key in arm.choose}
                words = tuple(f"{key}={json.dumps(one)}" for key, one in settings.items())
                config = folder / (arm.config or study.base)
                runs.append(StudyRun(name, seed, config, words, Path(study.output_dir), value))
    return runs


def _prepare(files: Sequence[Preparation], out: Path, at_once: int) -> None:
    """Make what is not there. Files in a row that are made by commands of one name, such as shards, are made
    together; those behind them may read them."""
    for _, together in itertools.groupby(files, lambda file: file.kind):
        if jobs := [file.job(out) for file in together if not file.is_done]:
            run_jobs(jobs, min(at_once, len(jobs)), "prepare")


def choose(study: StudyConfig, runs: Sequence[StudyRun]) -> dict[str, dict[str, Any]]:
    """Choose the setting of each arm that has ``choose``, once its ``runs`` are done, by their validations.

    Returns:
        By arm: ``setting``, ``accept_lengths`` as pairs of value and length, and ``best``; of equal ones the
        first.

    Raises:
        UserError: a run was never validated.
    """
    choices = {}
    for name, arm in study.arms.items():
        mine = [one for one in runs if one.arm == name]
        if arm.choose and all(one.is_done for one in mine):
            lengths = [(one.value, one.validated) for one in mine]
            best = max(lengths, key=lambda pair: pair[1])[0]
            choices[name] = {"setting": next(iter(arm.choose)), "accept_lengths": lengths, "best": best}
    return choices


def check(study: StudyConfig, files: Sequence[Preparation], runs: Sequence[StudyRun]) -> None:
    """Raise UserError for what would be found wrong only after hours: a config, a command, a task, a missing
    package, or a run or head that is there, done or not, and had other settings."""
    from eagle_kit.data.tasks.excluded import ExcludedSets
    from eagle_kit.data.tasks.sets import load_tasks
    from eagle_kit.report.plots import require_matplotlib

    for file in files:
        file.check()
    load_tasks(study.measure.tasks)
    require_matplotlib()
    for names in {one.resolved.data.decontaminate for one in runs}:  # before any folder is looked at
        ExcludedSets.load(names)
    places: dict[Path, StudyRun] = {}
    for one in runs:
        if (other := places.setdefault(one.folder, one)) is not one:
            raise UserError(
                f"The runs of the arms {other.arm} and {one.arm} would share {one.folder}.",
                "Rename one of them.",
            )
        if one.value is not None and not one.resolved.validation.every:
            raise UserError(
                f"The arm {one.arm} chooses {next(iter(study.arms[one.arm].choose))} by validations, and "
                "validation.every is 0.",
                "Set it, for example to as many steps as there are.",
            )
        one.check()
        if one.value is not None and one.is_done:
            _ = one.validated  # the choice needs it


def _train(study: StudyConfig, folder: Path, runs: Sequence[StudyRun], at_once: int) -> None:
    """Train ``runs``, and behind them the other seeds of each arm whose setting has been chosen."""
    known = {one.name for one in runs}

    def take() -> list[StudyRun]:
        found = [one for one in plan(study, folder, choose(study, runs)) if one.name not in known]
        known.update(one.name for one in found)
        for one in found:
            one.check()
        return found

    others = take()
    begun = [*runs, *others]
    jobs = [one.job() for one in begun if not one.is_done]
    num_choosing = sum(bool(arm.choose) for arm in study.arms.values())
    num_others = num_choosing * (len(study.seeds) - 1)
    following = Following(lambda: [one.job() for one in take()], num_others - len(others))
    run_jobs(jobs, at_once, "train", len(begun) - len(jobs), following)


def _about(arm: Arm, choice: Mapping[str, Any] | None) -> str:
    """The line of an arm, with what was chosen among what."""
    if choice is None:
        return arm.about
    tried = ", ".join(f"{value} {length:.3f}" for value, length in choice["accept_lengths"])
    chosen = f"{choice['setting'].rpartition('.')[2]} {choice['best']} (validated: {tried})"
    return "; ".join(filter(None, (arm.about, chosen)))


def _measure(study: StudyConfig, runs: Sequence[StudyRun], choices: Mapping[str, Mapping[str, Any]]) -> int:
    from eagle_kit.eval.runner import run_eval
    from eagle_kit.eval.tracking import log_evaluation
    from recipes.compare import compare

    out, measure, names = Path(study.output_dir), study.measure, [one.name for one in runs]
    settings = json.dumps([names, measure.model_dump(mode="json")])
    config = EvalConfig(
        **measure.model_dump(exclude={"batch_size", "max_context", "seed"}),
        seeds=(measure.seed,),
        engine=EngineConfig(max_batch_size=measure.batch_size, max_context=measure.max_context),
        plots=False,
    )
    folder = out / f"eval-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"  # one for each set of heads
    target = runs[0].resolved.target
    summary = run_eval(target, {one.name: one.head for one in runs}, config, out=folder)

    # The trackers are those of the trainings.
    tracking = runs[0].resolved.tracking.model_copy(update={"name": f"{out.name} evaluation"})
    log_evaluation(summary, tracking, folder)
    members = {arm: [one.name for one in runs if one.arm == arm] for arm in study.arms}
    about = {name: _about(arm, choices.get(name)) for name, arm in study.arms.items()}
    trained = {one.name: {**one.about, "parameters": one.num_parameters} for one in runs}
    print(compare(summary, members, about, trained, out))
    return 1 if summary["greedy_identical"] is False else 0
