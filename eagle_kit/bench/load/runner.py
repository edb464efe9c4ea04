"""Sends a workload to one or two endpoints, and stops in good order at Ctrl-C."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from eagle_kit.bench.load.acceptance import Snapshot, take_snapshot
from eagle_kit.bench.load.client import Client, Clock
from eagle_kit.bench.load.endpoint import Endpoint
from eagle_kit.bench.load.reply import Recorder, RequestResult
from eagle_kit.bench.load.workload import LoadRequest
from eagle_kit.core.errors import UserError


@dataclass(frozen=True)
class LoadPlan:
    """When requests are sent.

    Attributes:
        requests: in their order.
        warmup: sent first, all answered before the measurement begins, never counted.
        concurrency: None sends every request when it is due (an open loop); a number keeps that many under
            way and sends the next one when one has ended, whatever is due (a closed loop).
        rounds: parts of equal size. Endpoints take turns after every part, the first one beginning part 0,
            the second part 1 and so on, so that a drift of the machine falls on both.
    """

    requests: Sequence[LoadRequest]
    warmup: Sequence[LoadRequest] = ()
    concurrency: int | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError(f"--max-concurrency is {self.concurrency}.", "Give at least 1.")
        if not 1 <= self.rounds <= len(self.requests):
            raise UserError(
                f"--rounds is {self.rounds} for {len(self.requests)} requests.",
                "Give at least 1, and at most one round per request.",
            )

    def part(self, number: int) -> list[LoadRequest]:
        """The requests of one round, due from its own start on."""
        size, more = divmod(len(self.requests), self.rounds)
        start = number * size + min(number, more)
        part = self.requests[start : start + size + (number < more)]
        return [replace(request, due_s=request.due_s - part[0].due_s) for request in part]


@dataclass(frozen=True)
class Phase:
    """One uninterrupted stretch of load on one endpoint.

    Attributes:
        started_at: seconds of the clock.
        replies: of every request that was sent, in the order of their numbers.
        before, after: the server's counters, None where it shows none.
    """

    started_at: float
    replies: tuple[RequestResult, ...]
    before: Snapshot | None = None
    after: Snapshot | None = None

    @property
    def ended_at(self) -> float:
        """When the last reply ended."""
        return max((reply.ended_at for reply in self.replies), default=self.started_at)


@dataclass
class Measurement:
    """Everything measured at one endpoint.

    Attributes:
        endpoint: what it is.
        phases: one per round.
        warmup: replies that are not counted.
        num_planned: requests of the whole plan.
    """

    endpoint: Endpoint
    num_planned: int
    phases: list[Phase] = field(default_factory=list)
    warmup: tuple[RequestResult, ...] = ()

    @property
    def replies(self) -> list[RequestResult]:
        """Of all phases."""
        return [reply for phase in self.phases for reply in phase.replies]


async def measure(
    endpoints: Sequence[Endpoint], plan: LoadPlan, *, progress: bool = True, clock: Clock = time.perf_counter
) -> tuple[list[Measurement], bool]:
    """Run ``plan`` at every endpoint.

    Returns:
        One measurement per endpoint, in their order, and whether it was interrupted by Ctrl-C; requests that
        were under way are then in it as interrupted ones.
    """
    stop = asyncio.Event()
    measurements = [Measurement(endpoint, len(plan.requests)) for endpoint in endpoints]
    total = len(endpoints) * len(plan.requests)
    with _on_interrupt(stop), _Bar(total, progress) as bar:
        for measured in measurements:
            async with Client(measured.endpoint.settings, clock) as client:
                measured.warmup = tuple(await send_all(client, plan.warmup, plan.concurrency, stop))
        for number in range(plan.rounds):
            for measured in measurements if number % 2 == 0 else reversed(measurements):
                if stop.is_set():
                    break
                async with Client(measured.endpoint.settings, clock) as client:
                    phase = await _phase(client, plan, number, stop, bar.show)
                measured.phases.append(phase)
    return measurements, stop.is_set()


async def _phase(
    client: Client, plan: LoadPlan, number: int, stop: asyncio.Event, on_end: Callable[[RequestResult], None]
) -> Phase:
    before = await take_snapshot(client)
    started_at = client.clock()
    replies = await send_all(client, plan.part(number), plan.concurrency, stop, on_end)
    return Phase(started_at, tuple(replies), before, await take_snapshot(client))


async def send_all(
    client: Client,
    requests: Sequence[LoadRequest],
    concurrency: int | None,
    stop: asyncio.Event,
    on_end: Callable[[RequestResult], None] = lambda reply: None,
) -> list[RequestResult]:
    """Send all requests; when ``stop`` is set no more are sent, and those under way are given up.

    Returns:
        The replies to what was sent, in the order of the requests' numbers.
    """
    started_at = client.clock()
    recorders: dict[int, Recorder] = {}
    replies: dict[int, RequestResult] = {}

    async def one(request: LoadRequest) -> None:
        now = client.clock()
        planned_at = now if concurrency is not None else started_at + request.due_s
        recorders[request.number] = Recorder(request.number, planned_at, now)
        reply = await client.send(request, recorders[request.number])
        replies[request.number] = reply
        on_end(reply)

    async def when_due(request: LoadRequest) -> None:
        delay = started_at + request.due_s - client.clock()
        if delay > 0:
            await asyncio.sleep(delay)
        await one(request)

    waiting = iter(requests)

    async def worker() -> None:
        for request in waiting:
            await one(request)

    if concurrency is None:
        work = [when_due(request) for request in requests]
    else:
        work = [worker() for _ in range(min(concurrency, len(requests)))]
    await _run_until(stop, work)
    for number, recorder in recorders.items():
        if number not in replies:
            replies[number] = recorder.interrupt(client.clock())
            on_end(replies[number])
    return [replies[number] for number in sorted(replies)]


async def _run_until(stop: asyncio.Event, work: Sequence[Awaitable[None]]) -> None:
    """Await all of ``work``, or cancel it when ``stop`` is set. A defect in it is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    everything: asyncio.Future[Any] = asyncio.gather(*tasks)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([everything, stopped], return_when=asyncio.FIRST_COMPLETED)
        if everything.done():
            everything.result()
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(everything, stopped, *tasks, return_exceptions=True)


@contextmanager
def _on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets ``stop``; a second one interrupts at once."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield  # there Ctrl-C ends the run without a report
        return

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        print("\nStopping; what there is will be reported.", file=sys.stderr)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Bar:
    """A progress bar over ended requests with the tokens and failures so far."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._num_tokens = self._num_failed = 0
        slow = 0.5 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            total=total, unit="request", disable=not enabled, dynamic_ncols=True, mininterval=slow
        )

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, reply: RequestResult) -> None:
        """Count one ended request."""
        self._num_tokens += reply.output_tokens
        self._num_failed += reply.outcome == "failed"
        self._bar.set_postfix_str(f"{self._num_tokens} tokens, {self._num_failed} failed", refresh=False)
        self._bar.update()
