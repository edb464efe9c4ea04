"""Engine: requests in, responses out.

A step schedules, launches a decode cycle and prompt chunks on the device, and collects results. With a lag
of 1 it collects those of the step before, so that the host works while the device does. Then the end of a
request is seen one cycle late, and its tokens of that cycle are dropped. With a lag of 0 a step waits for its
own results.
"""

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from eagle_kit.autotune.chooser import MAX_OFFSET
from eagle_kit.autotune.policy import RequestAcceptance, ShapeChoice, ShapePolicy
from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import NOT_FINITE, FinishReason
from eagle_kit.core.shape import NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.ngram.index import NgramIndex
from eagle_kit.engine.grammar.bad_words import MatchWithoutBadWords
from eagle_kit.engine.grammar.bounds import BoundedMatch
from eagle_kit.engine.grammar.protocols import Grammars, Match
from eagle_kit.engine.graphs.cpu_graph import CpuGraphs
from eagle_kit.engine.graphs.cuda_graph import CycleGraphs, GraphRunner
from eagle_kit.engine.memory.engine_memory import NEED_LESS
from eagle_kit.engine.request import Request, UncountedTokens
from eagle_kit.engine.runner import PromptScores, Results, Runner
from eagle_kit.engine.scheduler import Chunk, Scheduler
from eagle_kit.engine.step_profile import ProfileSettings, StepProfile
from eagle_kit.kv.page_pool import PagePool
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.backend import current_device
from eagle_kit.ops.device_memory import memory_failure
from eagle_kit.ops.step_ranges import StepRanges
from eagle_kit.verify.verifiers import make_verifier

STEP = "computing a step"
"""Activity that errors of too little memory name."""
READING_COST = 64
"""Multiplications that take as long as reading one number of the key-value pool. Measured: 75 on a CPU
(SmolLM2-135M, one thread). The data sheets of GPUs give about as many."""
WEIGHTS_COST = {"cpu": 12, "cuda": 256}
"""Tokens whose computation takes as long as reading the weights. Measured on the same CPU; for GPUs from data
sheets."""


