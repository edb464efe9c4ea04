"""Responses of a server that speaks OpenAI's protocol: vLLM, SGLang, TensorRT-LLM, a public API, or ours.

The official client sends the requests, and sends them again where they failed for a passing reason.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from eagle_kit.core.errors import UserError, first_line, shown
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.messages import ChatPrompt, Message, Unusable, on_the_wire, read_calls
from eagle_kit.datagen.regenerate.responder import GeneratedResponse

if TYPE_CHECKING:
    import openai

REFUSALS = {400, 413, 422}
"""Statuses of a prompt that is not answered, because it is too long or not allowed."""
MOST_REFUSALS = 8
"""Number of refusals without any response that shows that the settings are wrong, not the prompts."""
PASSING = {408, 409, 429}
"""Statuses below 500 after which the client repeats a request; from 500 on it always does."""
EXTRAS = ("top_k", "min_p", "repetition_penalty")
"""Settings that OpenAI's own API does not have. They are sent even if they are neutral, because a server
would take them from its model's ``generation_config.json`` instead."""
START_IT = "Start it, or give its address with --base-url, such as http://127.0.0.1:8000/v1."


@dataclass(frozen=True)
class ServerOptions:
    """A server, and how requests are sent to it.

    Attributes:
        base_url: address of the server, with or without ``/v1``.
        model: name of the model; None takes the only one of the server.
        concurrency: maximum number of concurrent requests.
        retries: maximum number of repetitions of a request that failed for a passing reason.
        timeout: seconds without a response after which a request fails.
        api_key: key that is sent as a bearer token; None sends none.
        with_ids: request token ids.
    """

    base_url: str
    model: str | None = None
    concurrency: int = 16
    retries: int = 6
    timeout: float = 600.0
    api_key: str | None = None
    with_ids: bool = False

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UserError(
                f"--base-url is {shown(self.base_url)}.", "Give an address such as http://HOST:8000/v1."
            )
        if self.concurrency < 1 or self.retries < 0:
            raise UserError(
                f"The concurrency is {self.concurrency} and the retries are {self.retries}.",
                "Give at least 1 and 0.",
            )

    @property
    def root(self) -> str:
        """Address of the API."""
        base = self.base_url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"

    def client(self) -> "openai.AsyncOpenAI":
        """A client for one event loop. It ignores proxies of the environment and redirections.

        Raises:
            UserError: the package openai is not installed.
        """
        try:
            import openai
        except ImportError:
            raise UserError(
                "Responses of a server need the package openai.",
                "Install it: pip install 'eagle_kit[train]'.",
            ) from None

        http = openai.DefaultAsyncHttpxClient(timeout=self.timeout, trust_env=False, follow_redirects=False)
        return openai.AsyncOpenAI(
            base_url=self.root,
            api_key=self.api_key or "none",
            max_retries=self.retries,
            timeout=self.timeout,
            http_client=http,
        )

    def headers(self) -> Any:
        """Headers of a request. Without a key, the client must not send its placeholder."""
        import openai

        return {} if self.api_key else {"Authorization": openai.Omit()}


