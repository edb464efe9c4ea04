"""One reply as the client saw it, and the exact meaning of its latencies.

All times are seconds of the client's clock, taken when an event of the stream has been read and parsed. With
the events that carry text at t_1 < t_2 < ... , the reply's end (its last event with text or with a finish
reason) at t_end, the request sent at t_0 and n output tokens:

* TTFT = t_1 - t_0. A reply of tokens but no text (an end token alone) has t_1 = t_end.
* E2E = t_end - t_0.
* TPOT = (t_end - t_1) / (n - 1), one value per reply with n > 1: the pace after the first token.
* Chunk gap = t_i - t_(i-1): what a reader waits for the next piece of text.
* ITL: an event of m tokens after a gap g is m values of g / m, so that every token after the first event's
  counts once, however many share a chunk. A speculative engine sends several tokens at once; counting chunks
  would make its latency look worse than it is, and counting zeros for all but one token better.

n is the server's ``usage.completion_tokens``, end token included. m comes from the first of these that is
offered: usage in every event (``stream_options.continuous_usage_stats``); one token an event, when there are
as many events as tokens, or one less (an end token has no text); the event's share of the reply's characters.
Without any usage, every event with text counts as one token.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

Outcome = Literal["ok", "failed", "interrupted"]
CountedBy = Literal["usage", "events", "characters"]
DEFINITIONS = """\
Definitions, all as the client sees them (t: seconds, n: output tokens by the server's usage):
  TTFT  from sending a request to the first event with text
  E2E   from sending to the last event with text or with a finish reason
  TPOT  (E2E - TTFT) / (n - 1), one value per reply: the pace after the first token
  ITL   a chunk of m tokens that comes g after the one before it is m values of g / m, so that every token
        counts once however many share a chunk; m by the server's usage per chunk where it has it, else one
        a chunk where there are as many chunks as tokens, else by the chunk's share of the characters
  gap   time between two chunks with text, whatever they hold: what a reader waits
  throughput  tokens of good replies / time from the first request to the end of the last
  accept length  tokens per verify, bonus token included
"""
"""What is said above, for the help of the command."""


class TextEvent(NamedTuple):
    """An event that carried text: when, how many characters, and output tokens until then if it said so."""

    at: float
    num_chars: int
    num_tokens_so_far: int | None


@dataclass(frozen=True)
class RequestResult:
    """One finished, failed or interrupted request.

    Attributes:
        number: of the request in its workload.
        outcome: "ok" when the stream came to its proper end.
        reason: why it failed; None otherwise.
        planned_at, sent_at, ended_at: seconds of the clock; ``planned_at`` is when it was due.
        events: those with text.
        text: the whole reply.
        finish_reason: the server's.
        prompt_tokens, cached_tokens, usage_tokens: the server's counts, None where it gives none.
        speculation: the server's ``speculation`` object, None where it gives none.
    """

    number: int
    outcome: Outcome
    reason: str | None
    planned_at: float
    sent_at: float
    ended_at: float
    events: tuple[TextEvent, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_tokens: int | None = None
    speculation: dict[str, Any] | None = None

    @property
    def output_tokens(self) -> int:
        """n: the server's count, else one per event with text."""
        return self.usage_tokens if self.usage_tokens is not None else len(self.events)

    @property
    def ttft(self) -> float | None:
        """Time to first token in seconds; None for a reply without any token."""
        if self.events:
            return self.events[0].at - self.sent_at
        return self.ended_at - self.sent_at if self.output_tokens else None

    @property
    def e2e(self) -> float:
        """Seconds from sending to the reply's end."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None below two tokens."""
        if not self.events or self.output_tokens < 2:
            return None
        return (self.ended_at - self.events[0].at) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring events with text."""
        return [b.at - a.at for a, b in pairwise(self.events)]

    @property
    def counted_by(self) -> CountedBy:
        """Where the tokens of single events come from."""
        if self.events and all(event.num_tokens_so_far is not None for event in self.events):
            return "usage"
        if self.usage_tokens is None or len(self.events) in (self.usage_tokens, self.usage_tokens - 1):
            return "events"
        return "characters"

    @property
    def event_tokens(self) -> list[float]:
        """m of every event with text; a fraction where it is estimated by characters."""
        if self.counted_by == "usage":
            counts = [0, *(event.num_tokens_so_far or 0 for event in self.events)]
            return [float(max(0, b - a)) for a, b in pairwise(counts)]
        if self.counted_by == "events":
            return [1.0] * len(self.events)
        per_char = self.output_tokens / sum(event.num_chars for event in self.events) if self.events else 0.0
        return [event.num_chars * per_char for event in self.events]

    @property
    def itl(self) -> list[tuple[float, float]]:
        """(seconds per token, number of tokens) of every event after the first.

        An event whose usage counts no new token (the text was held back) lends its gap to the next one.
        """
        out: list[tuple[float, float]] = []
        since = self.events[0].at if self.events else 0.0
        for event, tokens in zip(self.events[1:], self.event_tokens[1:], strict=True):
            if tokens > 0:
                out.append(((event.at - since) / tokens, tokens))
                since = event.at
        return out


class BadEvent(Exception):
    """An event that ends the reply as a failure; the message is the reason."""


@dataclass
class Recorder:
    """Takes the events of one stream in; makes a :class:`RequestResult` of them at any moment.

    Args:
        number: of the request.
        planned_at, sent_at: seconds of the clock.
    """

    number: int
    planned_at: float
    sent_at: float
    events: list[TextEvent] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    ended_at: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] | None = None

    def take(self, event: Any, at: float) -> None:
        """Take one event, parsed, that was read at second ``at``.

        Raises:
            BadEvent: it reports an error, or is not what a completion's event looks like.
        """
        if not isinstance(event, dict):
            raise BadEvent("an event that is not an object")
        if event.get("error"):
            raise BadEvent(f"error in the stream: {error_message(event)}")
        self.usage = _object(event.get("usage")) or self.usage
        self.speculation = _object(event.get("speculation")) or self.speculation
        choices = event.get("choices") or [{}]
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise BadEvent("an event whose choices are not a list of objects")
        text = _text(choices[0])
        reason = choices[0].get("finish_reason")
        if text:
            so_far = _count(_object(event.get("usage")).get("completion_tokens"))
            self.events.append(TextEvent(at, len(text), so_far))
            self.texts.append(text)
        if text or reason:
            self.ended_at = at
        self.finish_reason = str(reason) if reason else self.finish_reason

    def finish(self, done: bool) -> RequestResult:
        """The stream is over; ``done`` says whether its end mark came."""
        if self.finish_reason == "abort":
            return self.fail("the server aborted the reply", self.ended_at or self.sent_at)
        if not done and self.finish_reason is None:
            raise BadEvent("the stream broke off before its end")
        if self.ended_at is None:
            raise BadEvent("the stream held no text and no finish reason")
        return self._reply("ok", None, self.ended_at)

    def fail(self, reason: str, at: float) -> RequestResult:
        """The request failed at second ``at``."""
        return self._reply("failed", reason, at)

    def interrupt(self, at: float) -> RequestResult:
        """The run was stopped while this request was under way."""
        return self._reply("interrupted", None, at)

    def _reply(self, outcome: Outcome, reason: str | None, ended_at: float) -> RequestResult:
        return RequestResult(
            self.number,
            outcome,
            reason,
            self.planned_at,
            self.sent_at,
            ended_at,
            tuple(self.events),
            "".join(self.texts),
            self.finish_reason,
            _count(self.usage.get("prompt_tokens")),
            _count(_object(self.usage.get("prompt_tokens_details")).get("cached_tokens")),
            _count(self.usage.get("completion_tokens")),
            self.speculation,
        )


def error_message(body: Any) -> str:
    """The message of an error body: OpenAI's shape, a plain text, or FastAPI's ``detail``."""
    if not isinstance(body, dict):
        return str(body)
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)


def _text(choice: dict[str, Any]) -> str:
    """What an event adds to the reply: text, content, reasoning, or the arguments of calls."""
    delta = _object(choice.get("delta"))
    parts = [choice.get("text"), delta.get("content")]
    parts.append(delta.get("reasoning_content") or delta.get("reasoning"))
    for call in delta.get("tool_calls") or ():
        function = _object(_object(call).get("function"))
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