@dataclass
class EngineTotals:
    """Counters since the engine was made; they only grow.

    Attributes:
        num_steps: steps of the engine.
        num_prompt_tokens: tokens of all prompts whose prefill has begun.
        num_cached_prompt_tokens: those of them that the prefix cache held.
        num_generated_tokens: tokens of responses.
        num_steps_in_parts: steps that a GPU had too little memory for, so that they were run in parts.
        num_preemptions: times that a request gave way to another.
        num_finished: ended requests, by reason.
        num_drafts: verifies of at least one draft token, as in vLLM.
        num_draft_tokens: draft tokens that were verified.
        spec: acceptance of the drafts.
        shapes: cycles in each shape.
        num_captures: graphs that were captured, or recorded on a CPU, while requests waited.
        num_eager_runs: cycles, parts of them and prompts that ran eagerly: they have no graph for good.
        num_compilations: kernels that Triton compiled, or read from its cache, in steps.
        num_steps_out_of_memory: steps for which the GPU had too little memory in parts too, so that all
            requests ended.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps_in_parts: int = 0
    num_preemptions: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    spec: SpecStats = field(default_factory=SpecStats)
    shapes: Counter[SpecShape] = field(default_factory=Counter)
    num_captures: int = 0
    num_eager_runs: int = 0
    num_compilations: int = 0
    num_steps_out_of_memory: int = 0


class _End(NamedTuple):
    """Token that ends a response, among the new tokens of a cycle.

    Attributes:
        num_tokens: number of new tokens up to it, itself included.
        reason: why the response ends.
        is_text: True if the token is part of the text.
    """

    num_tokens: int
    reason: FinishReason
    is_text: bool


class Engine:
    """Serve requests with a target, and with a draft if there is one. One thread makes all calls.

    A new engine decodes without drafts; :meth:`use_shape` changes that while nothing is being served.

    Args:
        target: the model that verifies.
        draft: the draft model; None for ordinary decoding and for the algorithm ``NGRAM``.
        config: resolved, with a size of the page pool.
        make_grammars: makes the compiler of grammars, when the first request with a grammar comes; None
            refuses grammars.

    Attributes:
        scheduler: queue and batch.
        runner: the device side.
        ranges: named ranges of the steps in traces.
        profile: profile of the present steps; None while there is none.
        page_pool: pages of the key-value stores.
        ngram: log of tokens that n-gram drafts come from; None without the algorithm ``NGRAM``.
        shapes: current shapes, as a table by batch size or as a policy.
        totals: counters since the engine was made.

    Raises:
        UserError: the options do not fit the draft.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None,
        config: ResolvedConfig,
        make_grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.config = config

        # The compiler of grammars, made when a request needs it.
        self._make_grammars = make_grammars
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()

        # The n-gram log, and how many tokens of each request are in it.
        self.ngram = NgramIndex(config.ngram) if config.algorithm == "NGRAM" else None
        assert draft is None or self.ngram is None, "one drafter at a time"
        self._num_indexed: dict[Request, int] = {}

        # Pages and models.
        self.page_pool = PagePool(
            config.num_pages,
            config.page_size,
            prefix_cache=config.prefix_cache,
            snapshots=None if target.config.states is None else config.snapshots,
            num_shards=config.num_shards,
        )
        self.ranges = StepRanges(has_nvtx=config.nvtx)
        self.profile: StepProfile | None = None
        self.runner = Runner(target, draft, config, _graphs(target, config), self.ranges)

        # The verifier must be sound for the drafts.
        verifier = make_verifier(config)
        if verifier is not None and not isinstance(verifier, self.runner.verifiers):
            fit = " or ".join(kind.__name__ for kind in self.runner.verifiers)
            raise UserError(f"{type(verifier).__name__} does not fit these drafts.", f"Use {fit}.")
        self._seeds = random.Random(config.seed)

        # Launched results, the oldest first, and requests with new tokens since the last step.
        self._in_flight: deque[Results] = deque()
        self._updated: dict[Request, None] = {}

        # Counters. Tokens that are not in the totals yet: how many are new, how many of them were drafted
        # (None where nothing was), and how many draft tokens were verified.
        self.totals = EngineTotals()
        self._counted: list[tuple[int, int | None, int]] = []

        # Time of the last cycle's end, and whether the step after it may measure the time of a cycle.
        self._clock = time.perf_counter()
        self._is_timing = False

        # Graphs by name, for measurements that need their own.
        self.graphs_in_use: Hashable = None
        self._graphs: dict[Hashable, CycleGraphs] = {}

        # The scheduler is made with the shapes.
        self.use_shape(NO_SPECULATION)

    @property
    def has_work(self) -> bool:
        """True if :meth:`step` has something to do."""
        return bool(self.scheduler.running or self.num_waiting or self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests in the batch, those whose prompt is being computed included."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.scheduler.num_waiting

    @property
    def kv_usage(self) -> float:
        """Share of the pages that running requests hold, 0 to 1."""
        return 1.0 - self.page_pool.num_available / self.page_pool.num_pages

    @property
    def num_graphs(self) -> int:
        """Number of graphs or recordings of cycles."""
        return self.runner.graphs.num_graphs

    @property
    def num_grammars(self) -> int:
        """Number of compiled grammars."""
        return 0 if self._grammars is None else self._grammars.num_compiled

    def use_shape(self, shapes: ShapeTable | SpecShape | ShapePolicy) -> None:
        """Speculate with ``shapes`` from the next request on. Nothing may be running or waiting.

        Args:
            shapes: one shape, a table by batch size, or a policy that chooses a shape for each cycle.

        Raises:
            UserError: a shape needs a draft and there is none, or the draft cannot fill it.
        """
        assert not hasattr(self, "scheduler") or not self.has_work, "requests are being served"
        if not isinstance(shapes, ShapePolicy):
            shapes = ShapeTable.parse(shapes)
        for shape in shapes.shapes:
            self._check_shape(shape)

        # The runner. Pages that were written without a draft lack its keys, so the prefix cache is emptied.
        did_speculate = bool(self.runner.steps)
        needs_confidence = isinstance(shapes, ShapePolicy) and not self.config.lag
        by_size = {size: shapes.shapes_at(size) for size in self.config.batch_sizes}
        self.runner.use_shape(shapes.shapes, needs_confidence=needs_confidence, by_size=by_size)
        if bool(self.runner.steps) != did_speculate:
            self.page_pool.clear()
        self.shapes = shapes

        # Costs of prompt tokens, relative to the first token of a prompt. All ranks take those of the first:
        # shards of the target may differ in size, and schedules must not.
        model = self.target.config
        size = sum(weight.numel() for weight in self.target.parameters())
        costs = {
            "attention_cost": 2 * model.num_heads * model.head_dim * len(self.target.variants) / size,
            "reading_cost": READING_COST * self.runner.kv.values_per_token / size,
            "weights_cost": WEIGHTS_COST[self.runner.device.type],
        }
        if self.target.ranks is not None:
            costs = self.target.ranks.agree(costs)

        # The scheduler.
        drafter = self.runner.models.drafter
        self.scheduler = Scheduler(
            self.page_pool,
            self.config,
            num_lookahead_tokens=self.config.num_lookahead_tokens(self.runner.steps),
            has_draft=drafter is not None,
            lookback=0 if drafter is None else drafter.lookback,
            **costs,
        )

    def use_graphs(self, name: Hashable) -> None:
        """Run cycles from graphs of their own, which measurements use.

        Args:
            name: graphs under this name are made at first use and stay apart from others. ``"off"`` runs
                eagerly. None goes back to the engine's graphs, and drops all others.
        """
        if self.graphs_in_use is None:
            self._graphs = {None: self.runner.graphs}
        if name not in self._graphs:
            self._graphs[name] = GraphRunner("off") if name == "off" else self._graphs[None].new_empty()
        self.runner.graphs = self._graphs[name]
        self.graphs_in_use = name
        if name is None:
            self._graphs = {}

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.page_pool.clear()

    def _check_shape(self, shape: SpecShape) -> None:
        if shape.steps and self.draft is None and self.ngram is None:
            raise UserError(
                f"The shape {shape} speculates, but there is no draft.", "Give a draft, or the shape none."
            )
        if self.draft is None or self.runner.drafter is None:
            return
        self.runner.drafter.check_shape(self.draft, shape)
        if shape.num_draft_nodes > self.config.draft_scratch:
            raise UserError(
                f"The draft runs {shape.num_draft_nodes} nodes in the shape {shape}, and this engine has "
                f"memory for {self.config.draft_scratch}.",
                "Give the shape when the engine is made, or use LLM.engine(shape), which makes a larger one.",
            )

    def check_tokens(self, prompt_ids: Sequence[int]) -> None:
        """Raise UserError for a prompt that can never be served in any shape."""
        config = self.config
        top = self.target.config.vocab_size
        if not prompt_ids:
            raise UserError("The prompt is empty.", "Give at least one token.")
        if len(prompt_ids) >= config.max_context:
            raise UserError(
                f"The prompt has {len(prompt_ids)} tokens, but the context holds {config.max_context} "
                "with the response.",
                "Shorten the prompt, or raise max_context if the model allows it.",
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < top:
            raise UserError(
                f"The prompt has a token id outside 0..{top - 1}.", "Tokenise it with the target's tokenizer."
            )

    def check_prompt(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Raise UserError for a prompt that can never be served in the present shapes."""
        self.check_tokens(prompt_ids)
        config = self.config
        num_tokens = min(len(prompt_ids) + max_tokens, config.max_context)
        num_tokens += config.num_lookahead_tokens(self.runner.steps)
        if config.num_pages_of(num_tokens) > config.num_shard_pages:
            of_rank = ""
            if config.num_shards > 1:
                of_rank = f", {config.num_shard_pages * config.page_size} of each rank"
            raise UserError(
                f"A prompt of {len(prompt_ids)} tokens and a response of up to {max_tokens} do not fit the "
                f"key-value pool of {config.num_pages * config.page_size} tokens{of_rank}.",
                "Lower max_tokens, or give the pool more tokens.",
            )

    def check_request(self, request: Request) -> None:
        """Compile a request's grammar. Raise UserError for a request that can never be served."""
        self.check_prompt(request.prompt_ids, request.params.max_tokens)
        top = self.target.config.vocab_size
        if not all(0 <= token < top for token in request.params.logit_bias):
            raise UserError(f"logit_bias names a token outside 0..{top - 1}.", "Use the target's token ids.")
        if not all(0 <= token < top for token in request.params.allowed_token_ids or ()):
            raise UserError(
                f"allowed_token_ids names a token outside 0..{top - 1}.", "Use the target's token ids."
            )
        self.prepare(request)

    def add_request(self, request: Request) -> None:
        """Put a request into the queue. Raise UserError for one that can never be served."""
        self.check_request(request)
        params = request.params
        response = request.response
        response.seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self.target.config.eos_token_ids
        response.stop_token_ids = frozenset((*params.stop_token_ids, *eos))
        response.max_tokens = min(params.max_tokens, self.config.max_context - len(request.prompt_ids))
        self.scheduler.add(request)

    def _bounded(self, request: Request, match: Match | None) -> Match | None:
        """A match with the bounds of a response's length. Raise UserError where they leave no token."""
        params = request.params
        # End tokens are forbidden with ignore_eos too, as in vLLM, SGLang and transformers.
        stops = frozenset((*params.stop_token_ids, *self.target.config.eos_token_ids))
        min_tokens = params.min_tokens if stops else 0
        if not min_tokens and params.thinking_budget is None:
            return match
        if min_tokens and params.allowed_token_ids is not None and stops.issuperset(params.allowed_token_ids):
            raise UserError(
                f"min_tokens is {min_tokens}, and allowed_token_ids has only tokens that end the response.",
                "Allow another token, or leave min_tokens out.",
            )
        if params.thinking_budget is not None:
            _check_end_is_allowed(params.thinking_budget.thought.end, request)
        vocab_size = self.target.config.vocab_size
        return BoundedMatch(stops, vocab_size, min_tokens, params.thinking_budget, match)

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar, which may take seconds, and read its forbidden words, unless that has
        been done. Any thread may call it while another one steps the engine.

        Raises:
            UserError: the grammar cannot be compiled, or words are forbidden without their tokens.
        """
        params = request.params
        if request.response.match is not None:
            return
        if params.bad_words and request.bad_word_ids is None:
            raise UserError("bad_words need a tokenizer, and the model has none.", "Leave them out.")
        constraint = params.constraint
        match = None if constraint is None else self._start(constraint, params.cache_salt)
        if request.bad_word_ids:
            vocab_size = self.target.config.vocab_size
            match = MatchWithoutBadWords(request.bad_word_ids, vocab_size, match, params.allowed_token_ids)
        request.response.match = self._bounded(request, match)

    def prepare_grammars(self) -> None:
        """Make the compiler of grammars and compile a first one, so that no request waits for it. Raises
        UserError where the tokenizer cannot be used."""
        self._start(Grammar("json_object"), None)

    def _start(self, grammar: Grammar, cache_salt: str | None) -> Match:
        """Compile a grammar, and return a match at its start."""
        if self._make_grammars is None:
            raise UserError("A grammar needs a tokenizer, and the model has none.", "Leave the grammar out.")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = self._make_grammars()
        return self._grammars.start(grammar, cache_salt)

    def abort(self, request: Request) -> None:
        """End a request now, waiting or running; its tokens so far stay."""
        if request.finish_reason is None:
            self.end(request, "abort")

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request that has not ended, between steps."""
        self._finish(request, reason)

    def stop(self, request: Request) -> None:
        """End a request if its text so far, by :meth:`Request.decode_text`, contains a stop text or could not
        be decoded; else do nothing."""
        if request.has_stops and request.finish_reason is None:
            self._count_decoded(request)
            assert request.stream is not None
            if request.stream.stopped or request.stream.failure:
                self.end(request, "stop")

    def drain(self) -> None:
        """Drop results in flight, and what :meth:`step` would have returned of aborted requests."""
        assert not (self.scheduler.running or self.num_waiting), "requests are being served"
        self._collect_until(0)
        self._updated.clear()

    def step(self) -> list[Request]:
        """Schedule, launch, and collect results. The calling thread's current CUDA device does not matter.

        Returns:
            The requests that have new tokens or have ended.
        """
        with torch.inference_mode(), current_device(self.runner.device), self.ranges("step"):
            updated = self._step()

        # A profile ends by itself after its last step.
        if self.profile is not None:
            self.profile.num_steps += 1
            if self.profile.is_complete:
                self._end_profile()
        return updated

    def start_profile(self, settings: ProfileSettings) -> None:
        """Profile the next steps, on all ranks. None may be running.

        Raises:
            UserError: torch cannot start a profile here.
        """
        assert self.profile is None, "a profile is running"
        ranks = self.target.ranks
        self.profile = StepProfile(
            settings,
            rank=0 if ranks is None else ranks.rank,
            ranges=self.ranges,
            has_graphs=self.runner.graphs.mode != "off",
        )

    def stop_profile(self) -> None:
        """End the profile on all ranks, if it has not ended by itself."""
        self._end_profile()

    def _end_profile(self) -> None:
        """End the profile of this rank, if there is one."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _step(self) -> list[Request]:
        # Plan the step.
        if not self._in_flight:
            self._clock = time.perf_counter()
        with self.ranges("schedule"):
            plan = self.scheduler.plan()
        decoding = plan.decoding
        chunks = plan.chunks
        # A cycle's time counts if neither this step nor the one before it has computed prompts.
        self._is_timing = self._is_timing and not plan.chunks
        self.totals.num_preemptions += len(plan.preempted)
        for request in plan.preempted:
            request.stats.num_preemptions += 1

        # Grammars and n-grams need every token on the host. Collecting results may end requests.
        num_earlier = len(self._in_flight)
        if self._uses_ngram or any(request.response.match for request in decoding):
            self._collect_until(0)
            num_earlier = 0
            decoding = [request for request in decoding if request.finish_reason is None]
            chunks = [chunk for chunk in chunks if chunk.request.finish_reason is None]

        # Launch the cycle.
        self._set_pages([*decoding, *(chunk.request for chunk in chunks)])
        failed: dict[Request, str] = {}
        if decoding:
            if self._uses_ngram:
                self._index(decoding)
            with self.ranges("decode"):
                failed |= self._launch_cycle(decoding)

        # Launch prefill behind the cycle, whose results do not wait for prompts.
        if chunks:
            failed |= self._launch_prefill(chunks)

        # Give up a request if a GPU has too little memory even for parts of the step.
        if failed:
            self._give_up_one(failed)

        # Collect the results of the steps before; without a lag those of this step too.
        num_launched = len(self._in_flight) - num_earlier
        self._collect_until(num_launched if self.config.lag else 0)

        # Hand over the requests with new tokens.
        self.totals.num_steps += 1
        self._is_timing = not plan.chunks
        updated = list(self._updated)
        self._updated = {}
        return updated

    # Work of a step. A GPU that has too little memory for it does it in parts. A part may run again over the
    # same state: keys of uncommitted tokens are written again, and slots and recurrent states change last.

    def _set_pages(self, requests: list[Request]) -> None:
        """Bring the device's page tables up to date, and once more with the memory that was kept of freed
        tensors."""
        copy = partial(self.runner.set_pages, requests)
        if self.target.ranks is not None or memory_failure(copy, STEP) is not None:
            copy()

    def _launch_cycle(self, decoding: list[Request]) -> dict[Request, str]:
        """Launch a cycle; in parts if the GPU has too little memory for the whole batch.

        Returns:
            The requests that could not be decoded for lack of memory, each with the cause.
        """
        shape = self._shape(decoding)
        launch = partial(self._decode, decoding, shape)
        if self.target.ranks is not None:  # the other ranks have launched it
            launch()
            return {}
        if memory_failure(launch, STEP) is None:
            return {}

        # Once more with the memory that was kept of freed tensors, then in halves.
        self._count_step_in_parts()
        if memory_failure(launch, STEP) is None:
            return {}
        with self.runner.eagerly():
            return self._decode_in_parts(decoding, shape)

    def _decode_in_parts(self, requests: list[Request], shape: SpecShape) -> dict[Request, str]:
        """Run a cycle eagerly. If memory is missing, run each half of the batch in the same way.

        Returns:
            See :meth:`_launch_cycle`.
        """
        if shape not in self.shapes_at(self.runner.padded(len(requests))):
            shape = self.shapes_at(self.runner.padded(len(requests)))[0]
        cause = memory_failure(partial(self._decode, requests, shape), STEP)
        if cause is None:
            return {}
        if len(requests) == 1:
            return {requests[0]: cause}
        half = len(requests) // 2
        failed = self._decode_in_parts(requests[:half], shape)
        return failed | self._decode_in_parts(requests[half:], shape)

    def _decode(self, requests: list[Request], shape: SpecShape) -> None:
        self._in_flight.append(self.runner.decode(requests, shape, self.ngram))

    def _launch_prefill(self, chunks: Sequence[Chunk]) -> dict[Request, str]:
        """Launch chunks of prompts; one by one if the GPU has too little memory for all of them.

        Returns:
            The requests whose chunks could not be computed for lack of memory, each with the cause.
        """
        launch = partial(self._prefill, chunks)
        if self.target.ranks is not None:  # the other ranks have launched them
            launch()
            return {}
        if memory_failure(launch, STEP) is None:
            return {}

        # One by one. The failed forward may have changed recurrent states in place: prompts that continue
        # from such a state begin again at a snapshot.
        self._count_step_in_parts()
        failed = {}
        for chunk in chunks:
            request = chunk.request
            if chunk.state_moves is not None and chunk.state_moves.source == request.sequence.slot:
                self.scheduler.send_back(request)
                continue
            cause = self._prefill_in_parts(chunk)
            if cause is not None:
                failed[request] = cause
        return failed

    def _prefill_in_parts(self, chunk: Chunk) -> str | None:
        """Compute a chunk. If memory is missing, compute each half of it in the same way.

        Returns:
            The cause if the chunk could not be computed to its end, else None.
        """
        cause = memory_failure(partial(self._prefill, [chunk]), STEP)
        num_tokens = chunk.stop - chunk.start
        if cause is None or chunk.state_moves is not None or num_tokens <= self.config.page_size:
            return cause
        middle = chunk.start + num_tokens // 2
        for part in (chunk._replace(stop=middle), chunk._replace(start=middle)):
            cause = self._prefill_in_parts(part)
            if cause is not None:
                return cause
        return None

    def _count_step_in_parts(self) -> None:
        """Count a step that is run in parts, and log the first, second, fourth and so on."""
        self._is_timing = False
        self.totals.num_steps_in_parts += 1
        number = self.totals.num_steps_in_parts
        if number & (number - 1) == 0:
            logging.getLogger(__name__).warning(
                "The GPU lacks memory: %d steps were run in parts. %s", number, NEED_LESS
            )

    def _give_up_one(self, failed: dict[Request, str]) -> None:
        """End the longest of the requests that a step had too little memory for. The others wait for the next
        step."""
        longest = max(failed, key=lambda request: (request.num_tokens, request.number))
        failure = UserError(failed[longest], NEED_LESS)
        logging.getLogger(__name__).error("Request %d ends: %s", longest.number, failure)
        longest.response.failure = failure
        self._finish(longest, "error")

    def _shape(self, decoding: Sequence[Request]) -> SpecShape:
        """Choose the shape of the next cycle."""
        if isinstance(self.shapes, ShapeTable):
            return self.shapes.at(self.runner.padded(len(decoding)))
        if all(request.params.speculative_depth == 0 for request in decoding):
            return NO_SPECULATION
        acceptances = []
        for request in decoding:
            acceptance = request.stats.acceptance or self._new_acceptance(self.shapes, request)
            acceptance.num_pending = request.on_device.num_pending_draft_tokens
            request.stats.acceptance = acceptance
            acceptances.append(acceptance)
        chosen = self.shapes.choose(acceptances, _mean_context(decoding))
        if self.target.ranks is not None:  # choices depend on time
            chosen = self.target.ranks.agree(chosen)
        return chosen

    @staticmethod
    def _new_acceptance(policy: ShapePolicy, request: Request) -> RequestAcceptance:
        """Statistics of a request for the policy; those of one without speculation expect no acceptance."""
        acceptance = policy.new_request()
        if request.params.speculative_depth == 0:
            acceptance.offset = -MAX_OFFSET
        return acceptance

    def shapes_at(self, batch_size: int) -> list[SpecShape]:
        """List the shapes that batches of a size may have."""
        return self.shapes.shapes_at(batch_size)

    def choices(self) -> list[ShapeChoice]:
        """What the policy chooses for text like that of the last requests, by batch size; empty where shapes
        are given."""
        if self._policy is None:
            return []
        powers_of_two = [size for size in self.config.batch_sizes if size & (size - 1) == 0]
        return self._policy.plan(powers_of_two)

    def reasons(self) -> list[str]:
        """Say why shapes are chosen as they are; empty where they are given."""
        if self._policy is None:
            return []
        return [*map(str, self.choices()), self._policy.origin]

    @property
    def _policy(self) -> ShapePolicy | None:
        """The policy that chooses shapes; None where they are given."""
        return self.shapes if isinstance(self.shapes, ShapePolicy) else None

    @property
    def takes_grammars(self) -> bool:
        """True if there is a compiler of grammars, or can be."""
        return self._make_grammars is not None

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute responses of one token, without a cycle."""
        with torch.inference_mode(), current_device(self.runner.device):
            for request in requests:
                self.add_request(request)
            while any(request.finish_reason is None for request in requests):
                self._prefill(self.scheduler.plan().chunks)
                self._collect_until(0)

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            request = chunk.request
            if request.stats.admitted_at == 0.0:
                request.stats.admitted_at = time.perf_counter()
                request.stats.num_cached_tokens = request.sequence.num_shared_tokens
                self.totals.num_prompt_tokens += len(request.prompt_ids)
                self.totals.num_cached_prompt_tokens += request.stats.num_cached_tokens
        with self.ranges("prefill", len(chunks), "prompts"):
            self._in_flight += self.runner.prefill(chunks)
        for chunk in chunks:
            self.scheduler.mark_computed(chunk.request, chunk.stop)

    @property
    def _uses_ngram(self) -> bool:
        return self.ngram is not None and self.runner.steps > 0

    def _index(self, requests: Sequence[Request]) -> None:
        """Append the new tokens of ``requests`` to the n-gram log, their prompts first."""
        assert self.ngram is not None
        for request in requests:
            known = self._num_indexed.get(request, 0)
            new = request.tokens(known, request.num_tokens)
            self.ngram.insert(request.number, new, request.params.cache_salt)
            self._num_indexed[request] = request.num_tokens

    def _collect_until(self, count: int) -> None:
        """Collect the oldest results until ``count`` are in flight."""
        while len(self._in_flight) > count:
            with self.ranges("collect"):
                self._collect(self._in_flight.popleft())

    def _collect(self, results: Results) -> None:
        """Wait for results and append them to the requests that are still in the batch."""
        # Wait for the device.
        with self.ranges("wait"):
            emitted = results.copy.wait(self.target.ranks)
        now = time.perf_counter()
        self.totals.num_captures += results.num_captures
        self.totals.num_eager_runs += results.num_eager_runs
        if not results.is_prefill:
            self._note_cycle(results, now)

        if results.prompt_scores is not None:
            self._append_prompt_logprobs(results.prompt_scores)

        # Read the tensors once, for all requests.
        tokens = emitted.tokens.tolist()
        counts = emitted.num_emitted.tolist()
        is_finite = emitted.is_finite.tolist()
        confidence = None if emitted.confidence is None else emitted.confidence.tolist()
        logprobs = None if emitted.logprobs is None else [part.tolist() for part in emitted.logprobs]

        for i, (request, sequence) in enumerate(zip(results.requests, results.sequences, strict=True)):
            # Drop the results of a request that has left the batch since.
            if request.sequence is not sequence:
                continue

            # End a request whose logits are not finite.
            if not is_finite[i]:
                logging.getLogger(__name__).error("Request %d ends: %s", request.number, NOT_FINITE)
                self._finish(request, "error")
                continue

            # Cache the pages of a whole prompt.
            if results.is_prefill:
                self.scheduler.mark_finite(request, results.num_computed[i])
                if not request.is_prefilling and self.scheduler.cache_pages(request):
                    self.runner.invalidate_pages(request)

            # Append the new tokens.
            num_emitted = counts[i]
            if num_emitted == 0:
                continue
            start = len(request.response.token_ids)
            reason = self._append_tokens(request, tokens[i][:num_emitted], now)
            num_tokens = len(request.response.token_ids) - start
            self._updated[request] = None

            # Append their log-probabilities.
            top = request.params.logprobs
            if logprobs is not None and top is not None:
                chosen, ids, values = (part[i] for part in logprobs)
                for j in range(num_tokens):
                    request.response.logprobs.append(chosen[j], ids[j][:top], values[j][:top])

            # Update the acceptance statistics of the policy.
            num_draft_tokens = None
            if results.num_draft_tokens is not None:
                num_draft_tokens = results.num_draft_tokens[i]
                next_confidence = None if confidence is None else confidence[i]
                self._observe(request, results.shape, num_emitted - 1, next_confidence)

            # Count the tokens. Where a stop text may remove them again, they wait until their text is read.
            new = UncountedTokens(start, num_tokens, num_emitted, results.shape, num_draft_tokens)
            if request.has_stops:
                request.stats.uncounted.append(new)
                self._count_decoded(request)
            else:
                self._count(request, new)

            # End the request, or look for a stop text.
            if reason is not None:
                self._finish(request, reason)
            elif request.has_stops and not self.config.lag and self.target.ranks is None:
                # Nothing is in flight, and a needless cycle would cost more than reading the text here. With
                # several ranks the first one reads it between steps, and sends the end to the others.
                request.decode_text()
                self.stop(request)
        self._add_to_totals()

    def _append_prompt_logprobs(self, scores: PromptScores) -> None:
        """Append log-probabilities of prompt tokens to the requests that are still in the batch.

        A request that was preempted has the first ones already.
        """
        chosen, ranks, top_ids, top_values = (part.tolist() for part in scores.copy.wait(self.target.ranks))
        row = 0
        for request, sequence, first, count in scores.parts:
            found = request.response.prompt_logprobs
            top = request.params.prompt_logprobs
            first_row = row
            row += count
            if request.sequence is not sequence:
                continue
            assert first <= len(found.entries), "chunks come in their order"
            for index in range(len(found.entries), first + count):
                at = first_row + index - first
                found.append(chosen[at], ranks[at], top_ids[at][:top], top_values[at][:top])

    def _observe(
        self,
        request: Request,
        shape: SpecShape,
        num_accepted: int,
        confidence: float | Sequence[float] | None,
    ) -> None:
        """Update the policy with the number of a request's draft tokens that a cycle accepted.

        Args:
            confidence: the draft's confidence in its next tokens; None if cycles do not emit it.
        """
        policy = self._policy
        acceptance = request.stats.acceptance
        limit = request.params.speculative_depth
        is_limited = limit is not None and limit < shape.steps
        if policy is None or acceptance is None or is_limited:
            return
        if shape.steps:
            policy.observe(acceptance, shape, num_accepted)
        if confidence is not None or acceptance.confidence_class is not None:
            policy.observe_confidence(acceptance, confidence)

    def _count_decoded(self, request: Request) -> None:
        """Count the tokens of a response whose text has been searched for stop texts."""
        assert request.stream is not None
        uncounted = request.stats.uncounted
        while uncounted and uncounted[0].start + uncounted[0].num_tokens <= request.stream.num_decoded:
            self._count(request, uncounted.popleft())

    def _count(self, request: Request, new: UncountedTokens) -> None:
        """Count tokens that no stop text can remove any more."""
        num_accepted = None
        if new.num_draft_tokens == 0:
            # A plain cycle is no verify, also where others of the batch had drafts.
            request.stats.shapes[NO_SPECULATION] += 1
        elif new.num_draft_tokens is not None:
            request.stats.shapes[new.shape] += 1
            num_accepted = min(new.num_tokens, new.num_emitted - 1)
            request.stats.spec.observe(new.num_tokens, num_accepted)
            request.stats.num_draft_tokens += new.num_draft_tokens
        self._counted.append((new.num_tokens, num_accepted, new.num_draft_tokens or 0))

    def _add_to_totals(self) -> None:
        """Add the counted tokens to the totals, equal entries at once."""
        totals = self.totals
        for (num_tokens, num_accepted, num_draft_tokens), times in Counter(self._counted).items():
            totals.num_generated_tokens += num_tokens * times
            totals.num_draft_tokens += num_draft_tokens * times
            if num_draft_tokens > 0:
                totals.num_drafts += times
            if num_accepted is not None:
                totals.spec.observe(num_tokens, num_accepted, times)
        self._counted.clear()

    def _note_cycle(self, results: Results, now: float) -> None:
        """Count a cycle by its shape. Give the policy its time, if the step did nothing else and no profile
        runs."""
        self.totals.shapes[results.shape] += 1
        policy = self._policy
        can_time = results.is_steady_state and self.profile is None
        if policy is not None and self._is_timing and can_time:
            context = _mean_context(results.requests)
            policy.observe_time(len(results.requests), results.shape, context, now - self._clock)
        self._clock = now

    def _append_tokens(self, request: Request, tokens: list[int], now: float) -> FinishReason | None:
        """Append new tokens up to the first that ends the response.

        Returns:
            Why the response ends; None if it goes on.
        """
        response = request.response
        reason: FinishReason | None = None
        is_text = True

        # Cut the tokens where one ends the response.
        most_tokens = len(response.token_ids) + len(tokens)
        if most_tokens >= response.max_tokens or not response.stop_token_ids.isdisjoint(tokens):
            end = self._find_end(request, tokens)
            if end is not None:
                tokens = tokens[: end.num_tokens]
                reason = end.reason
                is_text = end.is_text

        # Cut them where the grammar ends.
        match = response.match
        if match is not None:
            until_end = match.advance(tokens)
            if isinstance(match, BoundedMatch) and match.is_spent and self.target.ranks is None:
                # Without masks cycles need not wait for the host.
                response.match = match.match
                self.runner.forget_batch()
            if match.is_complete or match.is_stuck:
                is_text = is_text or until_end < len(tokens)
                tokens = tokens[:until_end]
                reason = "stop" if match.is_complete else "abort"

        # Append them. Their keys are in the pool, but for the last one's.
        response.token_ids += tokens
        num_hidden = 0 if is_text or request.params.include_stop_str_in_output else 1
        response.num_text_tokens = len(response.token_ids) - num_hidden
        self.scheduler.mark_finite(request, request.num_to_compute)
        request.stats.last_token_at = now
        if request.stats.first_token_at == 0.0:
            request.stats.first_token_at = now
        return reason

    def _find_end(self, request: Request, tokens: list[int]) -> _End | None:
        """Find the first of the new tokens that ends the response; None if it goes on."""
        if request.params.max_tokens == 0:
            return _End(0, "length", is_text=True)
        for num_tokens, token in enumerate(tokens, 1):
            if token in request.response.stop_token_ids:
                return _End(num_tokens, "stop", is_text=False)
            if len(request.token_ids) + num_tokens >= request.params.max_tokens:
                return _End(num_tokens, "length", is_text=True)
            if request.num_tokens + num_tokens >= self.config.max_context:
                return _End(num_tokens, "context", is_text=True)
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. If its response has a stop text, the response ends there."""
        self._updated[request] = None
        if request.sequence.slot >= 0:
            self.scheduler.cache_pages(request)
        self.scheduler.remove(request)
        if request.has_stops:
            reason = self._cut_at_stop_text(request, reason)
        if request in self._num_indexed and self.ngram is not None:
            self._index([request])
            del self._num_indexed[request]
            self.ngram.forget(request.number)
        request.response.finish_reason = reason
        self.totals.num_finished[reason] += 1

    def _cut_at_stop_text(self, request: Request, reason: FinishReason) -> FinishReason:
        """Remove the tokens of a response after its stop text, if it has one, and count the others.

        Returns:
            Why the response has ended.
        """
        stream = request.stream
        response = request.response
        assert stream is not None
        stream.decode(response.token_ids, response.num_text_tokens)
        kept = stream.num_kept
        if kept is not None:
            del response.token_ids[kept:]
            response.logprobs.cut(kept)
            response.num_text_tokens = kept
            reason = "stop"
        elif stream.failure:
            reason = "error"
        for new in request.stats.uncounted:
            num_left = min(new.num_tokens, len(response.token_ids) - new.start)
            if num_left > 0:
                self._count(request, new._replace(num_tokens=num_left))
        request.stats.uncounted.clear()
        self._add_to_totals()
        return reason

    def check(self) -> None:
        """Assert that no page is lost, owned twice, or counted wrongly."""
        self.page_pool.check(request.sequence.allocation for request in self.scheduler.running)


def _check_end_is_allowed(end: Sequence[int], request: Request) -> None:
    """Raise UserError if a request forbids a token of the reasoning's ``end``, which a budget forces."""
    allowed = request.params.allowed_token_ids
    if allowed is not None and not set(end).issubset(allowed):
        raise UserError(
            "There is a budget of reasoning, and allowed_token_ids have no token that ends it.",
            f"Allow {', '.join(map(str, end))}, or leave the budget out.",
        )
    if any((token,) in (request.bad_word_ids or ()) for token in end):
        raise UserError(
            "There is a budget of reasoning, and bad_words have the token that ends it.",
            "Leave that word or the budget out.",
        )


def _mean_context(requests: Sequence[Request]) -> int:
    return sum(request.num_tokens for request in requests) // len(requests)


def _graphs(target: Target, config: ResolvedConfig) -> CycleGraphs:
    on_cpu = target.embed_tokens.weight.device.type == "cpu"
    if on_cpu and config.graph_mode == "cycle":
        return CpuGraphs()
    return GraphRunner(config.graph_mode, target.ranks)
