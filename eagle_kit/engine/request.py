"""Requests in service: what a user asked for, and the engine's state of it, in parts with one owner each."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.output import FinishReason, PromptLogprobs, RequestOutput, ResponseLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.kv.page_pool import PageAllocation, RadixNode

if TYPE_CHECKING:
    from eagle_kit.autotune.policy import RequestAcceptance
    from eagle_kit.engine.grammar.protocols import Match
    from eagle_kit.engine.text_stream import TextStream


class UncountedTokens(NamedTuple):
    """New tokens of a response that are in no statistics yet, because a stop text may still remove them.

    Attributes:
        start: position of the first of them in the response.
        num_tokens: tokens that were appended to the response.
        num_emitted: tokens that the cycle emitted; those behind the end of the response were not appended.
        shape: of the cycle.
        num_draft_tokens: draft tokens that the cycle verified; None for the first token, which comes from
            prefill.
    """

    start: int
    num_tokens: int
    num_emitted: int
    shape: SpecShape
    num_draft_tokens: int | None


@dataclass(eq=False)
class ResponseState:
    """The response so far, and what can end it. Owner: ``engine.py``.

    Attributes:
        token_ids: tokens of the response. While stop texts are looked for, the last ones may be removed
            again.
        num_text_tokens: tokens of the response that are text: all but a token that ended the response.
        logprobs: one entry per token where log-probabilities were asked for.
        prompt_logprobs: those of the prompt's tokens, where they were asked for; complete before the first
            token of the response.
        finish_reason: set once, when the response has ended.
        stop_token_ids: tokens that end the response.
        max_tokens: most tokens that the response may have, by the parameters and the context.
        seed: of the request's random numbers; ``params.seed``, or drawn when the request is added.
        match: state of the request's grammar and of its forbidden words; None without any.
        failure: what ended a response with the reason ``"error"``, if it was a lack of memory; else None.
    """

    token_ids: list[int] = field(default_factory=list)
    num_text_tokens: int = 0
    logprobs: ResponseLogprobs = field(default_factory=ResponseLogprobs)
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    finish_reason: FinishReason | None = None
    stop_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 0
    seed: int = 0
    match: "Match | None" = None
    failure: UserError | None = None


@dataclass(eq=False)
class SequenceState:
    """Place of a request in the batch and its tokens in the key-value pool. Owner: ``scheduler.py``.

    The scheduler makes one when it admits a request, and another, of no slot, when the request leaves the
    batch. Results that were computed for an earlier one are dropped.

    Attributes:
        slot: index in the device's tables (``slots.py``); -1 while the request is not in the batch.
        allocation: pages of the tokens.
        num_shared_tokens: tokens whose pages were in the prefix cache at admission, those of the request
            itself before a preemption included.
        num_computed: tokens whose keys are in the pool, or will be when launched work has ended.
        num_finite: tokens whose keys are in the pool and whose results have come back with finite logits.
            Their pages may be cached.
        num_branch_pages: cached pages before the place where the prompt leaves another's, if a snapshot of
            recurrent states is missing there; else 0.
        has_begun: True once a part of the prompt was planned.
    """

    slot: int = -1
    allocation: PageAllocation = field(default_factory=PageAllocation)
    num_shared_tokens: int = 0
    num_computed: int = 0
    num_finite: int = 0
    num_branch_pages: int = 0
    has_begun: bool = False


@dataclass(eq=False)
class DeviceState:
    """What the device has of a request in the batch. Owner: ``runner.py`` with ``slots.py``. The scheduler
    makes a new one when the request leaves the batch.

    Attributes:
        num_pages_written: first pages that the device's page table has; -1 when any of them may have changed.
        num_pending_draft_tokens: last tokens that the draft has not read.
    """

    num_pages_written: int = -1
    num_pending_draft_tokens: int = 0


@dataclass(eq=False)
class TurnState:
    """State of a request in the deficit round robin. Owner: ``scheduler.py``.

    Attributes:
        deficit: share of earlier steps that the request did not use, in prompt tokens' worth.
        num_skipped: cycles that the request left to others, because its share did not pay for them.
        quantum_start: progress of the request when it was last admitted.
        cached_nodes: cached pages that begin the request's tokens, by shard; found while it waits.
    """

    deficit: float = 0.0
    num_skipped: int = 0
    quantum_start: int = 0
    cached_nodes: dict[int, list[RadixNode]] = field(default_factory=dict)


@dataclass(eq=False)
class RequestStats:
    """Statistics of a request. Owner: ``engine.py``.

    Attributes:
        spec: acceptance of the drafts.
        shapes: cycles in each shape.
        uncounted: new tokens that are not in the statistics yet, the oldest first.
        acceptance: what the policy of shapes knows of this request; None where shapes are given.
        num_draft_tokens: draft tokens that were verified.
        num_cached_tokens: prompt tokens that the prefix cache held when prefill began first.
        num_preemptions: times that the request gave way to another.
        admitted_at, first_token_at, last_token_at: ``time.perf_counter()`` seconds; 0.0 before.
    """

    spec: SpecStats = field(default_factory=SpecStats)
    shapes: Counter[SpecShape] = field(default_factory=Counter)
    uncounted: deque[UncountedTokens] = field(default_factory=deque)
    acceptance: "RequestAcceptance | None" = None
    num_draft_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0


@dataclass(eq=False)
class Request:
    """What a user asked for, and the engine's state of it. The caller fills in the first fields, before the
    request is added to an engine; each of the five states is written by its owner alone.

    Attributes:
        number: unique among the requests of an engine; lower ones arrived first.
        prompt_ids: tokens of the prompt.
        params: sampling parameters.
        priority: larger is served first.
        stream: turns tokens into text and finds stop texts; None for token ids only.
        group: number of the first of the requests that share a turn; default itself.
        client: name of the client, between whom slots are shared evenly; empty where there is but one.
        bad_word_ids: tokens of each of ``params.bad_words``, with and without a leading blank; None where
            there is no tokenizer or there are no such words.
        prompt: text of the prompt as it was given; None where it was no text.
        arrived_at: ``time.perf_counter()`` seconds.
        response: tokens of the response, and what can end it.
        sequence: place in the batch and in the key-value pool.
        on_device: what the device has of it.
        turn: state in the scheduler's deficit round robin.
        stats: statistics.
    """

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    stream: "TextStream | None" = None
    group: int = -1
    client: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] | None = None
    prompt: str | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    response: ResponseState = field(default_factory=ResponseState, init=False)
    sequence: SequenceState = field(default_factory=SequenceState, init=False)
    on_device: DeviceState = field(default_factory=DeviceState, init=False)
    turn: TurnState = field(default_factory=TurnState, init=False)
    stats: RequestStats = field(default_factory=RequestStats, init=False)

    def __post_init__(self) -> None:
        if self.group < 0:
            self.group = self.number

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the response so far."""
        return self.response.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the response has ended by its tokens; None before the end."""
        return self.response.finish_reason

    @property
    def reason(self) -> str | None:
        """Finish reason for the user, ``"error"`` where the text could not be made; None before the end."""
        if self.finish_reason is not None and self.stream is not None and self.stream.failure is not None:
            return "error"
        return self.finish_reason

    @property
    def has_stops(self) -> bool:
        """True if a text may end the response."""
        return self.stream is not None and self.stream.has_stops

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response.token_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens that prefill computes: all but the last of the response, which is the next window's root."""
        token_ids = self.response.token_ids
        if not token_ids:
            return len(self.prompt_ids)
        return len(self.prompt_ids) + len(token_ids) - 1

    @property
    def is_prefilling(self) -> bool:
        """True if part of the prompt is still to be computed."""
        return self.sequence.num_computed < self.num_to_compute

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of the prompt are to be computed: all of it is, without cached
        pages."""
        return self.params.prompt_logprobs is not None and not self.response.token_ids

    @property
    def num_cacheable(self) -> int:
        """Tokens whose keys others may use, those of the draft included."""
        return max(0, self.sequence.num_finite - self.on_device.num_pending_draft_tokens)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop-1 of prompt and response."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        return (
            self.prompt_ids[start:] + self.response.token_ids[max(0, start - num_prompt) : stop - num_prompt]
        )

    def decode_text(self) -> str:
        """Decode the response's new tokens, and return its text without what is held back until the end. Any
        thread may call it while another one steps the engine."""
        if self.stream is None:
            return ""
        has_ended = self.response.finish_reason is not None  # before its last tokens are decoded
        self.stream.decode(self.response.token_ids, self.response.num_text_tokens)
        if has_ended:
            self.stream.finish()
        return self.stream.text

    def output(self) -> RequestOutput:
        """Make the output for the user."""
        text = self.decode_text()
        stats = self.stats
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = self.response.prompt_logprobs.of_all_tokens()
        prefill_s = stats.first_token_at - stats.admitted_at if self.token_ids else 0.0
        return RequestOutput(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            text=text,
            finish_reason=self.reason or "",
            stats=stats.spec,
            shapes=stats.shapes,
            logprobs=list(self.response.logprobs),
            num_cached_tokens=stats.num_cached_tokens,
            prefill_s=prefill_s,
            decode_s=stats.last_token_at - stats.first_token_at,
            prompt=self.prompt,
            prompt_logprobs=prompt_logprobs,
        )
