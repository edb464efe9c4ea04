"""Calls that rank 0 broadcasts and the other ranks execute.

Every rank runs the same deterministic engine. Rank 0 alone makes text and reads clocks, so it broadcasts each
call that depends on them as a name and arguments.
"""

import logging
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.config.server import WarmUpExtent
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import FinishReason
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.calibrate.record_drafts import record_drafts
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.warm_up import warm_up
from eagle_kit.engine.request import Request
from eagle_kit.engine.step_profile import ProfileSettings
from eagle_kit.engine.tensor_parallel.ranks import RankGroup
from eagle_kit.engine.text_forwards import text_logits, text_states
from eagle_kit.models.targets.target import Target

CALLS = frozenset(
    (
        "add_request",
        "drain",
        "end",
        "forget_prefixes",
        "leave",
        "make_engine",
        "record_drafts",
        "set_draft",
        "start_profile",
        "step",
        "stop_profile",
        "text_logits",
        "text_states",
        "use_graphs",
        "use_shape",
        "warm_up",
    )
)
"""Methods of :class:`Follower` that rank 0 may call. Every other name is refused."""


class RankCall(NamedTuple):
    """Call of the method ``name`` of :class:`Follower`, one of :data:`CALLS`; ``args`` are pickled."""

    name: str
    args: tuple[Any, ...]


def rank_call(name: str, *args: Any) -> RankCall:
    """Make a call. Raise ValueError for a name that is not in :data:`CALLS`."""
    if name not in CALLS:
        raise ValueError(f"Ranks have no call {name!r}; the calls are {', '.join(sorted(CALLS))}.")
    return RankCall(name, args)


