"""`eagle-kit study FILE`: train every arm with every seed, then measure all heads in one evaluation."""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.config.command_line import add_config
from eagle_kit.config.study import StudyConfig
from eagle_kit.core.errors import UserError

POLL_S = 0.5


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


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``study``."""
    add_config(parser)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, on a CPU")
    parser.add_argument("--stop-after", metavar="TIME", help="stop and save after this long, e.g. 9m")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and what they differ in")


def run(args: argparse.Namespace) -> int:
    """Train what is not trained yet, export, measure, compare; exit code 130 when it was stopped."""
    from eagle_kit.config.load import load_config
    from eagle_kit.train.__main__ import parse_duration

    if args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}.", "Give at least one.")
    seconds = None if args.stop_after is None else parse_duration(args.stop_after)
    study = load_config(StudyConfig, args.config, args.overrides)
    runs = plan(study, Path(args.config).parent)
    check(runs)
    print(f"{len(study.arms)} arms x {len(study.seeds)} seeds in {study.output_dir}", flush=True)
    if args.dry_run:
        for one in runs:
            print(f"{one.name}: {one.config} {' '.join(one.overrides)}")
        return 0
    if not _train(runs, args.jobs, None if seconds is None else time.monotonic() + seconds):
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


def _train(runs: Sequence[StudyRun], jobs: int, deadline: float | None) -> bool:
    """Train and export, ``jobs`` at a time; False when it was stopped, every run having saved."""
    from tqdm import tqdm

    waiting = [one for one in runs if not (one.head / "config.json").is_file()]
    running: dict[str, tuple[StudyRun, subprocess.Popen[bytes]]] = {}
    stopped = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the runs must not outlive this
    with tqdm(total=len(runs), initial=len(runs) - len(waiting), unit="run", desc="train") as bar:
        try:
            while waiting or running:
                late = deadline is not None and time.monotonic() >= deadline
                if late and not stopped:
                    stopped = True
                    _interrupt(running)
                while waiting and len(running) < jobs and not stopped:
                    one = waiting.pop(0)
                    bar.set_postfix_str(one.name)
                    running[one.name] = (one, _start(one))
                for name, (one, process) in list(running.items()):
                    if (code := process.poll()) is None:
                        continue
                    del running[name]
                    if code == 0:
                        _export(one)
                        bar.update()
                    elif code == 130 or stopped:  # before its first step a run knows no good end
                        stopped = True
                    else:
                        raise UserError(
                            f"The run {name} failed: {_last_words(one.log)}",
                            f"Read {one.log}, correct it, and give the command again.",
                        )
                if stopped and not running:
                    break
                time.sleep(POLL_S)
        except BaseException:
            _interrupt(running)
            for _, process in running.values():
                process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if stopped:
        print("Stopped; every run has saved. Give the command again to go on.")
    return not stopped


def _start(one: StudyRun) -> subprocess.Popen[bytes]:
    """The run in a process of its own, which Ctrl-C reaches through us only."""
    one.log.parent.mkdir(parents=True, exist_ok=True)
    resumes = ["--resume"] if any(one.folder.glob("step-*")) else []
    if not resumes:  # broken off before its first save
        shutil.rmtree(one.folder, ignore_errors=True)
    command = [sys.executable, "-m", "eagle_kit.train", str(one.config), *one.overrides, *resumes]
    with one.log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith("error")] or lines[-1:] or ["it said nothing"]
    return said[-1].removeprefix("error: ")


def _interrupt(running: dict[str, tuple[StudyRun, subprocess.Popen[bytes]]]) -> None:
    for _, process in running.values():
        if process.poll() is None:
            process.terminate()  # a run saves first; in the background SIGINT may be ignored


def _export(one: StudyRun) -> None:
    from eagle_kit.checkpoints.export import export_draft

    export_draft(one.folder, one.head)


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
