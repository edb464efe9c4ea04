"""Who is served next: a policy on one screen.

Requests wait in the order of priority, then arrival. A step first gives every decoding request the pages it
may write in this cycle; when there are none left, the request that is last in that order gives all of its own
back and waits again (it is computed anew later, out of the prefix cache where that still holds it). What is
left of the step's token budget goes to prompts: those begun first, then new ones as long as a slot and pages
are free. Nobody overtakes: a request that does not fit yet keeps those behind it waiting.
"""

import heapq
from typing import NamedTuple

from eagle_kit.kv.page_pool import PagePool
from eagle_kit.serve.request import Request


class Chunk(NamedTuple):
    """Prompt tokens start..stop-1 of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int


class SchedulerOutput(NamedTuple):
    """One step: prompt ``chunks``, then a cycle for ``decoding``. ``preempted`` left the batch."""

    chunks: list[Chunk]
    decoding: list[Request]
    preempted: list[Request]


class Scheduler:
    """Decides; computes nothing. Owns the queue, the running list and the slots; allocates pages.

    Args:
        max_running: slots.
        prefill_tokens: most prompt tokens of one step, over all requests.
        room: tokens behind its known ones that a request may need pages for in the next cycle.
        needs_last: whether the last token of a cached beginning is computed again for its hidden state.
    """

    def __init__(
        self, page_pool: PagePool, *, max_running: int, prefill_tokens: int, room: int, needs_last: bool
    ) -> None:
        self.page_pool, self.prefill_tokens, self.room, self.needs_last = (
            page_pool,
            prefill_tokens,
            room,
            needs_last,
        )
        self.running: list[Request] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._slots = list(range(max_running - 1, -1, -1))
        self.num_preemptions = 0

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queue, in no particular order."""
        return [request for _, _, request in self._waiting]

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        heapq.heappush(self._waiting, (*_rank(request), request))

    def plan(self) -> SchedulerOutput:
        """Decide the next step, and allocate its pages."""
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
        return SchedulerOutput(chunks, decoding, preempted)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; its pages are let go."""
        if request.slot < 0:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
            return
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot, request.num_computed = -1, 0
        request.epoch += 1
        self.page_pool.release(request.allocation)

    def _make_room(self) -> list[Request]:
        """Pages for the next cycle of everybody who decodes, first come first."""
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
        done = request.num_computed if request.is_prefilling else request.num_tokens - 1
        self.page_pool.publish(request.allocation, request.tokens(0, done))
        self.remove(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def _admit(self, request: Request) -> int | None:
        """Give the first of the queue a slot and pages -> the first token to compute, or None."""
        wanted = request.num_to_compute
        shared = self.page_pool.match(request.tokens(0, wanted - 1)) if self.page_pool.prefix_cache else []
        need = self.page_pool.pages_for(request.num_tokens + self.room) - len(shared)
        # A page is left for each running request to grow into, or the newcomer would be sent back at once.
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
