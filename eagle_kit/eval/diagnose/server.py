"""The same prompts sent to a running server, and what it counts meanwhile."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json
from eagle_kit.serve.counters import DRAFTED, DRAFTS, difference, root_of, take_snapshot

REPLY_S = 600
"""Seconds that a server may take for one reply."""


class ServerReply(NamedTuple):
    """A reply: its text, and its number of prompt tokens (0 where the server does not say)."""

    text: str
    num_prompt_tokens: int


class ServerReading(NamedTuple):
    """What a server did with the prompts.

    Attributes:
        engine: its name, by its metrics.
        accept_length: tokens per verify; None where it counts no verifies.
        is_gauge: the length is that of the last interval of the server's log, not of these prompts.
        reach: share of verifies that accepted each depth; empty where it does not count them.
        num_verifies: 0 where it does not count them.
        num_steps: drafted tokens per verify, rounded; 0 where it does not count them.
    """

    engine: str
    replies: list[ServerReply]
    accept_length: float | None
    is_gauge: bool
    reach: tuple[float, ...]
    num_verifies: int
    num_steps: int


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
        model = self._model()
        before, replies = take_snapshot(self.url), []
        for messages in chats:
            body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
            replies.append(self._chat(body))
            on_reply()
        after = take_snapshot(self.url)
        figures = difference(before, after)
        drafted = after.counters.get(DRAFTED, 0.0) - before.counters.get(DRAFTED, 0.0)
        drafts = after.counters.get(DRAFTS, 0.0) - before.counters.get(DRAFTS, 0.0)
        depths = sorted(name for name in figures if name.startswith("accepted at depth "))
        gauge = figures.get("accept length of the last interval")
        return ServerReading(
            after.engine or "the server",
            replies,
            figures.get("accept length", gauge),
            "accept length" not in figures and gauge is not None,
            tuple(figures[f"accepted at depth {depth + 1}"] for depth in range(len(depths))),
            figures.get("verifies", 0),
            round(drafted / drafts) if drafts else 0,
        )

    def _model(self) -> str:
        models = self._ask("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise self._strange("/v1/models", models)
        return str(models[0].get("id"))

    def _chat(self, body: dict[str, Any]) -> ServerReply:
        answer = self._ask("/v1/chat/completions", body)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
            usage = answer.get("usage") or {}
            return ServerReply(str(text), int(usage.get("prompt_tokens") or 0))
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._strange("/v1/chat/completions", answer) from None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=REPLY_S) as response:
                answer = parse_json(response.read(), self.url + path, "Check --base-url.")
        except HTTPError as error:
            said = error.read(300).decode("utf-8", "replace")
            raise UserError(
                f"{self.url}{path} answers {error.code} ({said}).", "Check --base-url and the server's key."
            ) from None
        except (URLError, OSError) as error:
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
