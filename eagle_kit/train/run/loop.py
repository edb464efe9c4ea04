"""Training loop of a draft head: set-up, estimate, optimiser steps, validation, checkpoints, stop, resume.

An optimiser step is a pure function of the weights, the optimiser state and the step counter: the data order
and the learning rate follow from the counter. A resumed run is therefore bitwise the uninterrupted one.
"""

import os
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.drafts.base.kind import InitContext
from eagle_kit.drafts.files.draft import DraftFolder, save_draft
from eagle_kit.drafts.files.draft_files import read_metadata
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.ops.device_memory import out_of_memory, reserve_segment, reserved_again
from eagle_kit.report.environment import peak_memory_gb
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.optim.strategy import on_device
from eagle_kit.train.parallel.launch import go_on, is_main, sharding_asked_for
from eagle_kit.train.parallel.placement import output_layer
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
    describe_machine,
    describe_validation,
    estimate_run,
    metadata,
    summary,
    validation_line,
    validation_scalars,
)
from eagle_kit.train.run.folder import RunFolder, flatten
from eagle_kit.train.run.interrupt import FINISH_STEP, Interrupt
from eagle_kit.train.run.new_head import check_steps, head_architecture, new_head
from eagle_kit.train.run.progress import ProgressLine
from eagle_kit.train.run.report import write_report
from eagle_kit.train.run.setup import load_components, state_store
from eagle_kit.train.run.step import Stepper, StepResult
from eagle_kit.train.run.trackers import check_trackers, draws_report, start_trackers
from eagle_kit.train.run.validation import ValidationResult, Validator, choose_prompts

if TYPE_CHECKING:
    from accelerate import Accelerator


TOO_LARGE = (
    "Use a GPU with more free memory, another training.target_placement, or a launcher that shares the head."
)
"""Remedy if the weights do not fit into the memory of a GPU."""
NEED_LESS = (
    "Lower data.max_length, set training.gradient_checkpointing=steps, or leave out "
    "training.gradient_accumulation, so that a forward has one row; a saved run goes on with --resume."
)
"""Remedy if an optimiser step does not fit into the memory of a GPU."""
FINISH_VALIDATION = "the validation of this step is finished and the step is saved first"
"""What a signal during a validation is answered with."""


class Ending(Enum):
    """Reason why a session ended."""

    DONE = "all steps, or the patience of validation"
    MAX_STEPS = "the flag --max-steps"
    TIME = "the flag --stop-after"
    SIGNAL = "Ctrl-C or SIGTERM"

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 130 if a signal or the time limit stopped the run, else 0."""
        if self in (Ending.TIME, Ending.SIGNAL):
            return INTERRUPTED
        return 0


@dataclass(frozen=True)
class RunOptions:
    """Options of a session that are not part of the config.

    Attributes:
        resume: continue from the last checkpoint; start from step 0 if the folder has none.
        max_steps: stop at this step; the schedule stays as configured.
        stop_after_s: stop after this many seconds of training in this session. Every session makes at least
            one step, so repeated sessions finish the run.
        dry_run: print the estimate and stop; the run folder is neither created nor changed.
        arguments: config file and overrides, for :attr:`command`.
    """

    resume: bool = False
    max_steps: int | None = None
    stop_after_s: float | None = None
    dry_run: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Command line of this session without ``--resume``, for ``run.yaml`` and the model card."""
        words = ["eagle-kit", "train", *self.arguments]
        if self.max_steps is not None:
            words += ["--max-steps", str(self.max_steps)]
        if self.stop_after_s is not None:
            words += ["--stop-after", f"{self.stop_after_s:g}s"]
        return shlex.join(words)


