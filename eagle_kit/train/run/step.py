"""One optimiser step of training: packed rows of the global batch, gradients, optimiser, average of weights.

Legend: K steps of training-time test.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.data.hidden_states.store import StateStore
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.objective.batch import MicroBatch, make_micro_batch, row_weights
from eagle_kit.objective.loss import Objective, TTTOutput
from eagle_kit.objective.noise import add_noise
from eagle_kit.objective.row_drop import RowDrop
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt_module import TTTModule
from eagle_kit.ops.cpu.memory import release_free_memory
from eagle_kit.train.optim.choose import make_strategy
from eagle_kit.train.optim.ema import Ema
from eagle_kit.train.optim.schedule import Schedule, ttt_length_at
from eagle_kit.train.parallel.processes import gather_objects, sum_numbers
from eagle_kit.train.run.checkpoint import TrainState
from eagle_kit.train.run.clock import StepClock
from eagle_kit.train.run.feature_source import FeatureSource
from eagle_kit.train.run.order import DataOrder, parts_of
from eagle_kit.train.run.setup import TrainingComponents
from eagle_kit.train.run.state_source import state_source

if TYPE_CHECKING:
    from accelerate import Accelerator

MOST_SKIPPED = 3
"""Consecutive optimiser steps with a loss or gradient that is not finite, after which a run ends."""
TRIM_EVERY = 32
"""Optimiser steps between two releases of freed host memory. Rows of many sizes fragment it by gigabytes."""


@dataclass(frozen=True)
class StepResult:
    """Figures of one finished optimiser step, over the global batch.

    A supervised position is a position of a response; a loss position is a supervised position whose target
    token is in the draft vocabulary. Loss positions are known only after the target has run.

    Attributes:
        loss: the minimised loss: losses of the loss positions, weighted by TTT step. Unless
            ``loss_normalisation`` says otherwise, it is divided by the sum of the step weights and by the
            number of supervised positions.
        loss_per_step: mean loss over the loss positions of each TTT step, K numbers.
        learned_per_step: share of the supervised positions that are loss positions, K numbers.
        match_per_step: share of the supervised positions whose most likely draft token is the target's, K
            numbers.
        simulated_accept_length: 1 + the mean number of leading TTT steps that match, over all positions.
        simulated_of: ``simulated_accept_length`` by group of documents, for the groups in this step; empty if
            the data has one group.
        learning_rate: learning rate of this step.
        grad_norm: gradient norm before clipping.
        tokens: tokens of the packed rows.
        supervised_tokens: supervised positions at TTT step 0.
        seconds: wall time.
        clock: wall time by part of the step, in this process.
    """

    loss: float
    loss_per_step: list[float]
    learned_per_step: list[float]
    match_per_step: list[float]
    simulated_accept_length: float
    simulated_of: dict[str, float]
    learning_rate: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    seconds: float
    clock: StepClock

    @property
    def is_finite(self) -> bool:
        """False if the loss or the gradient was not finite; such a step changes no weight."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the packed rows per second, over all processes."""
        return self.tokens / self.seconds

    def row(self, step: int) -> dict[str, Any]:
        """Row of ``metrics.jsonl`` for the step with this number."""
        row: dict[str, Any] = {
            "step": step,
            "loss": _or_none(self.loss),
            "lr": self.learning_rate,
            "grad_norm": _or_none(self.grad_norm),
            "loss_per_step": [_or_none(loss) for loss in self.loss_per_step],
            "learned_per_step": self.learned_per_step,
            "match_per_step": self.match_per_step,
            "simulated_accept_length": self.simulated_accept_length,
        }
        if self.simulated_of:
            row["simulated_accept_length_of"] = self.simulated_of
        row["tokens"] = self.tokens
        row["supervised_tokens"] = self.supervised_tokens
        row["tokens_per_s"] = round(self.tokens_per_s, 1)
        if not self.is_finite:
            row["skipped"] = True
        row["seconds"] = {name: round(value, 4) for name, value in self.clock.seconds().items()}
        return row


def _or_none(number: float) -> float | None:
    """Replace NaN and infinities, which JSON cannot represent, by None."""
    return number if math.isfinite(number) else None


