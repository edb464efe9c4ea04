"""One optimiser step: rows of the global batch -> gradients -> optimiser -> average of weights.

Legend: T packed tokens of a micro_batch, K steps of training-time test.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
"""Optimiser steps in a row whose loss or gradient is not finite, after which a run ends."""
TRIM_EVERY = 32
"""Steps between two returns of freed memory: the gaps that rows of many sizes leave add up to gigabytes."""


@dataclass(frozen=True)
class StepResult:
    """Figures of one finished optimiser step, over the global batch.

    Attributes:
        loss: what was minimised: losses of rows weighted by step and, unless ``loss_normalisation`` says
            otherwise, divided by the sum of the step weights and by all supervised rows (those whose target
            token the draft cannot say add nothing, and are known only after the target has run).
        loss_per_step: mean loss of each TTT step over the rows that carry loss, K numbers.
        learned_per_step: share of the supervised rows that carry loss, K numbers.
        match_per_step: share of all supervised rows whose best draft token is the target's, K numbers.
        simulated_accept_length: 1 + the mean number of leading steps that match, over all rows.
        simulated_of: the same by group of documents, for the groups of this step's rows; empty where there
            is one group only.
        learning_rate: of this step.
        grad_norm: before clipping.
        tokens: tokens of the packed rows.
        supervised_tokens: rows with loss at step 0.
        seconds: wall time.
        clock: where it went, in this process.
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
        """False where loss or gradient was not, so that the step changed nothing."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the packed rows per second, over all processes."""
        return self.tokens / self.seconds

    def row(self, step: int) -> dict[str, Any]:
        """The row of ``metrics.jsonl``."""
        return {
            "step": step,
            "loss": _or_none(self.loss),
            "lr": self.learning_rate,
            "grad_norm": _or_none(self.grad_norm),
            "loss_per_step": [_or_none(loss) for loss in self.loss_per_step],
            "learned_per_step": self.learned_per_step,
            "match_per_step": self.match_per_step,
            "simulated_accept_length": self.simulated_accept_length,
            **({"simulated_accept_length_of": self.simulated_of} if self.simulated_of else {}),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            **({} if self.is_finite else {"skipped": True}),
            "seconds": {name: round(value, 4) for name, value in self.clock.seconds().items()},
        }


def _or_none(number: float) -> float | None:
    """Turn NaN and infinities, which JSON does not have, into None."""
    return number if math.isfinite(number) else None


