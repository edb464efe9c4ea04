"""The same prompts sent to a running server, with its counters before and after."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eagle_kit.core.shape import SpecShape
from eagle_kit.eval.counters import figures_of, take_snapshot
from eagle_kit.eval.openai_server import OpenAIServer


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


class ServerClient(OpenAIServer):
    """A client that sends chats one after the other and reads the server's counters."""

    def probe(self) -> None:
        """Request the server's model and its counters. Raises UserError as :meth:`replay` would."""
        self.model_name()
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
            "model": self.model_name(),
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
        counted = take_snapshot(self.url).since(before)

        # Figures of the counters. A gauge takes the place of an accept length that is not counted.
        figures = figures_of(counted)
        gauge = figures.get("accept length of the last interval")
        num_depths = sum(name.startswith("accepted at depth ") for name in figures)
        return ServerResult(
            engine=counted.engine or "the server",
            responses=responses,
            accept_length=figures.get("accept length", gauge),
            is_gauge="accept length" not in figures and gauge is not None,
            reach=tuple(figures[f"accepted at depth {depth + 1}"] for depth in range(num_depths)),
            num_verifies=figures.get("verifies", 0),
            shape=self.shape_of(counted),
            num_counted_tokens=figures.get("generation_tokens", 0),
        )

    def _chat(self, body: dict[str, Any]) -> ServerResponse:
        answer = self.request("/v1/chat/completions", body)
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
            raise self.not_openai("/v1/chat/completions", answer) from None
