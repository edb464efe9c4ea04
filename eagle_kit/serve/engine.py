"""Requests in, replies out. One step schedules, sends prompts and a cycle to the device, and takes in the
results of the step ``lag`` before: the host works while the device does.

With a lag of 1 a request's end is seen one cycle late; what that cycle decoded behind it is dropped. Lag 0 is
the same code without the delay.

Legend: S draft steps.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import FinishReason, TokenLogprobs
from eagle_kit.core.shape import NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.kv.page_pool import PagePool
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.cpu_graph import CpuGraphs
from eagle_kit.serve.grammar.compiler import GrammarCompiler
from eagle_kit.serve.graph import GraphMode, GraphRunner
from eagle_kit.serve.request import Request
from eagle_kit.serve.runner import Results, Runner
from eagle_kit.serve.scheduler import Chunk, Scheduler
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.ngram import NgramIndex, NgramOptions
from eagle_kit.speculation.propose.static import StaticDrafter
from eagle_kit.speculation.verify.proposal import Relaxed, TargetOnly, Verifier


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and policies, resolved once.

    Attributes:
        max_running: most requests decoded together.
        max_context: most tokens of a prompt and its reply.
        kv_tokens: tokens that the pool holds, all requests and the prefix cache together.
        page_size: tokens per page.
        kv_dtype: of the pool; None takes the model's.
        prefix_cache: share and remember the pages of common beginnings.
        prefill_tokens: most prompt tokens computed in one step.
        lag: steps between a cycle and its results on the host.
        batch_sizes: batches are padded to the next of these; empty for exact sizes.
        tree: ``"dynamic"`` chooses its best nodes (EAGLE-2), ``"static"`` has EAGLE-1's fixed topology.
        sampled_drafts: sample drafts from the draft's own distribution; chains and static trees only.
        verifier: decides on drafts of requests that sample; None takes the lossless one for the draft's
            distribution.
        seed: of the seeds of requests that bring none.
        graph_mode: whether a cycle is one CUDA graph (on a CPU: one recording), one for each phase, or runs
            eagerly.
    """

    max_running: int
    max_context: int
    kv_tokens: int
    page_size: int = 16
    kv_dtype: torch.dtype | None = None
    prefix_cache: bool = True
    prefill_tokens: int = 512
    lag: int = 0
    batch_sizes: tuple[int, ...] = ()
    tree: Literal["dynamic", "static"] = "dynamic"
    sampled_drafts: bool = False
    verifier: Verifier | None = None
    seed: int = 0
    graph_mode: GraphMode = "off"


