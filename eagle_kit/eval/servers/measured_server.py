"""A running server that decodes prompts of token ids, with its times and its counters.

A batch is sent at once and read as it is written. The counters are read before and after it, so that a
difference is of these prompts alone if nobody else uses the server.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import parse_json
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.eval.counters import GENERATION_TOKENS, Snapshot, take_snapshot
from eagle_kit.eval.openai_server import RESPONSE_TIMEOUT_S, TIMEOUT_S, OpenAIServer, RefusedRequest

if TYPE_CHECKING:
    import httpx

COMPLETIONS = "/v1/completions"
TOKEN_IDS = "return_token_ids"
"""Parameter of a request for the token ids of the response; servers without it refuse or ignore it."""
OURS = "eagle-kit"
"""Name of our engine by its metrics: its samples of a seed are those of our engine here."""
WARM_UP_TOKENS = 16
WARM_UP = "warm-up"
SETTLING_S = 3.0
"""Seconds in which a server writes its counters after the end of a response."""
POLL_S = 0.05
VERSION_PATHS = ("/version", "/server_info", "/get_server_info", "/openapi.json")
"""Where vLLM, SGLang (renamed once) and our server have their versions."""


@dataclass(frozen=True)
class ServedResponse:
    """A response of a server. Times are in seconds from the sending of its batch.

    Attributes:
        text: without special tokens.
        token_ids: of the response; empty where the server does not give them.
        num_prompt_tokens: as the server counts them.
        num_tokens: of the response, as the server counts them.
        finish_reason: as the server gives it.
        first_s: time of the first event.
        last_s: time of the last event.
        num_first_tokens: tokens of the first event.
    """

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str
    first_s: float
    last_s: float
    num_first_tokens: int

    @property
    def num_decode_tokens(self) -> int:
        """Tokens after the first event."""
        return max(self.num_tokens - self.num_first_tokens, 0)


@dataclass(frozen=True)
class ServedBatch:
    """Responses to a batch of prompts, and what the server counted meanwhile."""

    responses: list[ServedResponse]
    counted: Snapshot

    @property
    def decode_s(self) -> float:
        """Seconds from the first token of any response to the last token of all."""
        first = min(response.first_s for response in self.responses)
        return max(response.last_s for response in self.responses) - first


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        engine: name by its metrics.
        version: of the engine; empty where it does not say.
        model: name of its first model.
        root: folder or id that the model was loaded from; empty where it does not say.
        max_context: most tokens of a prompt and its response together; None where it does not say.
    """

    engine: str
    version: str
    model: str
    root: str
    max_context: int | None


