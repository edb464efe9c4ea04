"""Scheduling policy of requests.

Requests wait in the order of priority, then arrival. A step first gives every decoding request the pages it
may write in this cycle; when there are none left, the request that is last in that order is preempted: it
gives all of its pages back and waits again (it is recomputed later, from the prefix cache where that still
has it). The rest of the step's token budget goes to prompts: those begun first, then new ones as long as a
slot and pages are free. A request that does not fit yet keeps those behind it waiting.
"""

import heapq
from typing import NamedTuple

from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.kv.page_pool import PagePool
from eagle_kit.serve.request import Request


class Chunk(NamedTuple):
    """Prompt tokens start..stop-1 of a request, computed in this step."""

    request: Request
    start: int
    stop: int


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
    """

    def __init__(self, page_pool: PagePool, config: ResolvedConfig, *, room: int, needs_last: bool) -> None:
        self.page_pool, self.prefill_tokens = page_pool, config.prefill_tokens
        self.room, self.needs_last = room, needs_last
        self.running: list[Request] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._slots = list(range(config.max_batch_size - 1, -1, -1))

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queue, in no particular order."""
        return [request for _, _, request in self._waiting]

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        heapq.heappush(self._waiting, (*_rank(request), request))

    def plan(self) -> StepPlan:
        """Plan the next step, and allocate its pages."""
        preempted = self._make_room()
        decoding = [request for request in self.running if not request.is_prefilling]
        budget, chunks = self.prefill_tokens, []
        for request in self.running:
            if request.is_prefilling and budget > 0:
                chunks.append(self._chunk(request, request.num_computed, budget))
                budget -= chunks[-1].stop - chunks[-1].start
        while budget > 0 and self._waiting and self._slots and not preempted:
            request = self._waiting[0][2]
            start = self._admit(request)
            if start is None:
                break
            chunks.append(self._chunk(request, start, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        return StepPlan(chunks, decoding, preempted)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue or the batch, and release its pages."""
        if request.slot < 0:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
            return
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot, request.num_computed, request.num_verified = -1, 0, 0
        request.epoch += 1
        self.page_pool.release(request.allocation)

    def _make_room(self) -> list[Request]:
        """Allocate pages for the next cycle of every decoding request, in order -> the preempted
        ones."""
        preempted: list[Request] = []
        for request in sorted(self.running, key=_rank):
            if request.slot < 0 or request.is_prefilling:
                continue
            while not self._has_pages(request):
                victim = max(self.running, key=_rank)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
        return preempted

    def _has_pages(self, request: Request) -> bool:
        missing = self.page_pool.pages_for(request.num_tokens + self.room) - len(request.allocation)
        return missing <= 0 or self.page_pool.extend(request.allocation, missing)

    def _preempt(self, request: Request) -> None:
        self.page_pool.publish(request.allocation, request.tokens(0, request.num_verified))
        self.remove(request)
        request.num_preemptions += 1
        self.add(request)

    def _admit(self, request: Request) -> int | None:
        """Admit the first request of the queue -> the first token to compute, or None when it does not
        fit."""
        wanted = request.num_to_compute
        shared = self.page_pool.match(request.tokens(0, wanted - 1)) if self.page_pool.prefix_cache else []
        need = self.page_pool.pages_for(request.num_tokens + self.room) - len(shared)
        # A page is left for each running request to grow into, or the new one would be preempted at once.
        allocation = self.page_pool.allocate(shared, need)
        if allocation is None:
            return None
        if self.page_pool.num_available < len(self.running):
            self.page_pool.release(allocation)
            return None
        heapq.heappop(self._waiting)
        request.allocation, request.slot = allocation, self._slots.pop()
        request.num_computed = request.num_shared_tokens = len(shared) * self.page_pool.page_size
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_shared_tokens
        self.running.append(request)
        return request.num_shared_tokens - (1 if shared and self.needs_last else 0)

    def _chunk(self, request: Request, start: int, budget: int) -> Chunk:
        stop = min(request.num_to_compute, start + budget)
        return Chunk(request, start, stop)


def _rank(request: Request) -> tuple[int, int]:
    return -request.priority, request.number
