"""Replies of a server that speaks OpenAI's protocol: vLLM, SGLang, TensorRT-LLM, a public API, or ours."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.messages import ChatPrompt, Message, Unusable, on_the_wire, read_calls
from eagle_kit.train.replies.responder import Reply

PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""Statuses after which the same request may succeed."""
FIRST_WAIT, MOST_WAIT = 0.5, 30.0
"""Seconds before the first retry, which double from one to the next up to the most."""
REFUSALS = {400, 413, 422}
"""Statuses of a prompt that will not be answered, too long or not allowed."""
MOST_REFUSALS = 8
"""Refusals without any reply after which the settings are at fault, not the prompts."""
EXTRAS = ("top_k", "min_p", "repetition_penalty")
"""Settings that OpenAI's own API does not know. They are sent even where they are neutral, since a server
would take its model's ``generation_config.json`` for them."""
START_IT = "Start it, or give its address with --base-url, such as http://127.0.0.1:8000/v1."


@dataclass(frozen=True)
class ServerOptions:
    """A server and how to ask it.

    Attributes:
        base_url: its address, with or without ``/v1``.
        model: name there; None takes the only one that it has.
        concurrency: requests under way.
        retries: of a request that failed for a passing reason.
        timeout: seconds without an answer after which a request has failed.
        api_key: sent as a bearer token; None sends none.
        with_ids: ask for token ids.
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


class ServerResponder:
    """A server as a source of replies. Requests that fail for a passing reason are sent again, after waits
    that double and are spread by chance.

    Raises:
        UserError: no server there, or none or several models where none was named.
    """

    max_prompt_tokens: int | None = None
    repeats = False

    def __init__(self, options: ServerOptions) -> None:
        import httpx

        self._options, self.batch_size = options, options.concurrency
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        limits = httpx.Limits(max_connections=options.concurrency)
        self._client = httpx.Client(
            headers=headers, timeout=options.timeout, limits=limits, trust_env=False, follow_redirects=False
        )
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._knows_extras, self._num_replies, self._num_refusals = True, 0, 0
        self.model = options.model or self._only_model()

    def _only_model(self) -> str:
        answer = self._send("GET", "models", None)
        try:
            names = [str(each["id"]) for each in answer["data"]]
        except (KeyError, TypeError):
            names = []
        if len(names) != 1:
            raise UserError(
                f"The server at {self._options.root} has {len(names)} models"
                + (f": {', '.join(names[:8])}." if names else "."),
                "Name one with --model.",
            )
        return names[0]

    def num_tokens(self, prompt: ChatPrompt) -> int | None:
        """See :class:`~eagle_kit.train.replies.responder.Responder`; not known here."""
        return None

    def answer(
        self,
        prompts: Sequence[ChatPrompt],
        params: Sequence[SamplingParams],
        take: Callable[[int, Reply], None],
    ) -> None:
        """See :class:`~eagle_kit.train.replies.responder.Responder`.

        Raises:
            UserError: the server refuses a request, or has failed too often in a row. What was answered by
                then has been taken.
        """
        self._stopped.clear()
        pool = ThreadPoolExecutor(self._options.concurrency, thread_name_prefix="replies")
        numbers: dict[Future[Reply], int] = {}
        try:
            for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                numbers[pool.submit(self._reply, prompt, each)] = number
            left = set(numbers)
            failure: BaseException | None = None
            while left:
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for future in done:
                    if future.cancelled():
                        continue
                    error = future.exception()
                    if error is None:
                        take(numbers[future], future.result())
                    elif failure is None or isinstance(failure, _Stopped):
                        failure = error
                        for waiting in left:
                            waiting.cancel()  # those under way are still waited for
            if failure is not None:
                raise failure
        except BaseException:
            self._stopped.set()
            self._client.close()  # ends the requests that its threads wait for
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _reply(self, prompt: ChatPrompt, params: SamplingParams) -> Reply:
        try:
            return self._answer(prompt, params)
        except UserError:
            self._stopped.set()  # before this thread takes the next one
            raise

    def _answer(self, prompt: ChatPrompt, params: SamplingParams) -> Reply:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": on_the_wire(_without_old_reasoning(prompt.messages)),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "top_p": params.top_p,
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        if prompt.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(prompt.chat_template_kwargs)
        if params.stop:
            body["stop"] = list(params.stop)
        if self._options.with_ids:
            body["return_token_ids"] = True
        extras = {
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
        }
        has_extras = self._knows_extras
        try:
            try:
                answer = self._send("POST", "chat/completions", body | (extras if has_extras else {}))
            except _Refused as refused:
                if not has_extras or not any(name in str(refused) for name in EXTRAS):
                    raise
                self._knows_extras = False
                answer = self._send("POST", "chat/completions", body)
        except _Refused as refused:
            return self._refused(str(refused))
        with self._lock:
            self._num_replies += 1
        return read_reply(answer, self._options.root, self._options.with_ids)

    def _refused(self, message: str) -> Reply:
        """A reply that says why there is none. Raises UserError when nothing has been answered so far."""
        with self._lock:
            self._num_refusals += 1
            if not self._num_replies and self._num_refusals >= MOST_REFUSALS:
                raise UserError(
                    f"The server at {self._options.root} refuses every request: {message}.",
                    "Correct the settings of the replies, or the server's.",
                )
        return Reply("", "refused", 0, refused=f"the server refuses it: {message}")

    def _send(self, method: str, path: str, body: Any) -> Any:
        """Send a request, again where it failed for a passing reason -> the answer's JSON."""
        import httpx

        url, pause, problem = f"{self._options.root}/{path}", FIRST_WAIT, ""
        for left in range(self._options.retries, -1, -1):
            status, wanted = None, None
            if self._stopped.is_set():
                raise _Stopped
            try:
                answer = self._client.request(method, url, json=body)
                status, problem = answer.status_code, f"answers {answer.status_code}"
                if answer.is_success:
                    return answer.json()
                if status in REFUSALS:
                    raise _Refused(_message(answer.text))
                problem += f": {_message(answer.text)}"
                wanted = answer.headers.get("retry-after")
            except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
                problem = f"does not answer ({error or type(error).__name__})"
            except ValueError:
                problem = "answers with something that is no JSON"
            if status is not None and status not in PASSING and not 200 <= status < 300:
                raise UserError(
                    f"The server at {url} {problem}.", "Correct the request's settings, or the server's."
                )
            if not left:
                break
            self._stopped.wait(_seconds(wanted, pause))
            pause = min(2 * pause, MOST_WAIT)
        tries = self._options.retries + 1
        raise UserError(f"The server at {url} {problem}, {tries} times in a row.", START_IT)


