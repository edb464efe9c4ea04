"""The device's side of a step: prompts in one packed forward, then a cycle. Nothing here waits for results.

Legend: B requests, T packed prompt tokens, S steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.kernels.accept import Deterministic, TargetOnly, Verifier
from eagle_kit.kernels.sampling import SamplingBatch, make_sampling_batch, token_logprobs
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.models.llama import LlamaModel
from eagle_kit.serve.choose import choose
from eagle_kit.serve.cycle import Logprobs, Settings, cycle, propose, root_only, verify_cycle
from eagle_kit.serve.grammar import allowed_tokens
from eagle_kit.serve.request import Request
from eagle_kit.serve.scheduler import Chunk
from eagle_kit.serve.slots import Slots
from eagle_kit.speculation.draft_model import DraftModel
from eagle_kit.speculation.drafter import Draft, Drafter
from eagle_kit.speculation.ngram import NgramIndex, to_tree
from eagle_kit.speculation.paged_kv import PagedKV, Segment
from eagle_kit.speculation.static_tree import drafter_class

COLUMN_BUCKET = 64


class Results(NamedTuple):
    """Tokens on their way to the host: ``tokens`` int64 ``[B, n]``, the first ``num_emitted [B]`` of each row
    for ``requests``, if they are still in ``epochs``. ``is_verify`` is False for first tokens."""

    requests: list[Request]
    epochs: list[int]
    tokens: torch.Tensor
    num_emitted: torch.Tensor
    logprobs: Logprobs | None
    is_verify: bool


class Runner:
    """Owns the models' stores and the slots.

    Args:
        num_pages, page_size: of the pool.
        max_pages: most pages of one request.
        batch_sizes: batches are padded to the next of these with dummies.
        tree: ``"dynamic"`` (EAGLE-2), or ``"static"`` (EAGLE-1).
        sampled_drafts: draw drafts from the draft's law instead of taking its most likely tokens.
        verifier: decides on drafts of requests that sample; default the lossless one for the draft's law.
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
        tree: str = "dynamic",
        sampled_drafts: bool = False,
        verifier: Verifier | None = None,
    ) -> None:
        self.target, self.batch_sizes = target, batch_sizes
        self.num_slots, self.max_pages = max(batch_sizes), max_pages
        config, weight = target.config, target.embed_tokens.weight
        self.device = weight.device
        self.kv = PagedKV(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=self.num_slots,
            window=MAX_WINDOW,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._drafter: Drafter | None = None
        if draft is not None:
            self._drafter = drafter_class(tree, drawn=sampled_drafts)(
                draft,
                vocab_size=config.vocab_size,
                num_pages=num_pages,
                page_size=page_size,
                max_batch_size=self.num_slots,
            )
        default = TargetOnly() if self._drafter is None else self._drafter.verifiers[0]()
        self.verifier = verifier or default
        self.use_shape(SpecShape.parse(None))

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the current shape; None in ordinary decoding."""
        return self._drafter if self.shape.steps else None

    def use_shape(self, shape: SpecShape) -> None:
        """Speculate with ``shape`` from now on; nothing may be running."""
        self.shape = shape
        self.slots = Slots(
            self.num_slots, self.max_pages, self.kv.dummy_page, self.drafter, shape.topk, self.device
        )
        self._batch: tuple[tuple[tuple[int, int], ...], SamplingBatch | None] = ((), None)

    def prefill(self, chunks: Sequence[Chunk]) -> Results | None:
        """Compute prompt chunks; requests whose prompt ends here join the slots -> their first tokens."""
        ids, next_ids, segments, last, finished = [], [], [], [], []
        for request, start, stop in chunks:
            self.set_pages(request)
            ids += request.tokens(start, stop)
            is_last = stop == request.num_to_compute
            known = request.tokens(start + 1, stop + 1)
            next_ids += known if len(known) == stop - start else [*known, 0]
            write_from = max(start, request.num_cached_tokens)
            segments.append(Segment(self.slots.page_table[request.slot], start, stop, write_from))
            if is_last:
                last.append(len(ids) - 1)
                finished.append(request)
        tokens = self._tensor(ids)
        following = self._tensor(next_ids)
        positions = self._tensor([i for _, start, stop in chunks for i in range(start, stop)])
        capture = self.drafter.capture if self.drafter is not None else ()
        out = self.target(tokens, positions, self.kv.prefill_attend(segments), capture)
        rows = self._tensor(last)
        results = self._first_tokens(finished, out.hidden[rows]) if finished else None
        roots = rows
        if results is not None:
            last_ids = self._tensor([r.token_ids[-1] if r.token_ids else -1 for r in finished])
            roots = torch.where(last_ids >= 0, last_ids, results.tokens[:, 0])
            following[rows] = roots
        draft = None
        if self.drafter is not None:
            draft = self.drafter.prefill(out, tokens, following, segments, rows, self.shape.topk)
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

    def _first_tokens(self, requests: list[Request], hidden: torch.Tensor) -> Results:
        """Decide the token after each prompt; a request that was preempted has its tokens already."""
        logits = self.target.logits(hidden)
        zero = self._tensor([request.tokens(0, 1)[0] for request in requests])
        tree = root_only(zero)  # a window whose root is the prompt's last token: it adds nothing to a path
        lens = self._tensor([request.num_to_compute - 1 for request in requests])
        sampling = self._sampling(requests)
        matches = [request.match for request in requests]
        allowed = allowed_tokens(matches, tree, logits.shape[-1]) if any(matches) else None
        tokens = choose(logits[:, None], tree, lens, sampling, allowed)
        counts = self._tensor([0 if request.token_ids else 1 for request in requests])
        logprobs = None
        if (top := _num_logprobs(requests)) is not None:
            parts = token_logprobs(logits, tokens[:, 0], top)
            logprobs = Logprobs(*(part[:, None] for part in parts))
        return Results(requests, [r.epoch for r in requests], tokens, counts, logprobs, False)

    def decode(self, requests: list[Request], longest: int, ngram: NgramIndex | None = None) -> Results:
        """One cycle for ``requests``; none has more than ``longest`` tokens, those on their way included.

        Args:
            ngram: drafts in place of a model; every token of the requests must be known to the host.
        """
        for request in requests:
            if request.num_pages_written != len(request.lease):
                self.set_pages(request)
        size = next(size for size in self.batch_sizes if size >= len(requests))
        padding = [self.slots.dummy] * (size - len(requests))
        rows = self._tensor([request.slot for request in requests] + padding)
        steps, topk, tokens = self.shape
        columns = longest + max(tokens, 1 + max(steps - 1, 0) * topk, steps + 2)
        columns = -(-columns // COLUMN_BUCKET) * COLUMN_BUCKET
        settings = Settings(self.shape, columns, _num_logprobs(requests), self.verifier)
        sampling = self._sampling(requests, rows, len(padding))
        state = self.slots.gather(rows)
        models = self.target, self.kv, self.drafter
        matches = [request.match for request in requests]
        if any(matches) or (ngram is not None and steps):  # the host is needed in the middle: two parts
            if ngram is not None and steps:
                tree = self._ngram_tree(requests, len(padding), ngram)
                draft = Draft(tree, Deterministic())
            else:
                draft = propose(self.drafter, state, settings, sampling)
            allowed = None
            if any(matches):
                vocab = self.target.config.vocab_size
                allowed = allowed_tokens([*matches, *[None] * len(padding)], draft.tree, vocab)
            out = verify_cycle(*models, state, draft, settings, sampling, allowed)
        else:
            out = cycle(*models, state, settings, sampling)
        self.slots.scatter(rows, out.state, out.counts)
        epochs = [request.epoch for request in requests]
        return Results(requests, epochs, out.tokens, out.num_emitted, out.logprobs, True)

    def _ngram_tree(self, requests: list[Request], padding: int, ngram: NgramIndex) -> Tree:
        window = ngram.options.max_match_window_size
        contexts = [r.tokens(max(0, r.num_tokens - window), r.num_tokens) for r in requests]
        steps, _, num_tokens = self.shape
        return to_tree(ngram.propose([*contexts, *[[0]] * padding], num_tokens, steps), self.device)

    def set_pages(self, request: Request) -> None:
        """Bring the device's page table of a request up to date."""
        self.slots.set_pages(request.slot, request.lease.table)
        request.num_pages_written = len(request.lease)

    def _sampling(
        self, requests: list[Request], rows: torch.Tensor | None = None, padding: int = 0
    ) -> SamplingBatch | None:
        """The laws of the batch, None when all of it is greedy and nothing bends the logits. They are made
        anew only when the batch changes; ``rows`` None asks for first tokens, where no reply is counted."""
        plain = SamplingParams()
        if all(_is_plain(request.params) for request in requests):
            return None
        key = tuple((request.number, request.epoch) for request in requests) + ((-1, padding),)
        if rows is None or self._batch[0] != key:
            params = [request.params for request in requests] + [plain] * padding
            prompts = [request.prompt_ids for request in requests] + [[]] * padding
            seeds = [request.seed for request in requests] + [0] * padding
            made = make_sampling_batch(params, prompts, seeds, self.target.config.vocab_size, self.device)
            if rows is None:
                return made
            self._batch = key, made
        batch = self._batch[1]
        if batch is not None and batch.counts is not None and self.slots.counts is not None:
            batch = batch._replace(counts=self.slots.counts[rows])
        return batch

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


def _is_plain(params: SamplingParams) -> bool:
    return params.is_greedy and not params.has_penalties and not params.logit_bias


def _num_logprobs(requests: list[Request]) -> int | None:
    wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
    return max(wanted) if wanted else None
