"""Limits of clients: responses at a time, requests per minute, and bytes of bodies."""

import ipaddress
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from eagle_kit.server.api.errors import ApiError
from eagle_kit.server.response_stream import Overloaded
from eagle_kit.server.room import has_room


def network_of(address: str) -> str:
    """What limits count as one client: an IPv4 address, or the /64 network of an IPv6 address, any of whose
    addresses its holder can use. Names that are no addresses stay as they are."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), 64), strict=False))


MINUTE_S = 60.0
NUM_FORGOTTEN = 2
"""Buckets that are looked at with each request, to forget them: more than a request can add."""


class Bucket(NamedTuple):
    """Requests that a client may send at once, and when they were so many (``time.monotonic()``)."""

    level: float
    at: float


@dataclass
class ClientLimits:
    """Limits per client (:func:`network_of`), used on the event loop only. Requests per minute are a token
    bucket per client.

    Attributes:
        max_parallel: responses that one client may have in progress, or None.
        per_minute: requests of one client per minute, or None.
    """

    max_parallel: int | None = None
    per_minute: int | None = None
    _parallel: Counter[str] = field(default_factory=Counter)
    _buckets: dict[str, Bucket] = field(default_factory=dict)

    def count(self, client: str) -> None:
        """Count a request, whatever comes of it. Raises ApiError 429."""
        if self.per_minute is not None:
            self._draw(client, self.per_minute, time.monotonic())

    def enter(self, client: str, num_responses: int) -> None:
        """Begin ``num_responses`` responses; :meth:`leave` must follow. Raises ApiError 429."""
        if self.max_parallel is not None and self._parallel[client] + num_responses > self.max_parallel:
            raise ApiError(
                429,
                f"The client has {self._parallel[client]} responses in progress and asks for {num_responses} "
                f"more; {self.max_parallel} are allowed.",
                code="too_many_parallel_requests",
                headers={"Retry-After": "1"},
            )
        self._parallel[client] += num_responses

    def leave(self, client: str, num_responses: int) -> None:
        """End ``num_responses`` responses."""
        self._parallel[client] -= num_responses
        if self._parallel[client] <= 0:
            del self._parallel[client]

    def _draw(self, client: str, per_minute: int, now: float) -> None:
        # Buckets are in the order of their last use. One that was not used for a minute is full, as that of
        # an unknown client is.
        for name in list(islice(self._buckets, NUM_FORGOTTEN)):
            if now - self._buckets[name].at >= MINUTE_S:
                del self._buckets[name]

        bucket = self._buckets.get(client, Bucket(float(per_minute), now))
        level = min(float(per_minute), bucket.level + (now - bucket.at) * per_minute / MINUTE_S)
        if level < 1:
            wait = (1 - level) * MINUTE_S / per_minute
            raise ApiError(
                429,
                f"The client has sent more than {per_minute} requests per minute.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(int(wait) + 1)},
            )
        self._buckets.pop(client, None)
        self._buckets[client] = Bucket(level - 1, now)


class BodyRoom:
    """Room for the bodies of all requests in progress, used on the event loop only.

    Args:
        most: bytes for all clients; those that have few have room beside (:mod:`eagle_kit.server.room`).
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_held = 0
        self._num_held_by_client: Counter[str] = Counter()

    def take(self, client: str, num_bytes: int) -> None:
        """Take room for bytes that have arrived; :meth:`give_back` must follow. Raises Overloaded."""
        own = self._num_held_by_client[client]
        if not has_room(num_bytes, held=self.num_held, own=own, most=self.most):
            raise Overloaded(
                f"The bodies of all requests in progress have {self.num_held} bytes, "
                f"{self.most} are allowed. Try again later."
            )
        self.num_held += num_bytes
        self._num_held_by_client[client] += num_bytes

    def give_back(self, client: str, num_bytes: int) -> None:
        """Give room back."""
        self.num_held -= num_bytes
        self._num_held_by_client[client] -= num_bytes
        if not self._num_held_by_client[client]:
            del self._num_held_by_client[client]


class HeldBody:
    """Bytes of the body of one request.

    Args:
        client: that sends it.
        room: shared by all requests.
    """

    def __init__(self, client: str, room: BodyRoom) -> None:
        self._data = bytearray()
        self._client = client
        self._room = room
        self._num_held = 0

    def add(self, chunk: bytes) -> None:
        """Append bytes. Raises Overloaded."""
        self._room.take(self._client, len(chunk))
        self._num_held += len(chunk)
        self._data += chunk

    def pop(self) -> bytearray:
        """Return the bytes and forget them. Their room stays taken for what is made of them."""
        data = self._data
        self._data = bytearray()
        return data

    def close(self) -> None:
        """Give the room back; may be called again."""
        self._room.give_back(self._client, self._num_held)
        self._num_held = 0
        self._data = bytearray()
