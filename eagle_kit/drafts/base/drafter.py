"""Contract of drafters: what a decode cycle, a prefill and draft backfill ask of any drafting algorithm.

The implementations are :class:`~eagle_kit.drafts.base.autoregressive.AutoregressiveDrafter` (EAGLE heads and
whole models: one forward of the draft per step), :class:`~eagle_kit.drafts.base.one_pass.OnePassDrafter`
(all steps during draft-extend), and what derives from them. ``drafts/choose_drafter.py`` chooses.

Legend: B requests, K top-k, S steps, N nodes, M size of the target's states of a token, V target vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW, SpecShape, auto_shape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PaddedSegments, PoolLayout, Segment
from eagle_kit.models.targets.target import TargetOutput
from eagle_kit.ops.accept import Accepted
from eagle_kit.ops.attention.window import chain_bits
from eagle_kit.ops.sampling import SamplingBatch
from eagle_kit.ops.transfer import to_device
from eagle_kit.verify.proposal import DraftOutput
from eagle_kit.verify.verifiers import Relaxed, TargetOnly


class CandidateSpec(NamedTuple):
    """Candidates that a draft state holds.

    Attributes:
        steps: depths whose candidates are made during draft-extend: 1 for EAGLE and whole models, which make
            the others when they propose.
        topk: candidates of each depth.
        needs_confidence: True if :meth:`Drafter.confidence` will be called: the engine chooses shapes by it.
    """

    steps: int
    topk: int
    needs_confidence: bool = False


class PendingTokens(NamedTuple):
    """Emitted tokens that the draft has not run over, up to L of each request.

    Draft-extend makes them of the tokens of its own cycle; draft backfill, of those of several plain cycles.

    Attributes:
        hidden_states: ``[B, L, M]``, the target's hidden states that predicted the tokens.
        tokens: int64 ``[B, L]``.
        counts: int64 ``[B]``, how many of the L tokens are there.
    """

    hidden_states: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


class PromptBatch(NamedTuple):
    """Prompt rows of one or several requests, as the target computed them, request after request.

    T rows in all, of R requests, of which the prompts of n end.

    Attributes:
        out: the target's output at the rows, ``hidden [T, H]`` and the inputs of the captured layers.
        ids: int64 ``[T]``, the token of each row.
        next_ids: int64 ``[T]``, the token after each row.
        segments: the R requests in the order of their rows: page table ``[P]``, position of the first row,
            position after the last.
        last: int64 ``[n]``, the last rows of the prompts that end. Their draft states are returned. If it is
            empty, what :meth:`Drafter.prefill` returns has no meaning.
    """

    out: TargetOutput
    ids: torch.Tensor
    next_ids: torch.Tensor
    segments: Sequence[Segment]
    last: torch.Tensor

    @property
    def roots(self) -> torch.Tensor:
        """The tokens after the rows ``last``, int64 ``[n]``."""
        return self.next_ids[self.last]

    @property
    def stops(self) -> list[int]:
        """The position after the last row of each request, R of them."""
        return [segment.stop for segment in self.segments]

    @property
    def page_tables(self) -> torch.Tensor:
        """Page tables of the requests, int64 ``[R, P]``."""
        return torch.stack([segment.page_table for segment in self.segments])

    def requests_of_last(self) -> torch.Tensor:
        """The index of the request of each row of ``last``, int64 ``[n]``."""
        ends = list(accumulate(segment.stop - segment.start for segment in self.segments))
        return torch.searchsorted(to_device(ends, self.last.device), self.last, right=True)


class PaddedPromptBatch(NamedTuple):
    """Prompt rows of a forward of fixed shape, T in all, of up to R requests and of padding.

    Every request has a draft state made, of which only those of prompts that end are used. The host reads no
    tensor.

    Attributes:
        states: ``[T, M]``, the target's states of the rows that the draft reads.
        ids: int64 ``[T]``, the token of each row.
        next_ids: int64 ``[T]``, the token after each row.
        segments: where the rows of the R requests are, and those of padding in one more segment.
        last: int64 ``[R]``, the last row of each request; any row for padding.
        roots: int64 ``[R]``, the token after that row.
        stops: int64 ``[R]``, the position after that row; 0 for padding.
        num_columns: bound on the keys that a row attends to, with what draft-extend appends.
    """

    states: torch.Tensor
    ids: torch.Tensor
    next_ids: torch.Tensor
    segments: PaddedSegments
    last: torch.Tensor
    roots: torch.Tensor
    stops: torch.Tensor
    num_columns: int

    @property
    def page_tables(self) -> torch.Tensor:
        """Page tables of the requests, int64 ``[R, P]``."""
        return self.segments.page_tables[: len(self.last)]


class Drafter(ABC):
    """A draft model with its key-value store. Its methods change nothing but the store.

    A cycle calls :meth:`propose` and :meth:`draft_extend`, a prompt calls :meth:`prefill`, and draft backfill
    (the tokens that plain cycles left pending) calls :meth:`extend` and :meth:`store`.

    Args:
        model: the draft model.
        vocab_size: V of the target.
        layout: of the pool, shared with the target's store.

    Attributes:
        kv: store of the draft's keys and values.
        arange: int64, the numbers from 0 on; no tensor is made within a cycle.
        chain_bits: int64 ``[MAX_WINDOW]``, ancestors of the nodes of a chain.
    """

    supports_deferred_draft = True
    """True if the draft need not run in plain cycles: one forward over their tokens can follow later."""
    has_any_shape = True
    """True if the shape can change from cycle to cycle, to any that :meth:`check_shape` allows."""
    has_spec_by_size = False
    """True if each batch size has draft states for its own shapes only, which :meth:`pad_candidates` pads."""
    lookback = 0
    """Prompt tokens before a chunk that must be computed again with it; 0 but for several MTP modules."""
    has_padded_prefill = False
    """True if there is :meth:`prefill_padded`, for stores of keys and values."""
    verifiers: tuple[type, ...] = (TargetOnly, Relaxed)
    """Verifiers that are sound for these proposals, the default first."""

    def __init__(self, model: DraftModel, vocab_size: int, layout: PoolLayout) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.kv = open_store(
            model.cache,
            layout,
            model.variants,
            first_position=model.first_position,
            dtype=model.dtype,
            device=model.device,
        )
        self._make_constants(layout)

    def _make_constants(self, layout: PoolLayout) -> None:
        """Make the tensors that every cycle reads."""
        device = self.model.device
        self.arange = torch.arange(max(layout.window + 1, layout.max_batch_size), device=device)
        self.chain_bits = chain_bits(MAX_WINDOW, device)

    # Shapes and sizes, by the draft model alone.

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """Steps of the longest draft."""
        return MAX_WINDOW - 1

    @classmethod
    def logits_bytes(cls, model: DraftModel, batch_size: int, spec: CandidateSpec) -> int:
        """Bytes of logits, in all their copies, that draft-extend holds at the same time for a batch."""
        itemsize = model.dtype.itemsize
        copy_size = 0 if itemsize == 4 else itemsize  # beside the copy in fp32
        return batch_size * model.draft_vocab_size * (copy_size + 4)

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """Raise UserError when ``model`` cannot be drafted with in ``shape``."""
        if shape.topk > model.draft_vocab_size:
            raise UserError(
                f"The shape {shape} asks for more candidates than the draft's {model.draft_vocab_size} "
                "tokens.",
                "Lower topk.",
            )

    @classmethod
    def default_shape(cls, model: DraftModel, model_type: str) -> SpecShape:
        """Shape where none is asked for; ``model_type`` of the target."""
        return auto_shape(model_type, drafts_are_expensive=model.is_whole_model)

    @classmethod
    def candidate_spec(cls, shapes: Sequence[SpecShape], *, needs_confidence: bool = False) -> CandidateSpec:
        """Return the candidates that a draft state must hold, so that any of ``shapes`` can be proposed.

        Args:
            needs_confidence: :meth:`confidence` will be called. It takes two candidates, because a single one
                has no log-probability.
        """
        topk = max(1 + needs_confidence, *(shape.topk for shape in shapes))
        return CandidateSpec(1, topk, needs_confidence)

    def num_appended(self, spec: CandidateSpec) -> int:
        """Return how many rows draft-extend appends after the emitted tokens of a request."""
        return 0

    def max_pending_tokens(self, spec: CandidateSpec) -> int:
        """Return how many tokens of a request :meth:`extend` takes, a power of two that fits a window."""
        return 1 << ((MAX_WINDOW - self.num_appended(spec)).bit_length() - 1)

    @property
    def capture(self) -> tuple[int, ...]:
        """Ids of the target layers whose inputs the draft reads."""
        return self.model.capture

    # Draft states.

    @abstractmethod
    def empty_state(self, count: int, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """Make the draft state of ``count`` requests that have not been prefilled."""

    def pad_candidates(
        self, made: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the draft state ``made``, padded to as many candidates as the ``stored`` states have."""
        return made

    @abstractmethod
    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Return the draft's confidence in the tokens that it will propose from a draft state.

        It depends on the text alone, not on tokens that will be drawn.

        Returns:
            fp32 ``[B]``, the probability of the first token. Heads that predict acceptance return ``[B, D]``,
            the probability that each depth and all before it are accepted. None if the state holds one
            candidate, which has no log-probability.
        """

    # A cycle.

    @abstractmethod
    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Make the window to verify: the roots and a draft after each.

        Args:
            num_columns: bound on the keys that a node attends to: tokens in the pool, then window nodes.
            sampling: sampling parameters of the requests, for sampled drafts; None if all are greedy.
        """

    def draft_extend(
        self,
        state: CycleState,
        out: TargetOutput,
        accepted: Accepted,
        num_committed: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the draft over the emitted tokens and the target's states that predicted them.

        Stores the draft's keys and values.

        Args:
            state: state at the start of the cycle.
            out: the target's output over the window, ``B * N`` rows.
            accepted: the accepted path and the emitted tokens ``[B, S + 1]``.
            num_committed: int64 ``[B]``, emitted tokens whose keys are stored: all, or 0 for padding.
            spec: candidates that the result holds.
            num_columns: see :meth:`propose`.

        Returns:
            The draft state of the next cycle.
        """
        hidden_states = self.model.target_hidden_states(out, self._path_rows(out, accepted))
        hidden_states = hidden_states.unflatten(0, accepted.tokens.shape)  # [B, S + 1, M]
        pending = PendingTokens(hidden_states, accepted.tokens, num_committed)
        return self.extend(state, pending, accepted.num_accepted, spec, num_columns)

    def _path_rows(self, out: TargetOutput, accepted: Accepted) -> torch.Tensor:
        """Rows int64 ``[B * (S + 1)]`` of ``out`` that hold the accepted path: node n of request b has row
        ``b * N + n``."""
        b = len(accepted.path)
        num_nodes = out.hidden.shape[0] // b
        return torch.add(accepted.path, self.arange[:b, None], alpha=num_nodes).view(-1)

    # Draft backfill, and draft-extend by way of it. A drafter that replaces `draft_extend` and does not
    # support a deferred draft needs neither.

    def extend(
        self,
        state: CycleState,
        pending: PendingTokens,
        last: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the draft over the tokens that follow ``state``, store its keys, and return its draft state.

        Args:
            pending: the tokens.
            last: int64 ``[B]``, index of the last token; the draft state predicts the token after it.
            spec: candidates that the result holds.
            num_columns: see :meth:`propose`.
        """
        raise NotImplementedError

    def store(self, state: CycleState, pending: PendingTokens, num_columns: int) -> None:
        """Run the draft over the tokens that follow ``state`` to store its keys only: no draft state is made.

        Args:
            pending: the tokens, at most a window's.
            num_columns: see :meth:`propose`.
        """
        raise NotImplementedError

    # A prompt.

    @abstractmethod
    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """Run the draft over prompt rows, and store its keys.

        Returns:
            The draft states of the n prompts that end, with the candidates that ``spec`` asks for.
        """

    def prefill_padded(self, batch: PaddedPromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """Run the draft over prompt rows of a fixed shape, and store its keys: :meth:`prefill` for graphs.

        Returns:
            A draft state for each of the R requests. That of a prompt that goes on has no meaning.
        """
        raise NotImplementedError