class MeasuredServer(OpenAIServer):
    """A server that is measured.

    Args:
        name: for tables.
        base_url: with ``/v1`` at its end or not.
        key: sent as a bearer token; empty sends none.
    """

    def __init__(self, name: str, base_url: str, key: str = "") -> None:
        super().__init__(base_url, key)
        self.name = name
        self._facts: ServerFacts | None = None
        self._gives_token_ids = True

    @property
    def facts(self) -> ServerFacts:
        """What the server says of itself, read once.

        Raises:
            UserError: it does not answer, or there are no metrics of a known engine.
        """
        if self._facts is None:
            card = self.model_card()
            engine = take_snapshot(self.url).engine
            if not engine:
                raise UserError(
                    f"The metrics of {self.url} have no counters of vLLM, SGLang or eagle_kit.",
                    "Start vLLM without --disable-log-stats, and SGLang with --enable-metrics.",
                )
            length = card.get("max_model_len")
            self._facts = ServerFacts(
                engine=engine,
                version=self._version(),
                model=str(card.get("id")),
                root=str(card.get("root") or ""),
                max_context=length if isinstance(length, int) else None,
            )
        return self._facts

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Decode a little, unmeasured, and find out whether the server gives token ids."""
        params = SamplingParams(max_tokens=min(WARM_UP_TOKENS, max_tokens), cache_salt=WARM_UP)
        try:
            self.decode(prompts, params)
        except RefusedRequest as error:
            if TOKEN_IDS not in error.cause:
                raise
            self._gives_token_ids = False
            self.decode(prompts, params)

    def decode(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> ServedBatch:
        """Decode prompts of token ids, all at once.

        Args:
            params: the same for all, or those of each prompt.

        Raises:
            UserError: the server refuses a prompt, does not answer, counts other tokens in a prompt, or
                was restarted.
        """
        before = take_snapshot(self.url)
        of_each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        bodies = [self._body(ids, each) for ids, each in zip(prompts, of_each, strict=True)]
        responses = asyncio.run(self._send(bodies))

        # The prompts must have been read as they were sent.
        for ids, response in zip(prompts, responses, strict=True):
            if response.num_prompt_tokens != len(ids):
                raise UserError(
                    f"{self.name} counts {response.num_prompt_tokens} tokens in a prompt of {len(ids)} "
                    "token ids.",
                    "Give a server that takes prompts of token ids at /v1/completions.",
                )
        num_tokens = sum(response.num_tokens for response in responses)
        return ServedBatch(responses, self._settled(before, num_tokens))

    def _body(self, prompt_ids: list[int], params: SamplingParams) -> dict[str, Any]:
        """Body of a request. Everything that a target's generation_config.json could change is set."""
        body: dict[str, Any] = {
            "model": self.facts.model,
            "prompt": prompt_ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "repetition_penalty": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if params.temperature > 0:
            body["top_p"] = params.top_p
            body["top_k"] = params.top_k or -1
            body["min_p"] = params.min_p
            if params.seed is not None:
                body["seed"] = params.seed
        if self._gives_token_ids:
            body[TOKEN_IDS] = True
        if self.facts.engine == OURS and params.cache_salt is not None:
            body["cache_salt"] = params.cache_salt  # n-grams of other passes are not proposed
        return body

    async def _send(self, bodies: Sequence[dict[str, Any]]) -> list[ServedResponse]:
        """Send all bodies at once and read the responses."""
        import httpx

        timeout = httpx.Timeout(RESPONSE_TIMEOUT_S, connect=TIMEOUT_S)
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(
            timeout=timeout, limits=limits, headers=self.headers, trust_env=False
        ) as client:
            started = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._stream(client, body, started)) for body in bodies]
            except ExceptionGroup as errors:
                raise self._first_of(errors) from None
        return [task.result() for task in tasks]

    def _first_of(self, errors: ExceptionGroup) -> Exception:
        """The first error of a batch, as one for users where it is the connection's."""
        import httpx

        first: Exception = errors.exceptions[0]
        if isinstance(first, httpx.HTTPError):
            reason = first_line(first)
            return UserError(
                f"{self.url}{COMPLETIONS} does not answer ({reason}).",
                "Start the server, or check --base-url; the same command goes on.",
            )
        return first

    async def _stream(
        self, client: "httpx.AsyncClient", body: dict[str, Any], started: float
    ) -> ServedResponse:
        """Send one body and read its events."""
        url = self.url + COMPLETIONS
        events = _Events(self, started)
        async with client.stream("POST", url, json=body) as response:
            if response.status_code >= 400:
                reason = (await response.aread())[:300].decode("utf-8", "replace")
                raise self.refusal(COMPLETIONS, response.status_code, reason)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                events.add(parse_json(data, url, "Check --base-url."))
        return events.response()

    def _settled(self, before: Snapshot, num_tokens: int) -> Snapshot:
        """What the server counted since ``before``, read when it has counted ``num_tokens`` tokens or
        some seconds have passed."""
        until = time.monotonic() + SETTLING_S
        while time.monotonic() < until:
            counted = take_snapshot(self.url).since(before)
            if GENERATION_TOKENS not in counted.counters or counted.count(GENERATION_TOKENS) >= num_tokens:
                break
            time.sleep(POLL_S)
        # Once more: a server may write the counters of one step one after the other.
        return take_snapshot(self.url).since(before)

    def _version(self) -> str:
        """Version of the engine; empty where it does not say."""
        for path in VERSION_PATHS:
            try:
                answer = self.request(path)
            except UserError:
                continue
            version = answer.get("version")
            if path == "/openapi.json":
                version = answer.get("info", {}).get("version")
            if isinstance(version, str):
                return version
        return ""


@dataclass
class _Events:
    """The events of one stream, added up."""

    server: MeasuredServer
    started: float
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    num_first_tokens: int = 1

    def add(self, event: Any) -> None:
        """Add an event. Raises UserError for an error, or what is no event of a completion."""
        try:
            if "error" in event:
                raise UserError(f"{self.server.name} stopped ({event['error']}).", "Read the server's log.")
            usage = event.get("usage") or {}
            self.usage = usage or self.usage
            for choice in event["choices"]:
                self._add_choice(choice, usage)
        except (AttributeError, KeyError, TypeError):
            raise self.server.not_openai(COMPLETIONS, event) from None

    def _add_choice(self, choice: dict[str, Any], usage: dict[str, Any]) -> None:
        self.last_s = time.perf_counter() - self.started
        if self.first_s is None:
            self.first_s = self.last_s
            self.num_first_tokens = int(usage.get("completion_tokens") or 1)
        self.texts.append(choice["text"])
        self.token_ids += choice.get("token_ids") or []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def response(self) -> ServedResponse:
        """The whole response. Raises UserError where the stream was cut short or counts no tokens."""
        if self.first_s is None or not self.finish_reason or "completion_tokens" not in self.usage:
            raise UserError(
                f"{self.server.name} ended a stream without a finish reason or without counts of tokens.",
                "Read the server's log; the same command goes on.",
            )
        return ServedResponse(
            text="".join(self.texts),
            token_ids=self.token_ids,
            num_prompt_tokens=int(self.usage.get("prompt_tokens") or 0),
            num_tokens=int(self.usage["completion_tokens"]),
            finish_reason=self.finish_reason,
            first_s=self.first_s,
            last_s=self.last_s,
            num_first_tokens=self.num_first_tokens,
        )