class GlobalCounts(NamedTuple):
    """Sizes of one optimiser step over all processes.

    Attributes:
        supervised: supervised positions of each TTT step, K numbers.
        documents: documents with at least one loss position.
        tokens: tokens of the packed rows.
        groups: supervised positions at TTT step 0 in each group of documents.
    """

    supervised: list[float]
    documents: float
    tokens: int
    groups: list[float]


class Stepper:
    """Makes optimiser steps. Owns the strategy with the optimiser, and ``ema``, the average of the weights or
    None. Mutates the head, the strategy, the average and the state it is given.

    Args:
        head: draft head in fp32, trained in place.
        schedule: learning rate by step.
        store: captured hidden states on disk; None runs the target in every step.
        sharding: sharding of the head, see ``train.optim.choose.make_strategy``.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: "Accelerator",
        components: TrainingComponents,
        head: DraftHead,
        schedule: Schedule,
        store: StateStore | None = None,
        sharding: str = "none",
    ) -> None:
        training = config.training
        self.training = training
        self.accelerator = accelerator
        self.schedule = schedule
        self.store = store
        self.seed = config.seed
        self.target = components.target
        self.data = components.data
        self.head = head

        # Features of the target. Processes that share a target must all find a row in their stores, or none.
        def all_processes(mine: bool) -> bool:
            num_without = sum_numbers(accelerator, [float(not mine)])[0]
            return not num_without

        self.features = FeatureSource(
            state_source(self.target, training.target_placement, components.cut),
            head.capture,
            store,
            all_processes if training.shares_target else bool,
            pin=self.target.embed_tokens.weight.is_cuda,
        )

        # Packed rows of every step, and their split over processes and micro-batches.
        self._parts = parts_of(config.data, self.data)
        self.order = self._make_order()
        rows_per_process = training.sequences_per_step // accelerator.num_processes
        self.micro_batches_per_step = training.gradient_accumulation or rows_per_process
        self.rows_per_micro_batch = rows_per_process // self.micro_batches_per_step

        # Objective.
        device = accelerator.device
        learning = training.learning
        target_head = self.target.head_weight.to(device)
        confidence = learning.confidence_weight if head.predicts_confidence else 0.0
        objective = Objective.of(learning.losses, learning.lk_eta, head, target_head, confidence)
        objective = replace(
            objective,
            regression=learning.regression,
            detach_steps=learning.detach_steps,
            dpace_alpha=learning.dpace_alpha,
            form=self.target.logit_form,
        )
        self._drop: RowDrop | None = None
        if training.row_sampling is not None:
            self._drop = RowDrop(training.row_sampling, config.seed, 0)

        # Optimiser. The output layer of the target is reduced to the draft vocabulary.
        target_rows = self.target.head_weight
        if head.token_map is not None:
            target_rows = target_rows[head.token_map.to(target_rows.device)].contiguous()
        embeds = self.target.embed_tokens.weight.to(device)
        module = TTTModule(head, embeds, target_rows.to(device), training, objective)
        self.strategy = make_strategy(sharding, module, training, accelerator)
        self.ema = None if training.ema_decay is None else Ema(head, training.ema_decay)

        # Next step of the prefetch, and packed rows of the last step whose loss was not finite.
        self._expected_step = -1
        self._bad_rows: list[int] = []

    def step(self, state: TrainState) -> StepResult:
        """Make one optimiser step on the rows of ``state.step``; advances ``state``.

        Raises:
            UserError: loss or gradient was not finite in several consecutive steps.
        """
        # Rows of the step, as packed micro-batches.
        started = time.perf_counter()
        clock = StepClock(self.accelerator.device)
        if state.step != self._expected_step:
            self.features.expect(self._rows_from(state.step))
        micro_batches = self._micro_batches(state.step)
        clock.lap("data")

        # Counts over all processes, which normalise the losses.
        num_steps = self._ttt_length(state.step)
        counts = self._count(micro_batches, num_steps)
        clock.lap("communication")

        # Backward and update.
        loss, figures = self._backward(micro_batches, counts, state.step, clock)
        rate = self.schedule.learning_rate(state.step)
        grad_norm = self.strategy.update(rate, self.training.clip_norm)
        if self.ema is not None and math.isfinite(grad_norm):
            self.ema.update(state.step)
        if self.accelerator.device.type == "cpu" and state.step % TRIM_EVERY == 0:
            release_free_memory()
        clock.lap("optimizer")

        # Sum the figures over all processes.
        loss, *flat = sum_numbers(self.accelerator, [loss, *figures.tolist()])
        clock.lap("communication")
        self._count_skipped(state, math.isfinite(loss) and math.isfinite(grad_norm))
        seconds = time.perf_counter() - started

        # Advance the state. The next pass over the data may give rows of this process to another one.
        state.step += 1
        self._expected_step = state.step
        if self.order.ends_pass(state.step - 1):
            self.features.flush()
        num_supervised = int(counts.supervised[0])
        state.tokens += counts.tokens
        state.supervised_tokens += num_supervised
        state.seconds += seconds

        # Means over the supervised positions or the loss positions.
        sums = torch.tensor(flat, dtype=torch.float64)
        total = TTTOutput.unpack(torch.tensor(loss), sums, num_steps)
        supervised = torch.tensor(counts.supervised, dtype=torch.float64).clamp_min(1.0)
        num_leading = sum(total.leading.tolist())
        return StepResult(
            loss=loss,
            loss_per_step=(total.losses / total.learned.clamp_min(1.0)).tolist(),
            learned_per_step=(total.learned / supervised).tolist(),
            match_per_step=(total.matches / supervised).tolist(),
            simulated_accept_length=1.0 + num_leading / max(1.0, counts.supervised[0]),
            simulated_of=self._by_group(total.leading_of.tolist(), counts.groups),
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=counts.tokens,
            supervised_tokens=num_supervised,
            seconds=seconds,
            clock=clock,
        )

    def close(self) -> None:
        """Stop the prefetch, and write captured hidden states that wait for their shard."""
        self._expected_step = -1
        self.features.close()

    def _make_order(self) -> DataOrder:
        """A new :class:`DataOrder` of this run."""
        size = self.training.sequences_per_step
        return DataOrder(self._parts, size, self.seed, self.schedule.total_steps)

    def _ttt_length(self, step: int) -> int:
        """Steps of training-time test in this optimiser step; a curriculum increases them."""
        return ttt_length_at(self.training, step, self.schedule.total_steps)

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        """Micro-batches of this process."""
        ttt_length = self._ttt_length(step)
        drop = None
        if self._drop is not None:
            drop = self._drop._replace(step=step)

        micro_batches = []
        for rows in self._rows_of(step, self.order):
            micro_batch = make_micro_batch(
                self.data, rows, ttt_length, self.accelerator.device, self.training.loss_rows, drop
            )
            micro_batches.append(micro_batch)
        return micro_batches

    def _rows_of(self, step: int, order: DataOrder) -> list[list[int]]:
        """Numbers of the packed rows in each micro-batch of this process."""
        size = self.rows_per_micro_batch
        mine = order.share_of(step, self.accelerator.process_index, self.accelerator.num_processes)
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    def _rows_from(self, first: int) -> Iterator[list[int]]:
        """:meth:`_rows_of` of all steps from ``first``, for the prefetch thread.

        It has an order of its own, since an order is not safe to share between threads.
        """
        order = self._make_order()
        for step in range(first, self.schedule.total_steps):
            yield from self._rows_of(step, order)

    def _count(self, micro_batches: list[MicroBatch], num_steps: int) -> GlobalCounts:
        """Sum the sizes of the micro-batches over all processes."""
        # Counts of this process.
        mine: list[float] = []
        for k in range(num_steps):
            mine.append(sum(micro_batch.plan.counts[k] for micro_batch in micro_batches))
        mine.append(sum(micro_batch.num_documents for micro_batch in micro_batches))
        mine.append(sum(len(micro_batch.ids) for micro_batch in micro_batches))
        for group in range(len(self.data.groups)):
            mine.append(sum(micro_batch.group_counts[group] for micro_batch in micro_batches))

        # One reduction for all of them.
        totals = sum_numbers(self.accelerator, mine)
        return GlobalCounts(
            supervised=totals[:num_steps],
            documents=totals[num_steps],
            tokens=int(totals[num_steps + 1]),
            groups=totals[num_steps + 2 :],
        )

    def _backward(
        self, micro_batches: list[MicroBatch], counts: GlobalCounts, step: int, clock: StepClock
    ) -> tuple[float, torch.Tensor]:
        """Add the gradients of every micro-batch to the head.

        Returns:
            The loss of this process, and the sum of its :attr:`TTTOutput.figures`.
        """
        figures = []
        for number, micro_batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)

            # Weights of the loss positions.
            weights = row_weights(
                micro_batch,
                self.training.weights[: len(counts.supervised)],
                self.training.loss_normalisation,
                counts.supervised,
                counts.documents,
            )
            clock.lap("data")

            # Features of the target.
            features = self.features.get(micro_batch)
            clock.lap("capture")

            # Forward.
            inputs = self._with_noise(features, micro_batch, step)
            out = self.strategy.forward(micro_batch, inputs, features.hidden, weights, last=is_last)
            clock.lap("forward")

            # Backward, outside of autocast, which would round fp32 sums. A loss that is not finite makes
            # every gradient NaN, so that all processes skip the step.
            loss = out.loss.detach()
            finite_or_nan = out.loss * torch.where(loss.isfinite(), 1.0, math.nan)
            self.strategy.backward(finite_or_nan, last=is_last)
            clock.lap("backward")
            figures.append(torch.cat((loss.double()[None], out.figures)))

        # Sum on the host. The copy is the only place of a step where the host waits for the forwards.
        total = 0.0
        num_figures = 4 * len(counts.supervised) + len(self.data.groups)
        sums = torch.zeros(num_figures, dtype=torch.float64)
        self._bad_rows = []
        for micro_batch, mine in zip(micro_batches, torch.stack(figures).cpu(), strict=True):
            micro_batch_loss = float(mine[0])
            if not math.isfinite(micro_batch_loss):
                self._bad_rows += micro_batch.numbers
            total += micro_batch_loss
            sums += mine[1:]
        return total, sums

    def _with_noise(self, features: TargetFeatures, micro_batch: MicroBatch, step: int) -> TargetFeatures:
        """Features with noise as input of the head. The hidden states of the teacher have none."""
        noise = self.training.learning.feature_noise
        if noise is None:
            return features
        num_layers = len(self.head.capture)
        if num_layers:
            aux = add_noise(features.aux_hidden_states, micro_batch, noise, num_layers, self.seed, step)
            return features._replace(aux_hidden_states=aux)
        hidden = add_noise(features.hidden, micro_batch, noise, 1, self.seed, step)
        return features._replace(hidden=hidden)

    def _by_group(self, leading: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Simulated accept length by group of documents; empty if the data has one group.

        Args:
            leading: sum of the leading TTT steps that match, by group.
            counts: supervised positions at TTT step 0, by group; a group without any is left out.
        """
        if len(self.data.groups) <= 1:
            return {}
        lengths = {}
        for name, num_leading, count in zip(self.data.groups, leading, counts, strict=True):
            if count:
                lengths[name] = 1.0 + num_leading / count
        return lengths

    def _count_skipped(self, state: TrainState, is_finite: bool) -> None:
        """Count a step that is not finite in ``state``.

        Raises:
            UserError: too many consecutive steps were not finite.
        """
        if is_finite:
            state.num_skipped_now = 0
            return
        state.num_skipped_now += 1
        state.num_skipped += 1
        if state.num_skipped_now < MOST_SKIPPED:
            return

        # Name the packed rows with a bad loss, or all rows of the step if only the gradient was bad.
        mine = [row for rows in self._rows_of(state.step, self.order) for row in rows]
        gathered = gather_objects(self.accelerator, (self._bad_rows, mine))
        named = [row for bad, _ in gathered for row in bad]
        if not named:
            named = [row for _, rows in gathered for row in rows]
        raise UserError(
            f"Loss or gradient was not finite in {MOST_SKIPPED} steps in a row; in step {state.step + 1} "
            f"with the packed rows {', '.join(map(str, sorted(named)))}.",
            "Check the target's weights and the row's texts, or start a new run with a lower "
            "training.learning_rate or training.precision=float32.",
        )
