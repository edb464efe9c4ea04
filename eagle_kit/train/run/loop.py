"""The training loop: set up, estimate, step, judge, save; and how it is stopped and resumed.

A step is a pure function of the weights, the optimiser and the step counter: order of the data and learning
rate follow from the counter, so a resumed run is bitwise the run that was never stopped.
"""

import os
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.drafts.base.kind import InitContext
from eagle_kit.drafts.files.draft import DraftFolder, save_draft
from eagle_kit.drafts.files.draft_files import read_metadata
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.ops.device_memory import out_of_memory, reserve_segment, reserved_again
from eagle_kit.report.environment import peak_memory_gb
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.optim.strategy import on_device
from eagle_kit.train.parallel.launch import go_on, is_main, sharding_asked_for
from eagle_kit.train.parallel.placement import output_layer, place_target
from eagle_kit.train.parallel.processes import (
    gather_objects,
    make_accelerator,
    sum_numbers,
    watching,
    with_precision,
)
from eagle_kit.train.run.checkpoint import Checkpoint, TrainState, load_checkpoint, save_checkpoint
from eagle_kit.train.run.curves import RunCurves
from eagle_kit.train.run.describe import (
    describe,
    describe_judge,
    describe_machine,
    estimate_run,
    judgement_line,
    judgement_scalars,
    metadata,
    summary,
)
from eagle_kit.train.run.folder import RunFolder, flatten
from eagle_kit.train.run.interrupt import Interrupt
from eagle_kit.train.run.judge import Judge, Judgement, choose_prompts
from eagle_kit.train.run.new_head import check_steps, head_architecture, new_head
from eagle_kit.train.run.progress import ProgressLine
from eagle_kit.train.run.report import write_report
from eagle_kit.train.run.setup import load_components, state_store
from eagle_kit.train.run.step import Stepper, StepResult
from eagle_kit.train.run.trackers import check_trackers, draws_report, start_trackers

if TYPE_CHECKING:
    from accelerate import Accelerator


TOO_LARGE = (
    "Use a GPU with more free memory, another training.target_placement, or a launcher that shares the head."
)
"""Remedy where a GPU has too little memory for the weights."""
NEED_LESS = (
    "Lower data.max_length, set training.gradient_checkpointing=steps, or leave out "
    "training.gradient_accumulation, so that a forward has one row; a saved run goes on with --resume."
)
"""Remedy where a GPU has too little memory for a step."""


class Ending(Enum):
    """Why a session ended."""

    DONE = "all steps, or the judge's patience"
    MAX_STEPS = "the flag --max-steps"
    TIME = "the flag --stop-after"
    SIGNAL = "Ctrl-C or SIGTERM"

    @property
    def exit_code(self) -> int:
        """0 when what was asked for is done, 130 when it was saved on the way."""
        return INTERRUPTED if self in (Ending.TIME, Ending.SIGNAL) else 0


