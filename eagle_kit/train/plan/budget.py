"""Plan of a training within a budget of time: responses, training and expected accept length. Torch-free.

The training reads raw chats first, with the target's distribution as teacher. Responses of the target itself
are added early, and at the end it reads them alone. Responses must be generated. If the disk has room, the
target's hidden states are stored and rows are read several times, because the target's forward takes more
than half of the first pass. Rates are measured on this machine, so every number follows from the budget.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

ROW_TOKENS = 1024
"""Tokens of a packed sequence."""
RESERVED = 0.2
"""Share of the budget for tuning and evaluation, and for loading the target in every stage."""
RESPONSES = 0.35
"""Share of the rest for generating responses."""
TASK_SHARE = 1 / 3
"""Share of the responses' tokens that answer prompts of :mod:`eagle_kit.datagen.task_prompts`."""
RAW_PHASE = (0.0, 0.55)
"""Span of the training in which raw chats are drawn, as shares of its steps."""
OWN_PHASE = (0.1, 1.0)
"""The same for responses of the target. Where the spans overlap, both are drawn equally often."""
RAW_SHARE = OWN_PHASE[0] + (RAW_PHASE[1] - OWN_PHASE[0]) / 2
"""Share of the training's tokens that are raw chats."""
PASSES = 3
"""Passes over the raw chats if hidden states are stored."""
WITH_PROMPTS = 1.3
"""Tokens of packed sequences for each token of a generated response."""
WANTED_STEPS = 3000
"""Optimiser steps of a long training; with still more time, a step has more rows."""
MOST_ROWS_PER_STEP = 16
LEAST_STEPS = 20
LEAST_TRAINING = 0.25
"""Share of the planned training time that is granted, however long the stages before it took."""
SINGLE_RATE = 0.2
"""Rate of decoding one prompt at a time, as a share of the rate of a batch."""
PROMPTS_OF_A_TASK = (2, 32)
"""Minimum and maximum number of prompts of a task in the evaluation."""
BASE_RATE = 1.2e-3
"""Learning rate for the hidden size ``BASE_WIDTH``; wider targets take less, in inverse proportion."""
BASE_WIDTH = 576
LARGE_VOCAB = 65_536
"""Size of the target's vocabulary above which a head proposes 32,000 tokens, as published heads do."""
CURVE = (
    (192_000, 1.34, 1.69),
    (1_005_584, 1.505, 1.901),
    (2_008_872, 1.642, 2.025),
    (4_505_522, 1.764, 2.184),
    (6_437_698, 1.803, 2.194),
)
"""Tokens seen, and accept lengths in the shapes 4,1,5 and 5,4,16, of heads for SmolLM2-135M-Instruct: one of
half an hour, and the shipped one during its training (docs/results/training-runs.md)."""


@dataclass(frozen=True)
class TokenRates:
    """Measured rates in tokens per second.

    Attributes:
        responses: tokens of generated responses.
        training: tokens of packed sequences in training, with the target's forward.
        kept: tokens of packed sequences in training whose hidden states are stored.
    """

    responses: float
    training: float
    kept: float

    def seen(self, seconds: float, own: float, keeps: bool) -> tuple[float, float]:
        """Tokens that a training of some seconds sees.

        Args:
            seconds: time of the training.
            own: distinct tokens of packed sequences of responses.
            keeps: hidden states are stored, so that a row runs the target once.

        Returns:
            Tokens of all rows that the training sees, and distinct tokens of raw chats among them.
        """
        # Seconds of a token the first time, and of one that is read again.
        first = 1 / self.training
        again = first
        raw_share = RAW_SHARE
        if keeps:
            again = 1 / self.kept
            raw_share = RAW_SHARE / PASSES

        # All distinct tokens take ``first``, the others ``again``.
        extra = first - again
        seen = (seconds - own * extra) / (again + raw_share * extra)
        if own > (1 - RAW_SHARE) * seen:
            # There are more responses than the training reads, so it reads each at most once.
            seen = seconds / (again + (raw_share + 1 - RAW_SHARE) * extra)
        return seen, raw_share * seen


@dataclass(frozen=True)
class Phase:
    """Length of a training.

    Attributes:
        steps: optimiser steps.
        rows_per_step: packed sequences of ``ROW_TOKENS`` tokens in each.
    """

    steps: int
    rows_per_step: int

    @property
    def tokens(self) -> int:
        """Tokens of full rows."""
        return self.steps * self.rows_per_step * ROW_TOKENS

    @classmethod
    def of(cls, tokens: float, processes: int = 1) -> "Phase":
        """The phase that sees about ``tokens``, with an equal number of rows for each process."""
        rows = tokens / ROW_TOKENS
        per_step = min(max(round(rows / WANTED_STEPS), 2), MOST_ROWS_PER_STEP)
        per_step = math.ceil(per_step / processes) * processes
        return cls(max(int(rows / per_step), LEAST_STEPS), per_step)