class _Stopped(Exception):
    """Not sent: another request has ended the run."""


class _Refused(Exception):
    """A server refuses a request for what is in it."""


def _without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Messages without what was thought before the last human turn, which servers do not take or drop;
    between calls of tools it is sent back."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {key: value for key, value in message.items() if key != "reasoning_content" or i > last}
        for i, message in enumerate(messages)
    ]


def _seconds(wanted: str | None, pause: float) -> float:
    """Seconds to wait: as many as the server wants, or about ``pause``."""
    try:
        return min(float(wanted or ""), MOST_WAIT)
    except ValueError:
        return pause * random.uniform(0.5, 1.5)  # so that failed requests do not come back together


def _message(text: str) -> str:
    """Message of an error's body, one line of it."""
    import json

    try:
        found = json.loads(text)
        found = found.get("error", found.get("message", found)) if isinstance(found, dict) else found
        found = found.get("message", found) if isinstance(found, dict) else found
    except ValueError:
        found = text
    line = " ".join(str(found).split())
    return line[:200] or "nothing"


def read_reply(answer: Any, where: str, with_ids: bool) -> Reply:
    """Read the body of a chat completion.

    Raises:
        UserError: it is none, or has no token ids though they are wanted.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text, reason = message.get("content") or "", str(choice.get("finish_reason") or "unknown")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = read_calls(message["tool_calls"]) if message.get("tool_calls") else None
        usage = answer.get("usage") or {}
    except (KeyError, IndexError, TypeError, AttributeError, Unusable) as error:
        raise UserError(
            f"The server at {where} answers with something that is no chat completion.", START_IT
        ) from error
    ids = None
    if with_ids:
        prompt, reply = answer.get("prompt_token_ids"), choice.get("token_ids")
        if not isinstance(prompt, list) or not isinstance(reply, list):
            raise UserError(
                f"The server at {where} does not return token ids.", "Leave --ids out, or use one that does."
            )
        ids = [*prompt, *reply]
    counts = [int(usage.get(name) or 0) for name in ("completion_tokens", "prompt_tokens")]
    return Reply(text, reason, counts[0], ids, reasoning or None, calls, num_prompt_tokens=counts[1])
