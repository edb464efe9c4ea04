"""An engine that emits given tokens, for what no real model can be made to say on command.

It keeps the contract of ``Engine`` and counts slots as a real one counts pages.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.output import TokenLogprobs
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.template import prompt_token_ids
from eagle_kit.serve.request import Request
from eagle_kit.serve.text_stream import TextStream

Script = Callable[[Request], list[int]]


class ScriptedEngine:
    """Emits ``per_step`` tokens of ``script(request)`` a step, then ends with ``"stop"``.

    ``fail_at`` is the step that raises; ``step_s`` makes steps slow.
    """

    def __init__(
        self, script: Script, *, slots: int = 4, per_step: int = 3, step_s: float = 0.0, fail_at: int = -1
    ) -> None:
        self.script, self.slots, self.per_step = script, slots, per_step
        self.step_s, self.fail_at = step_s, fail_at
        self.shape = SpecShape(3, 1, 4)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.totals = SimpleNamespace(
            num_steps=0,
            num_prompt_tokens=0,
            num_cached_prompt_tokens=0,
            num_generated_tokens=0,
            num_preemptions=0,
            num_finished={},
            num_drafts=0,
            num_draft_tokens=0,
            spec=SpecStats(),
            shapes=Counter(),
        )

    def choices(self) -> list:
        return []

    def reasons(self) -> list[str]:
        return []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def kv_usage(self) -> float:
        return len(self.running) / self.slots

    num_graphs = num_grammars = 0
    ends: tuple[list[int], ...] = ()
    """Tokens that end a reply and are no text, each in a list."""

    def add_request(self, request: Request) -> None:
        if not request.prompt_ids:
            raise UserError("The prompt is empty.", "Give at least one token.")
        if request.prompt_ids == [7, 7, 7]:
            raise ZeroDivisionError("a defect while a request is taken")
        self.seen.append(request)
        self.waiting.append(request)

    def prepare(self, request: Request) -> None:
        """Grammars are not followed."""

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            self._finish(request, "abort")

    def stop(self, request: Request) -> None:
        """It has looked for stop texts itself."""

    def step(self) -> list[Request]:
        if self.totals.num_steps == self.fail_at:
            raise RuntimeError("the engine breaks on purpose")
        time.sleep(self.step_s)
        self.totals.num_steps += 1
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.pop(0)
            self.running.append(request)
            request.admitted_at = time.perf_counter()
            self.totals.num_prompt_tokens += len(request.prompt_ids)
        news = list(self.running)
        for request in news:
            self._advance(request)
        return news

    def _advance(self, request: Request) -> None:
        done, params = len(request.token_ids), request.params
        script = self.script(request)
        tokens = script[done : done + self.per_step][: params.max_tokens - done]
        assert request.stream is not None
        request.token_ids += tokens
        request.num_shown = len(request.token_ids) - (request.token_ids[-1:] in self.ends)
        if request.has_stops:
            request.read()
        kept = request.stream.num_kept
        if kept is not None:
            tokens = tokens[: kept - done]
            del request.token_ids[kept:]
            request.num_shown = kept
        if params.logprobs is not None:
            top = tuple((i, -1.5 - i) for i in range(params.logprobs))
            request.logprobs += [TokenLogprobs(-0.5, top)] * len(tokens)
        now = time.perf_counter()
        request.first_token_at, request.last_token_at = request.first_token_at or now, now
        self.totals.num_generated_tokens += len(tokens)
        if tokens:
            for stats in (request.stats, self.totals.spec):
                stats.observe(len(tokens), len(tokens) - 1)
            self.totals.num_drafts += 1
            self.totals.num_draft_tokens += self.shape.tokens - 1
        if kept is not None or len(request.token_ids) >= len(script):
            self._finish(request, "stop")
        elif len(request.token_ids) >= params.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: Any) -> None:
        request.finish_reason = reason
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.totals.num_finished[reason] = self.totals.num_finished.get(reason, 0) + 1


class ScriptedLLM:
    """The part of ``LLM`` that the server uses."""

    def __init__(self, tokenizer: Any, *, max_batch_size: int = 4, max_context: int = 400) -> None:
        self.tokenizer, self.max_batch_size, self.max_context = tokenizer, max_batch_size, max_context
        self.target = SimpleNamespace(config=SimpleNamespace(vocab_size=300))
        self._numbers = itertools.count()

    def tokenize(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return prompt_token_ids(self.tokenizer, prompt)
        return list(prompt)

    def make_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        shown_tokens: frozenset[int] = frozenset(),
    ) -> Request:
        stream = TextStream(self.tokenizer, stop=params.stop, shown=shown_tokens)
        return Request(next(self._numbers), self.tokenize(prompt), params, priority, stream)