class ServerResponder:
    """A server as the source of responses.

    Raises:
        UserError: the server does not answer, or no model is named and it has none or several.
    """

    max_prompt_tokens: int | None = None
    repeats = False

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.batch_size = options.concurrency
        self._knows_extras = True
        self._num_responses = 0
        self._num_refusals = 0
        self.model = options.model or asyncio.run(self._only_model())

    async def _only_model(self) -> str:
        """Name of the server's only model. Raises UserError if it has none or several."""
        async with self._options.client() as client:
            answer = await self._send(client.models.list(extra_headers=self._options.headers()))
        names = [str(each.id) for each in getattr(answer, "data", None) or []]
        if len(names) != 1:
            listed = f": {', '.join(names[:8])}" if names else ""
            raise UserError(
                f"The server at {self._options.root} has {len(names)} models{listed}.",
                "Name one with --model.",
            )
        return names[0]

    def num_tokens(self, prompt: ChatPrompt) -> int | None:
        """See :class:`~eagle_kit.datagen.regenerate.responder.Responder`; not known before the response."""
        return None

    def answer(
        self,
        prompts: Sequence[ChatPrompt],
        params: Sequence[SamplingParams],
        take: Callable[[int, GeneratedResponse], None],
    ) -> None:
        """See :class:`~eagle_kit.datagen.regenerate.responder.Responder`.

        Raises:
            UserError: the server refuses every request, or a request fails too often. Responses before that
                were taken.
            Exception: an error of ``take``. It is not called again.
        """
        asyncio.run(self._answer_all(prompts, params, take))

    async def _answer_all(
        self,
        prompts: Sequence[ChatPrompt],
        params: Sequence[SamplingParams],
        take: Callable[[int, GeneratedResponse], None],
    ) -> None:
        """Answer all prompts, with ``concurrency`` requests at a time.

        After a failed request no other is started, and running requests are waited for. After an error of
        ``take`` they are not waited for.
        """
        gate = asyncio.Semaphore(self._options.concurrency)
        failures: list[Exception] = []
        is_taking = True

        async def answer_one(number: int) -> None:
            nonlocal is_taking
            async with gate:
                if failures or not is_taking:
                    return
                try:
                    response = await self._answer(client, prompts[number], params[number])
                except Exception as error:
                    failures.append(error)
                    return

                # Other requests may be answered before the error of ``take`` has left ``gather``.
                if not is_taking:
                    return
                try:
                    take(number, response)
                except BaseException:
                    is_taking = False
                    raise

        async with self._options.client() as client:
            await asyncio.gather(*map(answer_one, range(len(prompts))))
        if failures:
            raise failures[0]

    async def _answer(
        self, client: "openai.AsyncOpenAI", prompt: ChatPrompt, params: SamplingParams
    ) -> GeneratedResponse:
        """Send one request and read its response. Raises UserError if it fails."""
        settings: dict[str, Any] = {
            "model": self.model,
            "messages": on_the_wire(_without_old_reasoning(prompt.messages)),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "top_p": params.top_p,
        }
        if prompt.tools:
            settings["tools"] = list(prompt.tools)
        if params.stop:
            settings["stop"] = list(params.stop)

        # Settings that are not in OpenAI's API.
        more: dict[str, Any] = {}
        if prompt.chat_template_kwargs:
            more["chat_template_kwargs"] = dict(prompt.chat_template_kwargs)
        if self._options.with_ids:
            more["return_token_ids"] = True
        extras = {
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
        }

        # Send it. A server that refuses the extra settings is asked again without them, and so from then on.
        create = partial(client.chat.completions.create, **settings, extra_headers=self._options.headers())
        has_extras = self._knows_extras
        try:
            try:
                body = more | extras if has_extras else more
                answer = await self._send(create(extra_body=body))
            except _Refused as refused:
                if not has_extras or not any(name in str(refused) for name in EXTRAS):
                    raise
                self._knows_extras = False
                answer = await self._send(create(extra_body=more))
        except _Refused as refused:
            return self._refused(str(refused))
        self._num_responses += 1

        # Read it. A response that is not JSON is a string.
        if hasattr(answer, "to_dict"):
            answer = answer.to_dict(warnings=False)
        return read_response(answer, self._options.root, self._options.with_ids)

    def _refused(self, message: str) -> GeneratedResponse:
        """Response to a refused prompt.

        Raises:
            UserError: many prompts were refused and none was answered.
        """
        self._num_refusals += 1
        if not self._num_responses and self._num_refusals >= MOST_REFUSALS:
            raise UserError(
                f"The server at {self._options.root} refuses every request: {message}.",
                "Correct the settings of the responses, or the server's.",
            )
        return GeneratedResponse("", "refused", 0, refused=f"the server refuses it: {message}")

    async def _send(self, request: Any) -> Any:
        """Wait for the response to a request.

        Raises:
            _Refused: the server refuses the contents of the request.
            UserError: the request failed.
        """
        import openai

        root = self._options.root
        tries = f"asked {self._options.retries + 1} times in a row"
        try:
            return await request
        except openai.APIStatusError as error:
            status = error.status_code
            if status in REFUSALS:
                raise _Refused(_message(error.body)) from None
            cause = f"The server at {root} answers {status}: {_message(error.body)}"
            if status not in PASSING and status < 500:
                raise UserError(f"{cause}.", "Correct the request's settings, or the server's.") from None
            raise UserError(f"{cause}, {tries}.", START_IT) from None
        except openai.APIConnectionError as error:
            reason = first_line(error.__cause__ or error)
            raise UserError(f"The server at {root} does not answer ({reason}), {tries}.", START_IT) from None
        except (openai.OpenAIError, ValueError) as error:  # a body that is no JSON, say
            raise UserError(
                f"The server at {root} answers with something else than JSON ({first_line(error)}).", START_IT
            ) from None


class _Refused(Exception):
    """A server refuses a request because of its contents."""


def _without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Remove the reasoning before the last human turn.

    Servers refuse or ignore it there; between calls of tools it is sent back.
    """
    last_human = -1
    for i, message in enumerate(messages):
        if message["role"] == "user":
            last_human = i

    stripped = []
    for i, message in enumerate(messages):
        copy = dict(message)
        if i <= last_human:
            copy.pop("reasoning_content", None)
        stripped.append(copy)
    return stripped


def _message(body: Any) -> str:
    """Message in the body of an error, as one line of at most 200 characters."""
    if isinstance(body, dict):
        body = body.get("message", body)
    line = " ".join(str(body).split())
    return line[:200] or "nothing"


def read_response(answer: Any, where: str, with_ids: bool) -> GeneratedResponse:
    """Read the body of a chat completion.

    Args:
        answer: parsed body.
        where: address of the server, for errors.
        with_ids: token ids were requested.

    Raises:
        UserError: the body is no chat completion, or has no token ids though they were requested.
    """
    # The first choice.
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        finish_reason = str(choice.get("finish_reason") or "unknown")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = None
        if message.get("tool_calls"):
            calls = read_calls(message["tool_calls"])
        usage = answer.get("usage") or {}
    except (KeyError, IndexError, TypeError, AttributeError, Unusable) as error:
        raise UserError(
            f"The server at {where} answers with something that is no chat completion.", START_IT
        ) from error

    # Token ids.
    ids = None
    if with_ids:
        prompt_ids = answer.get("prompt_token_ids")
        response_ids = choice.get("token_ids")
        if not isinstance(prompt_ids, list) or not isinstance(response_ids, list):
            raise UserError(
                f"The server at {where} does not return token ids.", "Leave --ids out, or use one that does."
            )
        ids = [*prompt_ids, *response_ids]
    return GeneratedResponse(
        text=text,
        finish_reason=finish_reason,
        num_tokens=int(usage.get("completion_tokens") or 0),
        ids=ids,
        reasoning=reasoning or None,
        tool_calls=calls,
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
    )
