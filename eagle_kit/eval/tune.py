"""``tune``: record what a draft proposes on tasks, time the engine's cycles, and keep both for the policy."""

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
PROMPTS_AT_A_TIME = 8
RECORDING = "recording drafts"
TIMING = "timing cycles"
CHOSEN = "timing what is chosen by them"
VISIT_COST = 1.0
"""Time of a visit of a plan beside that of recording a prompt."""
MORE_VISITS = 0.3
"""Expected visits for what is chosen, beside those of the plan."""
KINDS: dict[str, type[Drafts]] = {kind.__name__: kind for kind in get_args(Drafts)}


@dataclass(frozen=True)
class TuneOptions:
    """What to measure.

    Attributes:
        tasks: prompts whose replies are recorded.
        max_tokens: most tokens of a reply.
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
    """Measure an engine and its draft, and put the result into the cache. So is what has been measured until
    an interruption: the same call goes on from there.

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
    plan = plan._replace(num_passes=options.num_passes or plan.num_passes)
    key, draft = engine_key(engine), draft_key(llm.draft)
    asked = {
        "costs": key,
        "draft": draft,
        "tasks": {task.name: task.fingerprint for task in options.tasks},
        "max_tokens": options.max_tokens,
        "plan": [*plan[2:], list(map(str, plan.shapes)), *map(list, plan.points)],
    }
    place = files.folder() / f"work-{files.digest(asked)}"
    with sole_writer(place, place.with_suffix(".lock")):
        tuned = _measure(llm, options, plan, _Work(place), key, draft)
        files.save_costs(tuned.costs)
        files.save_acceptance(tuned.acceptance)
        remove(place)
    return tuned


def _measure(
    llm: LLM, options: TuneOptions, plan: Plan, work: "_Work", key: dict[str, Any], draft: str
) -> Tuned:
    """Record, time what the plan says, and then what would be chosen by that."""
    prompts = [(task, prompt) for task in options.tasks for prompt in task.prompts]
    num_visits = len(plan.visits)
    costs = {
        RECORDING: len(prompts),
        TIMING: VISIT_COST * num_visits,
        CHOSEN: MORE_VISITS * VISIT_COST * num_visits,
    }
    stages = Stages(costs, sample=PROMPTS_AT_A_TIME, is_quiet=not options.show_progress)
    try:
        stages.start(RECORDING, len(prompts), "prompt")
        recording = _record(llm, [prompt.given() for _, prompt in prompts], options, work, stages)
        about = {
            "tasks": {task.name: len(task.prompts) for task in options.tasks},
            "positions": len(recording.truth),
            "max_tokens": options.max_tokens,
            "date": now(),
        }
        shapes = runnable(llm.engine("none"), all_shapes(recording.steps, recording.topk))
        acceptance = MeasuredAcceptance(draft, recording.table(shapes), about)

        def tuned(timings: Sequence[Timing]) -> Tuned:
            most = max(timing.batch_size for timing in timings)
            costs = Costs(key, CostTable.fit(timings), tuple(timings), now(), most)
            return Tuned(costs, acceptance, is_average_head=False)

        stages.start(TIMING, num_visits, "visit")
        timings = _time(llm, plan, work, stages)
        more = plan_of_candidates(llm.engine("none"), tuned(timings), plan)
        stages.start(CHOSEN, len(more.visits), "visit")
        return tuned(join(timings, _time(llm, more, work, stages)))
    except KeyboardInterrupt:
        stages.close()
        print("Stopped: what was measured is kept; the same command goes on from there.", file=sys.stderr)
        raise
    finally:
        stages.close()


def _record(
    llm: LLM, prompts: Sequence[Any], options: TuneOptions, work: "_Work", stages: Stages
) -> DraftRecording:
    params = SamplingParams(max_tokens=options.max_tokens)
    recordings = []
    for first in range(0, len(prompts), PROMPTS_AT_A_TIME):
        part = prompts[first : first + PROMPTS_AT_A_TIME]
        recording = work.recording(first)
        if recording is None:
            requests = [llm.make_request(llm.tokenize_task(prompt), params) for prompt in part]
            recording = llm.record_drafts(requests, RECORDED, stages.step)
            work.keep_recording(first, recording)
        else:
            stages.skip(len(part))
        recordings.append(recording)
    return DraftRecording.join(recordings)


def _time(llm: LLM, plan: Plan, work: "_Work", stages: Stages) -> list[Timing]:
    done = work.timings()

    def keep(visit: Visit, timings: list[Timing]) -> None:
        done[visit] = timings
        work.keep_timings(done)
        stages.step()

    stages.skip(sum(visit in done for visit in plan.visits))
    return time_cycles(llm.engine("none"), plan, done=dict(done), on_visit=keep)


class _Work:
    """Files of a measurement under way."""

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True, exist_ok=True)

    def recording(self, number: int) -> DraftRecording | None:
        """Read a part of the recording, if it is there."""
        path = self._place / f"recording-{number}.pt"
        if not path.is_file():
            return None
        try:
            kind, steps, topk, candidates, *rest = torch.load(path, weights_only=True)
            return DraftRecording(steps, topk, KINDS[kind](*candidates), *rest)
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
            warnings.warn(f"{path} is damaged and is recorded again: {error}.", stacklevel=2)
            return None

    def keep_recording(self, number: int, part: DraftRecording) -> None:
        """Write a part of the recording."""
        kind = type(part.candidates).__name__
        rest = part.confidence, part.truth, list(part.lengths)
        data = kind, part.steps, part.topk, list(part.candidates), *rest
        with replacing(self._place / f"recording-{number}.pt") as path:
            save_torch_file(data, path)

    def timings(self) -> dict[Visit, list[Timing]]:
        """Read the timings by visit."""
        path = self._place / "timings.json"
        if not path.is_file():
            return {}
        try:
            return {
                Visit(each["pass"], Point(*each["point"])): [
                    Timing(batch, SpecShape.parse(shape), context, seconds)
                    for batch, shape, context, seconds in each["timings"]
                ]
                for each in read_object(path)["visits"]
            }
        except (KeyError, TypeError, ValueError) as error:
            warnings.warn(f"{path} is damaged and is measured again: {error}.", stacklevel=2)
            return {}

    def keep_timings(self, timings: dict[Visit, list[Timing]]) -> None:
        """Write the timings by visit."""
        visits = [
            {
                "pass": visit.number,
                "point": list(visit.point),
                "timings": [[t[0], str(t[1]), t[2], t[3]] for t in mine],
            }
            for visit, mine in timings.items()
        ]
        write_json_atomically(self._place / "timings.json", {"visits": visits})
