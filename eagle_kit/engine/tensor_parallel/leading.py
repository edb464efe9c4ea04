"""Engines of tensor parallelism. Every rank runs the same deterministic engine; the first one, which
:class:`LeadingEngine` is, tells the others what it is asked to do, and they do it in the same order.

A step of the first rank is one message with the requests that arrived, the ends that it was told or read from
text, and the step itself. Others make no text and look at no clock.
"""

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from eagle_kit.autotune.policy import ShapePolicy, ToldPolicy
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import FinishReason
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.calibrate.record_drafts import record_drafts
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.request import Request

if TYPE_CHECKING:
    from eagle_kit.engine.llm import LLM
    from eagle_kit.engine.tensor_parallel.ranks import Group


class Message(Protocol):
    """What the first rank tells the others to do."""

    def do(self, follower: "Follower") -> None:
        """Do it."""


class LeadingEngine(Engine):
    """Engine of the first rank. Its target has ``ranks``, all of which make their engines together.

    Args:
        args: of :class:`Engine`.
        group: the ranks.
    """

    def __init__(self, *args: Any, group: "Group") -> None:
        self._events: list[Message] = []
        self._group, self._is_silent = group, True  # others make the same calls by themselves
        super().__init__(*args)
        self._is_silent = False

    def add_request(self, request: Request) -> None:
        """See :class:`Engine`."""
        super().add_request(request)
        self._note(Arrival.of(request))

    def end(self, request: Request, reason: FinishReason) -> None:
        """See :class:`Engine`."""
        super().end(request, reason)
        self._note(End(request.number, reason))

    def use_shape(self, shapes: ShapeTable | SpecShape | ShapePolicy) -> None:
        """See :class:`Engine`."""
        told = shapes.menus if isinstance(shapes, ShapePolicy) else shapes
        with self.telling(UseShape(told)):
            super().use_shape(shapes)

    def use_graphs(self, name: Hashable) -> None:
        """See :class:`Engine`."""
        with self.telling(UseGraphs(name)):
            super().use_graphs(name)

    def forget_prefixes(self) -> None:
        """See :class:`Engine`."""
        with self.telling(ForgetPrefixes()):
            super().forget_prefixes()

    def drain(self) -> None:
        """See :class:`Engine`; without the others once they are lost, as requests of an error are drained."""
        if self._group.ranks.lost is not None:
            self._pending.clear()  # they may never come
            super().drain()
            return
        with self.telling(Drain()):
            super().drain()

    def step(self) -> list[Request]:
        """See :class:`Engine`."""
        with self.telling(Step()):
            return super().step()

    @contextmanager
    def telling(self, message: Message) -> Iterator[None]:
        """Context manager: tell the others to do what is done within, nothing of its parts. Errors are those
        of :meth:`~eagle_kit.engine.tensor_parallel.ranks.Group.whole`."""
        if self._is_silent:
            yield
            return
        try:
            with self._group.whole():
                events, self._events, self._is_silent = self._events, [], True
                self._group.ranks.tell([*events, message])
                yield
        finally:
            self._is_silent = False

    def _note(self, event: Message) -> None:
        """Tell the others before the next message."""
        if not self._is_silent:
            self._events.append(event)


class Follower:
    """A rank that is not the first.

    Args:
        llm: of the same arguments as that of the first rank.

    Attributes:
        requests: those that are served, by number.
    """

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm
        self.requests: dict[int, Request] = {}
        self.has_ended = False

    @property
    def engine(self) -> Engine:
        """The engine, once it was made."""
        assert self.llm.current_engine is not None
        return self.llm.current_engine

    def run(self, ranks: Ranks) -> None:
        """Do what the first rank says until it leaves. Raise RankLost where it ends without a word."""
        while not self.has_ended:
            for message in ranks.hear():
                try:
                    message.do(self)
                except UserError as error:  # which every rank raises, and the first one's user reads
                    logging.getLogger(__name__).info("%s", error)


@dataclass(frozen=True)
class Arrival:
    """A request that the first rank has taken."""

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int
    group: int
    client: str
    bad_word_ids: tuple[tuple[int, ...], ...] | None
    seed: int

    @classmethod
    def of(cls, request: Request) -> "Arrival":
        """That of ``request``."""
        return cls(
            number=request.number,
            prompt_ids=request.prompt_ids,
            params=request.params,
            priority=request.priority,
            group=request.group,
            client=request.client,
            bad_word_ids=request.bad_word_ids,
            seed=request.seed,
        )

    def request(self) -> Request:
        """The request, which makes no text."""
        return Request(
            self.number,
            self.prompt_ids,
            self.params,
            self.priority,
            group=self.group,
            client=self.client,
            bad_word_ids=self.bad_word_ids,
        )

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        request = self.request()
        follower.engine.add_request(request)
        request.seed = self.seed
        follower.requests[self.number] = request


@dataclass(frozen=True)
class End:
    """A request that the first rank has ended outside of a step."""

    number: int
    reason: FinishReason

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        request = follower.requests.pop(self.number, None)
        if request is not None:  # else the first rank had not taken it
            follower.engine.end(request, self.reason)


@dataclass(frozen=True)
class Step:
    """A step of the engine."""

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        for request in follower.engine.step():
            if request.finish_reason is not None:
                follower.requests.pop(request.number, None)


@dataclass(frozen=True)
class UseShape:
    """Shapes from now on, or the menus from which the first rank chooses one for each cycle."""

    shapes: ShapeTable | SpecShape | dict[int, list[SpecShape]]

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        given = self.shapes
        follower.engine.use_shape(ToldPolicy(given) if isinstance(given, dict) else given)


@dataclass(frozen=True)
class UseGraphs:
    """Graphs from now on."""

    name: Hashable

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        follower.engine.use_graphs(self.name)


@dataclass(frozen=True)
class ForgetPrefixes:
    """The prefix cache is emptied."""

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        follower.engine.forget_prefixes()


@dataclass(frozen=True)
class Drain:
    """Pending results are dropped."""

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        follower.engine.drain()


@dataclass(frozen=True)
class Ask:
    """A method of the ``LLM``, called with ``args``; its result is not used."""

    method: str
    args: tuple[Any, ...] = ()

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        getattr(follower.llm, self.method)(*self.args)


@dataclass(frozen=True)
class RecordDrafts:
    """The drafts of requests are recorded in an engine of their own
    (:mod:`eagle_kit.engine.calibrate.record_drafts`)."""

    arrivals: list[Arrival]
    shape: SpecShape

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        llm, requests = follower.llm, [each.request() for each in self.arrivals]
        assert llm.draft is not None
        record_drafts(llm.target, llm.draft, llm.config, requests, shape=self.shape)


@dataclass(frozen=True)
class Leave:
    """The first rank has done its work."""

    def do(self, follower: Follower) -> None:
        """See :class:`Message`."""
        follower.has_ended = True
