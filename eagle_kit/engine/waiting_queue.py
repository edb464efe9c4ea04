"""Waiting requests of a scheduler in the order of their admission, and the slots of groups and clients.

To add or to admit a request costs O(log n) comparisons for n waiting requests, and the next request is found
without a search. So a step costs the same with ten and with thousands of waiting requests. An abort searches
the waiting requests of its group.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import Any

from eagle_kit.engine.request import Request


class _Client:
    """First waiting requests of the groups of one client. Every list is sorted by its keys.

    Attributes:
        fresh: those without a token, as (priority, slots of the group, number, request).
        begun: those that gave way, by the same keys.
        by_progress: the same as (priority, progress, number, request).
    """

    def __init__(self) -> None:
        self.fresh: list[tuple[Any, ...]] = []
        self.begun: list[tuple[Any, ...]] = []
        self.by_progress: list[tuple[Any, ...]] = []

    def add(self, request: Request, num_slots: int) -> None:
        """Add the first request of a group that has ``num_slots`` slots."""
        for entries, entry in self._places(request, num_slots):
            insort(entries, entry)

    def remove(self, request: Request, num_slots: int) -> None:
        """Remove a request; its progress and ``num_slots`` are those with which it was added."""
        for entries, entry in self._places(request, num_slots):
            del entries[bisect_left(entries, entry)]

    def _places(
        self, request: Request, num_slots: int
    ) -> list[tuple[list[tuple[Any, ...]], tuple[Any, ...]]]:
        """Lists of a request, each with its entry. Numbers are unique, so requests are never compared."""
        priority, number = service_order(request)
        entry = (priority, num_slots, number, request)
        if not request.response.token_ids:
            return [(self.fresh, entry)]
        return [
            (self.begun, entry),
            (self.by_progress, (priority, progress(request), number, request)),
        ]

    def in_order(self) -> Iterator[Request]:
        """Iterate over the requests in the order of admission."""
        for *_, request in heapq.merge(self.fresh, self.begun):
            yield request


class WaitingQueue:
    """Queue of requests, a heap for each group.

    The keys of the order of admission are priority, the slots that the client has, the client's last
    admission, the slots that the group has, and arrival. All requests of a group are of one client.

    Attributes:
        num_slots_of: slots of each group that has some.
        num_slots_of_client: slots of each client that has some.
        num_requests: number of waiting requests.
        num_tokens: tokens of these.
    """

    def __init__(self) -> None:
        self.num_slots_of: Counter[int] = Counter()
        self.num_slots_of_client: Counter[str] = Counter()
        self.num_requests = 0
        self.num_tokens = 0

        # A heap for each group, and the number of waiting requests of each client.
        self._groups: dict[int, list[tuple[int, int, Request]]] = {}
        self._num_waiting_of_client: Counter[str] = Counter()

        # When each client had its last admission.
        self._num_admissions = 0
        self._last_admission: dict[str, int] = {}

        # First requests of the groups by client, and the clients by the keys of their first requests.
        self._clients: dict[str, _Client] = {}
        self._keys: dict[str, tuple[int, int, int, int, int]] = {}
        self._in_order: list[tuple[tuple[int, int, int, int, int], str]] = []

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        # A client that comes or comes back goes behind the clients that wait already.
        self._last_admission.setdefault(request.client, self._num_admissions)

        self._remove_head(request.group)
        heapq.heappush(self._groups.setdefault(request.group, []), (*service_order(request), request))
        self._add_head(request.group)
        self._num_waiting_of_client[request.client] += 1
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        self._sort_client(request.client)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        self._remove_head(request.group)
        heap = self._groups[request.group]
        if heap[0][2] is request:
            heapq.heappop(heap)
        else:
            heap.remove((*service_order(request), request))
            heapq.heapify(heap)
        if not heap:
            del self._groups[request.group]
        self._add_head(request.group)
        _count_down(self._num_waiting_of_client, request.client)
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        self._sort_client(request.client)

    def take_slot(self, request: Request) -> None:
        """Count the slot of a request that was admitted."""
        self._remove_head(request.group)
        self.num_slots_of[request.group] += 1
        self._add_head(request.group)
        self.num_slots_of_client[request.client] += 1
        self._num_admissions += 1
        self._last_admission[request.client] = self._num_admissions
        self._sort_client(request.client)

    def leave_slot(self, request: Request) -> None:
        """Count a slot back."""
        self._remove_head(request.group)
        _count_down(self.num_slots_of, request.group)
        self._add_head(request.group)
        _count_down(self.num_slots_of_client, request.client)
        self._sort_client(request.client)

    def forget_client(self, client: str) -> None:
        """Forget the last admission of a client that has no request any more."""
        if not self.num_slots_of_client[client] and not self._num_waiting_of_client[client]:
            self._last_admission.pop(client, None)

    def order(self, request: Request) -> tuple[int, int, int, int, int]:
        """Key of the order of admission. Requests of the batch are preempted from its other end."""
        client = request.client
        priority, number = service_order(request)
        num_slots = self.num_slots_of[request.group]
        return (
            priority,
            self.num_slots_of_client[client],
            self._last_admission[client],
            num_slots,
            number,
        )

    def in_order(self) -> Iterator[Request]:
        """Iterate over the first requests of the groups in the order of admission. The queue must not change
        meanwhile.

        A client is looked at when the first of its requests may be the next one of all.
        """
        clients = iter(self._in_order)
        upcoming = next(clients, None)
        opened: list[tuple[tuple[int, int, int, int, int], Request, Iterator[Request]]] = []
        while opened or upcoming is not None:
            # Open the clients whose first request comes before those of the open ones.
            while upcoming is not None and not (opened and opened[0][0] < upcoming[0]):
                requests = self._clients[upcoming[1]].in_order()
                head = next(requests)
                heapq.heappush(opened, (self.order(head), head, requests))
                upcoming = next(clients, None)

            # The least of their requests, in whose place comes the next one of its client.
            _, request, requests = opened[0]
            yield request
            following = next(requests, None)
            if following is None:
                heapq.heappop(opened)
            else:
                heapq.heapreplace(opened, (self.order(following), following, requests))

    def candidates(self, most: int) -> list[Request]:
        """Waiting requests that a request of the batch may have to give way to, in the order of admission.

        They are the first ones without a token, and the ones with the least progress that gave way before:
        up to ``most`` of each, which the first ``most`` clients share evenly.
        """
        clients = self._in_order[:most]
        most_of_client = most // max(len(clients), 1)
        found: list[Request] = []
        for _, client in clients:
            queue = self._clients[client]
            found += [entry[-1] for entry in queue.fresh[:most_of_client]]
            found += [entry[-1] for entry in queue.by_progress[:most_of_client]]
        return sorted(found, key=self.order)

    def _add_head(self, group: int) -> None:
        """Add the first request of a group to its client's, unless the group is empty."""
        if group in self._groups:
            head = self._groups[group][0][2]
            client = self._clients.setdefault(head.client, _Client())
            client.add(head, self.num_slots_of[group])

    def _remove_head(self, group: int) -> None:
        """Remove the first request of a group from its client's, unless the group is empty."""
        if group in self._groups:
            head = self._groups[group][0][2]
            self._clients[head.client].remove(head, self.num_slots_of[group])

    def _sort_client(self, client: str) -> None:
        """Move a client to its place in the order of clients."""
        known = self._keys.pop(client, None)
        if known is not None:
            del self._in_order[bisect_left(self._in_order, (known, client))]
        queue = self._clients.get(client)
        if queue is None:
            return
        head = next(queue.in_order(), None)
        if head is None:
            del self._clients[client]
            return
        self._keys[client] = self.order(head)
        insort(self._in_order, (self._keys[client], client))


def service_order(request: Request) -> tuple[int, int]:
    """Key of the order of service."""
    return -request.priority, request.number


def progress(request: Request) -> int:
    """Tokens of the response and cycles that the request skipped: a quantum counts both."""
    return len(request.response.token_ids) + request.turn.num_skipped


def _count_down(counts: Counter[Any], key: Any) -> None:
    """Count one less of ``key``, and forget it at 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
