"""Scheduler of requests: who is in the batch, which pages they get, and what a step computes.

Requests of one group share a turn: the choices of one HTTP request, or all prompts of one offline
call.

Order of admission:

* The keys are priority, the slots that the client has, the client's last admission, the slots that
  the group has, and arrival.
* A request that does not fit keeps the requests behind it waiting.
* A preempted request waits again. Its tokens stay in the prefix cache, so that little is computed
  twice.

A group without a slot does not wait for the end of other responses. It takes a slot, or missing
pages, from

* a group that has several slots, whatever its priority;
* a long prompt behind another long prompt, unless the waiting request is a long prompt itself;
* a request that is :data:`QUANTUM_TOKENS` tokens ahead of it and has had a quantum since its
  admission;
* with a prefix cache and for a first token: a longer prompt that has had its own quantum.

The quantum of a response is :data:`QUANTUM_TOKENS` tokens. For a first token
:data:`SHORT_QUANTUM_TOKENS` are enough where there is a prefix cache. The quantum of a prompt is
:data:`QUANTUM_CHUNKS` chunks. With recurrent layers a quantum is longer, because the tokens behind
the last snapshot of a state are computed again. Against a client that has a slot, its own included,
a response has a longer quantum on a GPU, and where the pool cannot hold all requests.

A step considers the first :data:`NUM_CANDIDATES` waiting requests for slots of others, and as many
of those that gave way before.

Limits of preemption:

* No client is preempted for another one that has as many slots or more, unless its priority is
  lower.
* No request is preempted for one that would not fit even so.
* For some steps after a preemption, a group's second request and a second long prompt leave the
  last free slot to others. Otherwise the same requests would begin again and again.

Work of a step:

* Every decoding request gets the pages that the next cycle may write. If pages are missing, the
  last request in the order of admission is preempted.
* Waiting requests are admitted.
* Where a step serves several groups, it computes fewer prompt tokens. The cost of a token
  grows with its position.
* Half of these tokens are reserved for the oldest prompt. The others go to the prompts that end
  soonest.
* A prompt that fits into two steps' tokens is computed to its end at once, even beyond these tokens.
* A long prompt saves its share of several steps as a deficit until a chunk is worth reading the
  weights and the tokens before it.
* A long response skips cycles, and saves its share of them as a deficit, until the deficit pays for a
  cycle. Skipped cycles count as tokens of a quantum.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.engine.request import DeviceState, Request, SequenceState
from eagle_kit.engine.waiting_queue import WaitingQueue, progress, service_order
from eagle_kit.kv.page_pool import PagePool, RadixNode

QUANTUM_TOKENS = 32
"""Tokens of a response in a quantum. With a prefix cache each further quantum costs about a page of
prefill, 2 % of the time of 32 tokens."""
SHORT_QUANTUM_TOKENS = 8
"""Tokens of a quantum that ends for a request without a token."""
MOST_RECOMPUTED = 2
"""Most tokens that are computed again for one token of a quantum: prompts are faster than
responses."""
MOST_QUANTUM_TOKENS = 512
"""Most tokens of a quantum, whatever has to be computed again."""
QUANTUM_CHUNKS = 4
"""Quantum of a prompt, in chunks of the size that is computed beside the responses of others."""
NUM_CANDIDATES = 32
"""Waiting requests of each kind that a step considers for the slots of others
(:meth:`~eagle_kit.engine.waiting_queue.WaitingQueue.candidates`)."""
DRAFTED_SHARE = 0.6
"""Time of a token of a response that decodes alone with drafts, over the time of a plain cycle. A share
of a group is what a token would cost the group if it were alone, so with a draft it is this part of
a plain cycle, also where the cycles that many groups share are plain."""


class StateMoves(NamedTuple):
    """Recurrent states that a chunk reads and writes, by index (``kv/recurrent_states.py``).

    Attributes:
        source: index of the state before the chunk; None at the beginning of a text.
        saves: (number of the chunk's tokens, index of the state saved after them), ascending. Tokens are
            counted from ``lookback`` tokens before the start of the chunk.
    """

    source: int | None
    saves: tuple[tuple[int, int], ...]


class Chunk(NamedTuple):
    """Prompt tokens start..stop-1 of a request, computed in this step.

    Attributes:
        state_moves: recurrent states to read and to save; None without recurrent layers.
    """

    request: Request
    start: int
    stop: int
    state_moves: StateMoves | None = None


class StepPlan(NamedTuple):
    """Work of one step.

    Attributes:
        chunks: parts of prompts to compute.
        decoding: requests of the cycle.
        preempted: requests that left the batch.
    """

    chunks: list[Chunk]
    decoding: list[Request]
    preempted: list[Request]


class _Claim(NamedTuple):
    """Properties of a waiting request that decide which requests of the batch give way to it.

    Attributes:
        client, priority: of the request.
        has_slot: True if its group has a slot.
        is_fresh: True if it has no token yet.
        is_long: True for a long prompt.
        progress, num_to_compute, num_pages: the more, the fewer requests give way.
    """

    client: str
    priority: int
    has_slot: bool
    is_fresh: bool
    is_long: bool
    progress: int
    num_to_compute: int
    num_pages: int

    def is_no_better_than(self, other: "_Claim") -> bool:
        """Return True if nobody gives way to this request where nobody gives way to the ``other``."""
        amounts = zip(self[5:], other[5:], strict=True)
        return self[:5] == other[:5] and all(mine >= theirs for mine, theirs in amounts)


class _Dispensable(NamedTuple):
    """Requests of the batch that some waiting request could preempt, most progress first.

    Attributes:
        to_new: for requests of clients without a slot.
        to_served: those of them for requests of clients with a slot.
    """

    to_new: list[Request]
    to_served: list[Request]


class Scheduler:
    """Owner of the queue, the batch and the slots; allocates pages.

    Args:
        page_pool: pages of the key-value stores.
        config: number of slots, and most prompt tokens of one step.
        num_lookahead_tokens: tokens after its known ones that a request may need pages for in the next
            cycle.
        has_draft: whether a draft model speculates. Then the last token of a cached prefix is
            computed again, because the draft's next entry needs its hidden state.
        lookback: tokens before a chunk that are computed with it.
        attention_cost: arithmetic of attention per token before, over that of everything else of a
            token.
        reading_cost: time to read one token before a chunk, over that to compute a token without
            any before.
        weights_cost: time to read the weights, once for all chunks of a step, in the same unit.

    Attributes:
        running: requests of the batch, in the order of their admission.
    """

    def __init__(
        self,
        page_pool: PagePool,
        config: ResolvedConfig,
        *,
        num_lookahead_tokens: int,
        has_draft: bool,
        lookback: int = 0,
        attention_cost: float = 0.0,
        reading_cost: float = 0.0,
        weights_cost: float = 0.0,
    ) -> None:
        self.page_pool = page_pool
        self.config = config
        self.num_lookahead_tokens = num_lookahead_tokens
        self.has_draft = has_draft
        self.lookback = lookback
        self.attention_cost = attention_cost
        self.reading_cost = reading_cost
        self.weights_cost = weights_cost

        # The batch, and who has its slots.
        self.running: list[Request] = []
        self._free_slots = list(range(config.max_batch_size - 1, -1, -1))
        self._num_running_in = [0] * page_pool.num_shards

        # The queue, and the slots of groups and clients.
        self._queue = WaitingQueue()
        self._num_slots_of = self._queue.num_slots_of
        self._num_slots_of_client = self._queue.num_slots_of_client
        self._num_guarded_steps = 0  # in which some leave the last free slot to others

        # Quanta.
        self._short_quantum = SHORT_QUANTUM_TOKENS if page_pool.can_reuse else QUANTUM_TOKENS
        self._prompt_quantum = min(config.prefill_tokens, QUANTUM_CHUNKS * config.mixed_prefill_tokens)
        self._cache_holds_all = True

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return self._queue.num_requests

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        self._queue.add(request)

    def plan(self) -> StepPlan:
        """Plan the next step, and allocate its pages."""
        if self.page_pool.has_snapshots:
            self._update_snapshots()

        # Allocate the pages of the next cycle.
        decoding = [request for request in self.running if not request.is_prefilling]
        preempted = self._extend_all(decoding)

        # Admit waiting requests, unless pages were missing.
        if not preempted:
            self._num_guarded_steps -= 1
            if self._queue.num_requests:
                self._fill_free_slots()
                preempted = self._take_slots()

        # Most steps end here: all requests decode.
        if not preempted and len(decoding) == len(self.running):
            return StepPlan([], self._select_affordable(decoding), [])

        # Divide the prompt tokens of the step.
        decoding = [request for request in self.running if not request.is_prefilling]
        chunks = self._make_chunks([request for request in self.running if request.is_prefilling])
        if self.page_pool.has_snapshots:
            chunks = [chunk._replace(state_moves=self._plan_state_moves(chunk)) for chunk in chunks]
        return StepPlan(chunks, self._select_affordable(decoding), preempted)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue or the batch, and release its pages."""
        if request.sequence.slot < 0:
            self._queue.remove(request)
            self._queue.forget_client(request.client)
            return

        # Give back the slot.
        self.running.remove(request)
        self._free_slots.append(request.sequence.slot)
        self._num_running_in[request.sequence.allocation.shard] -= 1
        self._queue.leave_slot(request)

        # Give back the pages. Results on their way belong to the old sequence state, and are
        # dropped.
        self.page_pool.release(request.sequence.allocation)
        request.sequence = SequenceState()
        request.on_device = DeviceState()
        request.turn.deficit = 0.0
        self._queue.forget_client(request.client)

    def mark_computed(self, request: Request, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` of a request have been sent to the device."""
        request.sequence.num_computed = num_tokens

    def mark_finite(self, request: Request, num_tokens: int) -> None:
        """Note that results of the first ``num_tokens`` of a request have come back with finite logits."""
        sequence = request.sequence
        sequence.num_finite = num_tokens
        sequence.num_computed = max(sequence.num_computed, num_tokens)

    def cache_pages(self, request: Request) -> bool:
        """Put the pages of a request that hold finite numbers into the prefix cache.

        Returns:
            True if page numbers of the request changed.
        """
        return self.page_pool.cache_pages(
            request.sequence.allocation, request.tokens(0, request.num_cacheable)
        )

    def _can_begin(self, head: Request) -> bool:
        """Return False for the first waiting request of a group while another of its group computes the same
        prompt, whose pages are in the prefix cache afterwards."""
        if not self.page_pool.can_reuse or not self._num_slots_of[head.group]:
            return True
        for other in self.running:
            if other.group != head.group or other.prompt_ids != head.prompt_ids:
                continue
            sequence = other.sequence
            is_computing = sequence.num_finite < other.num_to_compute
            will_share = sequence.num_shared_tokens + self.page_pool.page_size < other.num_to_compute
            if is_computing and will_share:
                return False
        return True

    # Pages of decoding requests.

    def _extend_all(self, decoding: Sequence[Request]) -> list[Request]:
        """Allocate pages for the next cycle of every decoding request, in the order of service.

        Returns:
            The requests that were preempted because pages were missing.
        """
        # A request whose device page table covers the next cycle needs no pages.
        page_size = self.page_pool.page_size
        short = []
        for request in decoding:
            num_covered = page_size * request.on_device.num_pages_written
            if request.num_tokens + self.num_lookahead_tokens > num_covered:
                short.append(request)

        # Preempt others in the same shard of the pool until the pages are there.
        preempted: list[Request] = []
        for request in sorted(short, key=service_order):
            if request.sequence.slot < 0:
                continue  # it was preempted for one before it
            shard = request.sequence.allocation.shard
            while not self._extend(request):
                rivals = [each for each in self.running if each.sequence.allocation.shard == shard]
                victim = max(rivals, key=self._queue.order)
                self.send_back(victim)
                preempted.append(victim)
                if victim is request:
                    break
        return preempted

    def _extend(self, request: Request) -> bool:
        """Allocate the pages that a request may write in the next cycle; False if too few are
        left."""
        allocation = request.sequence.allocation
        num_missing = self._num_pages(request) - len(allocation)
        return num_missing <= 0 or self.page_pool.extend(allocation, num_missing)

    def _num_pages(self, request: Request) -> int:
        """Number of pages of a request's tokens and of those that the next cycle may write."""
        return self.page_pool.pages_for(request.num_tokens + self.num_lookahead_tokens)

    def send_back(self, request: Request) -> None:
        """Send a request of the batch back to the queue. Its pages stay in the prefix cache."""
        self.cache_pages(request)
        self.remove(request)
        self.add(request)

    # Admission.

    def _fill_free_slots(self) -> None:
        """Admit waiting requests, in order, until one does not fit."""
        skipped: set[int] = set()  # groups that leave the slots of this step to others
        while self._free_slots:
            first = self._first_willing(skipped)
            if first is None or not self._admit(first):
                return

    def _first_willing(self, skipped: set[int]) -> Request | None:
        """The first waiting request that takes a free slot now; None without one.

        Args:
            skipped: groups that leave the slots of this step to others; more are added.
        """
        for request in self._queue.in_order():
            if request.group in skipped:
                continue
            if self._can_begin(request) and not self._leaves_last_slot(request):
                return request
            skipped.add(request.group)
        return None

    def _leaves_last_slot(self, request: Request) -> bool:
        """Return True if a request leaves the last free slot to others, for some steps after a
        preemption.

        The second request of a group does so, and a long prompt behind another one.
        """
        if self._num_guarded_steps <= 0 or len(self._free_slots) != 1:
            return False
        if self._num_slots_of[request.group]:
            return len(self._num_slots_of) > 1
        if request.response.token_ids or request.num_to_compute <= self._prompt_quantum:
            return False
        if not self._long_prompts():
            return False

        # The prompt may be short but for what is cached.
        num_cached = 0
        for shard in range(self.page_pool.num_shards):
            num_cached = max(num_cached, len(self.page_pool.reusable(self._match(request, shard))))
        num_left = request.num_to_compute - num_cached * self.page_pool.page_size
        return num_left > self._prompt_quantum

    def _match(self, request: Request, shard: int) -> list[RadixNode]:
        """Find the cached pages of a shard that a waiting request begins with, by what was found
        before. A prompt whose log-probabilities are asked for has none: cached tokens have no logits."""
        if request.scores_prompt:
            return []
        stop = request.num_to_compute - 1
        tokens = request.tokens(0, stop) if request.response.token_ids else request.prompt_ids
        known = request.turn.cached_nodes.get(shard, ())
        found = self.page_pool.match(tokens, stop, known, shard=shard, salt=request.params.cache_salt)
        request.turn.cached_nodes[shard] = found
        return found

    def _admit(self, request: Request) -> bool:
        """Admit the first request of its group to the batch; False if there is no slot or it does
        not fit."""
        if not self._free_slots:
            return False
        shards = []
        for shard, num_running in enumerate(self._num_running_in):
            if num_running < self.config.shard_batch_size:
                shards.append(shard)
        if len(shards) > 1:
            shards.sort(key=lambda shard: self._order_of_shard(shard, request))
        return any(self._admit_to(shard, request) for shard in shards)

    def _order_of_shard(self, shard: int, request: Request) -> tuple[bool, bool, int]:
        """Key of the order in which shards of the pool are tried for a request.

        The first one has most of its tokens cached, or else most free pages. A shard with far more
        requests than another is the last.
        """
        num_cached = 0
        if self.page_pool.can_reuse:
            num_cached = len(self._match(request, shard)) * self.page_pool.page_size
        has_most = 2 * num_cached >= request.num_tokens
        most_running = min(self._num_running_in) + max(2, self.config.shard_batch_size // 4)
        is_ahead = self._num_running_in[shard] >= most_running
        return not has_most or is_ahead, is_ahead, -self.page_pool.num_available_in(shard)

    def _admit_to(self, shard: int, request: Request) -> bool:
        """Admit a request to a shard of the pool; False if it does not fit."""
        # Allocate its pages.
        cached = self._match(request, shard) if self.page_pool.can_reuse else []
        shared = self.page_pool.reusable(cached)
        num_pages = self._num_pages(request) - len(shared)
        allocation = self.page_pool.allocate(shared, num_pages, shard, request.params.cache_salt)
        if allocation is None:
            return False

        # Leave a page for each request of the batch to grow into, or the new one would be preempted
        # at once.
        if self.page_pool.num_available_in(shard) < self._num_running_in[shard]:
            self.page_pool.release(allocation)
            return False

        # Move the request from the queue into the batch.
        self._queue.remove(request)
        self.page_pool.pin_snapshot(allocation)
        is_branch = len(cached) > len(shared) and bool(cached[-1].children)
        num_shared_tokens = len(shared) * self.page_pool.page_size
        num_recomputed = 1 if shared and self.has_draft else 0
        request.sequence = SequenceState(
            slot=self._free_slots.pop(),
            allocation=allocation,
            num_shared_tokens=num_shared_tokens,
            num_computed=num_shared_tokens - num_recomputed,
            num_branch_pages=len(cached) if is_branch else 0,
        )
        request.turn.cached_nodes = {}
        request.turn.quantum_start = progress(request)

        # Count its slot.
        self.running.append(request)
        self._num_running_in[shard] += 1
        self._queue.take_slot(request)
        return True

    # Preemption.

    def _take_slots(self) -> list[Request]:
        """Preempt requests for waiting groups that may take a slot or pages, and admit these.

        Returns:
            The requests that were preempted.
        """
        preempted: list[Request] = []
        if not self.page_pool.has_snapshots:
            self._cache_holds_all = self._holds_all()
        behind = self._long_prompts()[1:]
        dispensable = self._dispensable(behind)
        if not dispensable.to_new:
            return preempted
        failed: list[_Claim] = []
        for request in self._queue.candidates(NUM_CANDIDATES):
            if not self._can_begin(request):
                continue
            while request.sequence.slot < 0:
                claim = self._claim(request)
                if any(claim.is_no_better_than(other) for other in failed):
                    break
                victims = self._victims(request, dispensable, behind)
                if not victims:
                    failed.append(claim)
                    break
                victim = max(victims, key=self._queue.order)
                self.send_back(victim)
                preempted.append(victim)
                self._admit(request)
                self._num_guarded_steps = QUANTUM_TOKENS
                behind = self._long_prompts()[1:]
                dispensable = self._dispensable(behind)
                failed.clear()

            # A request that does not fit keeps those behind it waiting.
            if request.sequence.slot < 0 and self._free_slots:
                break
        return preempted

    def _claim(self, request: Request) -> _Claim:
        """Collect the properties of a waiting request that decide which requests give way to it."""
        return _Claim(
            client=request.client,
            priority=request.priority,
            has_slot=self._num_slots_of[request.group] > 0,
            is_fresh=not request.response.token_ids,
            is_long=request.num_to_compute > self._prompt_quantum,
            progress=progress(request),
            num_to_compute=request.num_to_compute,
            num_pages=self._num_pages(request),
        )

    def _holds_all(self) -> bool:
        """Return True if the pool, and with recurrent layers the snapshots, could hold all requests."""
        pool = self.page_pool
        num_tokens = self._queue.num_tokens + sum(request.num_tokens for request in self.running)
        if num_tokens > pool.num_pages * pool.page_size:
            return False
        # A request of the batch may have two snapshots.
        num_snapshots = self.num_waiting + 2 * len(self.running)
        return not pool.has_snapshots or num_snapshots <= pool.num_snapshots

    def _long_prompts(self) -> list[Request]:
        """List the requests of the batch with more than a quantum of their prompt left, the oldest
        first.

        All but the oldest get few tokens of a step. Empty without a prefix cache.
        """
        if not self.page_pool.can_reuse:
            return []
        long = []
        for request in self.running:
            if request.is_prefilling and _num_left(request) > self._prompt_quantum:
                long.append(request)
        return sorted(long, key=service_order)

    def _dispensable(self, behind: Sequence[Request]) -> _Dispensable:
        """List the requests of the batch that some waiting request could preempt, most progress
        first.

        Args:
            behind: long prompts behind another.
        """
        to_new = [request for request in self.running if self._is_dispensable(request, behind, 0)]
        to_new.sort(key=progress, reverse=True)
        to_served = []
        for request in to_new:
            if self._is_dispensable(request, behind, self._quantum_beside_served(request)):
                to_served.append(request)
        return _Dispensable(to_new, to_served)

    def _is_dispensable(self, request: Request, behind: Sequence[Request], quantum: int) -> bool:
        """Return True if some waiting request could preempt a request of the batch.

        Args:
            quantum: least tokens of its quantum.
        """
        if self._num_slots_of[request.group] > 1 or request in behind:
            return True
        is_ahead = progress(request) >= QUANTUM_TOKENS  # of a request without a token
        if is_ahead and self._has_had_quantum(request, max(quantum, self._short_quantum)):
            return True
        return self._has_had_prompt_quantum(request)

    def _victims(
        self, request: Request, dispensable: _Dispensable, behind: Sequence[Request]
    ) -> list[Request]:
        """List the requests of one shard of the pool that a waiting request may preempt."""
        is_served = self._num_slots_of_client[request.client] > 0
        possible = dispensable.to_served if is_served else dispensable.to_new
        if self._num_slots_of[request.group] or not possible:
            return []

        # A long queue usually ends here: nobody is a quantum ahead, and each group has one slot.
        most_ahead = progress(possible[0]) - progress(request)
        most_slots = max(self._num_slots_of.values())
        if most_ahead < QUANTUM_TOKENS and most_slots == 1 and request.response.token_ids:
            return []

        # A long prompt takes no slot from another.
        if request.num_to_compute > self._prompt_quantum:
            behind = ()

        # All victims together must make room in their shard.
        victims = [other for other in possible if self._gives_way(other, request, behind)]
        for shard in range(self.page_pool.num_shards):
            in_shard = [other for other in victims if other.sequence.allocation.shard == shard]
            if in_shard and self._would_fit(request, in_shard, shard):
                return in_shard
        return []

    def _gives_way(self, other: Request, request: Request, behind: Sequence[Request]) -> bool:
        """Return True if a request of the batch, ``other``, may be preempted for a waiting
        ``request``."""
        # A client keeps its slots against a client that has as many or more.
        num_slots = self._num_slots_of_client
        has_no_more = num_slots[other.client] <= num_slots[request.client]
        if other.client != request.client and has_no_more and other.priority >= request.priority:
            return False

        # Groups with several slots give way whatever their priority, others to their own priority
        # only.
        if self._num_slots_of[other.group] > 1:
            return True
        if other.priority > request.priority:
            return False
        if other in behind:
            return True

        # A response that is ahead gives way after its quantum.
        num_ahead = progress(other) - progress(request)
        quantum = QUANTUM_TOKENS if request.response.token_ids else self._short_quantum
        if self._num_slots_of_client[request.client]:
            quantum = max(quantum, self._quantum_beside_served(other))
        if num_ahead >= QUANTUM_TOKENS and self._has_had_quantum(other, quantum):
            return True

        # A longer prompt gives way to a first token after its quantum.
        is_longer = _num_left(other) - request.num_to_compute > self._prompt_quantum
        return is_longer and not request.response.token_ids and self._has_had_prompt_quantum(other)

    def _quantum_beside_served(self, request: Request) -> int:
        """Least quantum of a response against a client that has a slot already. To preempt it delays all
        responses of the batch.

        Tokens that are computed again take at least the time in which weights are read. Where the pool cannot
        hold all requests, the pages of a preempted one are evicted, and all of its tokens are computed again.
        """
        num_recomputed = self.weights_cost
        if self.page_pool.can_reuse and not self._cache_holds_all:
            num_recomputed = max(num_recomputed, request.num_tokens)
        return min(int(num_recomputed) // MOST_RECOMPUTED, MOST_QUANTUM_TOKENS)

    def _has_had_quantum(self, request: Request, num_tokens: int) -> bool:
        """Return True if a response has had a quantum of ``num_tokens`` since its admission.

        With recurrent layers the tokens behind the last snapshot are computed again after a
        preemption. All tokens are, if the snapshot may be evicted. The quantum is longer in
        proportion.
        """
        if self.page_pool.has_snapshots:
            num_resumable = 0
            if self._cache_holds_all:
                sequence = request.sequence
                num_resumable = self.page_pool.num_resumable(sequence.allocation, sequence.num_finite)
            worth = (request.num_tokens - num_resumable) // MOST_RECOMPUTED
            num_tokens = max(num_tokens, min(worth, MOST_QUANTUM_TOKENS))
        return progress(request) - request.turn.quantum_start >= num_tokens

    def _has_had_prompt_quantum(self, request: Request) -> bool:
        """Return True if a prompt has had its quantum, and lacks more than another one."""
        if not self.page_pool.can_reuse or _num_left(request) <= self._prompt_quantum:
            return False
        sequence = request.sequence
        num_kept = sequence.num_finite
        if self.page_pool.has_snapshots:
            # The tokens behind the last snapshot would be computed again.
            num_kept = self.page_pool.num_resumable(sequence.allocation, sequence.num_finite)
        return num_kept - sequence.num_shared_tokens >= self._prompt_quantum

    def _would_fit(self, request: Request, victims: Sequence[Request], shard: int) -> bool:
        """Return True if all ``victims`` together make room for a request in their shard of the
        pool."""
        num_others = self._num_running_in[shard] - len(victims)
        if num_others >= self.config.shard_batch_size:
            return False
        num_freed = 0
        for victim in victims:
            allocation = victim.sequence.allocation
            num_freed += len(allocation.pages) + sum(node.refs == 1 for node in allocation.nodes)
        num_needed = self._num_pages(request) + num_others
        return num_needed <= self.page_pool.num_available_in(shard) + num_freed

    # Shares of a step.

    def _select_affordable(self, decoding: list[Request]) -> list[Request]:
        """Select the requests of the next cycle: those whose deficit and share pay for their part
        of it.

        A request with many tokens before it makes the cycle longer for other groups. It skips
        cycles until its deficit has paid for one.
        """
        # One group has no others to leave cycles to.
        if len(self._num_slots_of) < 2 or all(request.group == decoding[0].group for request in decoding):
            return decoding

        # The share of a group, in the time of a token without any before: a plain cycle, or less.
        share = 1.0 + self.weights_cost
        if self.has_draft:
            share *= DRAFTED_SHARE

        # Take all where even the longest request is affordable.
        longest = max(request.num_tokens for request in decoding)
        most_cost = 1.0 + self.reading_cost * longest
        if most_cost <= share / max(self._num_slots_of.values()):
            for request in decoding:
                request.turn.deficit = 0.0
            return decoding

        # Count the shares that each request waits for.
        num_members = Counter(request.group for request in decoding)
        shares = []
        waits = []
        for request in decoding:
            share_of_request = share / num_members[request.group]
            cost = 1.0 + self.reading_cost * request.num_tokens
            missing = max(cost - request.turn.deficit, 0.0)
            shares.append(share_of_request)
            waits.append(math.ceil(missing / share_of_request))

        # Give out as many shares as it takes for somebody to decode.
        num_shares = max(min(waits), 1)
        affordable = []
        for request, wait, share_of_request in zip(decoding, waits, shares, strict=True):
            if wait <= num_shares:
                request.turn.deficit = 0.0
                affordable.append(request)
            else:
                request.turn.deficit += num_shares * share_of_request
                request.turn.num_skipped += 1
        return affordable

    def _make_chunks(self, prefilling: Sequence[Request]) -> list[Chunk]:
        """Divide a step's tokens among the prompts that are being computed."""
        if not prefilling:
            return []

        # Most tokens that memory is planned for.
        most_tokens = self.config.prefill_tokens
        is_decoding = len(prefilling) < len(self.running)
        if is_decoding:
            most_tokens = min(most_tokens, self.config.decode_prefill_tokens)

        # The budget, in the cost of a prompt's first token: smaller where other groups wait for the
        # step.
        mixed_tokens = self.config.mixed_prefill_tokens
        has_short = any(_num_left(request) <= mixed_tokens for request in prefilling)
        is_shared = len(self._num_slots_of) > 1 and (is_decoding or has_short)
        budget: float = mixed_tokens if is_shared else most_tokens

        # Half of it is reserved for the oldest prompt.
        oldest = min(prefilling, key=service_order)
        cost_of_oldest = _num_left(oldest) * self._token_cost(oldest.sequence.num_computed)
        reserved = min(cost_of_oldest, budget / 2)

        # The prompts that end soonest come first.
        chunks: list[Chunk] = []
        for request in sorted(prefilling, key=lambda each: (_num_left(each), service_order(each))):
            share = budget - reserved
            if request is oldest:
                # The reserved half stays whole, whatever short prompts took beyond the other half.
                share = max(budget, reserved)
                reserved = 0.0
            num_left = min(_num_left(request), most_tokens)
            if share <= 0 or num_left == 0:
                continue

            # Choose the number of tokens.
            start = request.sequence.num_computed
            token_cost = self._token_cost(start)
            reading_cost = 0.0
            if not is_shared:
                num_tokens = int(share / token_cost)
                if request is oldest:
                    num_tokens = max(num_tokens, 1)
            elif num_left * token_cost + self.reading_cost * start <= 2 * mixed_tokens:
                num_tokens = num_left  # two steps' tokens end it
            else:
                # The tokens before the chunk are read for it, and the weights for the first chunk.
                reading_cost = self.reading_cost * start
                if not chunks:
                    reading_cost += self.weights_cost
                num_tokens = int((share + request.turn.deficit - reading_cost) / token_cost)
                if num_tokens < num_left and num_tokens * token_cost < reading_cost:
                    num_tokens = 0  # the chunk is not worth what is read for it

            # Save the share for a later step, or make the chunk.
            if num_tokens <= 0:
                request.turn.deficit += share
                budget -= share
                continue
            num_tokens = min(num_tokens, num_left)
            chunks.append(Chunk(request, start, start + num_tokens))
            most_tokens -= num_tokens
            budget -= max(num_tokens * token_cost + reading_cost - request.turn.deficit, 0.0)
            request.turn.deficit = 0.0
        return chunks

    def _token_cost(self, position: int) -> float:
        """Cost of a prompt's token over that of its first one: attention reads all tokens before
        it."""
        return 1.0 + self.attention_cost * position

    # Snapshots of recurrent states.

    def _update_snapshots(self) -> None:
        """Note which prompts have read their snapshot, and whether the cache will hold all
        requests."""
        for request in self.running:
            if request.sequence.has_begun:
                self.page_pool.unpin_snapshot(request.sequence.allocation)
        self._cache_holds_all = self._holds_all()

    def _plan_state_moves(self, chunk: Chunk) -> StateMoves:
        """Choose the state that a chunk begins with and the states that it saves.

        A snapshot is saved where the prompt leaves another's. One behind the last whole page is
        saved too, and gives way to the next chunk's.
        """
        request = chunk.request
        sequence = request.sequence
        sequence.has_begun = True
        first = max(chunk.start - self.lookback, 0)
        is_last = chunk.stop == request.num_to_compute

        # The state before the chunk.
        source = None
        if first > 0:
            snapshot = sequence.allocation.pinned
            source = sequence.slot if snapshot is None else snapshot.snapshot

        # The state behind the chunk, in the slot.
        position = chunk.stop if is_last else max(chunk.stop - self.lookback, 0)
        saves = [(position, sequence.slot)]

        # Snapshots behind whole pages, but for the tokens that a draft needs again after a hit.
        page_size = self.page_pool.page_size
        num_before = self.lookback + 1 if self.has_draft else 0
        num_whole_pages = min(chunk.stop, request.num_to_compute - 1) // page_size
        for num_pages in {sequence.num_branch_pages, num_whole_pages}:
            position = num_pages * page_size - num_before
            if num_pages == 0 or not first <= position <= chunk.stop:
                continue
            is_transient = num_pages != sequence.num_branch_pages and not is_last
            number = self.page_pool.take_snapshot(sequence.allocation, num_pages, is_transient=is_transient)
            if number is not None:
                saves.append((position, number))

        counts = sorted((max(position - first, 0), number) for position, number in saves)
        return StateMoves(source, tuple(counts))


def _num_left(request: Request) -> int:
    """Number of prompt tokens that are still to be computed."""
    return request.num_to_compute - request.sequence.num_computed