@dataclass(frozen=True)
class RunOptions:
    """Settings of a session besides the config.

    Attributes:
        resume: go on from the last checkpoint; begin where there is none yet.
        max_steps: stop at this step; the schedule stays as configured.
        stop_after_s: stop after this many seconds of training in this session, but not before a step is made:
            who repeats the command comes to the end.
        dry_run: print the estimate and stop; the run folder is neither made nor changed.
        arguments: config file and overrides, for :attr:`command`.
    """

    resume: bool = False
    max_steps: int | None = None
    stop_after_s: float | None = None
    dry_run: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Command of this session but for ``--resume``, for ``run.yaml`` and the model card."""
        flags = {
            "--max-steps": None if self.max_steps is None else str(self.max_steps),
            "--stop-after": None if self.stop_after_s is None else f"{self.stop_after_s:g}s",
        }
        given = [word for name, value in flags.items() if value is not None for word in (name, value)]
        return shlex.join(["eagle-kit", "train", *self.arguments, *given])


def train(config: TrainConfig, options: RunOptions) -> Ending:
    """Train a head as ``config`` says; returns why it ended, having saved.

    Raises:
        UserError: settings, data or folders that cannot be used; nothing is half-written.
    """
    config = with_precision(config)
    folder = RunFolder(config.output_dir)
    writes = is_main(os.environ) and not options.dry_run
    with folder.locked() if writes else nullcontext():
        if options.resume:
            folder.check_resumable(config)
        elif not options.dry_run:
            folder.check_unused()
        check_trackers(config)
        accelerator = make_accelerator(config)
        try:
            with watching(config, accelerator):
                with out_of_memory("loading target and head", TOO_LARGE):
                    trainer = Trainer(config, options, folder, accelerator)
                with out_of_memory("training", NEED_LESS):
                    return trainer.run()
        finally:
            accelerator.end_training()


class Trainer:
    """One session of a run: owns the head, the counters and the stepper. Making one writes nothing."""

    def __init__(
        self, config: TrainConfig, options: RunOptions, folder: RunFolder, accelerator: "Accelerator"
    ) -> None:
        self.config, self.options, self.folder, self.accelerator = config, options, folder, accelerator
        self.components = load_components(config, accelerator)
        data = self.components.data
        context = self.components.target.config.max_position_embeddings
        self.prompts = choose_prompts(data.heldout_prompts, config.judge, context)
        found = self._checkpoint() if options.resume else None
        self.state, self.head = (found.state, found.head) if found else (TrainState(), self._new_head())
        self.tokens_before = self._tokens_before(found)
        if config.head.first_draft is not None and self.head.token_map is not None:
            data.use_vocabulary(self.head.token_map.cpu().numpy())
        schedule = Schedule.from_config(config.training, len(data))
        store = state_store(config, self.components, self.head.config)
        if found is not None:
            self._check_states(found, "computed" if store is None or store.is_exact else store.format)
        sharding = sharding_asked_for(os.environ)
        self.head.bind(output_layer(self.components.target, accelerator.device))
        place_target(self.components.target, config, accelerator)
        self.components.share_embedding()
        self.stepper = Stepper(config, accelerator, self.components, self.head, schedule, store, sharding)
        if found is not None:
            found.restore(self.stepper.strategy, self.stepper.ema)
        self.stop_at = min(schedule.total_steps, options.max_steps or schedule.total_steps)
        self.judge: Judge | None = None

    def run(self) -> Ending:
        """Estimate, then step until the end or a stop; returns which. A dry run is done with the estimate."""
        heldout = len(self.components.data.heldout_prompts)
        context = self.components.target.config.max_position_embeddings
        self._print(describe_machine(self.config, self.accelerator))
        self._print(describe(self.config, self.components, self.head.config))
        self._print(describe_judge(self.config, heldout, len(self.prompts), context))
        if self.options.resume:
            lacks = "" if self.folder.checkpoints() else " has no checkpoint yet:"
            self._print(f"resume  {self.folder.path}{lacks} from step {self.state.step} of {self.stop_at}")
        steps = range(self.state.step, self.stop_at)
        estimate = estimate_run(self.config, self.accelerator, self.components, self.stepper, steps)
        self._print(estimate.report())
        if self.options.dry_run:
            return Ending.DONE
        reserve_segment(self.accelerator.device, estimate.of_step)
        is_new = not (self.options.resume and self.folder.has_run)
        if self.accelerator.is_main_process:
            if not is_new:
                self.folder.resume(self.config, self.options.command, self.state.step)
            else:
                self.folder.start(self.config, self.options.command)
        self.accelerator.wait_for_everyone()
        try:
            settings = flatten(self.config.model_dump(mode="json"))
            start_trackers(self.accelerator, self.config, settings, self.state.step)
        except UserError:
            if is_new and self.accelerator.is_main_process:
                self.folder.discard()
            raise
        self.judge = self._make_judge()
        try:
            with Interrupt(announce=self.accelerator.is_main_process) as interrupt:
                ending, why = self._step_until_stopped(interrupt)
        finally:
            self.stepper.close()
        self._print(f"{why} The run is in {self.folder.path}.")
        if self.state.num_skipped:
            self._print(f"{self.state.num_skipped} steps were skipped: loss or gradient was not finite.")
        self._report()
        if self.accelerator.is_main_process and self.state.step:
            print(summary(RunCurves.read(self.folder.path)), flush=True)
        if ending is not Ending.DONE:
            reached = ending is Ending.MAX_STEPS
            again = replace(self.options, max_steps=None if reached else self.options.max_steps)
            self._print(go_on(f"{again.command} --resume", os.environ))
        return ending

    def _step_until_stopped(self, interrupt: Interrupt) -> tuple[Ending, str]:
        """The loop; returns why it ended, also as a sentence. The last step is always saved."""
        state, judge_every, total = self.state, self.config.judge.every, self.stepper.schedule.total_steps
        first, ending, why = state.step, Ending.DONE, f"All {total} steps are done."
        if self.stop_at < total:
            ending = Ending.MAX_STEPS
            why = f"Step {self.stop_at} of {total} is done, where --max-steps stops."
        started = time.perf_counter()
        saved = state.step if self.folder.checkpoints() else -1
        main = self.accelerator.is_main_process
        with ProgressLine(self.stop_at, state.step, self.options.stop_after_s, enabled=main) as line:
            while state.step < self.stop_at:
                if stop := self._should_stop(interrupt, started if state.step > first else None):
                    ending, why = stop, f"Stopped after step {state.step} of {total}."
                    break
                self._record(self.stepper.step(state), line)
                is_last = state.step == total
                due = judge_every and (is_last or state.step % judge_every == 0)
                with self._servable():
                    is_over = due and self._judge(line)
                if is_over:
                    ending = Ending.DONE
                    why = f"No better accept length in {self.config.judge.patience} judgements; stopped."
                    break
                if state.step % self.config.training.save_every == 0:
                    self._save()
                    saved = state.step
            if saved != state.step:
                self._save()
        return ending, why

    def _should_stop(self, interrupt: Interrupt, started: float | None) -> Ending | None:
        """Reason to stop: a process was interrupted, or time is up; all processes get the same answer.

        Args:
            started: when this session did; None while it has made no step, which it has time for.
        """
        limit = self.options.stop_after_s
        is_late = limit is not None and started is not None and time.perf_counter() - started >= limit
        asked, late = sum_numbers(self.accelerator, [float(interrupt.requested), float(is_late)])
        return Ending.SIGNAL if asked else Ending.TIME if late else None

    def _record(self, result: StepResult, line: ProgressLine) -> None:
        """Write the step's row, redraw the line, tell the tracker."""
        if not self.accelerator.is_main_process:
            return
        step = self.state.step
        row = result.row(step)
        self.folder.metrics.append(row)
        if not result.is_finite:
            line.say(f"note    step {step} is skipped: its loss or its gradient is not finite")
        line.update(step, result)
        if step % self.config.training.log_every == 0:
            self.accelerator.log(_scalars(row), step=step)

    def _judge(self, line: ProgressLine) -> bool:
        """Decode held-out prompts, keep the head as best/ when it is; whether patience has run out."""
        assert self.judge is not None
        started = time.perf_counter()
        whole, target = self.stepper.strategy.whole_head(), self.components.target
        # The engine sizes its pool by what is free, and gives back the segment of the steps for it.
        with reserved_again(self.accelerator.device):
            mine = self.judge.judge(on_device(whole, target.embed_tokens.weight.device, target.lm_head))
        is_shared = self.components.cut is not None  # then all have decoded the same
        figures = Judgement.total([mine] if is_shared else gather_objects(self.accelerator, mine)).row()
        decoded = figures["accept_length"]
        state, chosen = self.state, decoded[self.config.judge.shapes[0]]
        is_better = chosen > state.best_accept_length
        if is_better:
            state.best_accept_length, state.best_step, state.num_worse = chosen, state.step, 0
        else:
            state.num_worse += 1
        if self.accelerator.is_main_process:
            row = {
                "step": state.step,
                **figures,
                "tokens": state.tokens,
                "train_seconds": round(state.seconds, 1),
                "seconds": round(time.perf_counter() - started, 1),
                "best": is_better,
            }
            self.folder.judgements.append(row)
            self.accelerator.log(judgement_scalars(row), step=state.step)
            line.say(judgement_line(row, state.num_worse, self.config.judge.patience))
            if is_better:
                save_draft(whole, self.folder.path / "best", metadata=self._metadata(decoded))
        self._report(line.say)
        self.accelerator.wait_for_everyone()
        patience = self.config.judge.patience
        return patience is not None and state.num_worse >= patience

    def _report(self, say: Callable[[str], None] = print) -> None:
        """Draw report.html anew; what keeps it from being drawn costs no step."""
        if self.accelerator.is_main_process and draws_report(self.config) and self.state.step:
            try:
                write_report(self.folder.path)
            except UserError as error:
                say(f"note    {error.cause} The run goes on; draw it with eagle-kit report.")

    def _servable(self) -> AbstractContextManager[None]:
        """Context in which the head has the weights that are judged and served: their average, if any."""
        ema = self.stepper.ema
        return nullcontext() if ema is None else ema.applied()

    def _save(self) -> None:
        strategy = self.stepper.strategy
        head, optimizer_state = strategy.whole_head(), strategy.optimizer_state()  # all processes gather
        if self.accelerator.is_main_process:
            path, ema = self.folder.path / f"step-{self.state.step}", self.stepper.ema
            with self._servable():
                save_checkpoint(path, head, optimizer_state, self.state, self._metadata(), ema)
            self.folder.rotate(self.config.training.keep_last)
        self.accelerator.wait_for_everyone()

    def _checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None where there is none yet. Raises UserError for one of other data."""
        checkpoints, data = self.folder.checkpoints(), self.components.data
        if not checkpoints:
            return None
        about = read_metadata(checkpoints[-1][1]).get("data")
        learned = str(about.get("fingerprint") if isinstance(about, dict) else None)
        if not data.equals(learned):
            raise UserError(
                f"The run in {self.folder.path} learned from other data ({learned}) than there is now "
                f"({data.fingerprint}).",
                "Restore the data, or start a new run with output_dir=FOLDER.",
            )
        found = load_checkpoint(checkpoints[-1][1], self.accelerator.device)
        check_steps(self.config, found.head.config)  # the judge may be another one
        return found

    def _new_head(self) -> DraftHead:
        config, found = self.config, self.components
        draft = head_architecture(config, found.target.config, found.tokenizer)
        start = InitContext(found.target, found.folder, found.data.vocab_map, self.accelerator.device)
        return new_head(config, draft, start)

    def _check_states(self, found: Checkpoint, now: str) -> None:
        """Raise UserError when the run learned from states of another format than there are now."""
        data = read_metadata(found.folder).get("data")
        before = data.get("states", "computed") if isinstance(data, dict) else "computed"
        if before != now:
            raise UserError(
                f"The run in {self.folder.path} learned from states in the format {before}, and these are "
                f"{now}.",
                "Restore them, or start a new run with output_dir=FOLDER.",
            )

    def _make_judge(self) -> Judge | None:
        """The judge of this process's share of the prompts, or of all of them where processes share the
        target and decode together; None when nothing is judged."""
        settings, cut = self.config.judge, self.components.cut
        if not settings.every:
            return None
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        rank, count = (rank, count) if cut is None else (0, 1)
        data, mine = self.components.data, self.prompts[rank::count]
        prompts = [data.heldout_prompts[i] for i in mine]
        categories = [data.groups[data.heldout_groups[i]] for i in mine]
        return Judge(self.components.target if cut is None else cut, prompts, settings, categories)

    def _metadata(self, decoded: dict[str, float] | None = None) -> dict[str, Any]:
        peak = peak_memory_gb(str(self.accelerator.device)) or 0.0
        self.state.peak_memory_gb = max(self.state.peak_memory_gb, peak)
        about = metadata(
            self.config, self.accelerator, self.components, self.state, self.options.command, decoded
        )
        about["judged"] = [
            {"tokens_seen": row["tokens"], "accept_length": row["accept_length"]}
            for row in self.folder.judgements.rows()
            if "tokens" in row  # which rows of old runs do not have
        ]
        if self.tokens_before:
            about["tokens_before"] = self.tokens_before
        store = self.stepper.store
        about["data"]["states"] = "computed" if store is None or store.is_exact else store.format
        if store is not None:
            about["data"]["source"] = store.manifest["data"]["source"]
        return about

    def _tokens_before(self, found: Checkpoint | None) -> int:
        """Tokens that the head of ``head.start_from``, and those that it began with, had seen; 0 where it is
        of another trainer. A resumed run knows them, and may do without that head."""
        if found is not None:
            return int(read_metadata(found.folder).get("tokens_before", 0))
        first_draft = self.config.head.first_draft
        if first_draft is None:
            return 0
        about = DraftFolder.open(first_draft, self.components.target.config).files.metadata
        return sum(about.get(name, 0) for name in ("tokens_seen", "tokens_before"))

    def _print(self, text: str) -> None:
        if self.accelerator.is_main_process:
            print(text, flush=True)


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """A metrics row for a tracker: lists become one number per step; None is left out."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat |= {f"{name}/{i}": number for i, number in enumerate(value)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{key}": number for key, number in value.items()}
        elif name != "step":
            flat[name] = value
    return {name: value for name, value in flat.items() if value is not None}
