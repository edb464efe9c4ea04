"""A training within a budget of time: what to generate, what to train on, what may come of it. Torch-free.

One training, on raw chats at first, with the target's distribution as teacher, and on replies of the target
itself from early on and alone at the end. Replies cost their generation. Where the disk has room the target's
states are kept, and rows are gone through several times: the target's forward is more than half of the first
pass. Rates are measured on the machine at hand, so every number follows from the budget.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

ROW_TOKENS = 1024
RESERVED = 0.2
"""Share of the budget for tuning and evaluating, and for loading the target in every stage."""
REPLIES = 0.35
"""Share of the rest for generating replies."""
TASK_SHARE = 1 / 3
"""Share of the replies' tokens that answers prompts of :mod:`eagle_kit.datagen.task_prompts`."""
RAW_PHASE, OWN_PHASE = (0.0, 0.55), (0.1, 1.0)
"""Spans of the training in which raw chats and own replies are drawn, alike where both are."""
RAW_SHARE = OWN_PHASE[0] + (RAW_PHASE[1] - OWN_PHASE[0]) / 2
"""Share of the training's tokens that are raw chats."""
PASSES = 3
"""Times that raw rows are gone through where states are kept."""
WITH_PROMPTS = 1.3
"""Tokens of rows of own replies for each token of a reply."""
WANTED_STEPS = 3000
"""Optimiser steps of a training with time enough; with more time a step has more rows."""
MOST_ROWS_PER_STEP = 16
LEAST_STEPS = 20
LEAST_TRAINING = 0.25
"""Share of the planned training that is left to it, however long the stages before it took."""
SINGLE_RATE = 0.2
"""Rate of decoding one prompt at a time, as a share of that of a batch of replies."""
PROMPTS_OF_A_TASK = (2, 32)
"""Fewest and most prompts of a task that a draft is measured on."""
BASE_RATE, BASE_WIDTH = 1.2e-3, 576
"""Learning rate and hidden size that it was chosen for; other widths take it in inverse proportion."""
LARGE_VOCAB = 65_536
"""Tokens of a target's vocabulary above which a head proposes 32,000 of them, as published heads do."""
CURVE = (
    (192_000, 1.34, 1.69),
    (1_005_584, 1.505, 1.901),
    (2_008_872, 1.642, 2.025),
    (4_505_522, 1.764, 2.184),
    (6_437_698, 1.803, 2.194),
)
"""Tokens seen and accept lengths 4,1,5 and 5,4,16 of heads for SmolLM2-135M-Instruct: one of half an hour,
and the shipped one while it was trained (docs/training.md)."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second.

    Attributes:
        replies: of replies that the target writes.
        training: of packed rows that a head learns from, the target's forward included.
        kept: of rows whose states were kept.
    """

    replies: float
    training: float
    kept: float

    def seen(self, seconds: float, own: float, keeps: bool) -> tuple[float, float]:
        """Return the tokens that a head sees in ``seconds``, and how many of raw chats differ, where ``own``
        tokens of replies differ and states are kept, or not."""
        first, again = 1 / self.training, 1 / (self.kept if keeps else self.training)
        raw = RAW_SHARE / (PASSES if keeps else 1)
        saved = first - again
        seen = (seconds - own * saved) / (again + raw * saved)
        if own > (1 - RAW_SHARE) * seen:  # not all of them are reached
            seen = seconds / (again + (raw + 1 - RAW_SHARE) * saved)
        return seen, raw * seen


@dataclass(frozen=True)
class Phase:
    """Length of a training.

    Attributes:
        steps: optimiser steps.
        rows_per_step: packed rows of ``ROW_TOKENS`` of each.
    """

    steps: int
    rows_per_step: int

    @property
    def tokens(self) -> int:
        """Tokens of full rows."""
        return self.steps * self.rows_per_step * ROW_TOKENS

    @classmethod
    def of(cls, tokens: float, processes: int = 1) -> "Phase":
        """The phase that sees about ``tokens``, with as many rows a step for each of ``processes``."""
        rows = tokens / ROW_TOKENS
        per_step = min(max(round(rows / WANTED_STEPS), 2), MOST_ROWS_PER_STEP)
        per_step = math.ceil(per_step / processes) * processes
        return cls(max(int(rows / per_step), LEAST_STEPS), per_step)


@dataclass(frozen=True)
class Pilot:
    """Work that is measured before a plan: ``replies``, and ``steps`` of a training on ``rows`` of
    ``row_tokens`` each."""

    replies: int
    steps: int
    rows: int
    row_tokens: int


