"""Service that all routes share: it turns a validated request into responses of the engine.

The state of an HTTP request (``http.state``: id, arrival, cleanup) is set by ``middleware.py``.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from eagle_kit import __version__
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import cut
from eagle_kit.core.output import PromptLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.core.structured_outputs import ThinkingBudget, Thought
from eagle_kit.data.chat.response.choice import choose_forms
from eagle_kit.engine.text_stream import TextContext, special_tokens
from eagle_kit.engine.token_names import TokenNames
from eagle_kit.ops.device_memory import gpu_memory
from eagle_kit.server.api.body import NUM_BODIES
from eagle_kit.server.api.errors import ApiError
from eagle_kit.server.api.limits import BodyRoom, ClientLimits, network_of
from eagle_kit.server.api.metrics import Metrics
from eagle_kit.server.api.params import check_num_logprobs, make_grammar, sampling_params
from eagle_kit.server.api.profiles import Profiles
from eagle_kit.server.api.prompts import max_chars
from eagle_kit.server.api.protocol import Sampling
from eagle_kit.server.api.responses import CachedTokens, CompletionDetails, Usage
from eagle_kit.server.async_engine import AsyncEngine
from eagle_kit.server.fair_queue import FairThread
from eagle_kit.server.response_stream import Delta, ResponseStream

if TYPE_CHECKING:
    from eagle_kit.engine.engine import Engine
    from eagle_kit.engine.llm import LLM
    from eagle_kit.engine.request import Request

T = TypeVar("T")
FINGERPRINT = f"eagle_kit-{__version__}"
TOP_PRIORITY = 2**31
"""Priority above all that a request may ask for."""
PROBE_EVERY_S = 0.02
PROBE_S = 60.0
"""Seconds that a probe waits for a token."""
PROBE_LASTS_S = 1.0
"""Seconds in which later probes share the success of one."""
FINISH_REASONS = {"context": "length"}
"""OpenAI's names of finish reasons, where they differ. `abort` is an extension: the server stopped, or /abort
was called."""


class RequestName(NamedTuple):
    """Name by which a request is aborted.

    Attributes:
        client: address of the client.
        id: id of the request.
        is_chosen: True if the client chose the id, False if the server made it.
    """

    client: str
    id: str
    is_chosen: bool


@dataclass(frozen=True)
class Generation:
    """Responses of one HTTP request: prompt i's response j is number ``i * n + j``.

    Attributes:
        id: of the response.
        prompts: token ids of each prompt.
        responses: streams of the responses.
        created: Unix seconds.
        thought: bounds of the reasoning in the responses; None where they have none.
    """

    id: str
    prompts: Sequence[Sequence[int]]
    responses: Sequence[ResponseStream]
    created: int
    thought: Thought | None = None

    def scored_prompt(self, index: int) -> PromptLogprobs:
        """Log-probabilities of the prompt of response ``index``, once that has begun."""
        request = self.responses[index].request
        if request.params.prompt_logprobs is None:
            num_choices = len(self.responses) // len(self.prompts)
            request = self.responses[index - index % num_choices].request
        return request.response.prompt_logprobs

    async def collect(self) -> list[Delta]:
        """Wait for all responses."""
        return list(await asyncio.gather(*(response.collect() for response in self.responses)))

    def usage(self, num_sent: int | None = None) -> Usage:
        """Count tokens until now.

        Args:
            num_sent: tokens of the responses to count; None for all. The engine may be ahead of a stream.
        """
        prompt = sum(map(len, self.prompts))
        completion = num_sent
        if completion is None:
            completion = sum(len(response.request.token_ids) for response in self.responses)

        # Cached tokens of the first response to each prompt.
        num_choices = len(self.responses) // len(self.prompts)
        first_responses = self.responses[::num_choices]
        cached = sum(response.request.stats.num_cached_tokens for response in first_responses)

        # Draft tokens that are in the responses, and those that were verified in vain.
        accepted = sum(self.stats().num_accepted_at)
        rejected = self.num_draft_tokens() - accepted
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=cached),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=self._num_reasoning_tokens(num_sent),
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=rejected,
            ),
        )

    def _num_reasoning_tokens(self, num_sent: int | None) -> int:
        """Count the reasoning in all responses; in events before the last one, among their first tokens."""
        if self.thought is None:
            return 0
        tokens = (response.request.token_ids for response in self.responses)
        count = sum(self.thought.num_tokens_of(each) for each in tokens)
        return count if num_sent is None else min(count, num_sent)

    def stats(self) -> SpecStats:
        """Add up the acceptance of all responses."""
        total = SpecStats()
        for response in self.responses:
            total.add(response.request.stats.spec)
        return total

    def num_draft_tokens(self) -> int:
        """Count the draft tokens that were verified for all responses."""
        return sum(response.request.stats.num_draft_tokens for response in self.responses)

    def shapes(self) -> Counter[SpecShape]:
        """Count the cycles of all responses by shape."""
        total: Counter[SpecShape] = Counter()
        for response in self.responses:
            total.update(response.request.stats.shapes)
        return total


class Service:
    """Model, engine and limits of a server.

    Args:
        llm: tokenizer, templates and requests.
        engine: used by nothing else.
        config: name and limits.
    """

    def __init__(self, llm: "LLM", engine: "Engine", config: ServerConfig) -> None:
        self.llm = llm
        self.config = config

        # The engine, and what it reports.
        self.metrics = Metrics(
            engine,
            config.model_name,
            read_memory=partial(gpu_memory, engine.runner.device),
            planned_memory=0 if llm.memory_plan is None else llm.memory_plan.total,
        )
        self.engine = AsyncEngine(
            engine, capacity=llm.max_batch_size + config.max_queued, observer=self.metrics
        )
        self.reasons = engine.reasons
        self.profiles = Profiles(self.engine, config.profile_dir)

        # Limits of clients, bodies and prompts.
        self.limits = ClientLimits(config.max_parallel_per_client, config.max_requests_per_minute)
        self.body_room = BodyRoom(NUM_BODIES * config.max_body_bytes)
        self.max_chars = max_chars(llm)

        # Text of tokens, and formats of responses.
        self.token_names = TokenNames(llm.tokenizer)
        self.special_tokens = special_tokens(llm.tokenizer)
        self.response_forms = choose_forms(llm.renderer, config.reasoning_parser, config.tool_call_parser)

        # Requests that can be aborted, by name.
        self.started_at = int(time.time())
        self._live: dict[RequestName, list[ResponseStream]] = {}
        self._salt_key = secrets.token_bytes(32)

        # The probe of health checks, and when the last one succeeded.
        self._probe: asyncio.Task[None] | None = None
        self._probed_at = -PROBE_LASTS_S

        # One thread for tokenizers: they release the interpreter lock, and are not thread-safe.
        self._worker = FairThread("eagle-kit tokenizer")

    def start(self) -> None:
        """Start the threads; call it in the event loop."""
        self.engine.start()
        self._worker.start()

    async def off_loop(self, http: Any, function: Callable[..., T], *args: Any) -> T:
        """Run a slow function of a request, such as tokenising, in the worker thread. Clients take turns."""
        return await self._worker.run(network_of(_client_of(http)), function, *args)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served here; None is the served one."""
        if name is not None and name not in (self.config.model_name, *self.config.model_aliases):
            raise ApiError(
                404,
                f"The model {cut(name)!r} is not served here; use {self.config.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def enter(self, http: Any, body: Sampling, num_prompts: int) -> None:
        """Check the model, the room in the queue and the client's limits, before any work."""
        self.check_model(body.model)
        count = num_prompts * body.num_choices
        client = network_of(_client_of(http))
        self.engine.check_room(count, client)
        self.limits.enter(client, count)
        http.state.cleanup.append(lambda: self.limits.leave(client, count))

    def count(self, address: str) -> None:
        """Count a request against the limit per minute of the client at an address. Raises ApiError 429."""
        self.limits.count(network_of(address))

    async def generate(
        self,
        http: Any,
        body: Sampling,
        prompts: Sequence[list[int]],
        prefix: str,
        shown_tokens: frozenset[int] = frozenset(),
        thought: Thought | None = None,
        contexts: Sequence[TextContext] = (),
        thinking_budget: ThinkingBudget | None = None,
    ) -> Generation:
        """Make requests for all ``prompts`` and add them to the engine.

        They are aborted when the HTTP request is over.

        Args:
            http: the HTTP request, for its id and its cleanup.
            prefix: prefix of the response's id.
            shown_tokens: special tokens that are part of the text, unless the body shows all of them.
            thought: reasoning that comes before the body's grammar.
            contexts: end of each prompt, which the text of its responses continues; empty if responses do not
                continue a text.
            thinking_budget: of the responses; None without one.
        """
        # Make the requests in the worker thread.
        shown = self.special_tokens if body.shows_special_tokens else shown_tokens
        contexts = contexts or [TextContext()] * len(prompts)
        salt = self._cache_salt(http, body)
        make = partial(self._requests, body, prompts, shown, thought, contexts, salt, thinking_budget)
        requests = await self.off_loop(http, make)
        for request in requests:
            request.arrived_at = http.state.arrived_at
            request.client = network_of(_client_of(http))

        # Add them to the engine. They can be aborted by name until the HTTP request is over.
        responses = await self.engine.add(requests)
        request_id = http.state.request_id
        name = RequestName(_client_of(http), request_id, http.state.has_own_id)
        self._live.setdefault(name, []).extend(responses)
        http.state.cleanup.append(lambda: self._leave(name, responses))
        return Generation(f"{prefix}-{request_id}", prompts, responses, int(time.time()))

    async def probe(self) -> None:
        """Wait until the engine has emitted a token of any request.

        A request of one token with the highest priority makes sure that there is one. Probes share it, and
        its success for :data:`PROBE_LASTS_S` seconds.

        Raises:
            TimeoutError: no token was emitted in :data:`PROBE_S` seconds.
            Overloaded, EngineFailed: see :meth:`AsyncEngine.add`.
        """
        self.engine.check_room(0)
        if time.monotonic() < self._probed_at + PROBE_LASTS_S:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._wait_for_token())
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._probe)

    async def _wait_for_token(self) -> None:
        totals = self.engine.engine.totals
        before = totals.num_generated_tokens
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        request = self.llm.make_request([0], params, TOP_PRIORITY)
        async with asyncio.timeout(PROBE_S):
            (response,) = await self.engine.add([request], is_probe=True)
            end = asyncio.ensure_future(response.collect())
            try:
                while not end.done() and totals.num_generated_tokens == before:
                    await asyncio.wait({end}, timeout=PROBE_EVERY_S)
                if end.done():
                    end.result()
                self._probed_at = time.monotonic()
            finally:
                end.cancel()
                response.close()

    def abort(self, http: Any, request_id: str | None) -> int:
        """Abort the responses of a request, and return how many there were.

        A client can abort by an id that it chose or that the server made. Ids that other clients chose can be
        guessed, so they are not found.

        Args:
            request_id: id of the request or of its response; None aborts all responses of the client.
        """
        client = _client_of(http)
        given = request_id or ""
        ids = {given, given.removeprefix("chatcmpl-"), given.removeprefix("cmpl-")}
        responses = []
        for name, theirs in self._live.items():
            is_own = name.client == client
            is_named = name.id in ids
            if (is_own and request_id is None) or (is_named and (is_own or not name.is_chosen)):
                responses += [response for response in theirs if response.finish_reason is None]
        for response in responses:
            response.close()
        return len(responses)

    def close(self) -> None:
        """End the worker thread."""
        self._worker.close()

    def _requests(
        self,
        body: Sampling,
        prompts: Sequence[list[int]],
        shown_tokens: frozenset[int],
        thought: Thought | None,
        contexts: Sequence[TextContext],
        cache_salt: str | None,
        thinking_budget: ThinkingBudget | None,
    ) -> "list[Request]":
        """Make the requests of all choices of all prompts, those of a prompt one behind the other."""
        llm = self.llm
        grammar = make_grammar(body, thought)
        vocab_size = llm.target.config.vocab_size

        # Check all responses together before a request is made.
        params_of = [
            sampling_params(
                body, len(prompt), llm.max_context, vocab_size, grammar, cache_salt, thinking_budget
            )
            for prompt in prompts
        ]
        check_num_logprobs(body, prompts, params_of)

        return [
            llm.make_request(prompt, params, body.priority or 0, shown_tokens, context)
            for prompt, context, each in zip(prompts, contexts, params_of, strict=True)
            for params in each
        ]

    def _cache_salt(self, http: Any, body: Sampling) -> str | None:
        """Return the cache salt of a request.

        With separate clients it is a digest of the client's address and the body's salt. Its key never leaves
        the process, so no client can choose the salt of another.
        """
        if not self.config.separate_clients:
            return body.cache_salt
        text = f"{_client_of(http)}\0{body.cache_salt or ''}"  # no address has a NUL
        return hashlib.blake2b(text.encode(), key=self._salt_key, digest_size=32).hexdigest()

    def _leave(self, name: "RequestName", responses: Sequence[ResponseStream]) -> None:
        """Abort responses that have not finished, and forget their name."""
        for response in responses:
            response.close()
        staying = [response for response in self._live.get(name, ()) if response not in responses]
        if staying:
            self._live[name] = staying
        else:
            self._live.pop(name, None)


def _client_of(http: Any) -> str:
    """Address of the client of a request."""
    return http.client.host if http.client else ""