class Stepper:
    """Takes optimiser steps. Owns the strategy with the optimiser, and ``ema``, the average of weights or
    None; mutates head, all of these and the state it is given.

    Args:
        head: in fp32, trained in place.
        schedule: learning rate by step.
        store: captured states on disk, or None to run the target every time.
        sharding: of the head, see ``train.optim.choose.make_strategy``.
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
        self.training, self.accelerator, self.schedule, self.store = training, accelerator, schedule, store
        self.seed, self._expected_step = config.seed, -1
        self.target, self.data, self.head = components.target, components.data, head
        shares = training.shares_target
        everyone = (lambda mine: not sum_numbers(accelerator, [float(not mine)])[0]) if shares else bool
        source = state_source(self.target, training.target_placement, components.cut)
        is_cuda = self.target.embed_tokens.weight.is_cuda
        self.features = FeatureSource(source, head.capture, store, everyone, pin=is_cuda)
        self._parts = parts_of(config.data, self.data)
        self.order = self._make_order()
        share = training.sequences_per_step // accelerator.num_processes
        self.micro_batches_per_step = training.gradient_accumulation or share
        self.rows_per_micro_batch = share // self.micro_batches_per_step
        device, rows, token_map = accelerator.device, self.target.head_weight, head.token_map
        if token_map is not None:
            rows = rows[token_map.to(rows.device)].contiguous()

        # What the head learns from.
        learning = training.learning
        weight = self.target.head_weight.to(device)
        confidence = learning.confidence_weight if head.predicts_confidence else 0.0
        objective = Objective.of(learning.losses, learning.lk_eta, head, weight, confidence)
        objective = replace(
            objective,
            regression=learning.regression,
            detach_steps=learning.detach_steps,
            dpace_alpha=learning.dpace_alpha,
            form=self.target.logit_form,
        )
        sampled = training.row_sampling
        self._drop = None if sampled is None else RowDrop(sampled, config.seed, 0)

        embeds = self.target.embed_tokens.weight.to(device)
        module = TTTModule(head, embeds, rows.to(device), training, objective)
        self.strategy = make_strategy(sharding, module, training, accelerator)
        self.ema = None if training.ema_decay is None else Ema(head, training.ema_decay)
        self._bad_rows: list[int] = []  # of the last step, whose loss was not finite

    def step(self, state: TrainState) -> StepResult:
        """One optimiser step on the rows that belong to ``state.step``; advances ``state``.

        Raises:
            UserError: loss or gradient was not finite several times in a row.
        """
        # Rows of the step, as packed micro-batches.
        started = time.perf_counter()
        clock = StepClock(self.accelerator.device)
        if state.step != self._expected_step:
            self.features.expect(self._rows_from(state.step))
        micro_batches = self._micro_batches(state.step)
        clock.lap("data")

        # Counts of all processes, by which losses are normalised.
        steps = self._ttt_length(state.step)
        totals = sum_numbers(
            self.accelerator,
            [
                *(sum(micro_batch.plan.counts[k] for micro_batch in micro_batches) for k in range(steps)),
                sum(micro_batch.num_documents for micro_batch in micro_batches),
                sum(len(micro_batch.ids) for micro_batch in micro_batches),
                *(sum(counts) for counts in zip(*(one.group_counts for one in micro_batches), strict=True)),
            ],
        )
        clock.lap("communication")
        counts = totals[:steps]
        num_documents = totals[steps]
        tokens = int(totals[steps + 1])
        group_counts = totals[steps + 2 :]

        # Backward and update.
        loss, figures = self._backward(micro_batches, counts, num_documents, state.step, clock)
        rate = self.schedule.learning_rate(state.step)
        grad_norm = self.strategy.update(rate, self.training.clip_norm)
        if self.ema is not None and math.isfinite(grad_norm):
            self.ema.update(state.step)
        if self.accelerator.device.type == "cpu" and state.step % TRIM_EVERY == 0:
            release_free_memory()
        clock.lap("optimizer")

        # Sum the figures, and advance the state.
        loss, *flat = sum_numbers(self.accelerator, [loss, *figures.tolist()])
        clock.lap("communication")
        self._count_skipped(state, math.isfinite(loss) and math.isfinite(grad_norm))
        seconds = time.perf_counter() - started
        state.step += 1
        self._expected_step = state.step
        if self.order.ends_pass(state.step - 1):
            self.features.flush()  # the next pass may give these rows to another process
        state.tokens += tokens
        state.supervised_tokens += int(counts[0])
        state.seconds += seconds

        # Means over the positions that were supervised or learned.
        total = TTTOutput.unpack(torch.tensor(loss), torch.tensor(flat, dtype=torch.float64), steps)
        supervised = torch.tensor(counts, dtype=torch.float64).clamp_min(1.0)
        return StepResult(
            loss=loss,
            loss_per_step=(total.losses / total.learned.clamp_min(1.0)).tolist(),
            learned_per_step=(total.learned / supervised).tolist(),
            match_per_step=(total.matches / supervised).tolist(),
            simulated_accept_length=1.0 + sum(total.leading.tolist()) / max(1.0, counts[0]),
            simulated_of=self._by_group(total.leading_of.tolist(), group_counts),
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=tokens,
            supervised_tokens=int(counts[0]),
            seconds=seconds,
            clock=clock,
        )

    def _by_group(self, leading: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Simulated accept length by group; empty where there is one group only."""
        found = zip(self.data.groups, leading, counts, strict=True)
        return {name: 1.0 + hits / n for name, hits, n in found if n} if len(self.data.groups) > 1 else {}

    def _make_order(self) -> DataOrder:
        size, steps = self.training.sequences_per_step, self.schedule.total_steps
        return DataOrder(self._parts, size, self.seed, steps)

    def _count_skipped(self, state: TrainState, is_finite: bool) -> None:
        """Count a step that was not finite, and end the run after several in a row."""
        state.num_skipped_now = 0 if is_finite else state.num_skipped_now + 1
        state.num_skipped += not is_finite
        if state.num_skipped_now < MOST_SKIPPED:
            return
        mine = [int(row) for rows in self._rows_of(state.step, self.order) for row in rows]
        found = gather_objects(self.accelerator, (self._bad_rows, mine))
        bad = [row for rows, _ in found for row in rows]
        rows = sorted(bad or [row for _, rows in found for row in rows])
        raise UserError(
            f"Loss or gradient was not finite in {MOST_SKIPPED} steps in a row; in step {state.step + 1} "
            f"with the packed rows {', '.join(map(str, rows))}.",
            "Check the target's weights and the row's texts, or start a new run with a lower "
            "training.learning_rate or training.precision=float32.",
        )

    def close(self) -> None:
        """Stop reading ahead; states that wait for their shard are written."""
        self._expected_step = -1
        self.features.close()

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        length, rule, drop = self._ttt_length(step), self.training.loss_rows, self._drop
        drop = None if drop is None else drop._replace(step=step)
        return [
            make_micro_batch(self.data, rows, length, self.accelerator.device, rule, drop)
            for rows in self._rows_of(step, self.order)
        ]

    def _rows_of(self, step: int, order: DataOrder) -> list[list[int]]:
        """The rows of each forward of this process."""
        size = self.rows_per_micro_batch
        mine = order.share_of(step, self.accelerator.process_index, self.accelerator.num_processes)
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    def _rows_from(self, first: int) -> Iterator[list[int]]:
        """:meth:`_rows_of` of all steps from ``first``, for another thread, so with an order of its own."""
        order = self._make_order()
        for step in range(first, self.schedule.total_steps):
            yield from self._rows_of(step, order)

    def _ttt_length(self, step: int) -> int:
        """Steps of training-time test, which a curriculum lets grow."""
        return ttt_length_at(self.training, step, self.schedule.total_steps)

    def _backward(
        self,
        micro_batches: list[MicroBatch],
        counts: Sequence[float],
        num_documents: float,
        step: int,
        clock: StepClock,
    ) -> tuple[float, torch.Tensor]:
        """Add every forward's gradient; returns this process's loss and :attr:`TTTOutput.figures`."""
        total, figures = 0.0, []
        sums = torch.zeros(4 * len(counts) + len(self.data.groups), dtype=torch.float64)
        for number, micro_batch in enumerate(micro_batches, 1):
            last = number == len(micro_batches)
            step_weights = self.training.weights[: len(counts)]
            normalisation = self.training.loss_normalisation
            weights = row_weights(micro_batch, step_weights, normalisation, counts, num_documents)
            clock.lap("data")
            features = self.features.get(micro_batch)
            clock.lap("capture")
            inputs = self._with_noise(features, micro_batch, step)
            out = self.strategy.forward(micro_batch, inputs, features.hidden, weights, last=last)
            clock.lap("forward")
            # Where a loss is not finite no gradient is, so that all processes skip the step.
            loss_of_all = out.loss * torch.where(out.loss.detach().isfinite(), 1.0, math.nan)
            self.strategy.backward(loss_of_all, last=last)  # outside of autocast, which would round fp32 sums
            clock.lap("backward")
            figures.append(torch.cat((out.loss.detach().double()[None], out.figures)))
        self._bad_rows = []
        for micro_batch, mine in zip(micro_batches, torch.stack(figures).cpu(), strict=True):
            loss = float(mine[0])  # the first and only place of a step where the host waits for its forwards
            if not math.isfinite(loss):
                self._bad_rows += micro_batch.numbers
            total += loss
            sums += mine[1:]
        return total, sums

    def _with_noise(self, features: TargetFeatures, micro_batch: MicroBatch, step: int) -> TargetFeatures:
        """Features that the head reads, with noise; the teacher's states stay as they are."""
        noise = self.training.learning.feature_noise
        layers = len(self.head.capture)
        if noise is None:
            return features
        clean = features.aux if layers else features.hidden
        noisy = add_noise(clean, micro_batch, noise, max(1, layers), self.seed, step)
        return features._replace(**{"aux" if layers else "hidden": noisy})
