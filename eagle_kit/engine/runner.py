"""Device side of an engine step: a decode cycle over the batch, and one packed forward over prompt chunks.

The runner owns the key-value stores, the slots and the graphs. Nothing here waits for results, except that a
grammar reads the window on the host before it is verified.

Legend: B requests (padded), T packed prompt tokens, N window nodes, S draft steps, H hidden.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.core.sampling_params import MAX_LOGPROBS
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter, PaddedPromptBatch, PromptBatch
from eagle_kit.drafts.choose_drafter import drafter_class
from eagle_kit.drafts.ngram.index import NgramDraft, NgramIndex, to_tree
from eagle_kit.engine.cycle import (
    CycleModels,
    CycleSettings,
    Emitted,
    Logprobs,
    cycle,
    defers_draft,
    finish_cycle,
    propose,
    root_only,
)
from eagle_kit.engine.grammar.masks import unpacked
from eagle_kit.engine.grammar.protocols import Match
from eagle_kit.engine.graphs.batch_kind import BatchKind, kind_of
from eagle_kit.engine.graphs.cuda_graph import CycleGraphs, GraphCall, GraphRunner, HostCopy, Lengths
from eagle_kit.engine.graphs.graph_selection import GraphSelection, GraphUnit
from eagle_kit.engine.measured.choices import have_equal_parts
from eagle_kit.engine.measured.linear_backends import open_linear_backends
from eagle_kit.engine.measured.prefill_backends import open_backends
from eagle_kit.engine.memory.graph_memory import graphs_of_prompts, select_graphs
from eagle_kit.engine.padded_prompts import (
    PromptNumbers,
    PromptShape,
    first_numbers,
    pack_prompts,
    prompt_shapes,
)
from eagle_kit.engine.request import Request, SequenceState
from eagle_kit.engine.sampling_tables import SamplingTables, is_adjusted
from eagle_kit.engine.scheduler import Chunk
from eagle_kit.engine.slots import AdjustmentTables, Slots
from eagle_kit.engine.tensor_parallel.agreement import agree_bits, agree_tree
from eagle_kit.kv.dp_latents import ShardRequests, shard_requests
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.open import open_store
from eagle_kit.kv.recurrent_states import StatePool
from eagle_kit.kv.store import KV_DTYPES, PoolLayout, Segment
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.accept import is_finite
from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.cpu.summation import round_columns
from eagle_kit.ops.linear.reductions import add_up_in_fp32
from eagle_kit.ops.recurrence import Text
from eagle_kit.ops.sampling import SamplingBatch, token_logprobs
from eagle_kit.ops.step_ranges import StepRanges
from eagle_kit.ops.transfer import to_device
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.accept_window import sample_after_nodes
from eagle_kit.verify.proposal import Deterministic, DraftOutput
from eagle_kit.verify.verifiers import Relaxed, TargetOnly, Verifier, make_verifier

MAX_SCORED_ROWS = 256
MAX_SCORED_LOGITS = 2**24
"""Prompt tokens that are scored at once, and most logits of them."""


class PromptScores(NamedTuple):
    """Log-probabilities of prompt tokens, on their way to the host.

    Attributes:
        parts: of each chunk its request, the request's sequence state at launch, the index of its first
            entry, and the number of its entries.
        copy: copy to the host of the tokens' log-probabilities fp32 ``[R]``, their ranks int64 ``[R]``, the
            ids int64 and log-probabilities fp32 ``[R, top]`` of the most likely ones, chunk after chunk.
    """

    parts: list[tuple[Request, SequenceState, int, int]]
    copy: HostCopy


class Results(NamedTuple):
    """Results of a cycle or of a prefill, on their way to the host.

    Attributes:
        requests: requests of the results, in the order of their rows.
        sequences: the requests' sequence states at launch. The results of a request whose state is another
            one by now are dropped.
        copy: copy of an :class:`Emitted` to the host.
        num_draft_tokens: draft tokens that the cycle verified for each request; None for a prefill.
        num_computed: prompt tokens of each request that are computed after a prefill.
        shape: shape of the cycle.
        is_steady_state: False if the cycle included draft backfill or graph capture; its time is not used for
            tuning.
        num_captures: graphs that the cycle or the prefill captured, or recorded on a CPU.
        num_eager_runs: functions of it that ran eagerly because they have no graph for good.
        prompt_scores: log-probabilities of the tokens of the step's prompts; None where none are asked for.
    """

    requests: list[Request]
    sequences: list[SequenceState]
    copy: HostCopy
    num_draft_tokens: Sequence[int] | None
    num_computed: Sequence[int] = ()
    shape: SpecShape = NO_SPECULATION
    is_steady_state: bool = True
    num_captures: int = 0
    num_eager_runs: int = 0
    prompt_scores: PromptScores | None = None

    @property
    def is_prefill(self) -> bool:
        """True for results of prompts, False for those of a cycle."""
        return self.num_draft_tokens is None


def _rounded_nodes(most_drafts: int, max_nodes: int) -> int:
    """Nodes of n-gram windows with up to ``most_drafts`` drafts each: the root, and their number rounded up
    to a quarter of the drafts of ``max_nodes``. So there are five sizes, and few recordings."""
    quarters = [-(-part * (max_nodes - 1) // 4) for part in range(5)]
    return 1 + next(quarter for quarter in quarters if quarter >= most_drafts)


class CycleInputs(NamedTuple):
    """Tensors that a cycle reads besides the slots.

    Attributes:
        slot_ids: int64 ``[B]``, slots of the requests, then the dummy slot for padding.
        sampling: sampling parameters; None if all requests are greedy. The tables of the vocabulary are not
            in it: the cycle gathers them from the slots.
        window: the window to verify, if the host needs it before verification; None if the cycle proposes it.
        is_masked: True if grammars mask the logits of ``window``, by the masks of the slots.
        shard: requests that this rank computes attention for, in data-parallel attention; else None.
        depth_limits: int64 ``[B]``, the greatest depth of a draft that may be accepted; None without limits.
    """

    slot_ids: torch.Tensor
    sampling: SamplingBatch | None
    window: DraftOutput | None = None
    is_masked: bool = False
    shard: ShardRequests | None = None
    depth_limits: torch.Tensor | None = None


class Batch(NamedTuple):
    """Requests that decode together, and what stays the same in all their cycles.

    Attributes:
        requests, sequences: the requests, and their sequence states when the batch was made.
        own_unit: smallest size and kind of batch that the requests fit; None without graphs of few kinds.
        unit: size and kind of this batch, which may be larger, so that there is a graph.
        padding: number of dummies behind the requests.
        inputs: inputs of the cycles, on the device.
        num_logprobs: alternatives to compute for every emitted token; None computes no log-probabilities.
        wants_logprobs: True if a request asked for log-probabilities.
        matches: grammar state of every row, None for rows without; None if no request has a grammar.
    """

    requests: list[Request]
    sequences: list[SequenceState]
    own_unit: GraphUnit | None
    unit: GraphUnit | None
    padding: int
    inputs: CycleInputs
    num_logprobs: int | None
    wants_logprobs: bool
    matches: list[Match | None] | None


class _PackedPrompts(NamedTuple):
    """Prompt chunks of a step as the rows of one forward, T in all.

    Attributes:
        ids: token of each row.
        next_ids: token after each row; 0 where the model has to choose it.
        segments: place of each chunk in the key-value pool.
        finished: requests whose prompts end in this step.
        finished_rows: last row of each of them.
        unfinished: the other requests, each with the number of its tokens that are computed afterwards.
        unfinished_rows: last row of each of them.
        scored: chunks whose log-probabilities are asked for; see :class:`PromptScores`.
        scored_rows: rows before each token that is scored.
    """

    ids: list[int]
    next_ids: list[int]
    segments: list[Segment]
    finished: list[Request]
    finished_rows: list[int]
    unfinished: list[tuple[Request, int]]
    unfinished_rows: list[int]
    scored: list[tuple[Request, SequenceState, int, int]]
    scored_rows: list[int]


class _FirstTokenInputs(NamedTuple):
    """Tensors of n prompts that end, for their first tokens.

    Attributes:
        hidden: ``[n, H]``, the hidden state of the last token of each prompt.
        any_token: int64 ``[n]``, a token of each. Which one does not matter.
        last_positions: int64 ``[n]``, position of the last token.
        num_emitted: int64 ``[n]``, 1, or 0 for a request that was preempted: it has its tokens already.
    """

    hidden: torch.Tensor
    any_token: torch.Tensor
    last_positions: torch.Tensor
    num_emitted: torch.Tensor


class Runner:
    """Run prompts and decode cycles on the device.

    Args:
        target: the model that verifies.
        draft: the draft model; None for ordinary decoding and for n-grams.
        config: resolved, with a size of the page pool.
        graphs: runs the functions of a cycle, eagerly or as graphs; default eagerly.
        ranges: makes the named ranges of a step in traces; default none.

    Attributes:
        kv: the target's key-value store.
        recurrent_states: states of the target's recurrent layers; None if it has no recurrent layers.
        drafter: drafter of the draft model, also while the current shapes do not speculate; None without one.
        slots: device state of the requests of the batch.
        prompt_shapes: shapes of prompt steps that are graphs, the smallest first; empty without such graphs.
        steps: draft steps of the deepest current shape.
        candidate_spec: candidates that the draft state of a slot holds.

    Raises:
        UserError: the drafts or the verifier that the options ask for do not fit the draft, or the prefill
            backend is not there or does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None,
        config: ResolvedConfig,
        graphs: CycleGraphs | None = None,
        ranges: StepRanges | None = None,
    ) -> None:
        self.target = target
        self.config = config
        self.graphs = graphs or GraphRunner("off")
        self._ranges = ranges or StepRanges()
        weight = target.embed_tokens.weight
        self.device = weight.device
        self.vocab_size = target.config.vocab_size
        if self.device.type == "cuda":
            add_up_in_fp32()

        # The target's key-value store. With data-parallel attention it is this rank's shard.
        kv_dtype = KV_DTYPES[config.kv_dtype]
        layout = PoolLayout(config.num_pages, config.page_size, config.max_batch_size, dtype=kv_dtype)
        place: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self._share = None
        if config.num_shards > 1 and target.ranks is not None:
            self._share = target.ranks.share
        self.kv = open_store(target.config.cache, layout, target.variants, share=self._share, **place)

        # States of recurrent layers.
        self.recurrent_states: StatePool | None = None
        if target.config.states is not None:
            self.recurrent_states = StatePool(
                target.config.states, config.max_batch_size, config.num_snapshots, **place
            )

        # Backends that are chosen by measurement.
        ranks = None if weight.device.type == "cpu" else target.ranks
        models: list[torch.nn.Module] = [target]
        if draft is not None:
            models += [part for part in vars(draft).values() if isinstance(part, torch.nn.Module)]
        is_even = have_equal_parts(models, ranks)
        self.linear_backends = open_linear_backends(
            config.linear_backend, weight.device, ranks, has_equal_parts=is_even
        )
        self.prefill_backends = open_backends(config.prefill_backend, self.kv, ranks, has_equal_parts=is_even)
        self.prefill_backends.serve(self.kv)

        # The drafter, with the draft's key-value store.
        self.drafter: Drafter | None = None
        if draft is not None:
            draft_layout = replace(layout, window=config.draft_scratch)
            self.drafter = drafter_class(draft, config)(draft, self.vocab_size, draft_layout)

        # Prompt steps of fixed shapes, and what their graphs hand on: the states that the draft reads, and
        # the first tokens.
        self.prompt_shapes: list[PromptShape] = []
        if self._captures_prompts():
            self.prompt_shapes = prompt_shapes(config)
            most_rows, most_requests = self.prompt_shapes[-1]
            self._first_tokens_of_step = torch.zeros(most_requests, dtype=torch.int64, device=self.device)
            if draft is not None:
                size = (most_rows, draft.state_size)
                self._states_of_step = torch.zeros(size, dtype=draft.state_dtype, device=self.device)

        # Verification and sampling.
        self._verifier = make_verifier(config)
        self._sampling = SamplingTables(self.vocab_size, self.device)

        # Device state of requests, and the batch of the last cycle.
        self._slots: dict[tuple[bool, CandidateSpec], Slots] = {}
        self._batch: Batch | None = None
        self._graph_selection: GraphSelection | None = None
        self.use_shape([NO_SPECULATION])

    @property
    def models(self) -> CycleModels:
        """Models of a cycle in the current shapes; without the drafter if none of them speculates."""
        drafter = self.drafter if self.steps else None
        return CycleModels(self.target, self.kv, drafter, self.recurrent_states)

    @property
    def verifiers(self) -> tuple[type, ...]:
        """Verifiers that are sound for the drafts, the default first."""
        return (TargetOnly, Relaxed) if self.drafter is None else self.drafter.verifiers

    def verifier(self, shape: SpecShape) -> Verifier:
        """Return the verifier of the drafts of requests that sample.

        It is the one that the options ask for, if it is sound for the proposals of ``shape``. Windows without
        a draft model are deterministic.
        """
        drafter = self.models.drafter if shape.steps else None
        sound = (TargetOnly, Relaxed) if drafter is None else drafter.verifiers
        if isinstance(self._verifier, sound):
            return self._verifier  # type: ignore[return-value]
        return sound[0]()  # type: ignore[no-any-return]

    def use_shape(
        self,
        shapes: Sequence[SpecShape],
        *,
        needs_confidence: bool = False,
        by_size: Mapping[int, Sequence[SpecShape]] = MappingProxyType({}),
    ) -> None:
        """Speculate with any of ``shapes`` from now on; nothing may be running.

        Args:
            by_size: shapes that batches of some sizes may have.
            needs_confidence: let cycles emit the draft's confidence in its next tokens.
        """
        self.steps = max(shape.steps for shape in shapes)
        self._needs_confidence = needs_confidence and self.steps > 0
        drafter = self.models.drafter

        # Candidates of a draft state: enough for all shapes, or for those of a batch size.
        self.candidate_spec = CandidateSpec(1, 1)
        self._candidate_specs: dict[int, CandidateSpec] = {}
        if drafter is not None:
            self.candidate_spec = drafter.candidate_spec(shapes, needs_confidence=self._needs_confidence)
            if drafter.has_spec_by_size:
                for size, shapes_of_size in by_size.items():
                    spec = drafter.candidate_spec(shapes_of_size, needs_confidence=self._needs_confidence)
                    self._candidate_specs[size] = spec

        # Slots whose draft states have this layout. Graphs hold the slots that they were captured with, so
        # slots of other layouts stay.
        layout = (drafter is not None, self.candidate_spec)
        if layout not in self._slots:
            self._slots[layout] = Slots(
                self.config.max_batch_size,
                self.config.max_pages,
                self.config.num_pages,
                drafter,
                self.candidate_spec,
                self.device,
            )
        self.slots = self._slots[layout]

        # Graphs are selected when they are first needed.
        self._shapes_by_size = {size: by_size.get(size, shapes) for size in self.config.batch_sizes}
        self._graph_selection = None

        # Room for the tokens that plain cycles leave to the draft; one for all slots.
        if drafter is not None and drafter.supports_deferred_draft and NO_SPECULATION in shapes:
            existing = None
            for slots in self._slots.values():
                existing = existing or slots.pending
            self.slots.make_pending(drafter.model, existing)
        self._batch = None

    @property
    def graph_selection(self) -> GraphSelection | None:
        """Graphs that cycles in the current shapes may have; None without graphs of few kinds of batches."""
        if not self.graphs.has_fixed_shapes:
            return None
        if self._graph_selection is None:
            drafter = self.models.drafter
            draft = None if drafter is None else drafter.model
            budget = self.config.graph_memory
            self._graph_selection = select_graphs(
                self.target.config, draft, self.config, self._shapes_by_size, budget
            )
        return self._graph_selection

    # Prompts.

    def prefill(self, chunks: Sequence[Chunk]) -> list[Results]:
        """Compute prompt chunks in one forward of the target, and in one of the draft.

        Requests whose prompt ends here join the slots.

        Returns:
            The first tokens of those requests. For the others, whether all their numbers are finite.
        """
        num_captures = self.graphs.num_captures
        num_eager_runs = self.graphs.num_eager_runs
        with self.linear_backends.using():
            first, *others = self._prefill(chunks)
        first = first._replace(
            num_captures=self.graphs.num_captures - num_captures,
            num_eager_runs=self.graphs.num_eager_runs - num_eager_runs,
        )
        return [first, *others]

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Results]:
        # A step of few rows has a fixed shape, unless prompts are scored.
        num_rows = sum(chunk.stop - chunk.start for chunk in chunks)
        scores_prompts = any(chunk.request.scores_prompt for chunk in chunks)
        for shape in () if scores_prompts else self.prompt_shapes:
            if num_rows <= shape.rows and len(chunks) <= shape.requests:
                return self._prefill_padded(chunks, shape)
        drafter = self.models.drafter

        # Pack the tokens of all chunks, and send them to the device.
        prompts = self._pack(chunks, 0 if drafter is None else drafter.lookback)
        ids = self._tensor(prompts.ids)
        next_ids = self._tensor(prompts.next_ids)
        positions = self._tensor(
            [position for segment in prompts.segments for position in range(segment.start, segment.stop)]
        )

        # Run the target. It stores its keys and values.
        attend = self.kv.prefill_attend(prompts.segments)
        if self.recurrent_states is not None:
            attend = self.recurrent_states.prompts(attend, _recurrent_texts(chunks, prompts.segments))
        capture = () if drafter is None else drafter.capture
        out = self.target(ids, positions, attend, capture)

        # Score the prompts' tokens.
        scores = self._score_prompts(prompts, out.hidden, next_ids) if prompts.scored_rows else None

        # Where a prompt goes on, only report whether its hidden states are finite.
        last_rows = self._tensor(prompts.finished_rows)
        results = []
        if prompts.unfinished:
            hidden = out.hidden[self._tensor(prompts.unfinished_rows)]
            results.append(self._finite_results(prompts.unfinished, hidden.isfinite().all(-1)))

        # Where a prompt ends, sample the first token. A request that was preempted has its tokens already.
        roots = last_rows
        if prompts.finished:
            inputs = _FirstTokenInputs(
                hidden=out.hidden[last_rows],
                any_token=self._tensor([request.tokens(0, 1)[0] for request in prompts.finished]),
                last_positions=self._tensor([request.num_to_compute - 1 for request in prompts.finished]),
                num_emitted=self._tensor([0 if request.token_ids else 1 for request in prompts.finished]),
            )
            first, first_results = self._first_tokens(prompts.finished, inputs)
            results.append(first_results)
            known = [request.token_ids[-1] if request.token_ids else -1 for request in prompts.finished]
            known_roots = self._tensor(known)
            roots = torch.where(known_roots >= 0, known_roots, first)
            next_ids[last_rows] = roots

        # Run the draft over the same rows. It stores its keys and makes the first draft states.
        draft = None
        if drafter is not None:
            batch = PromptBatch(out, ids, next_ids, prompts.segments, last_rows)
            draft = drafter.prefill(batch, self.candidate_spec)
        results[0] = results[0]._replace(prompt_scores=scores)
        if not prompts.finished:
            return results

        # Requests whose prompt has ended join the slots.
        slot_ids = self._tensor([request.sequence.slot for request in prompts.finished])
        seq_lens = self._tensor([request.num_to_compute for request in prompts.finished])
        self.slots.join(slot_ids, seq_lens, roots, draft)
        for i, request in enumerate(prompts.finished):
            self.slots.write_adjustments(request, self.vocab_size, roots[i : i + 1])
        return results

    def _pack(self, chunks: Sequence[Chunk], lookback: int) -> _PackedPrompts:
        """Pack chunks behind each other, each with the ``lookback`` tokens before it."""
        prompts = _PackedPrompts([], [], [], [], [], [], [], [], [])
        for chunk in chunks:
            request = chunk.request
            stop = chunk.stop
            sequence = request.sequence

            # Rows that score the prompt's next token.
            start = max(0, chunk.start - lookback)
            if request.scores_prompt:
                first_row = len(prompts.ids) + chunk.start - start
                num_scored = min(stop, len(request.prompt_ids) - 1) - chunk.start
                prompts.scored.append((request, sequence, chunk.start, num_scored))
                prompts.scored_rows.extend(range(first_row, first_row + num_scored))

            # The tokens of the chunk, and the token after each. The last one may not be known yet.
            next_ids = request.tokens(start + 1, stop + 1)
            if len(next_ids) < stop - start:
                next_ids = [*next_ids, 0]
            prompts.ids.extend(request.tokens(start, stop))
            prompts.next_ids.extend(next_ids)

            # Tokens before the chunk, and those of shared pages, are in the pool already.
            write_from = max(chunk.start, sequence.num_shared_tokens)
            page_table = self.slots.page_table[sequence.slot]
            shard = sequence.allocation.shard
            prompts.segments.append(Segment(page_table, start, stop, write_from, shard))

            # The row that the next token is sampled from, if the prompt ends here.
            last_row = len(prompts.ids) - 1
            if stop == request.num_to_compute:
                prompts.finished.append(request)
                prompts.finished_rows.append(last_row)
            else:
                prompts.unfinished.append((request, stop))
                prompts.unfinished_rows.append(last_row)
        return prompts

    def _score_prompts(
        self, prompts: _PackedPrompts, hidden: torch.Tensor, next_ids: torch.Tensor
    ) -> PromptScores:
        """Compute log-probabilities of the tokens of prompts from the states before them.

        Args:
            hidden: ``[T, H]``.
            next_ids: int64 ``[T]``, the token after each row.
        """
        wanted = [request.params.prompt_logprobs or 0 for request, *_ in prompts.scored]
        num_rows = max(1, min(MAX_SCORED_ROWS, MAX_SCORED_LOGITS // self.vocab_size))
        rows = self._tensor(prompts.scored_rows)
        groups = []
        for group in rows.split(num_rows):
            logits = self.target.logits(hidden[group])
            tokens = next_ids[group]
            chosen, top_ids, top_values = token_logprobs(logits, tokens, max(wanted))
            ranks = (logits >= logits.gather(1, tokens[:, None])).sum(-1)
            groups.append((chosen, ranks, top_ids, top_values))
        parts = tuple(torch.cat(each) for each in zip(*groups, strict=True))
        return PromptScores(prompts.scored, HostCopy(parts))

    def _finite_results(self, prompts: list[tuple[Request, int]], finite: torch.Tensor) -> Results:
        """Make the results of prompts that go on: no tokens, and whether their last hidden states are finite.

        Attention reads all keys of a prompt, so its last hidden state shows whether they are finite.

        Args:
            prompts: requests, each with the number of its computed tokens.
            finite: bool ``[n]``, whether the last hidden state is.
        """
        requests = [request for request, _ in prompts]
        num_computed = [stop for _, stop in prompts]
        none = self._tensor([0] * len(requests))
        emitted = Emitted(none[:, None], none, None, finite)
        sequences = [request.sequence for request in requests]
        return Results(requests, sequences, HostCopy(emitted), None, num_computed)

    def _first_tokens(
        self, requests: list[Request], inputs: _FirstTokenInputs
    ) -> tuple[torch.Tensor, Results]:
        """Sample the token after each prompt.

        Returns:
            The tokens int64 ``[n]``, and the results that hold them. The results of a request that was
            preempted hold none.
        """
        logits = self.target.logits(inputs.hidden)

        # A prompt is a window of one node at its last token. Its penalties count no drafted token, so which
        # token the node has does not matter.
        tree = root_only(inputs.any_token)

        # Sampling parameters, and the tokens that grammars allow.
        kind = self._kind(requests)
        sampling = self._sampling.of_requests(requests, None if kind is None else kind.level)
        matches = [request.response.match for request in requests]
        allowed = None
        if any(matches):
            allowed = unpacked(self._allowed_bits(matches, tree), self.vocab_size)

        # Sample. All ranks take the token of the first one.
        tokens = sample_after_nodes(logits[:, None], tree, inputs.last_positions, sampling, allowed)
        if self.target.ranks is not None:
            tokens = self.target.ranks.first(tokens)

        # Log-probabilities.
        logprobs = None
        num_logprobs = self._num_logprobs(requests, kind)
        if num_logprobs is not None:
            parts = token_logprobs(logits, tokens[:, 0], num_logprobs)
            logprobs = Logprobs(*(part[:, None] for part in parts))

        # Send the results to the host.
        emitted = Emitted(tokens, inputs.num_emitted, logprobs, is_finite(logits))
        sequences = [request.sequence for request in requests]
        num_computed = [request.num_to_compute for request in requests]
        return tokens[:, 0], Results(requests, sequences, HostCopy(emitted), None, num_computed)

    # Prompts of few rows, in fixed shapes: a graph of the target, the first tokens, and a graph of the draft.

    def _captures_prompts(self) -> bool:
        """Return whether prompt steps of few rows are replayed as graphs."""
        draft = None if self.drafter is None else self.drafter.model
        if not self.graphs.has_fixed_shapes or not isinstance(self.kv, PagedKV):
            return False
        of_prompts = graphs_of_prompts(self.target.config, draft, self.config, self.config.graph_memory)
        return of_prompts.number > 0 and uses_triton("attention/prefill", self.kv.k)

    @contextmanager
    def unpadded_prompts(self) -> Iterator[None]:
        """Within, prompt steps of all sizes run eagerly."""
        shapes = self.prompt_shapes
        self.prompt_shapes = []
        try:
            yield
        finally:
            self.prompt_shapes = shapes

    def run_idle_prompt(self, shape: PromptShape) -> None:
        """Run a prompt step of padding: capture its graphs, and measure its linear layers."""
        numbers = self._tensor(pack_prompts([], shape, self.slots.dummy))
        self._run_prompt_graph("prefill", self._run_target_over_prompts, numbers, shape)
        if self.models.drafter is not None:
            self._run_prompt_graph("prefill_draft", self._run_draft_over_prompts, numbers, shape)

    def _prefill_padded(self, chunks: Sequence[Chunk], shape: PromptShape) -> list[Results]:
        """Compute prompt chunks that fit ``shape``; see :meth:`prefill`."""
        # The requests whose prompts end come first, so that their rows are the first of every result.
        chunks = sorted(chunks, key=lambda chunk: chunk.stop < chunk.request.num_to_compute)
        finished = [chunk.request for chunk in chunks if chunk.stop == chunk.request.num_to_compute]
        num_finished = len(finished)
        numbers = self._tensor(pack_prompts(chunks, shape, self.slots.dummy))

        # Run the target. It stores its keys and values.
        hidden, finite = self._run_prompt_graph("prefill", self._run_target_over_prompts, numbers, shape)

        # Where a prompt goes on, only report whether its hidden states are finite.
        results = []
        if num_finished < len(chunks):
            unfinished = [(chunk.request, chunk.stop) for chunk in chunks[num_finished:]]
            results.append(self._finite_results(unfinished, finite[num_finished : len(chunks)]))

        # Where a prompt ends, sample the first token.
        if finished:
            inputs = _FirstTokenInputs(
                hidden=hidden[:num_finished],
                any_token=first_numbers(numbers, shape, "ids", num_finished),
                last_positions=first_numbers(numbers, shape, "last_positions", num_finished),
                num_emitted=first_numbers(numbers, shape, "num_emitted", num_finished),
            )
            first, first_results = self._first_tokens(finished, inputs)
            results.append(first_results)
            self._first_tokens_of_step[:num_finished].copy_(first)

        # Run the draft over the same rows. The requests whose prompts have ended join the slots.
        if self.models.drafter is not None:
            roots = self._run_prompt_graph("prefill_draft", self._run_draft_over_prompts, numbers, shape)
        elif finished:
            known = first_numbers(numbers, shape, "roots", num_finished)
            roots = torch.where(known >= 0, known, first)
            slot_ids = first_numbers(numbers, shape, "join_slots", num_finished)
            self.slots.join(slot_ids, first_numbers(numbers, shape, "seq_lens", num_finished), roots, None)
        for i, request in enumerate(finished):
            self.slots.write_adjustments(request, self.vocab_size, roots[i : i + 1])
        return results

    def _run_prompt_graph(
        self,
        name: str,
        body: Callable[..., Any],
        numbers: torch.Tensor,
        shape: PromptShape,
    ) -> Any:
        """Run ``body(numbers, shape)`` as a graph."""
        # Slots are chosen by their layout, which the specification of candidates stands for.
        has_pending = self.slots.pending is not None
        key = (shape, self.models.drafter is not None, self.candidate_spec, has_pending)

        def idle() -> torch.Tensor:
            """Numbers of padding alone."""
            return self._tensor(pack_prompts([], shape, self.slots.dummy))

        call = GraphCall(name, key, partial(body, shape=shape), numbers, idle)
        with self._ranges(name, shape.rows, "rows"), self.linear_backends.measuring():
            return self.graphs.run(call)

    def _run_target_over_prompts(
        self, numbers: torch.Tensor, shape: PromptShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target over a prompt step, and keep the states that the draft reads.

        Returns:
            The hidden state of the last row of each of the R requests ``[R, H]``, and whether it is finite,
            bool ``[R]``.
        """
        assert isinstance(self.kv, PagedKV)
        drafter = self.models.drafter
        prompts = PromptNumbers.of(numbers, shape)
        attend = self.kv.padded_prefill_attend(prompts.padded_segments(self.slots.page_table))
        capture = () if drafter is None else drafter.capture
        out = self.target(prompts.ids, prompts.positions, attend, capture)
        if drafter is not None:
            self._states_of_step[: shape.rows].copy_(drafter.model.target_hidden_states(out))
        hidden = out.hidden[prompts.last_rows]
        return hidden, hidden.isfinite().all(-1)

    def _run_draft_over_prompts(self, numbers: torch.Tensor, shape: PromptShape) -> torch.Tensor:
        """Run the draft over a prompt step behind the target. Requests whose prompts end join the slots.

        Returns:
            The token after each of the R requests, int64 ``[R]``.
        """
        drafter = self.models.drafter
        assert drafter is not None
        prompts = PromptNumbers.of(numbers, shape)

        # The token after each prompt: as known, or as just sampled.
        sampled = self._first_tokens_of_step[: shape.requests]
        roots = torch.where(prompts.roots >= 0, prompts.roots, sampled)
        next_ids = prompts.next_ids.index_copy(0, prompts.root_rows, roots)

        # Run the draft. Requests whose prompts go on, and padding, join the dummy slot.
        batch = PaddedPromptBatch(
            states=self._states_of_step[: shape.rows],
            ids=prompts.ids,
            next_ids=next_ids[: shape.rows],
            segments=prompts.padded_segments(self.slots.page_table),
            last=prompts.last_rows,
            roots=roots,
            stops=prompts.stops,
            num_columns=self._num_columns((), 0),
        )
        draft = drafter.prefill_padded(batch, self.candidate_spec)
        self.slots.join(prompts.join_slots, prompts.seq_lens, roots, draft)
        return roots

    # Decoding.

    def padded(self, batch_size: int) -> int:
        """Size that a batch is padded to."""
        sizes = self.config.batch_sizes
        return sizes[bisect_left(sizes, batch_size)]

    def set_pages(self, requests: Iterable[Request]) -> None:
        """Bring the device's page tables of ``requests`` up to date, before their prompts or cycles."""
        self.slots.set_pages(requests)

    def invalidate_pages(self, request: Request) -> None:
        """Let the device's page table of a request be written again before its next prompt or cycle, because
        some of its pages have changed."""
        request.on_device.num_pages_written = -1

    def decode(
        self,
        requests: list[Request],
        shape: SpecShape,
        ngram: NgramIndex | None = None,
    ) -> Results:
        """Launch one cycle for ``requests`` in one of the current shapes.

        Args:
            ngram: drafts in place of a model; every token of the requests must be known to the host.
        """
        batch = self._batch_of(requests, shape)
        num_warm_ups = self.graphs.num_warm_ups
        num_captures = self.graphs.num_captures
        num_eager_runs = self.graphs.num_eager_runs

        # Bring the draft up to date, as far as this cycle needs it.
        has_backfill = self._prepare_draft(requests, shape)

        # Constants of the cycle. Keys after those of the pool: of the window, of the tree while it grows,
        # or of the emitted tokens with what draft-extend appends.
        size = len(batch.inputs.slot_ids)
        num_grown = 1 + shape.num_draft_nodes
        num_extended = shape.steps + 2 + self._num_appended
        num_new = max(shape.tokens, num_grown, num_extended)
        settings = self._settings(size, shape, self._num_columns(requests, num_new), batch.num_logprobs)

        # N-gram drafts come from the host.
        tree = None
        num_draft_tokens = [_num_draft_tokens(request, shape) for request in requests]
        if ngram is not None and shape.steps:
            with self._ranges("ngram"):
                found = self._ngram_draft(requests, batch.padding, ngram, shape)
            num_found = found.num_drafts[: len(requests)].tolist()
            num_draft_tokens = [min(pair) for pair in zip(num_found, num_draft_tokens, strict=True)]
            # A batch in which few drafts were found has smaller windows, where no graph fixes their size.
            if self.target.ranks is None and not self.graphs.has_fixed_shapes:
                found = found.cut(_rounded_nodes(max(num_found), shape.tokens))
            # The first rank's log may hold tokens that a stop text removed, so all ranks take its drafts.
            tree = agree_tree(to_tree(found, self.device), self.target.ranks)

        # Launch the cycle, and send its results to the host.
        emitted = self._run(batch.matches, batch.inputs, settings, tree, batch.unit)
        self._count_pending(requests, shape)
        if emitted.logprobs is not None and not batch.wants_logprobs:
            emitted = emitted._replace(logprobs=None)
        has_capture = self.graphs.num_warm_ups != num_warm_ups
        return Results(
            requests,
            batch.sequences,
            HostCopy(emitted),
            num_draft_tokens,
            shape=shape,
            is_steady_state=not (has_backfill or has_capture),
            num_captures=self.graphs.num_captures - num_captures,
            num_eager_runs=self.graphs.num_eager_runs - num_eager_runs,
        )

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Context manager: cycles run without graphs, whatever the options say."""
        graphs = self.graphs
        self.graphs = GraphRunner("off")
        self._batch = None  # its inputs are those of a kind of graphs
        try:
            yield
        finally:
            self.graphs = graphs
            self._batch = None

    def forget_batch(self) -> None:
        """Make the batch of the next cycle anew: masks of a request have changed."""
        self._batch = None

    def _batch_of(self, requests: list[Request], shape: SpecShape) -> Batch:
        """Make the batch of ``requests`` for a cycle of ``shape``, or return that of the last cycle.

        It is returned if it has the same requests, size and kind: then nothing has to be sent to the device.
        """
        known = self._batch
        sequences = [request.sequence for request in requests]
        if known is not None and (known.requests != requests or known.sequences != sequences):
            known = None

        # Size and kind of the batch.
        own_unit = self._own_unit(requests) if known is None else known.own_unit
        unit = self.serving_unit(own_unit, shape)
        if known is not None and known.unit == unit:
            return known
        size = self.padded(len(requests)) if unit is None else unit.size
        kind = None if unit is None else unit.kind

        # The slots of the requests, then dummies.
        padding = size - len(requests)
        slots = [request.sequence.slot for request in requests]
        slot_ids = self._tensor(slots + [self.slots.dummy] * padding)

        # Sampling parameters, grammars and log-probabilities.
        sampling = self._sampling.of_cycle(requests, padding, None if kind is None else kind.level)
        matches = None
        if any(request.response.match is not None for request in requests):
            matches = [*(request.response.match for request in requests), *[None] * padding]
        num_logprobs = self._num_logprobs(requests, kind)
        wants_logprobs = any(request.params.logprobs is not None for request in requests)

        # Requests of this rank, in data-parallel attention.
        shards = [request.sequence.allocation.shard for request in requests]
        shard = self._shard_requests(shards, len(slot_ids))
        inputs = CycleInputs(slot_ids, sampling, shard=shard)

        # Limits of the depth of drafts.
        if any(request.params.speculative_depth is not None for request in requests):
            limits = [_depth_limit(request) for request in requests] + [MAX_WINDOW] * padding
            inputs = inputs._replace(depth_limits=self._tensor(limits))

        self._batch = Batch(
            requests, sequences, own_unit, unit, padding, inputs, num_logprobs, wants_logprobs, matches
        )
        return self._batch

    def _own_unit(self, requests: list[Request]) -> GraphUnit | None:
        """Smallest size and kind of batch for ``requests``; None without graphs of few kinds."""
        kind = self._kind(requests)
        return None if kind is None else GraphUnit(self.padded(len(requests)), kind)

    def serving_unit(self, own_unit: GraphUnit | None, shape: SpecShape) -> GraphUnit | None:
        """Size and kind whose graphs serve a batch in a cycle of ``shape``."""
        selection = self.graph_selection
        if own_unit is None or selection is None or selection.may_capture(own_unit):
            return own_unit
        sizes = [size for size, shapes in self._shapes_by_size.items() if shape in shapes]
        return selection.serving(own_unit, sizes)

    def _shard_requests(self, shards: list[int], size: int) -> ShardRequests | None:
        """Select the requests of a batch that this rank computes attention for; None if there is one shard.

        Args:
            shards: the shard of each request.
            size: the padded size of the batch.
        """
        if self._share is None:
            return None

        # All ranks are padded to the same size, which fits the shard with most requests.
        sizes = self.config.shard_batch_sizes(size)
        most = sizes[bisect_left(sizes, max(Counter(shards).values()))]
        return shard_requests(shards, self._share, most, size, self.device)

    def _settings(
        self, size: int, shape: SpecShape, num_columns: int, num_logprobs: int | None
    ) -> CycleSettings:
        """Collect the constants of a cycle for a batch of ``size``."""
        return CycleSettings(
            shape=shape,
            num_columns=num_columns,
            num_logprobs=num_logprobs,
            verifier=self.verifier(shape),
            candidate_spec=self._candidate_specs.get(size, self.candidate_spec),
            needs_confidence=self._needs_confidence,
        )

    def _num_columns(self, requests: Sequence[Request], num_new: int) -> int:
        """Return a bound on the keys that a window node attends to: tokens in the pool, then window nodes.

        Graphs have the bound of the longest context, because GPU kernels read lengths on the device. Without
        graphs it is a multiple of a block, so that shapes repeat. On a CPU each request reads the columns
        that its length needs (``WindowPlan.by_length``).

        Args:
            num_new: columns behind the tokens of a request that the host knows or that are on their way.
        """
        if self.graphs.mode != "off":
            num_behind = max(self._num_appended, self.config.draft_scratch - MAX_WINDOW)
            return self.config.max_pages * self.kv.page_size + num_behind
        num_on_their_way = self.config.lag * (self.steps + 2)
        longest = max((request.num_tokens for request in requests), default=1)
        return round_columns(longest - 1 + num_on_their_way + num_new)

    @property
    def _num_appended(self) -> int:
        """Rows that draft-extend appends behind the emitted tokens."""
        drafter = self.models.drafter
        return 0 if drafter is None else drafter.num_appended(self.candidate_spec)

    # Draft backfill. A plain cycle of an engine that speculates in other cycles does not run the draft. Its
    # tokens, with the target's states that predicted them, stay pending in the slots. Before the next cycle
    # with drafts the draft runs over them once.

    def _prepare_draft(self, requests: list[Request], shape: SpecShape) -> bool:
        """Run the draft over pending tokens if a cycle of ``shape`` needs it.

        Returns:
            True if the draft ran.
        """
        drafter = self.models.drafter
        if drafter is None or not drafter.supports_deferred_draft:
            return False
        most_pending = max(map(_num_pending, requests))

        # A cycle with drafts needs the draft state behind all tokens.
        if shape.steps:
            if most_pending == 0:
                return False
            with self._ranges("backfill"):
                self._backfill_draft(requests)
            return True

        # A plain cycle adds a token to each request; make room where a request has no more.
        has_run = most_pending >= MAX_WINDOW
        if has_run:
            with self._ranges("backfill"):
                self._store_pending_keys(requests)
        return has_run

    def _count_pending(self, requests: list[Request], shape: SpecShape) -> None:
        """Count the token that a cycle of ``shape`` has left to the draft."""
        drafter = self.models.drafter
        if drafter is not None and drafter.supports_deferred_draft and not shape.steps:
            for request in requests:
                request.on_device.num_pending_draft_tokens += 1

    def _backfill_draft(self, requests: list[Request]) -> None:
        """Run the draft over all pending tokens of ``requests``: store its keys and make its draft states."""
        drafter = self.models.drafter
        assert drafter is not None
        pending = [request for request in requests if _num_pending(request)]
        longest = max(map(_num_pending, pending))

        # Where a window has no room for them all, store the keys of all but the last ones first.
        if longest > drafter.max_pending_tokens(self.candidate_spec):
            self._store_pending_keys(requests)
            longest = 1

        self._run_in_batches(self._backfill_batch, pending, longest, self._num_appended, num_left=0)

    def _store_pending_keys(self, requests: list[Request]) -> None:
        """Run the draft over all pending tokens but the last of each request: store its keys only.

        The last token stays pending, because the next draft state depends on its states.
        """
        pending = [request for request in requests if _num_pending(request) > 1]
        longest = max(map(_num_pending, pending))
        self._run_in_batches(self._store_batch, pending, longest - 1, 0, num_left=1)

    def _run_in_batches(
        self,
        run: Callable[[list[int], int, int], None],
        requests: list[Request],
        length: int,
        num_appended: int,
        *,
        num_left: int,
    ) -> None:
        """Call ``run(slots, length, num_columns)`` for as many requests at a time as memory is planned for.

        Args:
            length: most pending tokens of a request.
            num_appended: rows of a request behind its pending tokens.
            num_left: tokens of a request that are pending afterwards.
        """
        num_columns = self._num_columns(requests, length + 2 + num_appended)

        # Few lengths and sizes, if kernels are compiled for each.
        if self.graphs.has_fixed_shapes:
            length = 1 << (length - 1).bit_length()
        most = self._max_requests_per_forward(length + num_appended)
        for start in range(0, len(requests), most):
            batch = requests[start : start + most]
            slots = [request.sequence.slot for request in batch]
            if self.graphs.has_fixed_shapes:
                slots += [self.slots.dummy] * (self.padded(len(slots)) - len(slots))
            run(slots, length, num_columns)
            for request in batch:
                request.on_device.num_pending_draft_tokens = num_left

    def _max_requests_per_forward(self, num_rows: int) -> int:
        """Return how many requests one backfill forward takes, ``num_rows`` of each.

        A forward has at most ``prefill_tokens`` rows, or one request. With fixed shapes it is a batch size.
        """
        most = max(1, self.config.prefill_tokens // num_rows)
        if self.graphs.has_fixed_shapes:
            sizes = self.config.batch_sizes
            most = max([size for size in sizes if size <= most], default=sizes[0])
        return most

    def _backfill_batch(self, slots: list[int], length: int, num_columns: int) -> None:
        """Run the draft over up to ``length`` pending tokens of each of ``slots``, and make its states."""
        drafter = self.models.drafter
        assert drafter is not None
        slot_ids = self._tensor(slots)
        before, pending = self.slots.state_before_pending(slot_ids, length)
        with self.linear_backends.using():
            last = (pending.counts - 1).clamp(min=0)  # dummies have no pending token
            draft = drafter.extend(before, pending, last, self.candidate_spec, num_columns)
        after = before._replace(seq_lens=before.seq_lens + pending.counts, draft=draft)
        self.slots.scatter(slot_ids, after, None)
        self.slots.drop_pending(slot_ids)

    def _store_batch(self, slots: list[int], length: int, num_columns: int) -> None:
        """Run the draft over up to ``length`` pending tokens of each of ``slots``, all but the last one."""
        drafter = self.models.drafter
        assert drafter is not None
        slot_ids = self._tensor(slots)
        before, pending = self.slots.state_before_pending(slot_ids, length)
        with self.linear_backends.using():
            counts = (pending.counts - 1).clamp(min=0)  # dummies have no pending token
            drafter.store(before, pending._replace(counts=counts), num_columns)
        self.slots.keep_last_pending(slot_ids)

    # Warm-up: runs over dummy slots, which change nothing.

    def warm_up_backfill(self) -> int:
        """Run the draft over dummies in every size that a backfill may have.

        Returns:
            The number of forwards.
        """
        drafter = self.models.drafter
        if self.slots.pending is None or drafter is None:
            return 0
        num_forwards = 0
        for run, longest, num_appended in (
            (self._backfill_batch, drafter.max_pending_tokens(self.candidate_spec), self._num_appended),
            (self._store_batch, MAX_WINDOW, 0),
        ):
            for length in (1 << i for i in range(longest.bit_length())):
                num_columns = self._num_columns((), length + 2 + num_appended)
                most = self._max_requests_per_forward(length + num_appended)
                for size in self.config.batch_sizes:
                    if size <= most:
                        run([self.slots.dummy] * size, length, num_columns)
                        num_forwards += 1
        return num_forwards

    def run_idle(
        self,
        size: int,
        shard_size: int,
        shape: SpecShape,
        kind: BatchKind,
        ngram: NgramIndex | None = None,
        *,
        may_capture: bool = True,
    ) -> None:
        """Run a cycle of dummies: capture its graphs, measure its linear layers and compile its kernels.

        Args:
            size: requests of the batch.
            shard_size: how many of them are in the first shard of the pool.
            may_capture: False runs a cycle eagerly that has no graphs yet, as cycles do that are left out of
                the selection.
        """
        # Constants and inputs of the cycle.
        num_logprobs = self._most_logprobs if kind.has_logprobs else None
        num_columns = self._num_columns((), max(MAX_WINDOW, 1 + shape.num_draft_nodes))
        settings = self._settings(size, shape, num_columns, num_logprobs)
        slot_ids = self._tensor([self.slots.dummy] * size)
        sampling = self._sampling.of_level(kind.level, size)
        inputs = CycleInputs(slot_ids, sampling, shard=self._shard_requests([0] * shard_size, size))

        # A window from the host, where n-grams draft.
        tree = None
        if ngram is not None and shape.steps:
            tree = to_tree(self._ngram_draft([], size, ngram, shape), self.device)
        matches = [None] * size if kind.has_grammar else None
        self._run(matches, inputs, settings, tree, GraphUnit(size, kind), may_capture=may_capture)

    # The functions of a cycle, and their graphs.

    def _run(
        self,
        matches: Sequence[Match | None] | None,
        inputs: CycleInputs,
        settings: CycleSettings,
        tree: Tree | None,
        unit: GraphUnit | None,
        *,
        may_capture: bool = True,
    ) -> Emitted:
        """Run a cycle from graphs if it may have some, and leave its unit out if memory is missing for them.

        Args:
            matches: grammar state of every row; None if no request has a grammar.
            tree: window to verify, from the host; None lets the drafter propose it.
            unit: size and kind of the batch; None without graphs of few kinds.
            may_capture: False makes no new graphs.

        Returns:
            The emitted tokens, on the device.
        """
        selection = self.graph_selection
        if unit is None or selection is None:
            return self._run_parts(matches, inputs, settings, tree, may_capture)
        may_capture = may_capture and selection.may_capture(unit)
        num_failures = self.graphs.num_out_of_memory
        try:
            return self._run_parts(matches, inputs, settings, tree, may_capture)
        finally:
            if self.graphs.num_out_of_memory != num_failures:
                selection.note_out_of_memory(unit)

    def _run_parts(
        self,
        matches: Sequence[Match | None] | None,
        inputs: CycleInputs,
        settings: CycleSettings,
        tree: Tree | None,
        may_capture: bool,
    ) -> Emitted:
        """Run a cycle, as one function or as two with the host between them; see :meth:`_run`."""
        # Limits of depths are no input of graphs. Without limits the inputs stay the same object, which a
        # graph need not copy again. A window of the root has no depth.
        limits = None
        if inputs.depth_limits is not None:
            limits = inputs.depth_limits if settings.shape.steps else None
            inputs = inputs._replace(depth_limits=None)

        # One function does it all, unless the host needs the window.
        if tree is None and matches is None and limits is None:
            return self._run_as_graph("cycle", self.run_cycle, inputs, settings, may_capture)

        # Get the window: from the host, or from the drafter.
        if tree is not None:
            window = DraftOutput(tree, Deterministic())
        else:
            draft_inputs, draft_settings = self._proposal_inputs(inputs, settings)
            window = self._run_as_graph("propose", self._propose, draft_inputs, draft_settings, may_capture)

        # Leave out drafts that are too deep for their requests.
        if limits is not None:
            window = window.limit_depth(limits)

        # Let grammars say which tokens may follow each of its nodes.
        if matches is not None:
            bits = self._allowed_bits(matches, window.tree)
            self._masks[inputs.slot_ids, : bits.shape[1]] = bits

        # Verify it.
        inputs = inputs._replace(window=window, is_masked=matches is not None)
        return self._run_as_graph("verify", self.run_cycle, inputs, settings, may_capture)

    def _proposal_inputs(
        self, inputs: CycleInputs, settings: CycleSettings
    ) -> tuple[CycleInputs, CycleSettings]:
        """Leave out what a proposal does not depend on, so that its graphs are few."""
        # The draft is whole on every rank.
        inputs = inputs._replace(shard=None)

        # Deterministic drafts are the same for requests that sample.
        if TargetOnly in self.verifiers or self.models.drafter is None:
            inputs = inputs._replace(sampling=None)
        return inputs, settings._replace(num_logprobs=None)

    def _allowed_bits(self, matches: Sequence[Match | None], tree: Tree) -> torch.Tensor:
        with self._ranges("grammar"):
            return agree_bits(matches, tree, self.vocab_size, self.device, self.target.ranks)

    @property
    def _masks(self) -> torch.Tensor:
        return self.slots.make_masks(self.vocab_size)

    def _run_as_graph(
        self,
        name: str,
        body: Callable[..., Any],
        inputs: CycleInputs,
        settings: CycleSettings,
        may_capture: bool,
    ) -> Any:
        """Run ``body(inputs, settings)`` as a graph, or eagerly if there is none and none may be captured."""
        # Tables that the body reads must be there before a capture.
        if is_adjusted(inputs.sampling):
            self.slots.make_tables(self.vocab_size)
        launch = self._ranges(name, settings.shape, "batch", len(inputs.slot_ids))
        if self.graphs.mode == "off":
            with launch:
                return body(inputs, settings)

        # All that the operations of the body depend on.
        sampling = inputs.sampling
        window = inputs.window
        key = (
            len(inputs.slot_ids),
            settings,
            self.models.drafter is not None,
            None if sampling is None else tuple(field is not None for field in sampling),
            None if window is None else (type(window.proposal), window.tree.tokens.shape),
            inputs.is_masked,
            None if inputs.shard is None else len(inputs.shard.rows),
        )

        def idle() -> CycleInputs:
            """Inputs of a capture: dummies, which change no slot."""
            return inputs._replace(slot_ids=torch.full_like(inputs.slot_ids, self.slots.dummy))

        # Linear layers are measured before a capture.
        lengths = Lengths(self.slots.seq_lens, inputs.slot_ids)
        call = GraphCall(name, key, partial(body, settings=settings), inputs, idle, lengths, may_capture)
        with launch, self.linear_backends.measuring():
            return self.graphs.run(call)

    def run_cycle(self, inputs: CycleInputs, settings: CycleSettings) -> Emitted:
        """Run a cycle, or the part of it behind a given window, and update the slots."""
        # Read the slots.
        drafter = self.models.drafter
        uses_draft = drafter is not None and not defers_draft(drafter, settings)
        state, sampling = self._state(inputs, with_draft=uses_draft)

        # Run the cycle.
        if inputs.window is None:
            out = cycle(self.models, state, settings, sampling)
        else:
            allowed = None
            if inputs.is_masked:
                bits = self._masks[inputs.slot_ids, : inputs.window.tree.tokens.shape[1]]
                allowed = unpacked(bits, self.vocab_size)
            out = finish_cycle(self.models, state, inputs.window, settings, sampling, allowed)

        # Write the new state. A draft state of fewer candidates is padded to those of the slots.
        state = out.state
        if drafter is not None and state.draft is not None and self.slots.draft is not None:
            state = state._replace(draft=drafter.pad_candidates(state.draft, self.slots.draft))
        self.slots.scatter(inputs.slot_ids, state, out.counts)
        if out.pending is not None:
            self.slots.append_pending(inputs.slot_ids, out.pending)
        return out.emitted

    def _propose(self, inputs: CycleInputs, settings: CycleSettings) -> DraftOutput:
        state, sampling = self._state(inputs, with_draft=settings.shape.steps > 0)
        return propose(self.models.drafter, state, settings, sampling, self.target.ranks)

    def _state(
        self, inputs: CycleInputs, *, with_draft: bool = True
    ) -> tuple[CycleState, SamplingBatch | None]:
        """Gather the state of a batch from the slots.

        Args:
            with_draft: gather the draft state too.

        Returns:
            The state, and the sampling parameters with the tables of the slots where logits are adjusted.
        """
        sampling = inputs.sampling
        if sampling is not None and is_adjusted(sampling):
            assert self.slots.tables is not None
            rows = (table[inputs.slot_ids] for table in self.slots.tables)
            sampling = sampling._replace(**dict(zip(AdjustmentTables._fields, rows, strict=True)))
        state = self.slots.gather(inputs.slot_ids, with_draft=with_draft)
        return state._replace(shard=inputs.shard), sampling

    def _ngram_draft(
        self, requests: list[Request], padding: int, ngram: NgramIndex, shape: SpecShape
    ) -> NgramDraft:
        """Draft from the n-gram log, for ``requests`` and ``padding`` dummies."""
        window = ngram.config.max_match_window_size
        contexts = [r.tokens(max(0, r.num_tokens - window), r.num_tokens) for r in requests]
        salts = [r.params.cache_salt for r in requests] + [None] * padding
        return ngram.propose([*contexts, *[[0]] * padding], shape.tokens, shape.steps, salts)

    def _kind(self, requests: list[Request]) -> BatchKind | None:
        """Return the kind of a batch if graphs are captured for few kinds, else None."""
        return kind_of(requests) if self.graphs.has_fixed_shapes else None

    @property
    def _most_logprobs(self) -> int:
        return min(MAX_LOGPROBS, self.vocab_size)

    def _num_logprobs(self, requests: list[Request], kind: BatchKind | None) -> int | None:
        """Return the number of alternatives to report for a batch; with kinds of batches all or none."""
        if kind is not None:
            return self._most_logprobs if kind.has_logprobs else None
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        return min(max(wanted), self.vocab_size) if wanted else None

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(numbers, self.device)


def _depth_limit(request: Request) -> int:
    """The greatest depth of a draft of the request that may be accepted."""
    limit = request.params.speculative_depth
    return MAX_WINDOW if limit is None else min(limit, MAX_WINDOW)


def _num_draft_tokens(request: Request, shape: SpecShape) -> int:
    """Number of a window's draft tokens that may be accepted. Where the depth of a tree is limited it is not
    known to the host, and the number of the whole window is returned."""
    limit = _depth_limit(request)
    if limit == 0:
        return 0
    return min(shape.tokens - 1, limit) if shape.topk == 1 else shape.tokens - 1


def _num_pending(request: Request) -> int:
    """Number of the last tokens of a request that the draft has not run over."""
    return request.on_device.num_pending_draft_tokens


def _recurrent_texts(chunks: Sequence[Chunk], segments: Sequence[Segment]) -> list[Text]:
    """Rows of each chunk in the packed forward, with the recurrent states that it reads and saves."""
    texts = []
    start = 0
    for chunk, segment in zip(chunks, segments, strict=True):
        assert chunk.state_moves is not None
        stop = start + segment.stop - segment.start
        texts.append(Text(start, stop, *chunk.state_moves))
        start = stop
    return texts
