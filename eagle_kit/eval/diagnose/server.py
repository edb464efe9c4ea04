"""The same prompts sent to a running server, with its counters before and after."""

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

RESPONSE_TIMEOUT_S = 600
"""Seconds that a server may take for a response."""
TIMEOUT_S = 10
"""Seconds that a server may take for anything else."""
SGLANG_SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
"""Options of SGLang that are the numbers of a shape."""


class ServerResponse(NamedTuple):
    """A response that a server generated.

    Attributes:
        text: with the reasoning in front.
        num_prompt_tokens: 0 where the server does not count them.
        num_tokens: of the response; 0 where the server does not count them.
    """

    text: str
    num_prompt_tokens: int
    num_tokens: int = 0


class ServerResult(NamedTuple):
    """Responses of a server, and what it counted meanwhile.

    Attributes:
        engine: its name, by its metrics.
        responses: one to each prompt.
        accept_length: tokens per verify; None where it counts no verifies.
        is_gauge: the length is that of the last interval of the server's log, not of these prompts.
        reach: share of verifies that accepted each depth; empty where it does not count them.
        num_verifies: 0 where it does not count them.
        shape: speculation shape; None where it is not known.
        num_counted_tokens: tokens of responses that it counted meanwhile; 0 where it does not count them.
    """

    engine: str
    responses: list[ServerResponse]
    accept_length: float | None
    is_gauge: bool
    reach: tuple[float, ...]
    num_verifies: int
    shape: SpecShape | None
    num_counted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of these responses; 0 where the server does not count them."""
        counts = [response.num_tokens for response in self.responses]
        return sum(counts) if all(counts) else 0

    @property
    def other_traffic(self) -> float:
        """Difference of the counted tokens and those of these responses, as a share of the larger
        number."""
        own = self.num_tokens
        counted = self.num_counted_tokens
        if not own or not counted:
            return 0.0
        return abs(counted - own) / max(counted, own)


class ServerClient:
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
        """Request the server's model and its counters. Raises UserError as :meth:`replay` would."""
        self._model()
        take_snapshot(self.url)

    def replay(
        self,
        chats: Sequence[list[dict[str, str]]],
        max_tokens: int,
        on_response: Callable[[], None] = lambda: None,
    ) -> ServerResult:
        """Request greedy responses to ``chats``, one after the other.

        Raises:
            UserError: the server does not answer, an answer is no chat completion, or there are no
                metrics.
        """
        options = {
            "model": self._model(),
            "max_tokens": max_tokens,
            "temperature": 0,
            # Without it, servers apply that of the target's generation_config.json.
            "repetition_penalty": 1.0,
        }
        before = take_snapshot(self.url)
        responses = []
        for messages in chats:
            responses.append(self._chat({**options, "messages": messages}))
            on_response()
        after = take_snapshot(self.url)

        # Figures of the counters. A gauge takes the place of an accept length that is not counted.
        figures = difference(before, after)
        gauge = figures.get("accept length of the last interval")
        num_depths = sum(name.startswith("accepted at depth ") for name in figures)
        return ServerResult(
            engine=after.engine or "the server",
            responses=responses,
            accept_length=figures.get("accept length", gauge),
            is_gauge="accept length" not in figures and gauge is not None,
            reach=tuple(figures[f"accepted at depth {depth + 1}"] for depth in range(num_depths)),
            num_verifies=figures.get("verifies", 0),
            shape=self._shape(before, after),
            num_counted_tokens=figures.get("generation_tokens", 0),
        )

    def _model(self) -> str:
        """Name of the server's first model."""
        models = self._request("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise self._not_openai("/v1/models", models)
        return str(models[0].get("id"))

    def _chat(self, body: dict[str, Any]) -> ServerResponse:
        answer = self._request("/v1/chat/completions", body)
        try:
            message = answer["choices"][0]["message"]
            usage = answer.get("usage") or {}
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            return ServerResponse(
                text=f"{reasoning}{message.get('content') or ''}",
                num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
                num_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise self._not_openai("/v1/chat/completions", answer) from None

    def _shape(self, before: Snapshot, after: Snapshot) -> SpecShape | None:
        """The shape between two snapshots; None where there were several, or where it is not
        known."""

        def count(name: str) -> float:
            return after.counters.get(name, 0.0) - before.counters.get(name, 0.0)

        with suppress(UserError):  # of a shape that is not possible here
            # Ours counts cycles by shape.
            ran = [shape for shape, cycles in after.cycles.items() if cycles > before.cycles.get(shape, 0.0)]
            if ran:
                drafting = [shape for shape in map(SpecShape.parse, ran) if shape.steps]
                return drafting[0] if len(drafting) == 1 else None
            # vLLM counts drafted tokens.
            if count(DRAFTS):
                steps = round(count(DRAFTED) / count(DRAFTS))
                return SpecShape.parse(f"{steps},1,{steps + 1}")

        # SGLang shows its options, under a path that has been renamed.
        if after.engine == "SGLang":
            for path in ("/server_info", "/get_server_info"):
                with suppress(UserError):
                    options = self._request(path)
                    return SpecShape.parse(",".join(str(options.get(name)) for name in SGLANG_SHAPE))
        return None

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Get ``path``, or post ``body`` to it. Raises UserError."""
        data = None if body is None else json.dumps(body).encode()
        timeout = TIMEOUT_S if body is None else RESPONSE_TIMEOUT_S
        request = Request(self.url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout) as http_response:
                answer = parse_json(http_response.read(), self.url + path, "Check --base-url.")
        except HTTPError as error:
            reason = error.read(300).decode("utf-8", "replace")
            raise UserError(
                f"{self.url}{path} answers {error.code} ({reason}).",
                "Check --base-url and the server's key.",
            ) from None
        except (OSError, HTTPException) as error:
            raise UserError(
                f"{self.url}{path} does not answer ({error}).", "Start the server, or check --base-url."
            ) from None
        if not isinstance(answer, dict):
            raise self._not_openai(path, answer)
        return answer

    def _not_openai(self, path: str, answer: object) -> UserError:
        return UserError(
            f"{self.url}{path} answers {str(answer)[:80]!r}, which is not OpenAI's API.", "Check --base-url."
        )
