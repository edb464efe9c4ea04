"""The same prompts sent to a running server, and what it counts meanwhile."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json
from eagle_kit.core.shape import SpecShape
from eagle_kit.eval.counters import DRAFTED, DRAFTS, Snapshot, difference, root_of, take_snapshot

REPLY_S, ASK_S = 600, 10
"""Seconds that a server may take for a reply, and for anything else."""
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
"""Names of SGLang for the numbers of a shape."""


class ServerReply(NamedTuple):
    """A reply: its text with the reasoning in front, and its numbers of tokens (0 where the server does not
    say)."""

    text: str
    num_prompt_tokens: int
    num_tokens: int = 0


class ServerReading(NamedTuple):
    """What a server did with the prompts.

    Attributes:
        engine: its name, by its metrics.
        accept_length: tokens per verify; None where it counts no verifies.
        is_gauge: the length is that of the last interval of the server's log, not of these prompts.
        reach: share of verifies that accepted each depth; empty where it does not count them.
        num_verifies: 0 where it does not count them.
        shape: that it drafts in; None where it does not say.
        num_counted_tokens: tokens of replies that it counted meanwhile; 0 where it does not count them.
    """

    engine: str
    replies: list[ServerReply]
    accept_length: float | None
    is_gauge: bool
    reach: tuple[float, ...]
    num_verifies: int
    shape: SpecShape | None
    num_counted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of these replies; 0 where the server does not say."""
        counts = [reply.num_tokens for reply in self.replies]
        return sum(counts) if all(counts) else 0

    @property
    def other_traffic(self) -> float:
        """Share of the counted tokens that are not of these replies, or of these that were not counted."""
        mine, counted = self.num_tokens, self.num_counted_tokens
        return abs(counted - mine) / max(counted, mine) if mine and counted else 0.0


class Server:
    """A client of OpenAI's API.

    Args:
        base_url: with ``/v1`` at its end or not.
        key: sent as a bearer token; empty sends none.
    """

    def __init__(self, base_url: str, key: str = "") -> None:
        self.url = root_of(base_url)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = build_opener(ProxyHandler({}))

    def probe(self) -> None:
        """Ask for its model and its counters. Raises UserError as :meth:`replay` would."""
        self._model()
        take_snapshot(self.url)

    def replay(
        self,
        chats: Sequence[list[dict[str, str]]],
        max_tokens: int,
        on_reply: Callable[[], None] = lambda: None,
    ) -> ServerReading:
        """Ask one after the other, greedily, with the counters read before and after.

        Raises:
            UserError: nobody answers, an answer is no chat completion, or there are no metrics.
        """
        fixed = {"model": self._model(), "max_tokens": max_tokens, "temperature": 0}
        fixed["repetition_penalty"] = 1.0  # or that of the target's generation_config.json holds
        before, replies = take_snapshot(self.url), []
        for messages in chats:
            replies.append(self._chat({**fixed, "messages": messages}))
            on_reply()
        after = take_snapshot(self.url)
        figures = difference(before, after)
        depths = sorted(name for name in figures if name.startswith("accepted at depth "))
        gauge = figures.get("accept length of the last interval")
        return ServerReading(
            after.engine or "the server",
            replies,
            figures.get("accept length", gauge),
            "accept length" not in figures and gauge is not None,
            tuple(figures[f"accepted at depth {depth + 1}"] for depth in range(len(depths))),
            figures.get("verifies", 0),
            self._shape(before, after),
            figures.get("generation_tokens", 0),
        )

    def _model(self) -> str:
        models = self._ask("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise self._strange("/v1/models", models)
        return str(models[0].get("id"))

    def _chat(self, body: dict[str, Any]) -> ServerReply:
        answer = self._ask("/v1/chat/completions", body)
        try:
            message, usage = answer["choices"][0]["message"], answer.get("usage") or {}
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            counts = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
            return ServerReply(f"{reasoning}{message.get('content') or ''}", *counts)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise self._strange("/v1/chat/completions", answer) from None

    def _shape(self, before: Snapshot, after: Snapshot) -> SpecShape | None:
        """The shape of the time between: ours counts cycles by shape, vLLM drafted tokens, and SGLang says
        its options."""
        ran = [shape for shape, count in after.cycles.items() if count > before.cycles.get(shape, 0.0)]
        drafted, drafts = (
            after.counters.get(name, 0.0) - before.counters.get(name, 0.0) for name in (DRAFTED, DRAFTS)
        )
        with suppress(UserError):
            if ran:
                drafting = [shape for shape in map(SpecShape.parse, ran) if shape.steps]
                return drafting[0] if len(drafting) == 1 else None
            if drafts:
                steps = round(drafted / drafts)
                return SpecShape.parse(f"{steps},1,{steps + 1}")
        for path in ("/server_info", "/get_server_info") if after.engine == "SGLang" else ():
            with suppress(UserError):  # the other name, or a shape that we have not
                options = self._ask(path)
                return SpecShape.parse(",".join(str(options.get(name)) for name in SHAPE))
        return None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=ASK_S if body is None else REPLY_S) as response:
                answer = parse_json(response.read(), self.url + path, "Check --base-url.")
        except HTTPError as error:
            said = error.read(300).decode("utf-8", "replace")
            raise UserError(
                f"{self.url}{path} answers {error.code} ({said}).", "Check --base-url and the server's key."
            ) from None
        except (OSError, HTTPException) as error:
            raise UserError(
                f"{self.url}{path} does not answer ({error}).", "Start the server, or check --base-url."
            ) from None
        if not isinstance(answer, dict):
            raise self._strange(path, answer)
        return answer

    def _strange(self, path: str, answer: object) -> UserError:
        return UserError(
            f"{self.url}{path} answers {str(answer)[:80]!r}, which is not OpenAI's API.", "Check --base-url."
        )