class Leader:
    """Broadcasts the calls of rank 0 to the followers.

    Args:
        group: the ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._deferred: list[RankCall] = []
        self._is_in_call = False

    @contextmanager
    def call(self, name: str, *args: Any) -> Iterator[None]:
        """Context manager: the followers execute a call while rank 0 does the same work within.

        Deferred calls are sent before it, in the same message. Calls that rank 0 makes within are parts of
        this call, which the followers make by themselves, and are not sent.

        Raises:
            ValueError: the name is not in :data:`CALLS`.
            RankLost: see :meth:`~eagle_kit.engine.tensor_parallel.ranks.RankGroup.keep_in_step`.
        """
        if self._is_in_call:
            yield
            return
        calls = [*self._deferred, rank_call(name, *args)]
        self._deferred = []
        self._is_in_call = True
        try:
            with self.group.keep_in_step():
                self.group.ranks.broadcast(calls)
                yield
        finally:
            self._is_in_call = False

    def defer(self, name: str, *args: Any) -> None:
        """Send a call with the next one; within a call do nothing, since followers make it by themselves."""
        if not self._is_in_call:
            self._deferred.append(rank_call(name, *args))


class LeadingEngine(Engine):
    """Engine of rank 0, whose calls the followers execute too. It is made within the call ``make_engine``.

    Args:
        args: of :class:`Engine`.
        leader: sends the calls.
    """

    def __init__(self, *args: Any, leader: Leader) -> None:
        self._leader = leader
        super().__init__(*args)

    def add_request(self, request: Request) -> None:
        """See :class:`Engine`. The call is deferred to the next step."""
        super().add_request(request)
        self._leader.defer("add_request", RequestData.of(request))

    def end(self, request: Request, reason: FinishReason) -> None:
        """See :class:`Engine`. The call is deferred to the next step."""
        super().end(request, reason)
        self._leader.defer("end", request.number, reason)

    def use_shape(self, shapes: ShapeTable | SpecShape | ShapePolicy) -> None:
        """See :class:`Engine`. Followers get the candidate shapes of a policy, not the policy."""
        given = shapes.shapes_by_size if isinstance(shapes, ShapePolicy) else shapes
        with self._leader.call("use_shape", given):
            super().use_shape(shapes)

    def use_graphs(self, name: Hashable) -> None:
        """See :class:`Engine`."""
        with self._leader.call("use_graphs", name):
            super().use_graphs(name)

    def forget_prefixes(self) -> None:
        """See :class:`Engine`."""
        with self._leader.call("forget_prefixes"):
            super().forget_prefixes()

    def drain(self) -> None:
        """See :class:`Engine`. Once a rank is lost, rank 0 drops its results in flight without waiting."""
        if self._leader.group.ranks.lost is not None:
            self._in_flight.clear()
            super().drain()
            return
        with self._leader.call("drain"):
            super().drain()

    def step(self) -> list[Request]:
        """See :class:`Engine`."""
        with self._leader.call("step"):
            return super().step()

    def start_profile(self, settings: ProfileSettings) -> None:
        """See :class:`Engine`. Each rank writes a file on its own machine."""
        with self._leader.call("start_profile", settings):
            super().start_profile(settings)

    def stop_profile(self) -> None:
        """See :class:`Engine`. Once a rank is lost, rank 0 ends its own profile alone."""
        if self._leader.group.ranks.lost is not None:
            super().stop_profile()
            return
        with self._leader.call("stop_profile"):
            super().stop_profile()


@dataclass(frozen=True)
class RequestData:
    """The fields of a request that decide its token ids. Followers make no text, so its text stream is left
    out."""

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int
    group: int
    client: str
    bad_word_ids: tuple[tuple[int, ...], ...] | None
    seed: int

    @classmethod
    def of(cls, request: Request) -> "RequestData":
        """Copy the fields of a request."""
        return cls(
            number=request.number,
            prompt_ids=request.prompt_ids,
            params=request.params,
            priority=request.priority,
            group=request.group,
            client=request.client,
            bad_word_ids=request.bad_word_ids,
            seed=request.response.seed,
        )

    def request(self) -> Request:
        """Make the request; :meth:`Engine.add_request` sets its seed."""
        return Request(
            self.number,
            self.prompt_ids,
            self.params,
            self.priority,
            group=self.group,
            client=self.client,
            bad_word_ids=self.bad_word_ids,
        )


class Follower:
    """Executes the calls of rank 0 on another rank.

    Args:
        target: this rank's part of the target.
        current_engine: returns the engine of this rank, None before ``make_engine``.
        make_engine: allocates the engine of this rank.
        set_draft: loads a draft on this rank; the engine of the former draft is gone then.

    Attributes:
        requests: the requests that the engine serves, by number.
        has_left: True once rank 0 has left.
    """

    def __init__(
        self,
        target: Target,
        current_engine: Callable[[], Engine | None],
        make_engine: Callable[[int], None],
        set_draft: Callable[[Any, str, str | Path | None], None],
    ) -> None:
        self._target = target
        self._current_engine = current_engine
        self._make_engine = make_engine
        self._set_draft = set_draft
        self.requests: dict[int, Request] = {}
        self.has_left = False

    @property
    def engine(self) -> Engine:
        """The engine of this rank, once it was made."""
        engine = self._current_engine()
        assert engine is not None
        return engine

    def run(self, ranks: Ranks) -> None:
        """Execute the calls of rank 0 until it leaves. Raise RankLost if it ends without leaving."""
        while not self.has_left:
            for call in ranks.receive():
                try:
                    self.execute(call)
                except UserError as error:
                    # All ranks raise it; rank 0 reports it to the user.
                    logging.getLogger(__name__).info("%s", error)

    def execute(self, call: RankCall) -> None:
        """Execute one call. Raise ValueError for a name that is not in :data:`CALLS`, and what the call
        raises."""
        name, args = rank_call(call.name, *call.args)
        getattr(self, name)(*args)

    # Calls that end or prepare the work

    def leave(self) -> None:
        """Execute no more calls."""
        engine = self._current_engine()
        if engine is not None:
            engine.stop_profile()
        self.has_left = True

    def set_draft(self, draft: Any, algorithm: str, token_map: str | Path | None) -> None:
        """Use another draft from now on."""
        self._set_draft(draft, algorithm, token_map)

    def make_engine(self, draft_scratch: int) -> None:
        """Allocate the engine, with so many scratch rows of the draft for each request."""
        self._make_engine(draft_scratch)

    def warm_up(self, extent: WarmUpExtent) -> None:
        """See :func:`~eagle_kit.engine.graphs.warm_up.warm_up`."""
        warm_up(self.engine, extent)

    # Calls of the engine

    def add_request(self, data: RequestData) -> None:
        """Put a request into the queue, with the seed that rank 0 has given it."""
        request = data.request()
        self.engine.add_request(request)
        request.response.seed = data.seed
        self.requests[data.number] = request

    def end(self, number: int, reason: FinishReason) -> None:
        """End a request between steps; one that rank 0 did not accept is unknown here and is skipped."""
        request = self.requests.pop(number, None)
        if request is not None:
            self.engine.end(request, reason)

    def step(self) -> None:
        """Run a step, and forget the requests that end in it."""
        for request in self.engine.step():
            if request.finish_reason is not None:
                self.requests.pop(request.number, None)

    def start_profile(self, settings: ProfileSettings) -> None:
        """See :meth:`Engine.start_profile`. A profile that rank 0 could not start itself ends here."""
        self.engine.stop_profile()
        self.engine.start_profile(settings)

    def stop_profile(self) -> None:
        """See :meth:`Engine.stop_profile`."""
        self.engine.stop_profile()

    def use_shape(self, shapes: ShapeTable | SpecShape | dict[int, list[SpecShape]]) -> None:
        """Speculate in ``shapes``. From candidate shapes by batch size rank 0 chooses one a cycle."""
        if isinstance(shapes, dict):
            self.engine.use_shape(ShapePolicy(shapes))
        else:
            self.engine.use_shape(shapes)

    def use_graphs(self, name: Hashable) -> None:
        """See :meth:`Engine.use_graphs`."""
        self.engine.use_graphs(name)

    def forget_prefixes(self) -> None:
        """See :meth:`Engine.forget_prefixes`."""
        self.engine.forget_prefixes()

    def drain(self) -> None:
        """See :meth:`Engine.drain`."""
        self.engine.drain()

    # Calls beside the engine. Rank 0 returns the results; the others take part in the collectives.

    def text_states(self, ids: list[int], layers: tuple[int, ...]) -> None:
        """See :func:`~eagle_kit.engine.text_forwards.text_states`."""
        text_states(self._target, ids, layers)

    def text_logits(self, ids: list[int]) -> None:
        """See :func:`~eagle_kit.engine.text_forwards.text_logits`."""
        text_logits(self._target, ids)

    def record_drafts(self, data: list[RequestData], shape: SpecShape) -> None:
        """See :func:`~eagle_kit.engine.calibrate.record_drafts.record_drafts`."""
        engine = self.engine
        assert engine.draft is not None
        requests = [each.request() for each in data]
        record_drafts(engine.target, engine.draft, engine.config, requests, shape=shape)


def follow(follower: Follower, group: RankGroup) -> None:
    """Execute the calls of rank 0 until it leaves. SIGINT and SIGTERM are ignored in the main thread: rank 0
    handles them and ends this rank.

    Raises:
        RankLost: rank 0 has ended without leaving.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    with group.keep_in_step():
        follower.run(group.ranks)
