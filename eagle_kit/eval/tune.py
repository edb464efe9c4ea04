"""``tune``: record a draft's proposals on tasks, time the engine's cycles, and cache both for the policy."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import torch

from eagle_kit.autotune import files
from eagle_kit.autotune.acceptance import DraftRecording, Drafts
from eagle_kit.autotune.costs import CostTable, Timing, join
from eagle_kit.autotune.files import Costs, MeasuredAcceptance
from eagle_kit.autotune.shapes import MOST_STEPS, all_shapes
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object, remove, replacing, sole_writer, write_json_atomically
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.tasks.sets import Task
from eagle_kit.drafts.files.torch_file import save_torch_file
from eagle_kit.engine.calibrate.cycle_timing import Plan, Point, Visit, time_cycles
from eagle_kit.engine.calibrate.policies import (
    Tuned,
    can_tune,
    draft_key,
    engine_key,
    plan_of_candidates,
    runnable,
    whole_plan,
)
from eagle_kit.engine.llm import LLM
from eagle_kit.report.environment import now
from eagle_kit.report.stages import Stages

RECORDED = SpecShape(MOST_STEPS, 8, 64)
"""Shape of the recorded drafts."""
PROMPTS_AT_A_TIME = 8
"""Prompts that are recorded together, and kept in one file."""
RECORDING = "recording drafts"
TIMING = "timing cycles"
CHOSEN = "timing what is chosen by them"
VISIT_COST = 1.0
"""Time of a visit of a plan, in times that of recording a prompt."""
MORE_VISITS = 0.3
"""Expected visits for what is chosen, in times those of the plan."""
KINDS: dict[str, type[Drafts]] = {kind.__name__: kind for kind in get_args(Drafts)}
"""Classes of recorded candidates by the names that files have for them."""


@dataclass(frozen=True)
class TuneOptions:
    """Prompts to record, and cycles to time.

    Attributes:
        tasks: prompts whose responses are recorded.
        max_tokens: most tokens of a response.
        plan: cycles to time; default those of :func:`~eagle_kit.engine.calibrate.policies.whole_plan`.
        num_passes: of the plan over its batch sizes and contexts; default the plan's.
        show_progress: draw a progress bar.
    """

    tasks: Sequence[Task]
    max_tokens: int = 64
    plan: Plan | None = None
    num_passes: int | None = None
    show_progress: bool = True


def tune(llm: LLM, options: TuneOptions) -> Tuned:
    """Measure an engine and its draft, and write the result into the cache. After an interruption
    the same call continues the measurement.

    Raises:
        UserError: the draft's shape cannot change between cycles, or another process measures the same.
    """
    engine = llm.engine("none")
    if llm.draft is None or not can_tune(engine):
        raise UserError(
            "Shapes are chosen for drafts of chains or dynamic trees, and this is none.",
            "Give a draft head, without a static tree.",
        )
    plan = options.plan or whole_plan(engine)
    if options.num_passes is not None:
        plan = plan._replace(num_passes=options.num_passes)

    # A folder for everything that decides the result.
    costs_key = engine_key(engine)
    acceptance_key = draft_key(llm.draft)
    digest = files.digest(
        {
            "costs": costs_key,
            "draft": acceptance_key,
            "tasks": {task.name: task.fingerprint for task in options.tasks},
            "max_tokens": options.max_tokens,
            "plan": {
                "points": list(map(list, plan.points)),
                "shapes": list(map(str, plan.shapes)),
                "num_rounds": plan.num_rounds,
                "num_cycles": plan.num_cycles,
                "num_passes": plan.num_passes,
                "first_pass": plan.first_pass,
                "seconds": plan.seconds,
            },
        }
    )
    folder = files.folder() / f"work-{digest}"

    with sole_writer(folder, folder.with_suffix(".lock")):
        tuned = _measure(llm, options, plan, _WorkFolder(folder), costs_key, acceptance_key)
        files.save_costs(tuned.costs)
        files.save_acceptance(tuned.acceptance)
        remove(folder)
    return tuned


def _measure(
    llm: LLM,
    options: TuneOptions,
    plan: Plan,
    work: "_WorkFolder",
    costs_key: dict[str, Any],
    acceptance_key: str,
) -> Tuned:
    """Record drafts, time the cycles of the plan, and then the cycles that would be chosen by those
    times."""
    engine = llm.engine("none")
    prompts = [prompt.given() for task in options.tasks for prompt in task.prompts]
    num_visits = len(plan.visits)
    stage_costs = {
        RECORDING: len(prompts),
        TIMING: VISIT_COST * num_visits,
        CHOSEN: MORE_VISITS * VISIT_COST * num_visits,
    }
    stages = Stages(stage_costs, sample=PROMPTS_AT_A_TIME, is_quiet=not options.show_progress)
    try:
        # Record drafts.
        stages.start(RECORDING, len(prompts), "prompt")
        recording = _record(llm, prompts, options, work, stages)
        about = {
            "tasks": {task.name: len(task.prompts) for task in options.tasks},
            "positions": len(recording.truth),
            "max_tokens": options.max_tokens,
            "date": now(),
        }
        shapes = runnable(engine, all_shapes(recording.steps, recording.topk))
        acceptance = MeasuredAcceptance(acceptance_key, recording.table(shapes), about)

        def tuned(timings: Sequence[Timing]) -> Tuned:
            largest = max(timing.batch_size for timing in timings)
            costs = Costs(costs_key, CostTable.fit(timings), tuple(timings), now(), largest)
            return Tuned(costs, acceptance, is_average_head=False)

        # Time the plan, and what is chosen by it.
        stages.start(TIMING, num_visits, "visit")
        timings = _time(llm, plan, work, stages)
        chosen = plan_of_candidates(engine, tuned(timings), plan)
        stages.start(CHOSEN, len(chosen.visits), "visit")
        return tuned(join(timings, _time(llm, chosen, work, stages)))
    except KeyboardInterrupt:
        stages.close()
        print("Stopped: what was measured is kept; the same command goes on from there.", file=sys.stderr)
        raise
    finally:
        stages.close()


def _record(
    llm: LLM, prompts: Sequence[Any], options: TuneOptions, work: "_WorkFolder", stages: Stages
) -> DraftRecording:
    """Record the drafts at every position of the responses, a few prompts at a time."""
    params = SamplingParams(max_tokens=options.max_tokens)
    recordings = []
    for first in range(0, len(prompts), PROMPTS_AT_A_TIME):
        part = prompts[first : first + PROMPTS_AT_A_TIME]
        recording = work.read_recording(first)
        if recording is None:
            requests = [llm.make_request(llm.tokenize_task(prompt), params) for prompt in part]
            recording = llm.record_drafts(requests, RECORDED, stages.step)
            work.write_recording(first, recording)
        else:
            stages.skip(len(part))
        recordings.append(recording)
    return DraftRecording.join(recordings)


def _time(llm: LLM, plan: Plan, work: "_WorkFolder", stages: Stages) -> list[Timing]:
    """Time the visits of a plan that have not been timed."""
    timings_by_visit = work.read_timings()
    done = dict(timings_by_visit)

    def write(visit: Visit, timings: list[Timing]) -> None:
        timings_by_visit[visit] = timings
        work.write_timings(timings_by_visit)
        stages.step()

    stages.skip(sum(visit in done for visit in plan.visits))
    return time_cycles(llm.engine("none"), plan, done=done, on_visit=write)


class _WorkFolder:
    """Files of a measurement under way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read_recording(self, first: int) -> DraftRecording | None:
        """Read the recording of the prompts from ``first`` on; None where there is none that can be
        read."""
        path = self._folder / f"recording-{first}.pt"
        if not path.is_file():
            return None
        try:
            data = torch.load(path, weights_only=True)
            return DraftRecording(
                steps=data["steps"],
                topk=data["topk"],
                candidates=KINDS[data["kind"]](*data["candidates"]),
                confidence=data["confidence"],
                truth=data["truth"],
                lengths=data["lengths"],
            )
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
            warnings.warn(f"{path} is damaged and is recorded again: {error}.", stacklevel=2)
            return None

    def write_recording(self, first: int, recording: DraftRecording) -> None:
        """Write the recording of the prompts from ``first`` on."""
        data = {
            "kind": type(recording.candidates).__name__,
            "steps": recording.steps,
            "topk": recording.topk,
            "candidates": list(recording.candidates),
            "confidence": recording.confidence,
            "truth": recording.truth,
            "lengths": list(recording.lengths),
        }
        with replacing(self._folder / f"recording-{first}.pt") as path:
            save_torch_file(data, path)

    def read_timings(self) -> dict[Visit, list[Timing]]:
        """Read the timings by visit; empty where there are none that can be read."""
        path = self._folder / "timings.json"
        if not path.is_file():
            return {}
        try:
            timings_by_visit: dict[Visit, list[Timing]] = {}
            for record in read_object(path)["visits"]:
                visit = Visit(record["pass"], Point(*record["point"]))
                timings_by_visit[visit] = [
                    Timing(batch_size, SpecShape.parse(shape), context, seconds)
                    for batch_size, shape, context, seconds in record["timings"]
                ]
            return timings_by_visit
        except (KeyError, TypeError, ValueError) as error:
            warnings.warn(f"{path} is damaged and is measured again: {error}.", stacklevel=2)
            return {}

    def write_timings(self, timings_by_visit: dict[Visit, list[Timing]]) -> None:
        """Write the timings by visit."""
        visits = []
        for visit, timings in timings_by_visit.items():
            rows = [[each.batch_size, str(each.shape), each.context, each.seconds] for each in timings]
            visits.append({"pass": visit.number, "point": list(visit.point), "timings": rows})
        write_json_atomically(self._folder / "timings.json", {"visits": visits})
