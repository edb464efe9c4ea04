"""A training within a budget of time: what to generate, what to train on, what may come of it. Torch-free.

Two phases: raw chats first, with the target's distribution as teacher, then replies of the target itself,
which cost their generation. Where the disk has room the target's states are kept, and rows are gone through
several times: the target's forward is more than half of the first pass. Rates are measured on the machine at
hand, so every number follows from the budget.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

ROW_TOKENS = 1024
RESERVED = 0.2
"""Share of the budget for tuning and evaluating, and for loading the target in every stage."""
RAW, REPLIES, OWN = 0.35, 0.3, 0.35
"""Shares of the rest: training on raw chats, generating replies, training on them."""
PASSES = 3
"""Times that raw rows are gone through where their states are kept."""
WITH_PROMPTS = 1.3
"""Tokens of rows of own replies for each token of a reply."""
WANTED_STEPS = 3000
"""Optimiser steps of a phase with time enough; with more time a step has more rows."""
MOST_ROWS_PER_STEP = 16
LEAST_STEPS = 20
BASE_RATE, BASE_WIDTH = 1.5e-3, 576
"""Learning rate and hidden size that it was chosen for; other widths take it in inverse proportion."""
LARGE_VOCAB = 65_536
"""Tokens of a target's vocabulary above which a head proposes 32,000 of them, as published heads do."""
CURVE = ((151_000, 1.229, 1.508), (3_590_407, 1.57, 2.00), (5_387_312, 1.64, 2.10))
"""Tokens seen and accept lengths 4,1,5 and 5,4,16 of heads for SmolLM2-135M-Instruct: the study of
docs/training.md, and the shipped head's two parts on HumanEval."""


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

    def seen(self, seconds: float, distinct: float) -> float:
        """Tokens that a head sees in ``seconds`` of going through ``distinct`` tokens with kept states."""
        first = min(seconds, distinct / self.training)
        return first * self.training + (seconds - first) * self.kept

    def distinct(self, seconds: float, passes: int) -> float:
        """Tokens that are gone through ``passes`` times in ``seconds``."""
        return seconds / (1 / self.training + (passes - 1) / self.kept)


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
    def of(cls, tokens: float) -> "Phase":
        """The phase that sees about ``tokens``."""
        rows = tokens / ROW_TOKENS
        per_step = min(max(round(rows / WANTED_STEPS), 2), MOST_ROWS_PER_STEP)
        return cls(max(int(rows / per_step), LEAST_STEPS), per_step)


@dataclass(frozen=True)
class BudgetPlan:
    """Work of a budget.

    Attributes:
        raw, own: the two phases.
        passes: times that the rows of the first are gone through; states are kept where it is more than one.
        reply_tokens: tokens of replies to generate for the second.
        seconds: of raw training, replies, training on them, and of what is reserved.
    """

    raw: Phase
    own: Phase
    passes: int
    reply_tokens: int
    seconds: tuple[float, float, float, float]

    @property
    def tokens(self) -> int:
        """Tokens that the head sees in both phases."""
        return self.raw.tokens + self.own.tokens


def plan_budget(budget_s: float, spent_s: float, rates: Rates, kept_tokens: float) -> BudgetPlan:
    """Plan ``budget_s`` seconds, of which ``spent_s`` went into measuring ``rates``, on a disk with room for
    the states of ``kept_tokens``."""
    reserved = RESERVED * budget_s
    left = max(budget_s - reserved - spent_s, 0.0)
    raw, replies, own = RAW * left, REPLIES * left, OWN * left
    passes = PASSES if rates.distinct(raw, PASSES) <= kept_tokens else 1
    reply_tokens = replies * rates.replies
    return BudgetPlan(
        Phase.of(passes * rates.distinct(raw, passes)),
        own_phase(own, reply_tokens, rates, kept_tokens),
        passes,
        int(reply_tokens),
        (raw, replies, own, reserved),
    )


def own_phase(seconds: float, reply_tokens: float, rates: Rates, kept_tokens: float) -> Phase:
    """Training on replies of ``reply_tokens`` for ``seconds``; ``kept_tokens`` as for :func:`plan_budget`."""
    if keeps_own(reply_tokens, kept_tokens):
        return Phase.of(rates.seen(seconds, WITH_PROMPTS * reply_tokens))
    return Phase.of(seconds * rates.training)


def keeps_own(reply_tokens: float, kept_tokens: float) -> bool:
    """True where the states of replies of ``reply_tokens``, with their prompts, fit into the room for
    ``kept_tokens``."""
    return WITH_PROMPTS * reply_tokens <= kept_tokens


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
