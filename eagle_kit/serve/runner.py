"""The device's side of a step: prompts in one packed forward, then a cycle. Nothing here waits for results.

Legend: B requests, T packed prompt tokens, S steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from eagle_kit.core.request import MAX_LOGPROBS, SamplingParams
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.kernels.sampling import SamplingBatch, make_sampling_batch, token_logprobs
from eagle_kit.kernels.transfer import to_device
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.kv.latents import open_store
from eagle_kit.kv.store import Segment
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.cycle import (
    CycleSettings,
    CycleState,
    Logprobs,
    Verified,
    cycle,
    draft_extend,
    propose,
    root_only,
    verify,
)
from eagle_kit.serve.grammar.compiler import allowed_tokens
from eagle_kit.serve.graph import GraphRunner, HostCopy, Lengths, map_tensors
from eagle_kit.serve.linear_forms import LinearForms
from eagle_kit.serve.request import Request
from eagle_kit.serve.scheduler import Chunk
from eagle_kit.serve.slots import Slots
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.propose.drafter import Drafter, DraftOutput
from eagle_kit.speculation.propose.modules import ModulesDrafter
from eagle_kit.speculation.propose.ngram import NgramDraft, NgramIndex, to_tree
from eagle_kit.speculation.propose.static import drafter_class
from eagle_kit.speculation.verify.decide import choose
from eagle_kit.speculation.verify.proposal import Deterministic, Relaxed, TargetOnly, Verifier

COLUMN_BUCKET = 64


class Results(NamedTuple):
    """Tokens on their way to the host, for ``requests`` if they are still in ``epochs``: ``copy`` of
    (``tokens`` int64 ``[B, n]``, how many of each row are new ``[B]``, ``Logprobs`` or None). ``is_verify``
    is False for first tokens. ``num_drafts`` of each request were verified."""

    requests: list[Request]
    epochs: list[int]
    copy: HostCopy
    is_verify: bool
    num_drafts: Sequence[int] = ()


class CycleInputs(NamedTuple):
    """What changes from one cycle to the next besides the slots: their ``rows`` int64 ``[B]`` and the
    sampling parameters, without counts. In a split cycle the ``draft``, what grammars allow, and what was
    ``verified``."""

    rows: torch.Tensor
    sampling: SamplingBatch | None
    draft: DraftOutput | None = None
    allowed: torch.Tensor | None = None
    verified: Verified | None = None


class Runner:
    """Owns the models' stores and the slots.

    Args:
        num_pages, page_size: of the pool.
        max_pages: most pages of one request.
        batch_sizes: batches are padded to the next of these with dummies.
        kv_dtype: of the stores; None takes the models' own.
        tree: ``"dynamic"`` (EAGLE-2), or ``"static"`` (EAGLE-1).
        sampled_drafts: sample drafts from the draft's distribution instead of taking its most likely tokens.
        verifier: decides on drafts of requests that sample; default the lossless one for the draft's
            distribution.
        graphs: runs the cycle's parts; default eagerly.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: DraftModel | None,
        *,
        num_pages: int,
        page_size: int,
        max_pages: int,
        batch_sizes: Sequence[int],
        kv_dtype: torch.dtype | None = None,
        tree: str = "dynamic",
        sampled_drafts: bool = False,
        verifier: Verifier | None = None,
        graphs: GraphRunner | None = None,
    ) -> None:
        self.graphs = graphs or GraphRunner("off")
        self.target, self.batch_sizes = target, batch_sizes
        self.num_slots, self.max_pages = max(batch_sizes), max_pages
        config, weight = target.config, target.embed_tokens.weight
        self.device = weight.device
        self.linear_forms = LinearForms(weight.device)
        self.kv = open_store(
            config.cache,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=self.num_slots,
            window=MAX_WINDOW,
            dtype=weight.dtype,
            store_dtype=kv_dtype,
            device=weight.device,
        )
        self._drafter: Drafter | None = None
        if draft is not None:
            several = draft.num_modules > 1
            self._drafter = (ModulesDrafter if several else drafter_class(tree, sampled=sampled_drafts))(
                draft,
                vocab_size=config.vocab_size,
                num_pages=num_pages,
                page_size=page_size,
                max_batch_size=self.num_slots,
                kv_dtype=kv_dtype,
            )
        self._verifier = verifier
        self._slots: dict[tuple[bool, int], Slots] = {}
        self.use_shape(ShapeTable.parse(NO_SPECULATION))

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the current shapes; None in ordinary decoding."""
        return self._drafter if self.shapes.steps else None

    def verifier(self, shape: SpecShape) -> Verifier:
        """What decides on drafts of requests that sample. Windows that no model drafted are deterministic."""
        speculates = self.drafter is not None and shape.steps
        kinds = self.drafter.verifiers if speculates and self.drafter is not None else (TargetOnly, Relaxed)
        fits = self._verifier is not None and isinstance(self._verifier, kinds)
        return self._verifier if fits else kinds[0]()  # type: ignore[return-value]

    def use_shape(self, shapes: ShapeTable) -> None:
        """Speculate with ``shapes`` from now on; nothing may be running."""
        self.shapes = shapes
        kind = (self.drafter is not None, shapes.topk)
        if kind not in self._slots:  # graphs know the slots that they were captured with
            self._slots[kind] = Slots(
                self.num_slots, self.max_pages, self.kv.dummy_page, self.drafter, shapes.topk, self.device
            )
        self.slots = self._slots[kind]
        self._batch: tuple[tuple[tuple[int, int], ...], SamplingBatch | None] = ((), None)

    def prefill(self, chunks: Sequence[Chunk]) -> Results | None:
        """Compute prompt chunks; requests whose prompt ends here join the slots -> their first tokens."""
        ids, next_ids, segments, last, finished = [], [], [], [], []
        lookback = self.drafter.lookback if self.drafter is not None else 0
        for request, begin, stop in chunks:
            self.set_pages(request)
            start, write_from = max(0, begin - lookback), max(begin, request.num_shared_tokens)
            ids += request.tokens(start, stop)
            is_last = stop == request.num_to_compute
            known = request.tokens(start + 1, stop + 1)
            next_ids += known if len(known) == stop - start else [*known, 0]
            segments.append(Segment(self.slots.page_table[request.slot], start, stop, write_from))
            if is_last:
                last.append(len(ids) - 1)
                finished.append(request)
        tokens = self._tensor(ids)
        following = self._tensor(next_ids)
        positions = self._tensor([i for _, start, stop, _ in segments for i in range(start, stop)])
        capture = self.drafter.capture if self.drafter is not None else ()
        out = self.target(tokens, positions, self.kv.prefill_attend(segments), capture)
        rows = self._tensor(last)
        roots, results = rows, None
        if finished:
            first, results = self._first_tokens(finished, out.hidden[rows])
            last_ids = self._tensor([r.token_ids[-1] if r.token_ids else -1 for r in finished])
            roots = torch.where(last_ids >= 0, last_ids, first)
            following[rows] = roots
        draft = None
        if self.drafter is not None:
            draft = self.drafter.prefill(out, tokens, following, segments, rows, self.shapes.topk)
        if results is None:
            return None
        slots = self._tensor([request.slot for request in finished])
        lens = self._tensor([request.num_to_compute for request in finished])
        self.slots.join(slots, lens, roots, draft)
        for i, request in enumerate(finished):
            if request.params.has_penalties:
                vocab = self.target.config.vocab_size
                self.slots.start_counts(request.slot, vocab, request.token_ids, roots[i : i + 1])
        return results

    def _first_tokens(self, requests: list[Request], hidden: torch.Tensor) -> tuple[torch.Tensor, Results]:
        """Decide the token after each prompt -> int64 ``[B]`` and the same on its way to the host; a request
        that was preempted has its tokens already."""
        logits = self.target.logits(hidden)
        zero = self._tensor([request.tokens(0, 1)[0] for request in requests])
        tree = root_only(zero)  # a window whose root is the prompt's last token: it adds nothing to a path
        lens = self._tensor([request.num_to_compute - 1 for request in requests])
        sampling = self._sampling_batch(requests)
        matches = [request.match for request in requests]
        allowed = allowed_tokens(matches, tree, logits.shape[-1]) if any(matches) else None
        tokens = choose(logits[:, None], tree, lens, sampling, allowed)
        counts = self._tensor([0 if request.token_ids else 1 for request in requests])
        logprobs = None
        if (top := self._num_logprobs(requests)) is not None:
            parts = token_logprobs(logits, tokens[:, 0], top)
            logprobs = Logprobs(*(part[:, None] for part in parts))
        epochs = [request.epoch for request in requests]
        return tokens[:, 0], Results(requests, epochs, HostCopy((tokens, counts, logprobs)), False)

    def decode(self, requests: list[Request], longest: int, ngram: NgramIndex | None = None) -> Results:
        """One cycle for ``requests``; none has more than ``longest`` tokens, those on their way included.

        Args:
            ngram: drafts in place of a model; every token of the requests must be known to the host.
        """
        for request in requests:
            if request.num_pages_written != len(request.allocation):
                self.set_pages(request)
        size = next(size for size in self.batch_sizes if size >= len(requests))
        padding = [self.slots.dummy] * (size - len(requests))
        rows = self._tensor([request.slot for request in requests] + padding)
        shape = self.shapes.at(size)
        steps, topk, tokens = shape
        lookback = self.drafter.lookback if self.drafter is not None else 0
        columns = longest + max(tokens, 1 + max(steps - 1, 0) * topk, steps + 2 + lookback)
        settings = self._settings(shape, self._columns(columns), self._num_logprobs(requests))
        sampling = self._sampling(requests, len(padding))
        tree, num_drafts = None, [tokens - 1] * len(requests)
        if ngram is not None and steps:
            found = self._ngram_draft(requests, len(padding), ngram, shape)
            tree, num_drafts = to_tree(found, self.device), found.num_drafts[: len(requests)].tolist()
        outputs = self._run(requests, CycleInputs(rows, sampling), settings, tree)
        epochs = [request.epoch for request in requests]
        return Results(requests, epochs, HostCopy(outputs), True, num_drafts)

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Capture the graphs of greedy batches and of batches that draw, the largest first -> how many. Forms
        of linear layers are chosen by measurements before that."""
        if self.graphs.mode != "cycle" or not self.graphs.has_fixed_shapes:
            return 0
        for size in sorted(self.batch_sizes, reverse=True):
            settings = self._settings(self.shapes.at(size), self._columns(0), None)
            rows = self._tensor([self.slots.dummy] * size)
            warm_up = (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
            for params in (None, *warm_up):
                sampling = None if params is None else self._warm_up_sampling(params, size)
                self._part("cycle", self._cycle, CycleInputs(rows, sampling), settings)
        return self.graphs.num_graphs

    def _warm_up_sampling(self, params: SamplingParams, size: int) -> SamplingBatch:
        vocab = self.target.config.vocab_size
        return _widened(
            make_sampling_batch([params] * size, [[]] * size, [0] * size, vocab, self.device), vocab
        )

    def _settings(self, shape: SpecShape, num_columns: int, num_logprobs: int | None) -> CycleSettings:
        return CycleSettings(shape, num_columns, num_logprobs, self.verifier(shape), self.shapes.topk)

    def _columns(self, least: int) -> int:
        """A bound on the columns of a window, of few different values: shapes repeat. Kernels on a GPU read
        lengths on the device, so graphs are made for the longest context only; on a CPU each request has the
        columns that its length needs (``WindowPlan.by_length``)."""
        if self.graphs.mode == "off":
            return -(-least // COLUMN_BUCKET) * COLUMN_BUCKET
        return self.max_pages * self.kv.page_size

    def _run(
        self, requests: list[Request], inputs: CycleInputs, settings: CycleSettings, tree: Tree | None
    ) -> tuple[torch.Tensor, torch.Tensor, Logprobs | None]:
        """Verify ``tree``, or a draft of its own -> tokens, how many are new, their log-probabilities, on the
        device."""
        matches = [request.match for request in requests]
        if tree is None and not any(matches) and self.graphs.mode != "phases":
            return self._part("cycle", self._cycle, inputs, settings)
        # The host is needed in the middle, or the phases are to be told apart.
        padding = len(inputs.rows) - len(requests)
        if tree is not None:
            draft = DraftOutput(tree, Deterministic())
        else:
            draft = self._part("propose", self._propose, inputs, settings)
        allowed = None
        if any(matches):
            vocab = self.target.config.vocab_size
            allowed = allowed_tokens([*matches, *[None] * padding], draft.tree, vocab)
        inputs = inputs._replace(draft=draft, allowed=allowed)
        if self.graphs.mode != "phases":
            return self._part("verify and draft-extend", self._verify_and_draft_extend, inputs, settings)
        verified = self._part("verify", self._verify, inputs, settings)
        # Graphs share memory, and that of the observation may have been captured before this verification.
        outputs = verified.accepted.tokens, verified.num_emitted, verified.logprobs
        outputs = map_tensors(torch.clone, outputs)
        self._part(
            "draft_extend",
            self._draft_extend,
            CycleInputs(inputs.rows, inputs.sampling, None, None, verified),
            settings,
        )
        return outputs

    def _part(self, name: str, body: Any, inputs: CycleInputs, settings: CycleSettings) -> Any:
        """Run a part of the cycle, as a graph where there are graphs. Rare sampling parameters have none:
        there would be one for every combination of them."""
        if self.graphs.mode == "off" or (inputs.sampling is not None and _is_rare(inputs.sampling)):
            return body(inputs, settings)
        sampling_fields = None
        if inputs.sampling is not None:
            sampling_fields = tuple(field is not None for field in inputs.sampling)
        drafts = (
            None if inputs.draft is None else (type(inputs.draft.proposal), inputs.draft.tree.tokens.shape)
        )
        allowed = inputs.allowed is not None
        key = (len(inputs.rows), settings, self.drafter is not None, sampling_fields, drafts, allowed)

        def idle() -> CycleInputs:
            return inputs._replace(rows=torch.full_like(inputs.rows, self.slots.dummy))

        with self.linear_forms.measuring():  # before a capture
            lengths = Lengths(self.slots.seq_lens, inputs.rows)
            return self.graphs.run(name, key, partial(body, settings=settings), inputs, idle, lengths)

    def _cycle(
        self, inputs: CycleInputs, settings: CycleSettings
    ) -> tuple[torch.Tensor, torch.Tensor, Logprobs | None]:
        state, sampling = self._state(inputs)
        out = cycle(self.target, self.kv, self.drafter, state, settings, sampling)
        self.slots.scatter(inputs.rows, out.state, out.counts)
        return out.tokens, out.num_emitted, out.logprobs

    def _propose(self, inputs: CycleInputs, settings: CycleSettings) -> DraftOutput:
        state, sampling = self._state(inputs)
        return propose(self.drafter, state, settings, sampling)

    def _verify_and_draft_extend(
        self, inputs: CycleInputs, settings: CycleSettings
    ) -> tuple[torch.Tensor, torch.Tensor, Logprobs | None]:
        verified = self._verify(inputs, settings)
        self._draft_extend(inputs._replace(verified=verified), settings)
        return verified.accepted.tokens, verified.num_emitted, verified.logprobs

    def _verify(self, inputs: CycleInputs, settings: CycleSettings) -> Verified:
        state, sampling = self._state(inputs)
        draft = inputs.draft
        assert draft is not None
        return verify(self.target, self.kv, self.drafter, state, draft, settings, sampling, inputs.allowed)

    def _draft_extend(self, inputs: CycleInputs, settings: CycleSettings) -> None:
        state, _ = self._state(inputs)
        assert inputs.verified is not None
        following = draft_extend(self.drafter, state, inputs.verified, settings)
        self.slots.scatter(inputs.rows, following, inputs.verified.counts)

    def _state(self, inputs: CycleInputs) -> tuple[CycleState, SamplingBatch | None]:
        """The slots' rows, and the sampling parameters with the counts of their replies."""
        sampling = inputs.sampling
        if sampling is not None and _counts_tokens(sampling):
            assert self.slots.counts is not None
            sampling = sampling._replace(counts=self.slots.counts[inputs.rows])
        return self.slots.gather(inputs.rows), sampling

    def _ngram_draft(
        self, requests: list[Request], padding: int, ngram: NgramIndex, shape: SpecShape
    ) -> NgramDraft:
        window = ngram.options.max_match_window_size
        contexts = [r.tokens(max(0, r.num_tokens - window), r.num_tokens) for r in requests]
        return ngram.propose([*contexts, *[[0]] * padding], shape.tokens, shape.steps)

    def set_pages(self, request: Request) -> None:
        """Bring the device's page table of a request up to date."""
        self.slots.set_pages(request.slot, request.allocation.table)
        request.num_pages_written = len(request.allocation)

    def _sampling(self, requests: list[Request], padding: int) -> SamplingBatch | None:
        """The sampling parameters of a batch without the counts of its replies, made anew only when the batch
        changes."""
        key = tuple((request.number, request.epoch) for request in requests) + ((-1, padding),)
        if self._batch[0] != key:
            made = self._sampling_batch(requests, padding)
            if made is not None:
                made = made._replace(counts=None)
                if self.graphs.has_fixed_shapes:
                    made = _widened(made, self.target.config.vocab_size)
            self._batch = key, made
        return self._batch[1]

    def _sampling_batch(self, requests: list[Request], padding: int = 0) -> SamplingBatch | None:
        """The sampling parameters of requests that have said nothing; None when all are greedy and nothing
        changes logits."""
        if all(_is_plain(request.params) for request in requests):
            return None
        params = [request.params for request in requests] + [SamplingParams()] * padding
        prompts = [request.prompt_ids for request in requests] + [[]] * padding
        seeds = [request.seed for request in requests] + [0] * padding
        return make_sampling_batch(params, prompts, seeds, self.target.config.vocab_size, self.device)

    def _num_logprobs(self, requests: list[Request]) -> int | None:
        """How many alternatives to report for the batch; for graphs it is all or none."""
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        if not wanted:
            return None
        most = MAX_LOGPROBS if self.graphs.has_fixed_shapes else max(wanted)
        return min(most, self.target.config.vocab_size)

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(numbers, self.device)


def _counts_tokens(sampling: SamplingBatch) -> bool:
    """Whether some request's distribution depends on what its reply has said."""
    return any(field is not None for field in (sampling.repetition, sampling.frequency, sampling.presence))


def _is_rare(sampling: SamplingBatch) -> bool:
    """Whether logits are bent before they are filtered, which takes tables of the vocabulary."""
    return _counts_tokens(sampling) or sampling.bias is not None


def _widened(sampling: SamplingBatch, vocab_size: int) -> SamplingBatch:
    """The same sampling parameters with all filters when there is one, so that graphs are made for few kinds
    of batches."""
    filters = sampling.top_k, sampling.top_p, sampling.min_p
    if all(part is None for part in filters):
        return sampling
    ones = torch.ones_like(sampling.temperature)
    neutral = (torch.full_like(sampling.seeds, vocab_size), ones, torch.zeros_like(ones))
    top_k, top_p, min_p = (
        own if own is not None else none for own, none in zip(filters, neutral, strict=True)
    )
    return sampling._replace(top_k=top_k, top_p=top_p, min_p=min_p)


def _is_plain(params: SamplingParams) -> bool:
    return params.is_greedy and not params.has_penalties and not params.logit_bias