def train(config: TrainConfig, options: RunOptions) -> Ending:
    """Train a head as ``config`` describes, and save the run.

    Returns:
        The reason why the session ended.

    Raises:
        UserError: settings, data or folders that cannot be used; no file is left half-written.
    """
    config = with_precision(config)
    folder = RunFolder(config.output_dir)
    writes = is_main(os.environ) and not options.dry_run
    with folder.locked() if writes else nullcontext():
        # Checks that need no model.
        if options.resume:
            folder.check_resumable(config)
        elif not options.dry_run:
            folder.check_unused()
        check_trackers(config)

        # Load and train.
        accelerator = make_accelerator(config)
        try:
            with watching(config, accelerator):
                with out_of_memory("loading target and head", TOO_LARGE):
                    trainer = Trainer(config, options, folder, accelerator)
                with out_of_memory("training", NEED_LESS):
                    return trainer.run()
        finally:
            accelerator.end_training()


class Stop(NamedTuple):
    """End of the step loop.

    Attributes:
        ending: the reason.
        message: the reason as a sentence.
    """

    ending: Ending
    message: str


class Trainer:
    """One session of a run. Owns the head, the counters and the stepper; the constructor writes no file."""

    def __init__(
        self, config: TrainConfig, options: RunOptions, folder: RunFolder, accelerator: "Accelerator"
    ) -> None:
        self.config = config
        self.options = options
        self.folder = folder
        self.accelerator = accelerator

        # Target, data and validation prompts.
        self.components = load_components(config, accelerator)
        target = self.components.target
        data = self.components.data
        context = target.config.max_position_embeddings
        self.prompts = choose_prompts(data.heldout_prompts, config.validation, context)

        # Head and counters: from the last checkpoint, or new.
        checkpoint = self._load_last_checkpoint() if options.resume else None
        if checkpoint is not None:
            self.state = checkpoint.state
            self.head = checkpoint.head
        else:
            self.state = TrainState()
            self.head = self._new_head()
        self.tokens_before = self._tokens_before(checkpoint)
        if config.head.first_draft is not None and self.head.token_map is not None:
            data.use_vocabulary(self.head.token_map.cpu().numpy())

        # Schedule and captured hidden states.
        schedule = Schedule.from_config(config.training, len(data))
        store = state_store(config, self.components, self.head.config)
        if checkpoint is not None:
            self._check_state_format(checkpoint, _state_format(store))

        # The head reads the output layer on its device.
        sharding = sharding_asked_for(os.environ)
        self.head.bind(output_layer(target, accelerator.device))
        self.components.share_embedding()

        # Optimiser.
        self.stepper = Stepper(config, accelerator, self.components, self.head, schedule, store, sharding)
        if checkpoint is not None:
            checkpoint.restore(self.stepper.strategy, self.stepper.ema)
        self.stop_at = schedule.total_steps
        if options.max_steps:
            self.stop_at = min(schedule.total_steps, options.max_steps)
        self.validator: Validator | None = None

    def run(self) -> Ending:
        """Print the estimate, then make optimiser steps until the end or a stop.

        Returns:
            The reason why the session ended; ``Ending.DONE`` for a dry run, which ends after the estimate.
        """
        # Describe the run and estimate its cost.
        self._describe_run()
        steps = range(self.state.step, self.stop_at)
        estimate = estimate_run(self.config, self.accelerator, self.components, self.stepper, steps)
        self._print(estimate.report())
        if self.options.dry_run:
            return Ending.DONE
        reserve_segment(self.accelerator.device, estimate.of_step)

        # Open the run folder and the trackers.
        self._open_folder()

        # Train.
        self.validator = self._make_validator()
        try:
            with Interrupt(announce=self.accelerator.is_main_process) as interrupt:
                stop = self._step_until_stopped(interrupt)
        finally:
            self.stepper.close()

        # Report.
        self._print(f"{stop.message} The run is in {self.folder.path}.")
        if self.state.num_skipped:
            self._print(f"{self.state.num_skipped} steps were skipped: loss or gradient was not finite.")
        self._report()
        if self.accelerator.is_main_process and self.state.step:
            print(summary(RunCurves.read(self.folder.path)), flush=True)
        if stop.ending is not Ending.DONE:
            self._print(go_on(f"{self._next_options(stop.ending).command} --resume", os.environ))
        return stop.ending

    def _describe_run(self) -> None:
        """Print the machine, the data, the validation and the step that the session starts from."""
        num_heldout = len(self.components.data.heldout_prompts)
        context = self.components.target.config.max_position_embeddings
        self._print(describe_machine(self.config, self.accelerator))
        self._print(describe(self.config, self.components, self.head.config))
        self._print(describe_validation(self.config, num_heldout, len(self.prompts), context))
        if self.options.resume:
            note = "" if self.folder.checkpoints() else " has no checkpoint yet:"
            self._print(f"resume  {self.folder.path}{note} from step {self.state.step} of {self.stop_at}")

    def _open_folder(self) -> None:
        """Create the run folder or note the resumed session in it, and start the trackers.

        Raises:
            UserError: a tracker does not start; a new run folder is removed.
        """
        is_main_process = self.accelerator.is_main_process
        is_new = not (self.options.resume and self.folder.has_run)
        if is_main_process:
            if is_new:
                self.folder.start(self.config, self.options.command)
            else:
                self.folder.resume(self.config, self.options.command, self.state.step)
        self.accelerator.wait_for_everyone()
        try:
            settings = flatten(self.config.model_dump(mode="json"))
            start_trackers(self.accelerator, self.config, settings, self.state.step)
        except UserError:
            if is_new and is_main_process:
                self.folder.discard()
            raise

    def _next_options(self, ending: Ending) -> RunOptions:
        """Options of the session that continues this one: a limit of steps that was reached is dropped."""
        if ending is Ending.MAX_STEPS:
            return replace(self.options, max_steps=None)
        return self.options

    def _step_until_stopped(self, interrupt: Interrupt) -> Stop:
        """Make optimiser steps until the end or a stop. The last step is always saved."""
        state = self.state
        first = state.step
        total = self.stepper.schedule.total_steps
        validate_every = self.config.validation.every
        stop = Stop(Ending.DONE, f"All {total} steps are done.")
        if self.stop_at < total:
            stop = Stop(Ending.MAX_STEPS, f"Step {self.stop_at} of {total} is done, where --max-steps stops.")

        started = time.perf_counter()
        saved = state.step if self.folder.checkpoints() else -1
        is_main_process = self.accelerator.is_main_process
        with ProgressLine(self.stop_at, first, self.options.stop_after_s, enabled=is_main_process) as line:
            while state.step < self.stop_at:
                # Stop on a signal, or on the time limit once this session has made a step.
                early = self._should_stop(interrupt, started if state.step > first else None)
                if early is not None:
                    stop = Stop(early, f"Stopped after step {state.step} of {total}.")
                    break

                # One optimiser step.
                self._record(self.stepper.step(state), line)

                # Validate, which may take minutes: a signal before or during it is answered accordingly.
                is_last = state.step == total
                if validate_every and (is_last or state.step % validate_every == 0):
                    if interrupt.requested:
                        line.say(f"The validation that is due after step {state.step} runs first.")
                    interrupt.promise = FINISH_VALIDATION
                    with self._servable():
                        out_of_patience = self._validate(line)
                    interrupt.promise = FINISH_STEP
                    if out_of_patience:
                        patience = self.config.validation.patience
                        message = f"No better accept length in {patience} validations; stopped."
                        stop = Stop(Ending.DONE, message)
                        break

                # Save.
                if state.step % self.config.training.save_every == 0:
                    self._save()
                    saved = state.step
            if saved != state.step:
                self._save()
        return stop

    def _should_stop(self, interrupt: Interrupt, started: float | None) -> Ending | None:
        """Reason to stop before the next step, or None. All processes return the same value.

        Args:
            started: start of this session in seconds of ``time.perf_counter``; None before its first step,
                which the time limit does not stop.
        """
        limit = self.options.stop_after_s
        is_late = False
        if limit is not None and started is not None:
            is_late = time.perf_counter() - started >= limit
        interrupted, late = sum_numbers(self.accelerator, [float(interrupt.requested), float(is_late)])
        if interrupted:
            return Ending.SIGNAL
        if late:
            return Ending.TIME
        return None

    def _record(self, result: StepResult, line: ProgressLine) -> None:
        """Write the row of the step, update the progress line, and log to the trackers."""
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

    def _validate(self, line: ProgressLine) -> bool:
        """Decode the held-out prompts, and save the head as ``best/`` if its accept length is the longest.

        Returns:
            True if ``validation.patience`` validations in a row brought no longer accept length.
        """
        assert self.validator is not None
        started = time.perf_counter()

        # Decode. The engine sizes its pool by the free memory: the segment of the steps is released.
        whole = self.stepper.strategy.whole_head()
        target = self.components.target
        with reserved_again(self.accelerator.device):
            head = on_device(whole, target.embed_tokens.weight.device, target.lm_head)
            mine = self.validator.validate(head, line.validating)

        # Sum over the processes. Processes that share the target have all decoded the same prompts.
        if self.components.cut is not None:
            validations = [mine]
        else:
            validations = gather_objects(self.accelerator, mine)
        figures = ValidationResult.total(validations).row()

        # Compare with the best head so far.
        state = self.state
        accept_lengths = figures["accept_length"]
        accept_length = accept_lengths[self.config.validation.shapes[0]]
        is_better = accept_length > state.best_accept_length
        if is_better:
            state.best_accept_length = accept_length
            state.best_step = state.step
            state.num_worse = 0
        else:
            state.num_worse += 1

        # Record, and save the best head.
        patience = self.config.validation.patience
        if self.accelerator.is_main_process:
            row = {
                "step": state.step,
                **figures,
                "tokens": state.tokens,
                "train_seconds": round(state.seconds, 1),
                "seconds": round(time.perf_counter() - started, 1),
                "best": is_better,
            }
            self.folder.validations.append(row)
            self.accelerator.log(validation_scalars(row), step=state.step)
            line.say(validation_line(row, state.num_worse, patience))
            if is_better:
                save_draft(whole, self.folder.path / "best", metadata=self._metadata(accept_lengths))
        self._report(line.say)
        self.accelerator.wait_for_everyone()
        return patience is not None and state.num_worse >= patience

    def _report(self, say: Callable[[str], None] = print) -> None:
        """Write ``report.html`` again. An error is printed with ``say`` and does not stop the run."""
        if not self.accelerator.is_main_process or not draws_report(self.config) or not self.state.step:
            return
        try:
            write_report(self.folder.path)
        except UserError as error:
            say(f"note    {error.cause} The run goes on; draw it with eagle-kit report.")

    def _servable(self) -> AbstractContextManager[None]:
        """Context in which the head has the weights that are validated and saved: the average, if any."""
        ema = self.stepper.ema
        if ema is None:
            return nullcontext()
        return ema.applied()

    def _save(self) -> None:
        """Write the checkpoint of the current step and delete the oldest. All processes call it together."""
        strategy = self.stepper.strategy
        head = strategy.whole_head()  # all processes gather
        optimizer_state = strategy.optimizer_state()
        if self.accelerator.is_main_process:
            path = self.folder.path / f"step-{self.state.step}"
            with self._servable():
                save_checkpoint(path, head, optimizer_state, self.state, self._metadata(), self.stepper.ema)
            self.folder.rotate(self.config.training.keep_last)
        self.accelerator.wait_for_everyone()

    def _load_last_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint of the run folder, or None if it has none.

        Raises:
            UserError: the run was trained on other data, or its head does not fit the settings.
        """
        checkpoints = self.folder.checkpoints()
        if not checkpoints:
            return None
        path = checkpoints[-1][1]

        # The data must be the same.
        data = self.components.data
        about = read_metadata(path).get("data")
        before = str(about.get("fingerprint") if isinstance(about, dict) else None)
        if not data.equals(before):
            raise UserError(
                f"The run in {self.folder.path} was trained on other data ({before}) than there is now "
                f"({data.fingerprint}).",
                "Restore the data, or start a new run with output_dir=FOLDER.",
            )

        # A resumed run may have other settings of validation.
        checkpoint = load_checkpoint(path, self.accelerator.device)
        check_steps(self.config, checkpoint.head.config)
        return checkpoint

    def _new_head(self) -> DraftHead:
        """A head with seeded weights."""
        components = self.components
        target = components.target
        draft = head_architecture(self.config, target.config, components.tokenizer)
        context = InitContext(target, components.folder, components.data.vocab_map, self.accelerator.device)
        return new_head(self.config, draft, context)

    def _check_state_format(self, checkpoint: Checkpoint, now: str) -> None:
        """Raise UserError if the checkpoint was trained on hidden states in another format than ``now``."""
        data = read_metadata(checkpoint.folder).get("data")
        before = data.get("states", "computed") if isinstance(data, dict) else "computed"
        if before != now:
            raise UserError(
                f"The run in {self.folder.path} learned from states in the format {before}, and these are "
                f"{now}.",
                "Restore them, or start a new run with output_dir=FOLDER.",
            )

    def _make_validator(self) -> Validator | None:
        """The validation of this process, or None without ``validation.every``.

        Each process decodes its share of the prompts. Processes that share the target decode all prompts
        together.
        """
        settings = self.config.validation
        if not settings.every:
            return None

        # Prompts of this process.
        cut = self.components.cut
        if cut is None:
            target = self.components.target
            mine = self.prompts[self.accelerator.process_index :: self.accelerator.num_processes]
        else:
            target = cut
            mine = self.prompts

        # Token ids and categories.
        data = self.components.data
        prompts = [data.heldout_prompts[i] for i in mine]
        categories = [data.groups[data.heldout_groups[i]] for i in mine]
        return Validator(target, prompts, settings, categories)

    def _metadata(self, accept_lengths: dict[str, float] | None = None) -> dict[str, Any]:
        """Contents of ``eagle_kit.json`` beside the weights. Updates the peak memory in the state.

        Args:
            accept_lengths: decoded accept length by shape, or None if the head was not validated.
        """
        # Counters and settings.
        peak = peak_memory_gb(str(self.accelerator.device)) or 0.0
        self.state.peak_memory_gb = max(self.state.peak_memory_gb, peak)
        about = metadata(
            self.config, self.accelerator, self.components, self.state, self.options.command, accept_lengths
        )

        # Validations so far; rows of old runs have no "tokens".
        about["judged"] = [
            {"tokens_seen": row["tokens"], "accept_length": row["accept_length"]}
            for row in self.folder.validations.rows()
            if "tokens" in row
        ]
        if self.tokens_before:
            about["tokens_before"] = self.tokens_before

        # Captured hidden states.
        store = self.stepper.store
        about["data"]["states"] = _state_format(store)
        if store is not None:
            about["data"]["source"] = store.manifest["data"]["source"]
        return about

    def _tokens_before(self, checkpoint: Checkpoint | None) -> int:
        """Training tokens of the draft of ``head.start_from`` and of its predecessors.

        A checkpoint has the number in its metadata, so a resumed run does not need that draft.

        Returns:
            The number; 0 without ``head.start_from``, and for a draft of another trainer.
        """
        if checkpoint is not None:
            return int(read_metadata(checkpoint.folder).get("tokens_before", 0))
        first_draft = self.config.head.first_draft
        if first_draft is None:
            return 0
        about = DraftFolder.open(first_draft, self.components.target.config).files.metadata
        return sum(about.get(name, 0) for name in ("tokens_seen", "tokens_before"))

    def _print(self, text: str) -> None:
        """Print on the main process."""
        if self.accelerator.is_main_process:
            print(text, flush=True)


def _state_format(store: StateStore | None) -> str:
    """Format of the hidden states that the head is trained on; "computed" if none is lossy."""
    if store is None or store.is_exact:
        return "computed"
    return store.format


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """Turn a row of ``metrics.jsonl`` into scalars for a tracker; None values are left out.

    Entries of lists and dictionaries get the names ``name/index`` and ``name/key``.
    """
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat |= {f"{name}/{i}": number for i, number in enumerate(value)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{key}": number for key, number in value.items()}
        elif name != "step":
            flat[name] = value
    return {name: value for name, value in flat.items() if value is not None}