@dataclass
class EngineTotals:
    """Counters since the engine was made; they only grow."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)
    num_draft_tokens: int = 0
    spec: SpecStats = field(default_factory=SpecStats)


class Engine:
    """Serves requests with a target and perhaps a draft. One thread calls all of it.

    It starts with ordinary decoding; :meth:`use_shape` changes that while nothing is being served.

    Args:
        make_grammars: called when a request brings the first grammar; None refuses grammars.
        ngram: draft from what was said before instead of with a model; ``draft`` must be None.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: DraftModel | None,
        options: EngineOptions,
        make_grammars: Callable[[], GrammarCompiler] | None = None,
        ngram: NgramOptions | None = None,
    ) -> None:
        self.target, self.draft, self.options = target, draft, options
        self._make_grammars = make_grammars
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        assert draft is None or ngram is None, "one drafter at a time"
        self.ngram = None if ngram is None else NgramIndex(ngram)
        self._num_indexed: dict[Request, int] = {}
        # Behind the known tokens of a request lie those of cycles on their way and of the next, and a draft's
        # entry of its root; the deepest shape decides, so that a change of shape needs no other tables.
        room = self._room(63)
        kv_pages = -(-options.kv_tokens // options.page_size)
        self.page_pool = PagePool(kv_pages, options.page_size, prefix_cache=options.prefix_cache)
        self.runner = Runner(
            target,
            draft,
            num_pages=kv_pages,
            page_size=options.page_size,
            max_pages=self.page_pool.pages_for(options.max_context + room),
            batch_sizes=options.batch_sizes or range(1, options.max_running + 1),
            kv_dtype=options.kv_dtype,
            tree=options.tree,
            sampled_drafts=options.sampled_drafts,
            verifier=options.verifier,
            graphs=_graphs(target, options.graph_mode),
        )
        drafter, verifier = self.runner._drafter, options.verifier
        kinds = (TargetOnly, Relaxed) if drafter is None else drafter.verifiers
        if verifier is not None and not isinstance(verifier, kinds):
            fit = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(
                f"{type(verifier).__name__} does not fit the drafts.",
                f"Use {fit}.",
            )
        self.totals = EngineTotals()
        self._seeds = random.Random(options.seed)
        self._pending: deque[Results] = deque()
        self._news: dict[Request, None] = {}
        self.use_shape(NO_SPECULATION)

    @property
    def shapes(self) -> ShapeTable:
        """How much is drafted and verified, by batch size."""
        return self.runner.shapes

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""
        return bool(self.scheduler.running or self.num_waiting or self._pending)

    @property
    def num_running(self) -> int:
        """Requests in the batch, those whose prompt is being computed included."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the pages that running requests hold, 0 to 1."""
        return 1.0 - self.page_pool.num_available / self.page_pool.num_pages

    def use_shape(self, shapes: ShapeTable | SpecShape) -> None:
        """Speculate with ``shapes`` from the next request on.

        Raises:
            UserError: there is no draft for one, or its vocabulary is smaller than the asked candidates.
        """
        assert not hasattr(self, "scheduler") or not self.has_work, "requests are being served"
        shapes = ShapeTable.parse(shapes)
        for shape in shapes.shapes:
            self._check_shape(shape)
        if bool(shapes.steps) != bool(self.shapes.steps):
            self.page_pool.clear()  # pages written without a draft have no entries of it
        self.runner.use_shape(shapes)
        self.scheduler = Scheduler(
            self.page_pool,
            max_running=self.options.max_running,
            prefill_tokens=self.options.prefill_tokens,
            room=self._room(shapes.steps),
            needs_last=self.runner.drafter is not None,
        )

    def _check_shape(self, shape: SpecShape) -> None:
        if shape.steps and self.draft is None and self.ngram is None:
            raise UserError(
                f"The shape {shape} speculates, but there is no draft.", "Give a draft, or the shape none."
            )
        if self.draft is not None and shape.topk > (size := self.draft.draft_vocab_size):
            raise UserError(
                f"The shape {shape} asks for more candidates than the draft's {size} tokens.", "Lower topk."
            )
        drafter = self.runner._drafter
        if isinstance(drafter, StaticDrafter):
            if shape.steps and shape != drafter.topology.shape:
                raise UserError(
                    f"The shape {shape} was asked of a static tree.",
                    f"Use its own, {drafter.topology.shape}, or a dynamic tree.",
                )
        elif self.options.sampled_drafts and shape.topk > 1:
            raise UserError(
                f"The shape {shape} is a tree, and drafts are to be sampled.",
                f"Use a chain such as {shape.steps},1,{shape.steps + 1}, or do not sample drafts.",
            )

    def _room(self, steps: int) -> int:
        return (self.options.lag + 1) * (steps + 1) + 2

    def check_prompt(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Raises UserError for a prompt that can never be served."""
        options, top = self.options, self.target.config.vocab_size
        if not prompt_ids:
            raise UserError("The prompt is empty.", "Give at least one token.")
        if len(prompt_ids) >= options.max_context:
            raise UserError(
                f"The prompt has {len(prompt_ids)} tokens, but the context holds {options.max_context} "
                "with the reply.",
                "Shorten the prompt, or raise max_context if the model allows it.",
            )
        if not all(0 <= token < top for token in prompt_ids):
            raise UserError(
                f"The prompt has a token id outside 0..{top - 1}.", "Tokenise it with the target's tokenizer."
            )
        tokens = min(len(prompt_ids) + max_tokens, options.max_context)
        if self.page_pool.pages_for(tokens + self._room(self.shapes.steps)) > self.page_pool.num_pages:
            raise UserError(
                f"A prompt of {len(prompt_ids)} tokens and a reply of up to {max_tokens} do not fit the "
                f"key-value pool of {self.page_pool.num_pages * options.page_size} tokens.",
                "Lower max_tokens, or give the pool more tokens.",
            )

    def check_request(self, request: Request) -> None:
        """Raises UserError for what can never be served; a grammar is compiled."""
        self.check_prompt(request.prompt_ids, request.params.max_tokens)
        top = self.target.config.vocab_size
        if not all(0 <= token < top for token in request.params.logit_bias):
            raise UserError(f"logit_bias names a token outside 0..{top - 1}.", "Use the target's token ids.")
        self.prepare(request)

    def add_request(self, request: Request) -> None:
        """Put a request into the queue. Raises UserError for what can never be served."""
        self.check_request(request)
        seed = request.params.seed
        request.seed = self._seeds.getrandbits(62) if seed is None else seed
        self.scheduler.add(request)

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar, which may take seconds; :meth:`add_request` does it when nobody has.
        Any thread may call it, while another one steps the engine.

        Raises:
            UserError: the grammar is of no use, or cannot be had.
        """
        grammar = request.params.grammar
        if grammar is None or request.match is not None:
            return
        if self._make_grammars is None:
            raise UserError("A grammar needs a tokenizer, and the model has none.", "Leave the grammar out.")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = self._make_grammars()
        request.match = self._grammars.start(grammar)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is; what it has so far stays."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def drain(self) -> None:
        """Drop results that are on their way and news that nobody has read, of requests that were aborted."""
        assert not (self.scheduler.running or self.num_waiting), "requests are being served"
        self._collect_until(0)
        self._news.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Schedule, compute, and take in results -> requests with new tokens or an end."""
        plan = self.scheduler.plan()
        self.totals.num_preemptions += len(plan.preempted)
        launched = len(self._pending)
        if plan.chunks:
            self._prefill(plan.chunks)
        # A request whose prompt was finished above decodes from the next step on, as if it had just arrived.
        decoding = plan.decoding
        if self._uses_ngram or any(request.match for request in decoding):
            # The host has to know every token to walk a grammar or look text up. That may end requests.
            self._collect_until(0)
            decoding = [request for request in decoding if request.finish_reason is None]
            launched = 0
        if decoding:
            if self._uses_ngram:
                self._index(decoding)
            results = self.runner.decode(decoding, self._longest(decoding), self.ngram)
            self._pending.append(results)
        self._collect_until(len(self._pending) - launched if self.options.lag else 0)
        self.totals.num_steps += 1
        news, self._news = list(self._news), {}
        return news

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        for request, start, _ in chunks:
            if start <= request.num_cached_tokens and request.admitted_at == 0.0:
                request.admitted_at = time.perf_counter()
                self.totals.num_prompt_tokens += len(request.prompt_ids)
                self.totals.num_cached_prompt_tokens += request.num_cached_tokens
        with self.runner.linear_forms.using():
            results = self.runner.prefill(chunks)
        for request, _, stop in chunks:
            request.num_computed = stop
            if not request.is_prefilling and self.page_pool.publish(
                request.allocation, request.tokens(0, stop)
            ):
                request.num_pages_written = -1
        if results is not None:
            self._pending.append(results)

    @property
    def _uses_ngram(self) -> bool:
        return self.ngram is not None and self.shapes.steps > 0

    def _index(self, requests: Sequence[Request]) -> None:
        """Put what is new in ``requests`` into the n-gram log, their prompts first."""
        assert self.ngram is not None
        for request in requests:
            known = self._num_indexed.get(request, 0)
            self.ngram.insert(request.number, request.tokens(known, request.num_tokens))
            self._num_indexed[request] = request.num_tokens

    def _collect_until(self, count: int) -> None:
        """Take in the oldest results until ``count`` are left on their way."""
        while len(self._pending) > count:
            self._collect(self._pending.popleft())

    def _longest(self, requests: Sequence[Request]) -> int:
        """A bound on the tokens that any of ``requests`` has in the pool."""
        unseen = self.options.lag * (self.shapes.steps + 2)
        return max(request.num_tokens for request in requests) - 1 + unseen

    def _collect(self, results: Results) -> None:
        """Wait for results and hand them to the requests that are still there."""
        on_host = results.copy.wait()
        tokens, counts = on_host[0].tolist(), on_host[1].tolist()
        logprobs = None if on_host[2] is None else [part.tolist() for part in on_host[2]]
        for i, (request, epoch) in enumerate(zip(results.requests, results.epochs, strict=True)):
            if request.epoch != epoch or not counts[i]:
                continue
            kept = self._take(request, tokens[i][: counts[i]])
            if logprobs is not None and (top := request.params.logprobs) is not None:
                chosen, ids, values = (part[i] for part in logprobs)
                for j in range(kept):
                    pairs = tuple(zip(ids[j][:top], values[j][:top], strict=True))
                    request.logprobs.append(TokenLogprobs(chosen[j], pairs))
            if results.is_verify:
                for stats in (request.stats, self.totals.spec):
                    stats.observe(kept, min(kept, counts[i] - 1))
                self.totals.num_draft_tokens += results.num_drafts[i]
            self.totals.num_generated_tokens += kept
            self._news[request] = None
            if request.finish_reason is not None:
                self._leave(request)

    def _take(self, request: Request, tokens: list[int]) -> int:
        """Append new tokens up to the first that ends the reply -> how many were kept."""
        params = request.params
        reason: FinishReason | None = None
        kept, shown = len(tokens), len(tokens)
        for i, token in enumerate(tokens, 1):
            if token in params.stop_token_ids or (
                not params.ignore_eos and token in self.target.config.eos_token_ids
            ):
                reason, shown = "stop", i - 1
            elif len(request.token_ids) + i >= params.max_tokens:
                reason = "length"
            elif request.num_tokens + i >= self.options.max_context:
                reason = "context"
            if reason is not None:
                kept = i
                break
        if request.match is not None:
            until_end = request.match.advance(tokens[:kept])
            if request.match.is_complete:
                kept, reason = until_end, "stop"
            elif request.match.is_stuck:
                kept, reason = until_end, "abort"
        if request.stream is not None:
            until_stop = request.stream.push(tokens[: min(kept, shown)])
            if until_stop is not None:
                kept, reason = until_stop, "stop"
        request.token_ids += tokens[:kept]
        request.num_computed = request.num_to_compute
        request.last_token_at = time.perf_counter()
        request.first_token_at = request.first_token_at or request.last_token_at
        request.finish_reason = reason
        return kept

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._news[request] = None
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take a request with a finish reason out; its pages stay cached as long as there is room."""
        assert request.finish_reason is not None
        if request.stream is not None:
            request.stream.finish()
        if request.slot >= 0:
            done = request.num_computed if request.is_prefilling else request.num_tokens - 1
            self.page_pool.publish(request.allocation, request.tokens(0, done))
        if request in self._num_indexed and self.ngram is not None:
            self._index([request])
            del self._num_indexed[request]
            self.ngram.forget(request.number)
        self.scheduler.remove(request)
        self.totals.num_finished[request.finish_reason] += 1

    def check(self) -> None:
        """Assert that no page is lost, owned twice, or counted wrongly."""
        self.page_pool.check(request.allocation for request in self.scheduler.running)


def _graphs(target: LlamaModel, mode: GraphMode) -> GraphRunner:
    on_cpu = target.embed_tokens.weight.device.type == "cpu"
    return CpuGraphs() if on_cpu and mode == "cycle" else GraphRunner(mode)