@dataclass(frozen=True)
class Training:
    """A training within a time.

    Attributes:
        phase: its length.
        raw_tokens: tokens of raw chats that differ.
        keeps: the target's states are kept, and rows are gone through several times.
    """

    phase: Phase
    raw_tokens: int
    keeps: bool


@dataclass(frozen=True)
class BudgetPlan:
    """Work of a budget.

    Attributes:
        reply_tokens: tokens of replies to generate.
        training: on them and on raw chats.
        replies_s, training_s, reserved_s: seconds of both, and for tuning and evaluating.
    """

    reply_tokens: int
    training: Training
    replies_s: float
    training_s: float
    reserved_s: float

    @property
    def tokens(self) -> int:
        """Tokens that the head sees."""
        return self.training.phase.tokens

    def training_left_s(self, budget_s: float, spent_s: float) -> float:
        """Seconds that a training has when stages have taken ``spent_s`` of ``budget_s``."""
        left = budget_s - self.reserved_s - spent_s
        return max(left, LEAST_TRAINING * self.training_s)

    def prompts_of_a_task(self, reply_rate: float, tokens: int, num_tasks: int, num_shapes: int) -> int:
        """Prompts of each task that a draft is measured on, in a third of the reserved time: the others are
        for tuning and for loading the target.

        Args:
            reply_rate: tokens per second of a batch of replies.
            tokens: of a reply, which is decoded plainly and in every shape.
        """
        seconds = self.reserved_s / 3
        replies = seconds * SINGLE_RATE * reply_rate / tokens
        fewest, most = PROMPTS_OF_A_TASK
        return min(max(int(replies / ((1 + num_shapes) * num_tasks)), fewest), most)


def plan_budget(
    budget_s: float, spent_s: float, rates: Rates, kept_tokens: float, processes: int = 1
) -> BudgetPlan:
    """Plan ``budget_s`` seconds, of which ``spent_s`` went into measuring ``rates``, on a disk with room for
    the states of ``kept_tokens``, for a training of ``processes``."""
    reserved = RESERVED * budget_s
    left = max(budget_s - reserved - spent_s, 0.0)
    replies = REPLIES * left
    reply_tokens = replies * rates.replies
    training = plan_training(left - replies, reply_tokens, rates, kept_tokens, processes)
    return BudgetPlan(int(reply_tokens), training, replies, left - replies, reserved)


def plan_training(
    seconds: float, reply_tokens: float, rates: Rates, kept_tokens: float, processes: int = 1
) -> Training:
    """Plan a training of ``seconds`` on replies of ``reply_tokens`` and on raw chats; the rest as for
    :func:`plan_budget`."""
    own = WITH_PROMPTS * reply_tokens
    seen, raw = rates.seen(seconds, own, keeps=True)
    keeps = raw + min(own, (1 - RAW_SHARE) * seen) <= kept_tokens
    if not keeps:
        seen, raw = rates.seen(seconds, own, keeps=False)
    return Training(Phase.of(seen, processes), int(raw), keeps)


def learning_rate(hidden_size: int) -> float:
    """Learning rate for a target of this width, in inverse proportion to it, rounded to two digits."""
    return float(f"{min(BASE_RATE * BASE_WIDTH / hidden_size, BASE_RATE):.1e}")


def draft_vocab_size(vocab_size: int) -> int:
    """Tokens that the head can propose, of ``vocab_size`` of the target's tokenizer."""
    return min(8192 if vocab_size <= LARGE_VOCAB else 32_000, vocab_size)


def expected_accept_lengths(tokens: int) -> tuple[float, float]:
    """Accept lengths of a chain 4,1,5 and a tree 5,4,16 after ``tokens``, by :data:`CURVE`, linear in the
    logarithm of tokens and beyond its ends as between its first and its last point; at least 1."""
    xs = [math.log(point[0]) for point in CURVE]
    x = math.log(max(tokens, 1))
    inside = xs[0] <= x <= xs[-1]
    i = min(bisect_right(xs, x), len(xs) - 1) if inside else len(xs) - 1
    before = i - 1 if inside else 0
    share = (x - xs[before]) / (xs[i] - xs[before])
    chain, tree = (CURVE[before][k] + share * (CURVE[i][k] - CURVE[before][k]) for k in (1, 2))
    return max(chain, 1.0), max(tree, 1.0)
