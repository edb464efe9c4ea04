"""Device side of a step: prompts in one packed forward, then a cycle. Nothing here waits for
results, except that a grammar reads the window.

Legend: B requests, T packed prompt tokens, S steps.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from eagle_kit.autotune.packing import packed_rows
from eagle_kit.config.engine import ResolvedConfig
from eagle_kit.core.sampling_params import MAX_LOGPROBS
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, SpecShape
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter, PromptBatch
from eagle_kit.drafts.base.state import CycleState
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
from eagle_kit.engine.measured.linear_forms import LinearForms
from eagle_kit.engine.measured.prefill_backends import open_backends
from eagle_kit.engine.request import Request, SequenceState
from eagle_kit.engine.sampling_tables import SamplingTables, is_adjusted
from eagle_kit.engine.scheduler import Chunk
from eagle_kit.engine.slots import Slots, Tables
from eagle_kit.engine.tensor_parallel.agreement import agree_bits, agree_tree
from eagle_kit.kv.dp_latents import ShardRequests, shard_requests
from eagle_kit.kv.open import open_store
from eagle_kit.kv.states import StatePool
from eagle_kit.kv.store import KV_DTYPES, PoolLayout, Segment
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.accept import is_finite
from eagle_kit.ops.cpu.summation import round_columns
from eagle_kit.ops.recurrence import Text
from eagle_kit.ops.sampling import SamplingBatch, token_logprobs
from eagle_kit.ops.transfer import to_device
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.decide import choose
from eagle_kit.verify.proposal import Deterministic, DraftOutput
from eagle_kit.verify.verifiers import Relaxed, TargetOnly, Verifier, make_verifier


class Results(NamedTuple):
    """Tokens on their way to the host: ``copy`` of an :class:`Emitted` for ``requests`` that are still in
    ``sequences``. ``num_drafts``: draft tokens that were verified for each; None for prompts, of which
    ``num_computed`` tokens are computed, and the first tokens of replies where they end. ``shape``: of the
    cycle. ``is_steady_state``: False for a cycle whose time tells nothing of others: the draft caught up with
    what it had pending, or there was no graph of it yet."""

    requests: list[Request]
    sequences: list[SequenceState]
    copy: HostCopy
    num_drafts: Sequence[int] | None
    num_computed: Sequence[int] = ()
    shape: SpecShape = NO_SPECULATION
    is_steady_state: bool = True
    num_rows: int | None = None


def _texts(chunks: Sequence[Chunk], segments: Sequence[Segment]) -> list[Text]:
    """Parts of prompts as they are packed, with their states."""
    texts, start = [], 0
    for chunk, segment in zip(chunks, segments, strict=True):
        assert chunk.states is not None
        stop = start + segment.stop - segment.start
        texts.append(Text(start, stop, *chunk.states))
        start = stop
    return texts


def _num_pending(request: Request) -> int:
    """Number of the last tokens of a request that the draft has not read."""
    return request.on_device.num_pending_draft_tokens


class CycleInputs(NamedTuple):
    """Inputs of a cycle besides the slots: their ``rows`` int64 ``[B]`` and the sampling parameters, without
    counts. In a split cycle also the ``window``, and whether grammars mask its logits (``is_masked``), by the
    masks of the slots. ``own``: of data-parallel attention. ``num_drafts`` int64 ``[B]``: nodes to verify of
    each window where they are packed."""

    rows: torch.Tensor
    sampling: SamplingBatch | None
    window: DraftOutput | None = None
    is_masked: bool = False
    own: ShardRequests | None = None
    num_drafts: torch.Tensor | None = None


class Batch(NamedTuple):
    """Requests that decode together, in their ``sequences``, and what is the same in all their cycles:
    ``inputs`` with ``padding`` dummies, alternatives ``num_logprobs`` to compute, whether any request
    ``wants_logprobs``, and the grammars of all rows, ``matches``, None without any."""

    requests: list[Request]
    sequences: list[SequenceState]
    padding: int
    inputs: CycleInputs
    num_logprobs: int | None
    wants_logprobs: bool
    matches: list[Match | None] | None


class Runner:
    """Owner of the models' stores and of the slots.

    Args:
        config: resolved, with a size of the pool.
        graphs: runs the cycle's parts; default eagerly.

    Attributes:
        drafter: of the draft model, whether the current shapes speculate or not.

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
    ) -> None:
        self.target, self.config, self.graphs = target, config, graphs or GraphRunner("off")
        weight = target.embed_tokens.weight
        self.device, self.vocab_size = weight.device, target.config.vocab_size
        kv_dtype = KV_DTYPES[config.kv_dtype]
        layout = PoolLayout(config.num_pages, config.page_size, config.max_batch_size, dtype=kv_dtype)
        place: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self._share = target.ranks.share if config.num_shards > 1 and target.ranks is not None else None
        self.kv = open_store(
            target.config.cache,
            layout,
            target.variants,
            share=self._share,
            **place,
        )
        self.states: StatePool | None = None
        if target.config.states is not None:
            self.states = StatePool(
                target.config.states, config.max_batch_size, config.num_snapshots, **place
            )
        self.linear_forms = LinearForms(weight.device)
        self.prefill_backends = open_backends(config.prefill_backend, self.kv)
        self.prefill_backends.serve(self.kv)
        self.drafter: Drafter | None = None
        if draft is not None:
            self.drafter = drafter_class(draft, config)(draft, self.vocab_size, layout)
        self._verifier = make_verifier(config)
        self._sampling = SamplingTables(self.vocab_size, self.device)
        self._slots: dict[tuple[bool, CandidateSpec], Slots] = {}
        self._batch: Batch | None = None
        self.use_shape([NO_SPECULATION])

    @property
    def models(self) -> CycleModels:
        """Models of a cycle in the current shapes; in ordinary decoding without the drafter."""
        return CycleModels(self.target, self.kv, self.drafter if self.steps else None, self.states)

    @property
    def verifiers(self) -> tuple[type, ...]:
        """Verifiers that are sound for the drafts, the default first."""
        return (TargetOnly, Relaxed) if self.drafter is None else self.drafter.verifiers

    @property
    def packs(self) -> bool:
        """True if windows can be packed: nothing depends on their layout, and no graph on their number of
        rows."""
        return not self.graphs.has_fixed_shapes and self.states is None and self._share is None

    def verifier(self, shape: SpecShape) -> Verifier:
        """Verifier of the drafts of requests that sample. Windows without a draft model are deterministic."""
        drafter = self.models.drafter if shape.steps else None
        kinds = drafter.verifiers if drafter is not None else (TargetOnly, Relaxed)
        fits = isinstance(self._verifier, kinds)
        return self._verifier if fits else kinds[0]()  # type: ignore[return-value]

    def use_shape(
        self,
        shapes: Sequence[SpecShape],
        *,
        reads_confidence: bool = False,
        by_size: Mapping[int, Sequence[SpecShape]] = MappingProxyType({}),
    ) -> None:
        """Speculate with any of ``shapes`` from now on; nothing may be running.

        Args:
            by_size: those that batches of some sizes may have.
            reads_confidence: let cycles emit how sure the draft is of its next token.
        """
        self.steps = max(shape.steps for shape in shapes)
        self._reads_confidence = reads_confidence and self.steps > 0
        drafter = self.models.drafter
        self.candidate_spec = CandidateSpec(1, 1)
        if drafter is not None:
            self.candidate_spec = drafter.candidate_spec(shapes, reads_confidence=self._reads_confidence)
        self._candidate_specs: dict[int, CandidateSpec] = {}
        if drafter is not None and drafter.has_spec_by_size:
            self._candidate_specs = {
                size: drafter.candidate_spec(mine, reads_confidence=self._reads_confidence)
                for size, mine in by_size.items()
            }
        kind = (drafter is not None, self.candidate_spec)
        if kind not in self._slots:  # graphs know the slots that they were captured with
            sizes = self.config.max_batch_size, self.config.max_pages, self.config.num_pages
            self._slots[kind] = Slots(*sizes, drafter, self.candidate_spec, self.device)
        self.slots = self._slots[kind]
        if drafter is not None and drafter.supports_deferred_draft and NO_SPECULATION in shapes:
            others = (slots.pending for slots in self._slots.values() if slots.pending is not None)
            self.slots.make_pending(drafter.model, next(others, None))
        self._batch = None

    def prefill(self, chunks: Sequence[Chunk]) -> list[Results]:
        """Compute prompt chunks; requests whose prompt ends here join the slots -> their first tokens, and of
        the others whether all is finite."""
        with self.linear_forms.using():
            return self._prefill(chunks)

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Results]:
        drafter = self.models.drafter
        ids, next_ids, segments, last, finished = [], [], [], [], []
        open_ends, unfinished = [], []
        lookback = drafter.lookback if drafter is not None else 0
        for request, begin, stop, _ in chunks:
            start, write_from = max(0, begin - lookback), max(begin, request.sequence.num_shared_tokens)
            ids += request.tokens(start, stop)
            is_last = stop == request.num_to_compute
            known = request.tokens(start + 1, stop + 1)
            next_ids += known if len(known) == stop - start else [*known, 0]
            table, part = self.slots.page_table[request.sequence.slot], request.sequence.allocation.part
            segments.append(Segment(table, start, stop, write_from, part))
            if is_last:
                last.append(len(ids) - 1)
                finished.append(request)
            else:
                open_ends.append(len(ids) - 1)
                unfinished.append((request, stop))
        tokens = self._tensor(ids)
        following = self._tensor(next_ids)
        positions = self._tensor([i for segment in segments for i in range(segment.start, segment.stop)])
        capture = drafter.capture if drafter is not None else ()
        attend = self.kv.prefill_attend(segments)
        if self.states is not None:
            attend = self.states.prompts(attend, _texts(chunks, segments))
        out = self.target(tokens, positions, attend, capture)
        rows = self._tensor(last)
        roots, results = rows, []
        if unfinished:
            results.append(self._soundness(unfinished, out.hidden[self._tensor(open_ends)]))
        if finished:
            first, first_results = self._first_tokens(finished, out.hidden[rows])
            results.append(first_results)
            last_ids = self._tensor([r.token_ids[-1] if r.token_ids else -1 for r in finished])
            roots = torch.where(last_ids >= 0, last_ids, first)
            following[rows] = roots
        draft = None
        if drafter is not None:
            batch = PromptBatch(out, tokens, following, segments, rows)
            draft = drafter.prefill(batch, self.candidate_spec)
        if not finished:
            return results
        slots = self._tensor([request.sequence.slot for request in finished])
        lens = self._tensor([request.num_to_compute for request in finished])
        self.slots.join(slots, lens, roots, draft)
        for i, request in enumerate(finished):
            self.slots.adjust(request, self.vocab_size, roots[i : i + 1])
        return results

    def _soundness(self, prompts: list[tuple[Request, int]], hidden: torch.Tensor) -> Results:
        """Whether the last states of prompts that go on, ``hidden [n, H]``, are finite, and so all their
        keys."""
        requests, stops = [request for request, _ in prompts], [stop for _, stop in prompts]
        none = self._tensor([0] * len(requests))
        emitted = Emitted(none[:, None], none, None, hidden.isfinite().all(-1))
        return Results(requests, [request.sequence for request in requests], HostCopy(emitted), None, stops)

    def _first_tokens(self, requests: list[Request], hidden: torch.Tensor) -> tuple[torch.Tensor, Results]:
        """Sample the token after each prompt -> int64 ``[B]``, and the same on its way to the host; a request
        that was preempted has its tokens already."""
        logits = self.target.logits(hidden)
        zero = self._tensor([request.tokens(0, 1)[0] for request in requests])
        tree = root_only(zero)  # a window whose root is the prompt's last token: it adds nothing to a path
        lens = self._tensor([request.num_to_compute - 1 for request in requests])
        kind = self._kind(requests)
        sampling = self._sampling.of_requests(requests, None if kind is None else kind.level)
        matches, allowed = [request.reply.match for request in requests], None
        if any(matches):
            allowed = unpacked(self._allowed_bits(matches, tree), self.vocab_size)
        tokens = choose(logits[:, None], tree, lens, sampling, allowed)
        if (ranks := self.target.ranks) is not None:
            tokens = ranks.first(tokens)
        counts = self._tensor([0 if request.token_ids else 1 for request in requests])
        logprobs = None
        if (top := self._num_logprobs(requests, kind)) is not None:
            parts = token_logprobs(logits, tokens[:, 0], top)
            logprobs = Logprobs(*(part[:, None] for part in parts))
        sequences = [request.sequence for request in requests]
        emitted = Emitted(tokens, counts, logprobs, is_finite(logits))
        stops = [request.num_to_compute for request in requests]
        return tokens[:, 0], Results(requests, sequences, HostCopy(emitted), None, stops)

    def padded(self, batch_size: int) -> int:
        """Size that a batch is padded to."""
        sizes = self.config.batch_sizes
        return sizes[bisect_left(sizes, batch_size)]

    def set_pages(self, requests: Iterable[Request]) -> None:
        """Bring the device's page tables of ``requests`` up to date, before their prompts or cycles."""
        self.slots.set_pages(requests)

    def forget_pages(self, request: Request) -> None:
        """Write all pages of a request again before its next prompt or cycle, because some have changed."""
        request.on_device.num_pages_written = -1

    def decode(
        self,
        requests: list[Request],
        shape: SpecShape,
        ngram: NgramIndex | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Results:
        """Run one cycle for ``requests`` in one of the shapes.

        Args:
            ngram: drafts in place of a model; every token of the requests must be known to the host.
            wanted: drafts of each request to verify, the first of its window; None for all.
        """
        batch = self._batch_of(requests)
        (steps, topk, tokens), drafter = shape, self.models.drafter
        is_steady_state, num_warm_ups = True, self.graphs.num_warm_ups
        if drafter is not None and drafter.supports_deferred_draft:
            if steps and any(map(_num_pending, requests)):
                self._backfill_draft(requests)
                is_steady_state = False
            elif not steps and max(map(_num_pending, requests)) >= MAX_WINDOW:
                self._store_pending_keys(requests)
                is_steady_state = False
            if not steps:
                for request in requests:
                    request.on_device.num_pending_draft_tokens += 1
        behind = max(tokens, 1 + max(steps - 1, 0) * topk, steps + 2 + self._appended)
        size = len(batch.inputs.rows)
        settings = self._settings(size, shape, self._columns(requests, behind), batch.num_logprobs)
        tree, num_drafts = None, [tokens - 1] * len(requests)
        if ngram is not None and steps:
            found = self._ngram_draft(requests, batch.padding, ngram, shape)
            tree, num_drafts = to_tree(found, self.device), found.num_drafts[: len(requests)].tolist()
            tree = agree_tree(tree, self.target.ranks)  # the log may have what a stop text took back
            wanted = num_drafts if self.target.ranks is None else None
        inputs = batch.inputs
        if wanted is not None and self.packs:
            num_rows = packed_rows(size, tokens - 1, sum(wanted))
            if num_rows is not None:
                num_drafts, settings = list(wanted), settings._replace(num_rows=num_rows)
                inputs = inputs._replace(num_drafts=self._tensor([*wanted, *[0] * batch.padding]))
        emitted = self._run(batch.matches, inputs, settings, tree)
        if emitted.logprobs is not None and not batch.wants_logprobs:
            emitted = emitted._replace(logprobs=None)
        is_steady_state = is_steady_state and self.graphs.num_warm_ups == num_warm_ups
        return Results(
            requests,
            batch.sequences,
            HostCopy(emitted),
            num_drafts,
            shape=shape,
            is_steady_state=is_steady_state,
            num_rows=settings.num_rows,
        )

    def _batch_of(self, requests: list[Request]) -> Batch:
        """What the cycle before had, where the batch is the same, so that nothing is sent to the device."""
        known = self._batch
        sequences = [request.sequence for request in requests]
        if known is not None and known.requests == requests and known.sequences == sequences:
            return known
        padding = self.padded(len(requests)) - len(requests)
        rows = self._tensor([request.sequence.slot for request in requests] + [self.slots.dummy] * padding)
        kind, matches = self._kind(requests), None
        sampling = self._sampling.of_cycle(requests, padding, None if kind is None else kind.level)
        if any(request.reply.match is not None for request in requests):
            matches = [*(request.reply.match for request in requests), *[None] * padding]
        wants_logprobs = any(request.params.logprobs is not None for request in requests)
        own = self._own([request.sequence.allocation.part for request in requests], len(rows))
        inputs = CycleInputs(rows, sampling, own=own)
        num_logprobs = self._num_logprobs(requests, kind)
        self._batch = Batch(requests, sequences, padding, inputs, num_logprobs, wants_logprobs, matches)
        return self._batch

    def _own(self, parts: list[int], size: int) -> ShardRequests | None:
        """This rank's rows of a batch that is padded to ``size``, of requests of ``parts`` of the pool. They
        are padded for the rank with most."""
        if self._share is None:
            return None
        sizes = self.config.shard_batch_sizes(size)
        most = sizes[bisect_left(sizes, max(Counter(parts).values()))]
        return shard_requests(parts, self._share, most, size, self.device)

    def _backfill_draft(self, requests: list[Request]) -> None:
        """Let the draft read what it has pending, and draft behind it."""
        behind = [request for request in requests if _num_pending(request)]
        drafter, longest = self.models.drafter, max(map(_num_pending, behind))
        assert drafter is not None
        if longest > drafter.max_pending_tokens(self.candidate_spec):
            self._store_pending_keys(requests)
            longest = 1
        self._run_in_batches(self._backfill_batch, behind, longest, self._appended)
        for request in behind:
            request.on_device.num_pending_draft_tokens = 0

    def _store_pending_keys(self, requests: list[Request]) -> None:
        """Let the draft read what it has pending but the last tokens; nothing is drafted."""
        behind = [request for request in requests if _num_pending(request) > 1]
        longest = max(map(_num_pending, behind))
        self._run_in_batches(self._store_batch, behind, longest - 1, 0)
        for request in behind:
            request.on_device.num_pending_draft_tokens = 1

    def _run_in_batches(
        self, read: Callable[[list[int], int, int], None], behind: list[Request], length: int, appended: int
    ) -> None:
        """Let the draft read up to ``length`` tokens of each request, in forwards of at most
        ``prefill_tokens`` rows (or of one request), as memory is planned for, ``appended`` of a request
        behind its tokens."""
        columns = self._columns(behind, length + 2 + appended)
        if self.graphs.has_fixed_shapes:  # so that kernels are compiled for few
            length = 1 << (length - 1).bit_length()
        most = self._max_requests_per_forward(length + appended)
        for start in range(0, len(behind), most):
            slots = [request.sequence.slot for request in behind[start : start + most]]
            if self.graphs.has_fixed_shapes:
                slots += [self.slots.dummy] * (self.padded(len(slots)) - len(slots))
            read(slots, length, columns)

    def warm_up_backfill(self) -> int:
        """Let the draft read nothing in every size in which it may have to catch up -> their number."""
        if self.slots.pending is None or self.models.drafter is None:
            return 0
        most, ways = self.models.drafter.max_pending_tokens(self.candidate_spec), 0
        for read, longest, appended in (
            (self._backfill_batch, most, self._appended),
            (self._store_batch, MAX_WINDOW, 0),
        ):
            for length in (1 << i for i in range(longest.bit_length())):
                for size in self.config.batch_sizes:
                    if size <= self._max_requests_per_forward(length + appended):
                        columns = self._columns((), length + 2 + appended)
                        read([self.slots.dummy] * size, length, columns)
                        ways += 1
        return ways

    def _max_requests_per_forward(self, num_rows: int) -> int:
        """Most requests whose pending tokens are read in one forward, ``num_rows`` of each; a batch
        size where shapes are fixed."""
        most = max(1, self.config.prefill_tokens // num_rows)
        if self.graphs.has_fixed_shapes:
            sizes = self.config.batch_sizes
            most = max([size for size in sizes if size <= most], default=sizes[0])
        return most

    def _backfill_batch(self, slots: list[int], length: int, columns: int) -> None:
        """Let the draft read up to ``length`` tokens that it has pending of each of ``slots``, over
        ``columns``, and draft behind them."""
        drafter, rows = self.models.drafter, self._tensor(slots)
        assert drafter is not None
        before, pending = self.slots.state_before_pending(rows, length)
        with self.linear_forms.using():
            last = (pending.counts - 1).clamp(min=0)  # padding has none
            draft = drafter.extend(before, pending, last, self.candidate_spec, columns)
        after = before._replace(seq_lens=before.seq_lens + pending.counts, draft=draft)
        self.slots.scatter(rows, after, None)
        self.slots.drop_pending(rows)

    def _store_batch(self, slots: list[int], length: int, columns: int) -> None:
        """Let the draft read up to ``length`` tokens that it has pending of each of ``slots``, over
        ``columns``, all but the last one."""
        drafter, rows = self.models.drafter, self._tensor(slots)
        assert drafter is not None
        before, pending = self.slots.state_before_pending(rows, length)
        with self.linear_forms.using():
            drafter.store(before, pending._replace(counts=(pending.counts - 1).clamp(min=0)), columns)
        self.slots.keep_last_pending(rows)

    def run_idle(
        self, size: int, shard_size: int, shape: SpecShape, kind: BatchKind, ngram: NgramIndex | None = None
    ) -> None:
        """Run a cycle of dummies, ``shard_size`` of them of one part of the pool, which changes nothing, so
        that its graphs are captured, the forms of its linear layers measured and its kernels compiled."""
        num_logprobs = self._most_logprobs if kind.has_logprobs else None
        settings = self._settings(size, shape, self._columns((), MAX_WINDOW), num_logprobs)
        rows, sampling = self._tensor([self.slots.dummy] * size), self._sampling.of_level(kind.level, size)
        inputs = CycleInputs(rows, sampling, own=self._own([0] * shard_size, size))
        tree = None
        if ngram is not None and shape.steps:
            tree = to_tree(self._ngram_draft([], size, ngram, shape), self.device)
        self._run([None] * size if kind.has_grammar else None, inputs, settings, tree)

    def _settings(
        self, size: int, shape: SpecShape, num_columns: int, num_logprobs: int | None
    ) -> CycleSettings:
        candidate_spec = self._candidate_specs.get(size, self.candidate_spec)
        return CycleSettings(
            shape, num_columns, num_logprobs, self.verifier(shape), candidate_spec, self._reads_confidence
        )

    def _columns(self, requests: Sequence[Request], behind: int) -> int:
        """Bound on the columns of a window, ``behind`` of them behind the tokens of any request, those on
        their way included; of few different values, so that shapes repeat. Kernels on a GPU
        read lengths on the device, so graphs are captured for the longest context only; on a CPU each request
        has the columns that its length needs (``WindowPlan.by_length``)."""
        if self.graphs.mode == "off":
            unseen = self.config.lag * (self.steps + 2)
            longest = max((request.num_tokens for request in requests), default=1)
            return round_columns(longest - 1 + unseen + behind)
        return self.config.max_pages * self.kv.page_size + self._appended

    @property
    def _appended(self) -> int:
        """Rows that draft-extend has behind the emitted ones."""
        drafter = self.models.drafter
        return 0 if drafter is None else drafter.num_appended(self.candidate_spec)

    def _run(
        self,
        matches: Sequence[Match | None] | None,
        inputs: CycleInputs,
        settings: CycleSettings,
        tree: Tree | None,
    ) -> Emitted:
        """Verify ``tree``, or a draft of the drafter -> tokens on the device. ``matches`` are those of all
        rows; None where no request has a grammar."""
        if tree is None and matches is None:
            return self._part("cycle", self.run_cycle, inputs, settings)
        # The host is needed in the middle.
        if tree is not None:
            window = DraftOutput(tree, Deterministic())
        else:
            window = self._part("propose", self._propose, *self._as_proposed(inputs, settings))
        if matches is not None:
            bits, masks = self._allowed_bits(matches, window.tree), self._masks
            masks[inputs.rows, : bits.shape[1]] = bits
        inputs = inputs._replace(window=window, is_masked=matches is not None)
        return self._part("verify", self.run_cycle, inputs, settings)

    def _as_proposed(self, inputs: CycleInputs, settings: CycleSettings) -> tuple[CycleInputs, CycleSettings]:
        """Leave out what a proposal does not depend on, so that its graphs are few."""
        inputs = inputs._replace(own=None, num_drafts=None)  # the draft is whole on every rank
        if TargetOnly in self.verifiers or self.models.drafter is None:  # drafts are not sampled
            inputs = inputs._replace(sampling=None)
        return inputs, settings._replace(num_logprobs=None, num_rows=None)

    def _allowed_bits(self, matches: Sequence[Match | None], tree: Tree) -> torch.Tensor:
        return agree_bits(matches, tree, self.vocab_size, self.device, self.target.ranks)

    @property
    def _masks(self) -> torch.Tensor:
        return self.slots.make_masks(self.vocab_size)

    def _part(
        self,
        name: str,
        body: Callable[..., Any],
        inputs: CycleInputs,
        settings: CycleSettings,
    ) -> Any:
        """Run a part of the cycle, as a graph where there are graphs."""
        sampling, window = inputs.sampling, inputs.window
        if is_adjusted(sampling):
            self.slots.make_tables(self.vocab_size)  # before a capture
        if self.graphs.mode == "off":
            return body(inputs, settings)
        given = None if sampling is None else tuple(part is not None for part in sampling)
        drafts = None if window is None else (type(window.proposal), window.tree.tokens.shape)
        speculates = self.models.drafter is not None
        own = None if inputs.own is None else len(inputs.own.rows)
        key = (len(inputs.rows), settings, speculates, given, drafts, inputs.is_masked, own)

        def idle() -> CycleInputs:
            return inputs._replace(rows=torch.full_like(inputs.rows, self.slots.dummy))

        lengths = Lengths(self.slots.seq_lens, inputs.rows)
        with self.linear_forms.measuring():  # before a capture
            return self.graphs.run(
                GraphCall(name, key, partial(body, settings=settings), inputs, idle, lengths)
            )

    def run_cycle(self, inputs: CycleInputs, settings: CycleSettings) -> Emitted:
        """Run a cycle, or the part of it behind a given window, and update the slots."""
        drafter = self.models.drafter
        drafts = drafter is not None and not defers_draft(drafter, settings)
        state, sampling = self._state(inputs, drafts=drafts)
        if inputs.window is None:
            out = cycle(self.models, state, settings, sampling)
        else:
            allowed = None
            if inputs.is_masked:
                bits = self._masks[inputs.rows, : inputs.window.tree.tokens.shape[1]]
                allowed = unpacked(bits, self.vocab_size)
            out = finish_cycle(self.models, state, inputs.window, settings, sampling, allowed)
        state = out.state
        if drafter is not None and state.draft is not None and self.slots.draft is not None:
            state = state._replace(draft=drafter.widened(state.draft, self.slots.draft))
        self.slots.scatter(inputs.rows, state, out.counts)
        if out.pending is not None:
            self.slots.append_pending(inputs.rows, out.pending)
        return out.emitted

    def _propose(self, inputs: CycleInputs, settings: CycleSettings) -> DraftOutput:
        state, sampling = self._state(inputs, drafts=settings.shape.steps > 0)
        return propose(self.models.drafter, state, settings, sampling, self.target.ranks)

    def _state(self, inputs: CycleInputs, *, drafts: bool = True) -> tuple[CycleState, SamplingBatch | None]:
        """Gather the rows of the slots, their ``drafts`` too where the cycle reads or makes some, and of
        their tables where logits are adjusted."""
        sampling = inputs.sampling
        if sampling is not None and is_adjusted(sampling):
            assert self.slots.tables is not None
            rows = (table[inputs.rows] for table in self.slots.tables)
            sampling = sampling._replace(**dict(zip(Tables._fields, rows, strict=True)))
        state = self.slots.gather(inputs.rows, drafts=drafts)
        return state._replace(own=inputs.own, num_drafts=inputs.num_drafts), sampling

    def _ngram_draft(
        self, requests: list[Request], padding: int, ngram: NgramIndex, shape: SpecShape
    ) -> NgramDraft:
        window = ngram.config.max_match_window_size
        contexts = [r.tokens(max(0, r.num_tokens - window), r.num_tokens) for r in requests]
        salts = [r.params.cache_salt for r in requests] + [None] * padding
        return ngram.propose([*contexts, *[[0]] * padding], shape.tokens, shape.steps, salts)

    def _kind(self, requests: list[Request]) -> BatchKind | None:
        """Kind of a batch where graphs are for few kinds of them."""
        return kind_of(requests) if self.graphs.has_fixed_shapes else None

    @property
    def _most_logprobs(self) -> int:
        return min(MAX_LOGPROBS, self.vocab_size)

    def _num_logprobs(self, requests: list[Request], kind: BatchKind | None) -> int | None:
        """Alternatives to report for the batch; for graphs all or none."""
        if kind is not None:
            return self._most_logprobs if kind.has_logprobs else None
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        return min(max(wanted), self.vocab_size) if wanted else None

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(numbers, self.device)
