"""Request in service."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from eagle_kit.core.output import FinishReason, ReplyLogprobs, RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.kv.page_pool import PageAllocation, RadixNode

if TYPE_CHECKING:
    from eagle_kit.autotune.policy import Ease
    from eagle_kit.engine.grammar.protocols import Match
    from eagle_kit.engine.text_stream import TextStream


class Uncounted(NamedTuple):
    """Tokens of a reply from ``start`` on, ``kept`` of the ``num_emitted`` of a cycle in a ``shape`` with
    ``num_drafts`` (None: no cycle, the first one), which count once no stop text has ended it before."""

    start: int
    kept: int
    num_emitted: int
    shape: SpecShape
    num_drafts: int | None


@dataclass(eq=False)
class Request:
    """Request and its reply so far. The caller fills in the first six fields and
    ``bad_word_ids``; the others belong to the engine.

    Attributes:
        number: unique among the requests of an engine; lower ones arrived first.
        priority: larger is served first.
        group: number of the first of the requests that share a turn; default itself.
        client: name of the client, between whom slots are shared evenly; empty where there is but one.
        stream: turns tokens into text and finds stop texts; None for token ids only.
        bad_word_ids: tokens of each of ``params.bad_words``, with and without a leading blank; None where
            there is no tokenizer or there are no such words.
        token_ids: the reply so far. Where a stop text has not been looked for in its last ones, these may be
            taken back.
        num_shown: those of them that are text: all but a token that ended the reply.
        uncounted: what a stop text may take back; nothing of it is in any statistics yet.
        ends, most_tokens: tokens that end the reply, and most that it may have.
        logprobs: one entry per token of the reply when they were asked for.
        finish_reason: set once.
        ease: what the policy of shapes knows of it.
        shapes: cycles in each shape.
        num_cached_tokens: prompt tokens that the prefix cache held when the request was first admitted.
        num_shared_tokens: tokens whose pages were shared at the last admission, its own before a preemption
            included.
        num_sat_out: cycles that it left to others, because what it reads is worth several.
        turn_began: its progress when it was last admitted.
        savings: prompt tokens' worth of earlier steps that were its share and that it did not use.
        num_computed: tokens whose keys are in the pool or on their way there, while the prompt is computed.
        num_verified: tokens whose keys are in the pool and led to finite logits, so that others may use them.
        num_missed: its last tokens that the draft has not read.
        num_branch_pages: cached pages of its tokens where it leaves those of another, without a state to go
            on from; 0 without any.
        matched: cached pages that its tokens were found to begin with while it waited, by part of the pool.
        has_begun: a part of its prompt was given to the device since it was admitted.
        slot: row of the device's tables while it runs, else -1.
        num_pages_written: its first pages that the device's table has; -1 when any of them may have changed.
        seed: of its draws; ``params.seed``, or drawn when it arrived.
        match: state of its grammar, and of its forbidden words.
        generation: raised whenever the request leaves the batch, so that results on their way are dropped.
        arrived_at, admitted_at, first_token_at, last_token_at: ``time.perf_counter()`` seconds.
    """

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    stream: "TextStream | None" = None
    group: int = -1
    client: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] | None = None
    token_ids: list[int] = field(default_factory=list)
    num_shown: int = 0
    uncounted: deque[Uncounted] = field(default_factory=deque)
    ends: frozenset[int] = frozenset()
    most_tokens: int = 0
    logprobs: ReplyLogprobs = field(default_factory=ReplyLogprobs)
    finish_reason: FinishReason | None = None
    ease: "Ease | None" = None
    stats: SpecStats = field(default_factory=SpecStats)
    shapes: Counter[SpecShape] = field(default_factory=Counter)
    num_cached_tokens: int = 0
    num_shared_tokens: int = 0
    num_preemptions: int = 0
    num_sat_out: int = 0
    turn_began: int = 0
    savings: float = 0.0
    num_computed: int = 0
    num_verified: int = 0
    num_missed: int = 0
    num_branch_pages: int = 0
    matched: dict[int, list[RadixNode]] = field(default_factory=dict)
    has_begun: bool = False
    slot: int = -1
    generation: int = 0
    num_pages_written: int = -1
    seed: int = 0
    match: "Match | None" = None
    allocation: PageAllocation = field(default_factory=PageAllocation)
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def __post_init__(self) -> None:
        if self.group < 0:
            self.group = self.number

    @property
    def has_stops(self) -> bool:
        """True if a text may end the reply."""
        return self.stream is not None and self.stream.has_stops

    @property
    def progress(self) -> int:
        """Tokens of the reply, and the cycles that it sat out: in a turn they count alike."""
        return len(self.token_ids) + self.num_sat_out

    @property
    def num_tokens(self) -> int:
        """Prompt and reply together."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_readable(self) -> int:
        """Tokens whose keys others may use, those of the draft included."""
        return max(0, self.num_verified - self.num_missed)

    @property
    def num_to_compute(self) -> int:
        """Tokens that prefill computes: all but the last of the reply, which is the next window's root."""
        return len(self.prompt_ids) + (len(self.token_ids) - 1 if self.token_ids else 0)

    @property
    def is_prefilling(self) -> bool:
        """True if part of the prompt is still to be computed."""
        done = len(self.token_ids) - 1 if self.token_ids else 0  # asked of every request in every step
        return self.num_computed < len(self.prompt_ids) + done

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop-1 of prompt and reply."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:] + self.token_ids[max(0, start - prompt) : stop - prompt]

    def read(self) -> str:
        """Read the reply's new tokens -> its text, without what is held back until it has ended. Any thread
        may call it while another one steps the engine."""
        if self.stream is None:
            return ""
        has_ended = self.finish_reason is not None  # before its last tokens are read
        self.stream.read(self.token_ids, self.num_shown)
        if has_ended:
            self.stream.finish()
        return self.stream.text

    @property
    def reason(self) -> str | None:
        """Finish reason for the user, ``"error"`` where the text could not be made; None before the end."""
        if self.finish_reason is not None and self.stream is not None and self.stream.failure is not None:
            return "error"
        return self.finish_reason

    def output(self) -> RequestOutput:
        """Make the output for the user."""
        text = self.read()
        return RequestOutput(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            text=text,
            finish_reason=self.reason or "",
            stats=self.stats,
            shapes=self.shapes,
            logprobs=list(self.logprobs),
            num_cached_tokens=self.num_cached_tokens,
            prefill_s=self.first_token_at - self.admitted_at if self.token_ids else 0.0,
            decode_s=self.last_token_at - self.first_token_at,
        )
