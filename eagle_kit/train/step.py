"""One optimiser step: rows of the global batch -> gradients -> AdamW.

Legend: T packed tokens of a forward, K steps of training-time test.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.config.train import TrainConfig, TrainingConfig
from eagle_kit.kernels.cpu_memory import release_free_memory
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.train.batch import Forward, make_forward, row_weights
from eagle_kit.train.cache import StateStore
from eagle_kit.train.noise import add_noise
from eagle_kit.train.order import DataOrder
from eagle_kit.train.parallel import sum_gradients, sum_numbers
from eagle_kit.train.schedule import Schedule
from eagle_kit.train.setup import Ingredients
from eagle_kit.train.state import TrainState
from eagle_kit.train.teacher import TargetFeatures, capture_features
from eagle_kit.train.ttt import ttt_forward_backward

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
    """Takes optimiser steps. Owns the optimiser; mutates the head, the optimiser and the state it is given.

    Args:
        head: in fp32, trained in place.
        schedule: learning rate by step.
        store: captured states on disk, or None to run the target every time.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: "Accelerator",
        ingredients: Ingredients,
        head: DraftHead,
        schedule: Schedule,
        store: StateStore | None = None,
    ) -> None:
        training = config.training
        self.seed, self.regression = config.seed, config.regression
        self.training, self.accelerator, self.schedule, self.store = training, accelerator, schedule, store
        self.target, self.data, self.head = ingredients.target, ingredients.data, head
        self.optimizer = make_optimizer(head, training)
        self.parameters = [p for p in head.parameters() if p.requires_grad]
        self.order = DataOrder(len(self.data), training.sequences_per_step, config.seed)
        share = training.sequences_per_step // accelerator.num_processes
        self.forwards_per_step = training.gradient_accumulation or share
        self.rows_per_forward = share // self.forwards_per_step
        rows, token_map = self.target.head_weight, head.token_map
        self.target_rows = rows if token_map is None else rows[token_map].contiguous()

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
        sums = self._backward(forwards, counts, num_documents, state.step)
        sum_gradients(self.accelerator, self.parameters)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm or float("inf"))
        )
        rate = self.schedule.learning_rate(state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
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
        self, forwards: list[Forward], counts: Sequence[float], num_documents: float, step: int
    ) -> list[float]:
        """Add every forward's gradient; returns this process's loss, then K loss sums, matches, leading
        matches and rows that carried loss, end to end."""
        total = 0.0
        sums = torch.zeros(4, len(counts), dtype=torch.float64)
        for forward in forwards:
            weights = row_weights(
                forward, self.training.weights, self.training.loss_normalisation, counts, num_documents
            )
            features, inputs = self._features(forward), None
            if (noise := self.training.feature_noise) is not None:
                inputs = add_noise(features, noise, forward, seed=self.seed, step=step)
            with self.accelerator.autocast():
                result = ttt_forward_backward(
                    self.head,
                    self.target.embed_tokens.weight,
                    forward.ids,
                    features,
                    self.target_rows,
                    forward.plan,
                    weights,
                    inputs=inputs,
                    regression=self.regression,
                    detach_steps=self.training.detach_steps,
                )
            total += result.loss
            sums += torch.stack((result.losses, result.matches, result.leading, result.learned))
        return [total, *sums.flatten().tolist()]

    def _features(self, forward: Forward) -> TargetFeatures:
        """The target's view of the rows, from the store when it holds all of them."""
        if self.store is not None:
            kept = self.store.load(forward.numbers, forward.ids.device)
            if kept is not None:
                return TargetFeatures(**kept)
        features = capture_features(
            self.target, forward.ids, forward.doc_start, self.head.capture, forward.plan.needed
        )
        if self.store is not None:
            self.store.save(forward.numbers, forward.lengths, features._asdict())
        return features


def make_optimizer(head: DraftHead, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over what is trained, with weight decay on matrices only."""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True
    )
