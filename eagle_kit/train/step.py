"""One optimiser step: rows of the global batch -> gradients -> AdamW.

Legend: T packed tokens of a forward, K steps of training-time test.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.kernels.cpu_memory import release_free_memory
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.train.batch import Forward, make_forward, row_weights
from eagle_kit.train.cache import StateStore
from eagle_kit.train.module import TTTModule, autocast
from eagle_kit.train.order import DataOrder
from eagle_kit.train.parallel import sum_numbers
from eagle_kit.train.schedule import Schedule
from eagle_kit.train.setup import Ingredients
from eagle_kit.train.state import TrainState
from eagle_kit.train.strategy import make_strategy
from eagle_kit.train.teacher import TargetFeatures, capture_features

if TYPE_CHECKING:
    from accelerate import Accelerator

TRIM_EVERY = 8
"""Steps between two returns of freed memory: the gaps that rows of many sizes leave add up to gigabytes."""


@dataclass(frozen=True)
class StepResult:
    """Figures of one finished optimiser step, over the global batch.

    Attributes:
        loss: what was minimised: cross-entropies weighted by step, divided by the sum of the step weights and
            by all supervised rows (those whose target token the draft cannot say add nothing, and are known
            only after the target has run).
        loss_per_step: mean cross-entropy of each TTT step over the rows that carry loss, K numbers.
        learned_per_step: share of the supervised rows that carry loss, K numbers.
        match_per_step: share of all supervised rows whose best draft token is the target's, K numbers.
        simulated_accept_length: 1 + the mean number of leading steps that match, over all rows.
        learning_rate: of this step.
        grad_norm: before clipping.
        tokens: tokens of the packed rows.
        supervised_tokens: rows with loss at step 0.
        seconds: wall time.
    """

    loss: float
    loss_per_step: list[float]
    learned_per_step: list[float]
    match_per_step: list[float]
    simulated_accept_length: float
    learning_rate: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the packed rows per second, over all processes."""
        return self.tokens / self.seconds

    def row(self, step: int) -> dict[str, Any]:
        """The row of ``metrics.jsonl``."""
        return {
            "step": step,
            "loss": self.loss,
            "lr": self.learning_rate,
            "grad_norm": self.grad_norm,
            "loss_per_step": self.loss_per_step,
            "learned_per_step": self.learned_per_step,
            "match_per_step": self.match_per_step,
            "simulated_accept_length": self.simulated_accept_length,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
        }


class Stepper:
    """Takes optimiser steps. Owns the strategy and its optimiser; mutates the head, the optimiser
    and the state it is given.

    Args:
        head: in fp32, trained in place.
        schedule: learning rate by step.
        store: captured states on disk, or None to run the target every time.
        sharding: how the processes share the head, see :func:`eagle_kit.train.strategy.make_strategy`.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: "Accelerator",
        ingredients: Ingredients,
        head: DraftHead,
        schedule: Schedule,
        store: StateStore | None = None,
        sharding: str = "none",
    ) -> None:
        training = config.training
        self.training, self.accelerator, self.schedule, self.store = training, accelerator, schedule, store
        self.target, self.data, self.head = ingredients.target, ingredients.data, head
        self.order = DataOrder(len(self.data), training.sequences_per_step, config.seed)
        share = training.sequences_per_step // accelerator.num_processes
        self.forwards_per_step = training.gradient_accumulation or share
        self.rows_per_forward = share // self.forwards_per_step
        device, rows, token_map = accelerator.device, self.target.head_weight, head.token_map
        if token_map is not None:
            rows = rows[token_map.to(rows.device)].contiguous()
        module = TTTModule(head, self.target.embed_tokens.weight.to(device), rows.to(device), training)
        self.strategy = make_strategy(sharding, module, training, accelerator)
        self.optimizer = self.strategy.optimizer

    def step(self, state: TrainState) -> StepResult:
        """One optimiser step on the rows that belong to ``state.step``; advances ``state``."""
        started = time.perf_counter()
        forwards = self._forwards(state.step)
        steps = self.training.ttt_length
        totals = sum_numbers(
            self.accelerator,
            [
                *(sum(forward.plan.counts[k] for forward in forwards) for k in range(steps)),
                sum(forward.num_documents for forward in forwards),
                sum(len(forward.ids) for forward in forwards),
            ],
        )
        counts, num_documents, tokens = totals[:steps], totals[steps], int(totals[steps + 1])
        sums = self._backward(forwards, counts, num_documents)
        rate = self.schedule.learning_rate(state.step)
        grad_norm = self.strategy.update(rate, self.training.clip_norm)
        if self.accelerator.device.type == "cpu" and state.step % TRIM_EVERY == 0:
            release_free_memory()
        summed = sum_numbers(self.accelerator, sums)
        seconds = time.perf_counter() - started
        state.step += 1
        state.tokens += tokens
        state.supervised_tokens += int(counts[0])
        state.seconds += seconds
        losses, matches, leading, learned = (summed[1 + i * steps : 1 + (i + 1) * steps] for i in range(4))
        return StepResult(
            loss=summed[0],
            loss_per_step=[value / max(1.0, count) for value, count in zip(losses, learned, strict=True)],
            learned_per_step=[value / max(1.0, count) for value, count in zip(learned, counts, strict=True)],
            match_per_step=[value / max(1.0, count) for value, count in zip(matches, counts, strict=True)],
            simulated_accept_length=1.0 + sum(leading) / max(1.0, counts[0]),
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=tokens,
            supervised_tokens=int(counts[0]),
            seconds=seconds,
        )

    def _forwards(self, step: int) -> list[Forward]:
        accelerator, size = self.accelerator, self.rows_per_forward
        mine = self.order.share_of(step, accelerator.process_index, accelerator.num_processes)
        return [
            make_forward(self.data, mine[i : i + size], self.training.ttt_length, accelerator.device)
            for i in range(0, len(mine), size)
        ]

    def _backward(
        self, forwards: list[Forward], counts: Sequence[float], num_documents: float
    ) -> list[float]:
        """Add every forward's gradient; returns this process's loss, then K loss sums, matches, leading
        matches and rows that carried loss, end to end."""
        total = 0.0
        sums = torch.zeros(4, len(counts), dtype=torch.float64)
        for number, forward in enumerate(forwards, 1):
            last = number == len(forwards)
            weights = row_weights(
                forward, self.training.weights, self.training.loss_normalisation, counts, num_documents
            )
            features = self._features(forward)
            with autocast(self.training, forward.ids.device):
                out = self.strategy.forward(forward, features, weights, last=last)
                self.strategy.backward(out.loss, last=last)
            total += float(out.loss.detach())
            sums += torch.stack(out[1:])
        return [total, *sums.flatten().tolist()]

    def _features(self, forward: Forward) -> TargetFeatures:
        """The target's view of the rows, from the store when it holds all of them."""
        kept = None if self.store is None else self.store.load(forward.numbers, forward.ids.device)
        if self.training.target_placement == "fsdp":  # its layers are gathered by all processes or by none
            missing = sum_numbers(self.accelerator, [float(kept is None)])[0]
            kept = None if missing else kept
        if kept is not None:
            return TargetFeatures(**kept)
        features = capture_features(
            self.target, forward.ids, forward.doc_start, self.head.capture, forward.plan.needed
        )
        if self.store is not None:
            self.store.save(forward.numbers, forward.lengths, features._asdict())
        return features
