"""Requests in, replies out: admission, prefill, cycles, stops.

The engine owns the stores, the pages and the running batch. Requests join and leave between cycles.

Legend: B running requests, P pages a request may have.
"""

import time
from dataclasses import dataclass, field

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.models.eagle3 import Eagle3Head
from eagle_kit.models.llama import LlamaModel
from eagle_kit.serve.cycle import CycleState, cycle
from eagle_kit.serve.kv_pool import PagePool
from eagle_kit.speculation.eagle3 import DraftState, Eagle3Proposer
from eagle_kit.speculation.paged_kv import PagedKV

COLUMN_BUCKET = 64
PREFILL_CHUNK = 512


@dataclass
class Request:
    """One reply in the making. ``token_ids`` grows; ``finish_reason`` is set once, by the engine."""

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and reply together."""
        return len(self.prompt_ids) + len(self.token_ids)


class Engine:
    """Decodes up to ``max_batch_size`` requests together, each at most ``max_context`` tokens with its
    prompt.

    It starts with ordinary decoding; :meth:`use_shape` changes that while nothing runs.
    """

    def __init__(
        self,
        target: LlamaModel,
        head: Eagle3Head | None,
        *,
        max_batch_size: int,
        max_context: int,
        page_size: int,
    ) -> None:
        self.target, self.max_context, self.max_batch_size = target, max_context, max_batch_size
        self.shape = NO_SPECULATION
        config, weight = target.config, target.embed_tokens.weight
        # A last cycle may commit up to `steps` tokens past the end, and the draft's entry of the root is one
        # ahead.
        self.max_pages = -(-(max_context + MAX_WINDOW + 2) // page_size)
        self.pool = PagePool(self.max_pages * max_batch_size, page_size)
        self.kv = PagedKV(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_pages=self.pool.num_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            window=MAX_WINDOW,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._proposer: Eagle3Proposer | None = None
        if head is not None:
            draft_kv = Eagle3Proposer.make_kv(
                head, num_pages=self.pool.num_pages, page_size=page_size, max_batch_size=max_batch_size
            )
            self._proposer = Eagle3Proposer(head, target, draft_kv)
        self.running: list[Request] = []
        self.state: CycleState | None = None

    @property
    def proposer(self) -> Eagle3Proposer | None:
        """The drafter of the current shape; None in ordinary decoding."""
        return self._proposer if self.shape.steps else None

    def use_shape(self, shape: SpecShape) -> None:
        """Speculate with ``shape`` from the next request on. Raises UserError when there is no draft for
        it."""
        assert not self.running, "the shape can change only while nothing runs"
        if shape.steps and self._proposer is None:
            raise UserError(
                f"The shape {shape} speculates, but there is no draft.", "Give a draft, or the shape none."
            )
        if self._proposer is not None and shape.topk > (size := self._proposer.head.config.draft_vocab_size):
            raise UserError(
                f"The shape {shape} asks for more candidates than the draft's {size} tokens.", "Lower topk."
            )
        self.shape = shape

    def check_request(self, prompt_ids: list[int]) -> None:
        """Raises UserError for a prompt that cannot be decoded."""
        if not prompt_ids:
            raise UserError("The prompt is empty.", "Give at least one token.")
        if len(prompt_ids) >= self.max_context:
            raise UserError(
                f"The prompt has {len(prompt_ids)} tokens, but the context holds {self.max_context} "
                "with the reply.",
                "Shorten the prompt, or raise max_context if the model allows it.",
            )
        top = self.target.config.vocab_size
        if not all(0 <= token < top for token in prompt_ids):
            raise UserError(
                f"The prompt has a token id outside 0..{top - 1}.", "Tokenise it with the target's tokenizer."
            )

    def has_room(self, request: Request) -> bool:
        """Whether :meth:`add` can take the request now."""
        return len(self.running) < self.max_batch_size and self.pool.can_allocate(self._need(request))

    def _need(self, request: Request) -> int:
        wanted = len(request.prompt_ids) + request.params.max_tokens
        return min(wanted, self.max_context) + self.shape.steps + 2

    @torch.inference_mode()
    def add(self, request: Request) -> None:
        """Prefill the request and let it join the batch, unless its first token already ends it."""
        request.admitted_at = time.perf_counter()
        pages = self.pool.allocate(request.number, self._need(request))
        device = self.kv.k.device
        table = torch.zeros(1, self.max_pages, dtype=torch.int64, device=device)
        table[0, : len(pages)] = torch.tensor(pages, device=device)
        try:
            root, draft = self._prefill(request.prompt_ids, table)
            first_token = int(root)
        except BaseException:
            self.pool.free(request.number)
            raise
        request.first_token_at = time.perf_counter()
        self._take(request, [first_token])
        if request.finish_reason is not None:
            self.pool.free(request.number)
            return
        lens = torch.tensor([len(request.prompt_ids)], device=device)
        joined = CycleState(table, lens, root, draft)
        self.state = joined if self.state is None else _join(self.state, joined)
        self.running.append(request)

    def _prefill(self, prompt_ids: list[int], table: torch.Tensor) -> tuple[torch.Tensor, DraftState | None]:
        """Run the prompt through target and draft -> the first token ``[1]`` and its candidates."""
        ids = torch.tensor(prompt_ids, device=self.kv.k.device)
        capture = self.proposer.head.config.aux_layer_ids if self.proposer is not None else ()
        draft: DraftState | None = None
        root = ids[:1]
        for start in range(0, len(prompt_ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            stop = start + chunk.shape[0]
            attend = self.kv.prefill_attend(table, start, stop)
            out = self.target(chunk, torch.arange(start, stop, device=ids.device), attend, capture)
            following = ids[stop : stop + 1]
            if stop == len(prompt_ids):
                root = self.target.logits(out.hidden[-1:]).argmax(-1)
                following = root
            if self.proposer is not None:
                next_tokens = torch.cat((chunk[1:], following))
                draft = self.proposer.prefill(out.aux, next_tokens, start, table, self.shape.topk)
        return root, draft

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One cycle for the running batch -> the requests it finished."""
        if self.state is None:
            return []
        out = cycle(self.target, self.kv, self.proposer, self.state, self.shape, self._num_columns())
        tokens, counts = out.tokens.tolist(), out.num_emitted.tolist()
        for request, row, count in zip(self.running, tokens, counts, strict=True):
            kept = self._take(request, row[:count])
            request.stats.observe(kept, min(kept, count - 1))
        self.state = out.state
        return self._leave()

    def _num_columns(self) -> int:
        longest = max(request.num_tokens for request in self.running) - 1
        steps, topk, tokens = self.shape
        need = longest + max(tokens, 1 + max(steps - 1, 0) * topk, steps + 2)
        return -(-need // COLUMN_BUCKET) * COLUMN_BUCKET

    def _take(self, request: Request, tokens: list[int]) -> int:
        """Append new tokens up to the first that ends the reply -> how many were kept."""
        params = request.params
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(self.target.config.eos_token_ids)
        request.last_token_at = time.perf_counter()
        for kept, token in enumerate(tokens, 1):
            request.token_ids.append(token)
            if token in ends:
                request.finish_reason = "stop"
            elif len(request.token_ids) >= params.max_tokens:
                request.finish_reason = "length"
            elif request.num_tokens >= self.max_context:
                request.finish_reason = "context"
            if request.finish_reason is not None:
                return kept
        return len(tokens)

    def abort(self, request: Request) -> None:
        """Take a running request out of the batch between two cycles."""
        request.finish_reason = "abort"
        self._leave()

    def _leave(self) -> list[Request]:
        finished = [request for request in self.running if request.finish_reason is not None]
        if finished:
            for request in finished:
                self.pool.free(request.number)
            staying = [i for i, request in enumerate(self.running) if request.finish_reason is None]
            self.running = [self.running[i] for i in staying]
            assert self.state is not None
            self.state = _select(self.state, staying) if staying else None
        return finished


def _join(a: CycleState, b: CycleState) -> CycleState:
    draft = None
    if a.draft is not None and b.draft is not None:
        draft = DraftState(*(torch.cat(pair) for pair in zip(a.draft, b.draft, strict=True)))
    return CycleState(
        torch.cat((a.page_table, b.page_table)),
        torch.cat((a.seq_lens, b.seq_lens)),
        torch.cat((a.roots, b.roots)),
        draft,
    )


def _select(state: CycleState, rows: list[int]) -> CycleState:
    index = torch.tensor(rows, device=state.roots.device)
    draft = DraftState(*(t[index] for t in state.draft)) if state.draft is not None else None
    return CycleState(state.page_table[index], state.seq_lens[index], state.roots[index], draft)
