"""The mix of clients: what each does, how many there are, and how long they pause."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.soak.wire import Answer, Server, read_head

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = (
    "What is the capital of Italy?",
    "Write a Python function that reverses a list.",
    "Explain in two sentences why leaves are green.",
    "List five animals that can swim.",
    "Translate 'good morning' into French and Spanish.",
    "How many minutes are there in a day?",
)
MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "seed": 7}}
NUM_TOKENS = 32
"""Tokens of an ordinary response."""
Case = tuple[int, str]
"""Number of a question, and a mode."""


class Wait(NamedTuple):
    """An ordinary response: seconds since the start of the soak when it was asked for, seconds to its first
    and last token, the mean number of other requests with a prompt or a body meanwhile, and its text."""

    at: float
    case: Case
    first: float
    whole: float
    others: float
    text: str


@dataclass
class Load:
    """State of a soak that its clients share.

    Attributes:
        max_context: tokens of the served context.
        outcomes: of each kind of client, how often.
        waits: of ordinary clients.
        num_unreadable: answers of ``/metrics`` that could not be read.
    """

    server: Server
    rng: random.Random
    max_context: int
    started: float = field(default_factory=time.monotonic)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    num_unreadable: int = 0
    num_served: int = 0
    _area: float = 0.0
    _at: float = field(default_factory=time.monotonic)

    @contextmanager
    def serving(self) -> Iterator[Callable[[], float]]:
        """Count a request that takes work; what it gives returns the mean number of others meanwhile."""
        begun, area = time.monotonic(), self._advance()
        self.num_served += 1
        try:
            yield lambda: (self._advance() - area) / max(time.monotonic() - begun, 1e-9) - 1.0
        finally:
            self._advance()
            self.num_served -= 1

    def _advance(self) -> float:
        now = time.monotonic()
        self._area += self.num_served * (now - self._at)
        self._at = now
        return self._area


Act = Callable[[Load], Awaitable[str]]


class Kind(NamedTuple):
    """Kind of client: ``num_clients`` of them do ``act``, then pause ``pause_s`` seconds on average.

    ``right``: outcomes that are right; any other is a failure of the server.
    """

    name: str
    act: Act
    num_clients: int
    pause_s: float
    right: tuple[str, ...]
    text: str


async def ordinary(load: Load, case: Case | None = None) -> str:
    """Ask a question and read the response."""
    number, mode = case = case or (load.rng.randrange(len(QUESTIONS)), load.rng.choice(tuple(MODES)))
    body = {"messages": [{"role": "user", "content": QUESTIONS[number]}], "max_tokens": NUM_TOKENS}
    begun, first, text = time.monotonic(), 0.0, ""
    with load.serving() as others:
        async for event in load.server.stream(CHATS, {**body, **MODES[mode]}):
            if "error" in event:
                return f"event {event['error']['code']}"
            deltas = [choice["delta"] for choice in event["choices"]]
            piece = "".join(each.get("reasoning_content") or each.get("content") or "" for each in deltas)
            first = first or (time.monotonic() - begun if piece else 0.0)
            text += piece
        waited = time.monotonic() - begun
        load.waits.append(Wait(begun - load.started, case, first, waited, others(), text))
    return "200"


async def _generate(load: Load, path: str, **body: Any) -> Answer:
    with load.serving():
        return await load.server.ask(path, body)


async def many_choices(load: Load) -> str:
    """Ask for 128 choices of 64 tokens."""
    body = {"prompt": "Once upon a time", "n": 128, "max_tokens": 64, "ignore_eos": True}
    return str((await _generate(load, COMPLETIONS, **body)).status)


async def long_prompt(load: Load) -> str:
    """Send a prompt that fills the context, another every time."""
    ids = [load.rng.randrange(5, 100) for _ in range(load.max_context - 16)]
    return str((await _generate(load, COMPLETIONS, prompt=ids, max_tokens=8)).status)


async def long_response(load: Load) -> str:
    """Ask for 1,000 tokens, or half of the context."""
    body = {"prompt": "The history of", "ignore_eos": True, "max_tokens": min(1000, load.max_context // 2)}
    return str((await _generate(load, COMPLETIONS, **body)).status)


async def echo(load: Load) -> str:
    """Have a prompt that fills the context repeated 128 times, as a stream."""
    body = {"prompt": [70] * (load.max_context - 16), "n": 128, "max_tokens": 1, "echo": True}
    with load.serving():
        async for _ in load.server.stream(COMPLETIONS, body):
            pass
    return "200"


async def leaver(load: Load) -> str:
    """Go away in the middle of a response."""
    body = {"prompt": "A list of numbers:", "max_tokens": min(400, load.max_context // 2)}
    with load.serving():
        try:
            async with asyncio.timeout(load.rng.uniform(0.1, 4.0)):
                async for _ in load.server.stream(COMPLETIONS, body):
                    pass
        except TimeoutError:
            return "left"
    return "200"


async def unread(load: Load) -> str:
    """Ask for a long stream, read nothing of it for 20 seconds, and leave."""
    body = {"prompt": [71] * (load.max_context - 16), "n": 16, "max_tokens": 4, "echo": True, "stream": True}
    content = json.dumps(body).encode()
    with load.serving():
        async with load.server.connect() as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(load.server.head("POST", COMPLETIONS, len(content)) + content)
            await asyncio.sleep(20)
    return "left"


async def slow_headers(load: Load) -> str:
    """Begin a request, and never end its headers."""
    async with load.server.connect() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        return str(await read_head(reader))


async def slow_body(load: Load) -> str:
    """Send a byte of a body every second."""
    async with load.server.connect() as (reader, writer):
        writer.write(load.server.head("POST", CHATS, 10_000))
        answer = asyncio.ensure_future(read_head(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=1.0)
        return str(answer.result())


async def probe(load: Load) -> str:
    """Ask for the health by a generated token."""
    return str((await load.server.ask("/health_generate")).status)


def _schema(schema: Any) -> bytes:
    named = {"name": "s", "schema": schema}
    return json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 8,
            "response_format": {"type": "json_schema", "json_schema": named},
        }
    ).encode()


BODIES: tuple[Callable[[], bytes], ...] = (
    lambda: b'{"prompt":[' + b"[]," * 700_000 + b"[]]}",
    lambda: b'{"prompt":[' + b"1," * 1_400_000 + b"1]}",
    lambda: json.dumps({f"k{i}": 1 for i in range(100_000)}).encode(),
    lambda: b"[" * 100_000,
    lambda: b'{"prompt": "\\ud800"}',
    lambda: json.dumps({"prompt": "a" * 7_000_000}).encode(),
    lambda: b" " * 9_000_000,
    lambda: json.dumps({"prompt": "a", "n": 1_000_000}).encode(),
    lambda: json.dumps({"prompt": "a", "regex": "(" * 2000 + "a" + ")" * 2000}).encode(),
    lambda: json.dumps({"prompt": "a", "regex": "a\\"}).encode(),
    lambda: _schema({"oneOf": [{"enum": [f"{i}.{j}" for j in range(4000)]} for i in range(32)]}),
    lambda: _schema({"allOf": [{"pattern": f"a{i}.*b"} for i in range(30)]}),
    lambda: _schema({"$ref": "#/$defs/none"}),
)
"""Requests that must be refused."""


async def refused(load: Load) -> str:
    """Send what must be refused, up to 9 MB."""
    path, body = CHATS if load.rng.random() < 0.3 else COMPLETIONS, load.rng.choice(BODIES)()
    with load.serving():
        return str((await load.server.ask(path, body)).status)


async def structured(load: Load) -> str:
    """Ask for JSON of a schema that nobody has asked for yet, and check it."""
    names = [f"f{load.rng.randrange(10_000)}" for _ in range(3)]
    kinds: list[dict[str, Any]] = [{"type": "integer", "maximum": 99}, {"enum": ["a", "b"]}]
    schema = {
        "type": "object",
        "properties": {name: load.rng.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    with load.serving():
        answer = await load.server.ask(
            CHATS, _schema(schema).replace(b'"max_tokens": 8', b'"max_tokens": 60')
        )
    if answer.status != 200:
        return str(answer.status)
    choice = json.loads(answer.body)["choices"][0]
    if choice["finish_reason"] == "length":
        return "200 cut"
    return "200" if sorted(json.loads(choice["message"]["content"])) == sorted(set(names)) else "wrong JSON"


MIX = (
    Kind("ordinary", ordinary, 3, 2.0, ("200",), f"chats of {NUM_TOKENS} tokens, greedy or seeded, streamed"),
    Kind("many choices", many_choices, 1, 5.0, ("200",), "n=128, 64 tokens each"),
    Kind("long prompt", long_prompt, 1, 30.0, ("200",), "the context full, never the same"),
    Kind("long response", long_response, 1, 5.0, ("200",), "1,000 tokens"),
    Kind("echo", echo, 1, 240.0, ("200",), "the context full, repeated in 128 streamed choices"),
    Kind("leaver", leaver, 2, 3.0, ("left", "200"), "gone after 0.1 to 4 s of a stream"),
    Kind("unread", unread, 1, 60.0, ("left",), "a stream of 16 full contexts, none of it read in 20 s"),
    Kind("slow headers", slow_headers, 5, 1.0, ("408",), "headers that never end"),
    Kind("slow body", slow_body, 2, 5.0, ("408",), "a byte a second"),
    Kind("probe", probe, 20, 0.2, ("200",), "/health_generate"),
    Kind("refused", refused, 2, 2.0, ("400", "413"), f"{len(BODIES)} bodies of up to 9 MB"),
    Kind("structured", structured, 1, 3.0, ("200", "200 cut"), "a schema that is new every time"),
)


async def repeat(load: Load, kind: Kind) -> None:
    """Be a client of a kind until cancelled."""
    outcomes = load.outcomes.setdefault(kind.name, Counter())
    while True:
        try:
            outcome = await kind.act(load)
        except (OSError, EOFError) as error:
            outcome = str(error) or type(error).__name__
        outcomes[outcome] += 1
        await asyncio.sleep(load.rng.expovariate(1 / kind.pause_s) if kind.pause_s else 0)
