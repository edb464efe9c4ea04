"""The real engine over a device that emits given tokens, for responses that no model can be made to give.

Queues, pages, the ends of responses, stop texts and counts are the engine's own. Replaced are the two calls
of its runner that compute.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tiny import tiny_head, tiny_target

from eagle_kit.core.shape import SpecShape
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.engine.cycle import Emitted, Logprobs
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.cuda_graph import HostCopy
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.engine.runner import Results
from eagle_kit.engine.scheduler import Chunk

Script = Callable[[Request], list[int]]

SHAPE = SpecShape(3, 1, 4)
VOCAB_SIZE = 300
NO_LIMIT = 10**9
IDLE_S = 0.001
"""Pause of a cycle that emits nothing, so that a response that is held does not keep a core busy."""


class AnyText:
    """State of a grammar that takes every token."""

    is_complete = is_stuck = False

    def advance(self, tokens: Sequence[int]) -> int:
        return len(tokens)


class UnfollowedGrammars:
    """Grammars of the engine; ``compile`` is called with each and may be replaced."""

    num_compiled = 0

    def __init__(self) -> None:
        self.compile: Callable[[Grammar], Any] = lambda grammar: None

    def start(self, grammar: Grammar, salt: str | None = None) -> Any:
        self.compile(grammar)
        return AnyText()


class ScriptedEngine(Engine):
    """Engine whose device emits the tokens of ``script(request)``, then one that ends the response.

    Args:
        llm: made by :func:`scripted_llm`.
        script: the tokens of the response to a request.
        per_step: tokens of a cycle, at most four. The first token of a response comes from its prompt, alone.
        step_s: pause before each step, in seconds.
        hold_at: see ``most_tokens``.
        fail_at: number of steps after which a step raises; it can be set later.

    Attributes:
        seen: requests that were added.
        grammars: are compiled as ever, and are not followed.
        most_tokens: tokens that a response gets. Steps go on then, and emit no more of it: it is being
            decoded until it is aborted or :meth:`release` is called.
    """

    def __init__(
        self,
        llm: LLM,
        script: Script,
        *,
        per_step: int = 3,
        step_s: float = 0.0,
        hold_at: int = NO_LIMIT,
        fail_at: int = NO_LIMIT,
    ) -> None:
        self.grammars = UnfollowedGrammars()
        super().__init__(llm.target, llm.draft, llm.config, lambda: self.grammars)
        self.use_shape(SHAPE)
        self.script = script
        self.per_step = per_step
        self.step_s = step_s
        self.most_tokens = hold_at
        self.fail_at = fail_at
        self.seen: list[Request] = []
        self._end_token: int = llm.tokenizer.eos_token_id
        self.runner.prefill = self._prefill_scripted  # type: ignore[method-assign]
        self.runner.decode = self._decode_scripted  # type: ignore[method-assign]

    @property
    def running(self) -> list[Request]:
        """The requests of the batch."""
        return self.scheduler.running

    def release(self) -> None:
        """Let the responses that are held go on."""
        self.most_tokens = NO_LIMIT

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.seen.append(request)

    def step(self) -> list[Request]:
        if self.totals.num_steps >= self.fail_at:
            raise RuntimeError("the engine breaks on purpose")
        time.sleep(self.step_s)
        return super().step()

    def _prefill_scripted(self, chunks: Sequence[Chunk]) -> list[Results]:
        """Emit the first token of each response whose prompt ends here."""
        requests = [chunk.request for chunk in chunks]
        counts = []
        for chunk in chunks:
            is_last = chunk.stop == chunk.request.num_to_compute
            is_first = is_last and not chunk.request.token_ids
            counts.append(1 if is_first else 0)
        emitted = self._emit(requests, counts, 1)
        sequences = [request.sequence for request in requests]
        return [Results(requests, sequences, emitted, None, [chunk.stop for chunk in chunks])]

    def _decode_scripted(
        self, requests: list[Request], shape: SpecShape, ngram: Any = None, wanted: Any = None
    ) -> Results:
        """Emit the next tokens of each response."""
        emitted = self._emit(requests, [self.per_step] * len(requests), shape.steps + 1)
        sequences = [request.sequence for request in requests]
        return Results(requests, sequences, emitted, [shape.tokens - 1] * len(requests), shape=shape)

    def _emit(self, requests: Sequence[Request], counts: Sequence[int], width: int) -> HostCopy:
        """The next tokens of each response, at most as many as ``counts``, in rows of ``width``."""
        # The tokens.
        rows = []
        emitted_counts = []
        for request, count in zip(requests, counts, strict=True):
            begun = len(request.token_ids)
            known = self.script(request)[begun : begun + width]
            rows.append(known + [self._end_token] * (width - len(known)))
            emitted_counts.append(max(0, min(count, self.most_tokens - begun)))
        if not any(emitted_counts):
            time.sleep(IDLE_S)

        # Their log-probabilities, where somebody asks for them.
        logprobs = None
        asked = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        if asked:
            top = torch.arange(max(asked))
            place = len(requests), width, max(asked)
            logprobs = Logprobs(torch.full(place[:2], -0.5), top.expand(place), (-1.5 - top).expand(place))

        is_finite = torch.ones(len(requests), dtype=torch.bool)
        return HostCopy(Emitted(torch.tensor(rows), torch.tensor(emitted_counts), logprobs, is_finite))


def scripted_llm(tokenizer: Any, *, max_batch_size: int = 4, max_context: int = 400) -> LLM:
    """Make a tiny model with ``tokenizer``, whose pool holds a full batch, or two of its longest requests."""
    ends = tuple(sorted({tokenizer.eos_token_id, *ChatRenderer(tokenizer).end_token_ids}))
    target, head = _models(max(VOCAB_SIZE, len(tokenizer)), ends, max(512, max_context))
    is_long = max_context > 10_000
    num_requests = 2 if is_long else max_batch_size
    return LLM(
        target,
        head,
        tokenizer=tokenizer,
        shape=SHAPE,
        max_batch_size=max_batch_size,
        max_context=max_context,
        page_size=1024 if is_long else 16,
        prefill_tokens=max_context,
        kv_tokens=num_requests * (max_context + 1024),
        graph_mode="off",
    )


@cache
def _models(vocab_size: int, ends: tuple[int, ...], max_positions: int) -> tuple[Any, Any]:
    target = tiny_target(vocab_size, 1, eos_token_ids=ends, max_position_embeddings=max_positions)
    return target, tiny_head(target)
