"""Scheduling policy of requests.

Requests of one group share a turn: the choices of an HTTP request, or all prompts of one offline call. Groups
wait in the order of priority, then of the slots that their clients hold, then of the last time that their
clients got one, then of the slots that they hold themselves, then of arrival. A group that holds none need
not wait for the end of others' replies. It takes a slot, or the pages that it lacks, from

* a group that holds several, whatever its priority,
* unless it is a long prompt itself, a long prompt behind another that is being computed,
* a request that is :data:`TURN_TOKENS` tokens ahead of it in its reply, and has had a turn of as many, or of
  :data:`SHORT_TURN_TOKENS` where the group waits for its first token and there is a prefix cache,
* for its first token, and only with a prefix cache, a prompt that has had a turn of :data:`TURN_CHUNKS` parts
  and lacks more than those beyond its own.

Of two clients the one that holds no more slots than the other keeps them. Nobody gives way for a request that
would not fit even so. The one that gives way waits again. Its tokens stay in the prefix cache, so that going
on costs little; a slot that becomes free goes to the first in the order, which then has a turn, so that
nobody waits for ever. For some steps, though, a group's second request, and a long prompt behind another,
leave the last free slot to others, or they would be begun again and again.

A step first gives every decoding request the pages it may write in this cycle; when there are none left, a
request of the group with the most slots gives way, the last that arrived. Then requests are admitted. A step
that decodes, or ends a prompt, beside another group's computes fewer prompt tokens, which count for more the
more there are before them; half of them belong to the prompt that has waited longest, the rest to those that
end soonest, and one that two steps' tokens would end is ended, in addition to that half. The weights and what
is before a part are read once for all of it, so a longer prompt saves its share of several steps up until a
part is worth that. A reply with much before it, or several such of one group, likewise sit out cycles that
others share, until their share pays for one; in a turn these count like tokens. With recurrent layers a turn
is longer: what lies behind the last snapshot of a state is computed again.
A request that does not fit yet keeps those behind it waiting.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.engine.request import DeviceState, Request, SequenceState
from eagle_kit.kv.page_pool import PagePool, RadixNode

TURN_TOKENS = 32
"""Tokens of a reply in a turn. With a prefix cache each further turn costs about a page of prefill, 2 % of
the time of 32 tokens."""
SHORT_TURN_TOKENS = 8
"""Tokens of a turn that ends for a request without a token."""
RECOMPUTED = 2
"""Tokens that may be computed again for one of a turn: prompts are computed faster than replies."""
MOST_TURN_TOKENS = 512
"""Tokens of a turn, whatever has to be computed again behind it."""
TURN_CHUNKS = 4
"""Turn of a prompt, in parts as they are computed beside the replies of others."""
DRAFTED_SHARE = 0.6
"""Part of its share that a reply with much before it may use where the engine speculates. A share is the time
of a plain cycle alone. With drafts a reply alone needs about this part of it for a token, and the cycles that
many groups share may be plain."""


class StateMoves(NamedTuple):
    """States by number (``kv/states.py``): that before a part of a prompt, None at the beginning of a text,
    and those saved when so many of its tokens are computed, (tokens, number) ascending."""

    source: int | None
    saves: tuple[tuple[int, int], ...]


class Chunk(NamedTuple):
    """Prompt tokens start..stop-1 of a request, computed in this step; ``states`` for recurrent layers,
    counted from ``lookback`` tokens before the start."""

    request: Request
    start: int
    stop: int
    states: StateMoves | None = None


class StepPlan(NamedTuple):
    """Work of one step: prompt ``chunks``, then a cycle for ``decoding``. ``preempted`` left the batch."""

    chunks: list[Chunk]
    decoding: list[Request]
    preempted: list[Request]


class Scheduler:
    """Owner of the queue, the running list and the slots; allocates pages.

    Args:
        config: slots and most prompt tokens of one step, over all requests.
        room: tokens behind its known ones that a request may need pages for in the next cycle.
        needs_last: whether the last token of a cached prefix is computed again for its hidden state.
        lookback: tokens before a part of a prompt that are computed with it.
        attention_cost: arithmetic of attention per token before, over that of everything else of a token.
        reading_cost: time to read a token before for a part of a prompt, over that to compute one without
            any before.
        weights_cost: the same for reading the weights, once for all parts of a step.
    """

    def __init__(
        self,
        page_pool: PagePool,
        config: ResolvedConfig,
        *,
        room: int,
        needs_last: bool,
        lookback: int = 0,
        attention_cost: float = 0.0,
        reading_cost: float = 0.0,
        weights_cost: float = 0.0,
    ) -> None:
        self.page_pool, self.config = page_pool, config
        self.attention_cost, self.reading_cost = attention_cost, reading_cost
        self.weights_cost = weights_cost
        self.room, self.needs_last, self.lookback = room, needs_last, lookback
        self.running: list[Request] = []
        self._queues: dict[int, list[tuple[int, int, Request]]] = {}
        self._num_held: Counter[int] = Counter()
        self._num_held_by_client: Counter[str] = Counter()
        self._num_admitted = 0
        self._last_admitted: dict[str, int] = {}
        self._num_waiting_tokens, self._states_stay = 0, True
        self._num_kept = 0
        self._slots = list(range(config.max_batch_size - 1, -1, -1))
        self._num_in = [0] * page_pool.num_parts
        self._short_turn = SHORT_TURN_TOKENS if page_pool.can_reuse else TURN_TOKENS
        self._prompt_turn = min(config.prefill_tokens, TURN_CHUNKS * config.mixed_prefill_tokens)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(map(len, self._queues.values()))

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        heapq.heappush(self._queues.setdefault(request.group, []), (*_rank(request), request))
        self._num_waiting_tokens += request.num_tokens
        # Those that wait already are admitted once each before a client that comes or comes back.
        self._last_admitted.setdefault(request.client, self._num_admitted)

    def plan(self) -> StepPlan:
        """Plan the next step, and allocate its pages."""
        if self.page_pool.has_snapshots:
            for request in self.running:
                if request.sequence.has_begun:
                    self.page_pool.has_begun(request.sequence.allocation)
            self._states_stay = self._all_stay()
        decoding = [request for request in self.running if not request.is_prefilling]
        preempted = self._make_room(decoding)
        if not preempted:
            self._num_kept -= 1
            preempted = self._admit_all() if self._queues else []
        chunks: list[Chunk] = []
        if preempted or len(decoding) < len(self.running):
            decoding = [request for request in self.running if not request.is_prefilling]
            chunks = self._chunks([request for request in self.running if request.is_prefilling])
        if self.page_pool.has_snapshots:
            chunks = [chunk._replace(states=self._moves(chunk)) for chunk in chunks]
        return StepPlan(chunks, self._affordable(decoding), preempted)

    def _affordable(self, decoding: list[Request]) -> list[Request]:
        """Leave out requests with so much before them that a cycle of theirs takes more than a group's share;
        each has its turn when it has saved that up."""
        if len(self._num_held) < 2 or all(request.group == decoding[0].group for request in decoding):
            return decoding
        share = 1.0 + self.weights_cost
        if self.needs_last:
            share *= DRAFTED_SHARE
        if 1.0 + self.reading_cost * self.config.max_context <= share / max(self._num_held.values()):
            for request in decoding:  # none can have so much
                request.turn.deficit = 0.0
            return decoding
        num_members = Counter(request.group for request in decoding)
        gains = [share / num_members[request.group] for request in decoding]
        costs = [1.0 + self.reading_cost * request.num_tokens for request in decoding]
        lacks = [max(cost - each.turn.deficit, 0.0) for cost, each in zip(costs, decoding, strict=True)]
        waits = [math.ceil(lack / gain) for lack, gain in zip(lacks, gains, strict=True)]
        now = max(min(waits), 1)  # somebody decodes in every step
        kept = []
        for request, wait, gain in zip(decoding, waits, gains, strict=True):
            if wait <= now:
                request.turn.deficit = 0.0
                kept.append(request)
            else:
                request.turn.deficit += now * gain
                request.turn.num_skipped += 1
        return kept

    def remove(self, request: Request) -> None:
        """Take a request out of the queue or the batch, and release its pages."""
        if request.sequence.slot < 0:
            self._dequeue(request)
            self._forget_client(request.client)
            return
        self.running.remove(request)
        self._num_held[request.group] -= 1
        if not self._num_held[request.group]:
            del self._num_held[request.group]
        self._num_held_by_client[request.client] -= 1
        if not self._num_held_by_client[request.client]:
            del self._num_held_by_client[request.client]
        self._slots.append(request.sequence.slot)
        self._num_in[request.sequence.allocation.part] -= 1
        self.page_pool.release(request.sequence.allocation)
        request.sequence = SequenceState()
        request.on_device = DeviceState()
        request.turn.deficit = 0.0
        self._forget_client(request.client)

    def mark_computed(self, request: Request, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` of a request have been sent to the device."""
        request.sequence.num_computed = num_tokens

    def mark_verified(self, request: Request, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` of a request are computed and led to finite logits."""
        sequence = request.sequence
        sequence.num_verified = num_tokens
        sequence.num_computed = max(sequence.num_computed, num_tokens)

    def publish(self, request: Request) -> bool:
        """Cache the pages of a request that are known to hold finite numbers -> whether its pages changed."""
        return self.page_pool.publish(request.sequence.allocation, request.tokens(0, request.num_cacheable))

    def _forget_client(self, client: str) -> None:
        """Forget when a client was admitted last, if it has no request any more."""
        waiting = (request for queue in self._queues.values() for _, _, request in queue)
        if not self._num_held_by_client[client] and all(each.client != client for each in waiting):
            del self._last_admitted[client]

    def _dequeue(self, request: Request) -> None:
        self._num_waiting_tokens -= request.num_tokens
        queue = self._queues[request.group]
        if queue[0][2] is request:
            heapq.heappop(queue)
        else:
            queue.remove((*_rank(request), request))
            heapq.heapify(queue)
        if not queue:
            del self._queues[request.group]

    def _make_room(self, decoding: Sequence[Request]) -> list[Request]:
        """Allocate pages for the next cycle of every decoding request, in order -> the preempted
        ones."""
        preempted: list[Request] = []
        size, room = self.page_pool.page_size, self.room
        short = [  # but for those that may be; of written pages the host need not count the parts
            request
            for request in decoding
            if request.num_tokens + room > size * request.on_device.num_pages_written
        ]
        for request in sorted(short, key=_rank):
            if request.sequence.slot < 0:
                continue
            while not self._has_pages(request):
                part = request.sequence.allocation.part
                rivals = (each for each in self.running if each.sequence.allocation.part == part)
                victim = max(rivals, key=self._order)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
        return preempted

    def _has_pages(self, request: Request) -> bool:
        allocation = request.sequence.allocation
        missing = self.page_pool.pages_for(request.num_tokens + self.room) - len(allocation)
        return missing <= 0 or self.page_pool.extend(allocation, missing)

    def _order(self, request: Request) -> tuple[int, int, int, int, int]:
        """Key of the order in which requests are admitted; running ones give way from the other end."""
        priority, held, number = self._order_in_client(request)
        client = request.client
        return priority, self._num_held_by_client[client], self._last_admitted[client], held, number

    def _order_in_client(self, request: Request) -> tuple[int, int, int]:
        """Key of the order among the requests of one client."""
        priority, number = _rank(request)
        return priority, self._num_held[request.group], number

    def _preempt(self, request: Request) -> None:
        self.publish(request)
        self.remove(request)
        self.add(request)

    def _admit_all(self) -> list[Request]:
        """Admit requests in order as long as they fit, then those for which others give way -> those."""
        preempted: list[Request] = []

        # Free slots: what a client gets moves its others back, so that each client has a heap of its own.
        heaps: dict[str, list[tuple[tuple[int, int, int], Request]]] = {}
        for each in self._heads() if self._slots else ():
            heaps.setdefault(each.client, []).append((self._order_in_client(each), each))
        for heap in heaps.values():
            heapq.heapify(heap)
        while self._slots and heaps:
            client = min(heaps, key=lambda each: self._order(heaps[each][0][1]))
            first = heapq.heappop(heaps[client])[1]
            is_kept = self._num_kept > 0 and len(self._slots) == 1 and self._can_spare(first)
            if not is_kept:
                if not self._admit(first):
                    break
                if (head := self._head(first.group)) is not None:
                    heapq.heappush(heaps[client], (self._order_in_client(head), head))
            if not heaps[client]:
                del heaps[client]

        # Slots of others.
        behind = self._long_prompts()[1:]
        dispensable = self._dispensable(behind)
        for request in sorted(self._heads(), key=self._order) if dispensable else ():
            while request.sequence.slot < 0 and (victims := self._victims(request, dispensable, behind)):
                victim = max(victims, key=self._order)
                self._preempt(victim)
                preempted.append(victim)
                self._admit(request)
                self._num_kept = TURN_TOKENS
                behind = self._long_prompts()[1:]
                dispensable = self._dispensable(behind)
            if request.sequence.slot < 0 and self._slots:
                break
        return preempted

    def _can_spare(self, request: Request) -> bool:
        """Return True if a request can leave the last free slot to others: it is not the first of its group,
        or a long prompt behind another."""
        if self._num_held[request.group]:
            return len(self._num_held) > 1
        is_long = not request.reply.token_ids and request.num_to_compute > self._prompt_turn
        if not is_long or not self._long_prompts():
            return False
        parts = range(self.page_pool.num_parts)
        shared = max((self.page_pool.reusable(self._matched(request, part)) for part in parts), key=len)
        return request.num_to_compute - len(shared) * self.page_pool.page_size > self._prompt_turn

    def _long_prompts(self) -> list[Request]:
        """List the running requests that have more than a turn of their prompt to be computed, the oldest
        first. The others of them have little of a step's tokens."""
        long = (each for each in self.running if each.is_prefilling and _rest(each) > self._prompt_turn)
        return sorted(long, key=_rank) if self.page_pool.can_reuse else []

    def _heads(self) -> list[Request]:
        """List the first request of every group that waits."""
        return [head for group in self._queues if (head := self._head(group)) is not None]

    def _head(self, group: int) -> Request | None:
        """Return the first request of a group in the queue. One whose prompt another of the group computes
        waits, for the pages are in the cache afterwards."""
        if group not in self._queues:
            return None
        head = self._queues[group][0][2]
        if not self.page_pool.can_reuse or not self._num_held[group]:
            return head
        for other in self.running:
            sequence = other.sequence
            has_pages_to_share = sequence.num_shared_tokens + self.page_pool.page_size < other.num_to_compute
            if (
                other.group == group
                and sequence.num_verified < other.num_to_compute
                and has_pages_to_share
                and other.prompt_ids == head.prompt_ids
            ):
                return None
        return head

    def _dispensable(self, behind: Sequence[Request]) -> list[Request]:
        """List the running requests that could give way, those that have got most first. ``behind``: those
        with long prompts behind another."""

        def may_give_way(request: Request) -> bool:
            if self._num_held[request.group] > 1 or request in behind:
                return True
            is_ahead = progress(request) >= TURN_TOKENS  # of a request without a token
            has_had_turn = is_ahead and _has_had_turn(request, self._turn_of(request, self._short_turn))
            return has_had_turn or self._has_had_prompt_turn(request)

        return sorted(filter(may_give_way, self.running), key=lambda each: -progress(each))

    def _has_had_prompt_turn(self, request: Request) -> bool:
        sequence = request.sequence
        computed = sequence.num_verified - sequence.num_shared_tokens
        if self.page_pool.has_snapshots:  # what is behind the last snapshot would be computed again
            kept = self.page_pool.num_resumable(sequence.allocation, sequence.num_verified)
            computed = kept - sequence.num_shared_tokens
        return self.page_pool.can_reuse and computed >= self._prompt_turn < _rest(request)

    def _turn_of(self, request: Request, least: int) -> int:
        """Tokens of a request's turn. With recurrent layers what lies behind its last snapshot is computed
        again afterwards, all of it where this one does not stay, so that its turn is as much longer."""
        if not self.page_pool.has_snapshots:
            return least
        kept = 0
        if self._states_stay:
            sequence = request.sequence
            kept = self.page_pool.num_resumable(sequence.allocation, sequence.num_verified)
        return max(least, min((request.num_tokens - kept) // RECOMPUTED, MOST_TURN_TOKENS))

    def _all_stay(self) -> bool:
        """Return True if what all requests leave in the cache stays there: their pages, and their snapshots,
        of which running ones may have two."""
        num_tokens = self._num_waiting_tokens + sum(each.num_tokens for each in self.running)
        num_snapshots = self.num_waiting + 2 * len(self.running)
        pool = self.page_pool
        return num_tokens <= pool.num_pages * pool.page_size and num_snapshots <= pool.num_snapshots

    def _victims(
        self, request: Request, dispensable: Sequence[Request], behind: Sequence[Request]
    ) -> list[Request]:
        """List those that give way to a waiting request."""
        if self._num_held[request.group] or not dispensable:
            return []
        most = progress(dispensable[0]) - progress(request)
        if most < TURN_TOKENS and request.reply.token_ids and max(self._num_held.values()) == 1:
            return []  # at once in the usual case of a long queue

        behind = behind if request.num_to_compute <= self._prompt_turn else ()

        held = self._num_held_by_client

        def gives_way(other: Request) -> bool:
            is_others_share = other.client != request.client and held[other.client] <= held[request.client]
            if is_others_share and other.priority >= request.priority:
                return False
            if self._num_held[other.group] > 1:
                return True
            if other.priority > request.priority:
                return False
            if other in behind:
                return True
            ahead = progress(other) - progress(request)
            turn = TURN_TOKENS if request.reply.token_ids else self._short_turn
            if ahead >= TURN_TOKENS and _has_had_turn(other, self._turn_of(other, turn)):
                return True
            left = _rest(other) - request.num_to_compute
            is_longer = left > self._prompt_turn
            return is_longer and self._has_had_prompt_turn(other) and not request.reply.token_ids

        victims = [other for other in dispensable if gives_way(other)]
        for part in range(self.page_pool.num_parts):
            there = [other for other in victims if other.sequence.allocation.part == part]
            if there and self._would_fit(request, there, part):
                return there
        return []

    def _would_fit(self, request: Request, victims: Sequence[Request], part: int) -> bool:
        """Return True if all ``victims`` together make room for a request in their part of the pool."""
        others = self._num_in[part] - len(victims)
        if others >= self.config.own_batch_size:
            return False
        need = self.page_pool.pages_for(request.num_tokens + self.room) + others
        allocations = [each.sequence.allocation for each in victims]
        freed = sum(len(each.pages) + sum(node.refs == 1 for node in each.nodes) for each in allocations)
        return need <= self.page_pool.num_available_in(part) + freed

    def _matched(self, request: Request, part: int) -> list[RadixNode]:
        """Cached pages of a part that a waiting request begins with: looked for once, then followed."""
        stop = request.num_to_compute - 1
        tokens = request.tokens(0, stop) if request.reply.token_ids else request.prompt_ids
        known = request.turn.cached_nodes.get(part, ())
        salt = request.params.cache_salt
        found = self.page_pool.match(tokens, stop, known, part=part, salt=salt)
        request.turn.cached_nodes[part] = found
        return found

    def _admit(self, request: Request) -> bool:
        """Admit the first request of its group, if there is a slot and it fits: where most of its tokens are
        cached, or else where most pages are free, and last where far more requests are than elsewhere."""
        parts = [part for part, count in enumerate(self._num_in) if count < self.config.own_batch_size]
        if len(parts) > 1:
            most = min(self._num_in) + max(2, self.config.own_batch_size // 4)

            def lacks(part: int) -> tuple[bool, bool, int]:
                cached = len(self._matched(request, part)) if self.page_pool.can_reuse else 0
                is_most = 2 * cached * self.page_pool.page_size >= request.num_tokens
                is_ahead = self._num_in[part] >= most
                return not is_most or is_ahead, is_ahead, -self.page_pool.num_available_in(part)

            parts.sort(key=lacks)
        return bool(self._slots) and any(self._admit_to(part, request) for part in parts)

    def _admit_to(self, part: int, request: Request) -> bool:
        """Admit a request to a part of the pool, if it fits."""
        cached = self._matched(request, part) if self.page_pool.can_reuse else []
        shared = self.page_pool.reusable(cached)
        need = self.page_pool.pages_for(request.num_tokens + self.room) - len(shared)
        # A page is left for each running request to grow into, or the new one would be preempted at once.
        allocation = self.page_pool.allocate(shared, need, part, request.params.cache_salt)
        if allocation is None:
            return False
        if self.page_pool.num_available_in(part) < self._num_in[part]:
            self.page_pool.release(allocation)
            return False
        self._dequeue(request)
        request.turn.cached_nodes = {}
        self.page_pool.begin(allocation)
        is_branch = len(cached) > len(shared) and bool(cached[-1].children)
        num_shared_tokens = len(shared) * self.page_pool.page_size
        num_recomputed = 1 if shared and self.needs_last else 0
        request.sequence = SequenceState(
            slot=self._slots.pop(),
            allocation=allocation,
            num_shared_tokens=num_shared_tokens,
            num_computed=num_shared_tokens - num_recomputed,
            num_branch_pages=len(cached) if is_branch else 0,
        )
        request.turn.quantum_start = progress(request)
        self.running.append(request)
        self._num_in[part] += 1
        self._num_held[request.group] += 1
        self._num_held_by_client[request.client] += 1
        self._num_admitted += 1
        self._last_admitted[request.client] = self._num_admitted
        return True

    def _chunks(self, begun: Sequence[Request]) -> list[Chunk]:
        """Divide a step's tokens among the prompts that are being computed."""
        if not begun:
            return []
        room, mixed = self.config.prefill_tokens, self.config.mixed_prefill_tokens
        decodes = len(begun) < len(self.running)
        if decodes:
            room = min(room, self.config.decode_prefill_tokens)
        holds_others = len(self._num_held) > 1 and (decodes or any(_rest(each) <= mixed for each in begun))
        left: float = mixed if holds_others else room
        oldest = min(begun, key=_rank)
        reserved = min(_rest(oldest) * self._cost_at(oldest.sequence.num_computed), left / 2)
        chunks: list[Chunk] = []
        for request in sorted(begun, key=lambda each: (_rest(each), _rank(each))):
            share, rest = left - reserved, min(_rest(request), room)
            if request is oldest:  # what short ones took beyond their share is not taken from it
                share = max(left, reserved)
                reserved = 0.0
            if share <= 0 or not rest:
                continue
            start = request.sequence.num_computed
            cost = self._cost_at(start)
            reading = 0.0
            if not holds_others:
                count = max(int(share / cost), 1 if request is oldest else 0)
            elif rest * cost + self.reading_cost * start <= 2 * mixed:
                count = rest
            else:
                reading = self.reading_cost * start + (0.0 if chunks else self.weights_cost)
                count = int((share + request.turn.deficit - reading) / cost)
                count = 0 if count < rest and count * cost < reading else count
            if count <= 0:
                request.turn.deficit += share
                left -= share
                continue
            count = min(count, rest)
            chunks.append(Chunk(request, start, start + count))
            room -= count
            left -= max(count * cost + reading - request.turn.deficit, 0.0)
            request.turn.deficit = 0.0
        return chunks

    def _moves(self, chunk: Chunk) -> StateMoves:
        """Choose the states that a part of a prompt begins with and saves: a snapshot where the prompt leaves
        another's, and one behind its last whole page, which gives way to the next part's."""
        request, start, stop, _ = chunk
        sequence = request.sequence
        first = max(start - self.lookback, 0)
        ends = stop == request.num_to_compute
        source = sequence.allocation.source
        begins_with = sequence.slot if source is None else source.snapshot
        sequence.has_begun = True
        back = self.lookback + 1 if self.needs_last else 0
        size = self.page_pool.page_size
        last = min(stop, request.num_to_compute - 1) // size
        saves = [(stop if ends else max(stop - self.lookback, 0), sequence.slot)]
        for pages in {sequence.num_branch_pages, last}:
            position, is_passing = pages * size - back, pages != sequence.num_branch_pages and not ends
            if not pages or not first <= position <= stop:
                continue
            number = self.page_pool.take_snapshot(sequence.allocation, pages, is_passing=is_passing)
            if number is not None:
                saves.append((position, number))
        counts = sorted((max(position - first, 0), number) for position, number in saves)
        return StateMoves(None if first == 0 else begins_with, tuple(counts))

    def _cost_at(self, position: int) -> float:
        """Cost of a prompt's token, relative to that of the first: attention reads all before it."""
        return 1.0 + self.attention_cost * position


def progress(request: Request) -> int:
    """Tokens of the reply, and the cycles that the request skipped: in a turn they count alike."""
    return len(request.reply.token_ids) + request.turn.num_skipped


def _has_had_turn(request: Request, num_tokens: int) -> bool:
    return progress(request) - request.turn.quantum_start >= num_tokens


def _rest(request: Request) -> int:
    """Number of prompt tokens that are still to be computed."""
    return request.num_to_compute - request.sequence.num_computed


def _rank(request: Request) -> tuple[int, int]:
    """Key of the order of service."""
    return -request.priority, request.number