@dataclass(frozen=True)
class Pilot:
    """Work that is measured before a plan.

    Attributes:
        responses: responses to generate.
        steps: optimiser steps of a training.
        rows: packed sequences in each of these steps.
        row_tokens: tokens of such a row.
    """

    responses: int
    steps: int
    rows: int
    row_tokens: int


@dataclass(frozen=True)
class Training:
    """A training within a time.

    Attributes:
        phase: its length.
        raw_tokens: distinct tokens of raw chats.
        keeps: the target's hidden states are stored, and rows are read several times.
    """

    phase: Phase
    raw_tokens: int
    keeps: bool


@dataclass(frozen=True)
class BudgetPlan:
    """Work of a budget.

    Attributes:
        response_tokens: tokens of responses to generate.
        training: training on these responses and on raw chats.
        responses_s: seconds of the responses.
        training_s: seconds of the training.
        reserved_s: seconds for tuning, for evaluation and for loading the target.
    """

    response_tokens: int
    training: Training
    responses_s: float
    training_s: float
    reserved_s: float

    @property
    def tokens(self) -> int:
        """Tokens that the head sees."""
        return self.training.phase.tokens

    def training_left_s(self, budget_s: float, spent_s: float) -> float:
        """Seconds for the training after stages that took ``spent_s`` of ``budget_s``."""
        left = budget_s - self.reserved_s - spent_s
        return max(left, LEAST_TRAINING * self.training_s)

    def prompts_of_a_task(self, response_rate: float, tokens: int, num_tasks: int, num_shapes: int) -> int:
        """Number of prompts of each task in the evaluation, which has a third of the reserved time.

        Args:
            response_rate: tokens per second of a batch of responses.
            tokens: tokens of a response. It is decoded plainly, and once in every shape.
            num_tasks: number of tasks.
            num_shapes: number of speculation shapes.
        """
        seconds = self.reserved_s / 3
        responses = seconds * SINGLE_RATE * response_rate / tokens
        fewest, most = PROMPTS_OF_A_TASK
        return min(max(int(responses / ((1 + num_shapes) * num_tasks)), fewest), most)


def plan_budget(
    budget_s: float, spent_s: float, rates: TokenRates, kept_tokens: float, processes: int = 1
) -> BudgetPlan:
    """Plan the work of a budget.

    Args:
        budget_s: seconds of all stages together.
        spent_s: seconds that the measurement of ``rates`` took.
        rates: measured rates.
        kept_tokens: tokens whose hidden states the disk has room for.
        processes: processes of the training.
    """
    reserved = RESERVED * budget_s
    left = max(budget_s - reserved - spent_s, 0.0)
    responses = RESPONSES * left
    response_tokens = responses * rates.responses
    training = plan_training(left - responses, response_tokens, rates, kept_tokens, processes)
    return BudgetPlan(int(response_tokens), training, responses, left - responses, reserved)


def plan_training(
    seconds: float, response_tokens: float, rates: TokenRates, kept_tokens: float, processes: int = 1
) -> Training:
    """Plan a training on responses and on raw chats.

    Args:
        seconds: time of the training.
        response_tokens: tokens of generated responses.
        rates, kept_tokens, processes: see :func:`plan_budget`.
    """
    own = WITH_PROMPTS * response_tokens
    seen, raw = rates.seen(seconds, own, keeps=True)
    distinct = raw + min(own, (1 - RAW_SHARE) * seen)
    keeps = distinct <= kept_tokens
    if not keeps:
        seen, raw = rates.seen(seconds, own, keeps=False)
    return Training(Phase.of(seen, processes), int(raw), keeps)


def learning_rate(hidden_size: int) -> float:
    """Learning rate for a target of this hidden size, rounded to two digits."""
    rate = min(BASE_RATE * BASE_WIDTH / hidden_size, BASE_RATE)
    return float(f"{rate:.1e}")


def draft_vocab_size(vocab_size: int) -> int:
    """Size of the draft vocabulary for a target with ``vocab_size`` tokens."""
    most = 8192 if vocab_size <= LARGE_VOCAB else 32_000
    return min(most, vocab_size)


def expected_accept_lengths(tokens: int) -> tuple[float, float]:
    """Expected accept lengths of a head that has seen ``tokens``, by :data:`CURVE`.

    They are linear in the logarithm of tokens between two points of the curve. Outside of the curve they
    follow the line through its first and its last point.

    Returns:
        Accept lengths, at least 1, of the chain 4,1,5 and of the tree 5,4,16.
    """
    # The two points.
    xs = [math.log(point[0]) for point in CURVE]
    x = math.log(max(tokens, 1))
    left = 0
    right = len(xs) - 1
    if xs[0] <= x <= xs[-1]:
        right = min(bisect_right(xs, x), right)
        left = right - 1

    # The line through them.
    share = (x - xs[left]) / (xs[right] - xs[left])
    _, chain_left, tree_left = CURVE[left]
    _, chain_right, tree_right = CURVE[right]
    chain = chain_left + share * (chain_right - chain_left)
    tree = tree_left + share * (tree_right - tree_left)
    return max(chain, 1.0), max(tree, 1.0)
