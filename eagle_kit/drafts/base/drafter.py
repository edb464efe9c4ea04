"""Autoregressive drafting: chains (K = 1) and dynamic trees (EAGLE-2, arXiv 2406.16858; K > 1), and
draft-extend. EAGLE-3, EAGLE-1 and whole small models differ only in their `DraftModel`.

Legend: B requests, K top-k, S steps, N nodes, H hidden, F features, M numbers of the target's states,
Vd draft vocabulary.

The draft's keys and values of a token lie at the slot of that token. Those in the pool are computed from the
target's states (in a whole model from committed tokens) only. Those of drafted nodes lie in the scratch, for
one cycle.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW, SpecShape, auto_shape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel, StepRows
from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PoolLayout, Segment
from eagle_kit.models.draft_head import StepOutput
from eagle_kit.models.targets.llama import TargetOutput
from eagle_kit.ops.accept import Accepted
from eagle_kit.ops.attention.window import chain_bits
from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.draft_topk import MAX_TOPK, draft_topk, topk_of_logits
from eagle_kit.ops.sampling import SamplingBatch
from eagle_kit.ops.transfer import to_device
from eagle_kit.ops.tree_build import Candidates, Tree, chain_build, grow_beam, start_beam, tree_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput
from eagle_kit.verify.verifiers import Relaxed, TargetOnly


class DraftState(NamedTuple):
    """Draft state of an autoregressive drafter, the result of draft-extend: the candidates of depth 1.

    Attributes:
        tokens: int64 ``[B, K]``, the candidates as target ids.
        scores: fp32 ``[B, K]``, their log-probabilities; 0 if K is 1.
        features: ``[B, F]``, the features that the next step reads.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    features: torch.Tensor


class CandidateSpec(NamedTuple):
    """Candidates that a draft state holds.

    Attributes:
        steps: depths that it has candidates of; 1 if the draft grows them when it proposes.
        topk: candidates of each depth.
        reads_confidence: True if :meth:`Drafter.confidence` is read.
    """

    steps: int
    topk: int
    reads_confidence: bool = False


class PendingTokens(NamedTuple):
    """Tokens that the target has emitted and the draft has not run over, up to L of each request.

    Attributes:
        states: ``[B, L, M]``, the target's states that predicted the tokens.
        tokens: int64 ``[B, L]``.
        counts: int64 ``[B]``, how many of the L tokens are there.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


class PromptBatch(NamedTuple):
    """Prompt rows of one or several requests, as the target computed them, one request behind the other.

    T rows in all, of R requests, of which the prompts of n end.

    Attributes:
        out: the target's output at the rows, ``hidden [T, H]`` and the inputs of the captured layers.
        ids: int64 ``[T]``, the token of each row.
        next_ids: int64 ``[T]``, the token after each row.
        segments: the R requests in the order of their rows: page table ``[P]``, first slot, slot behind the
            last.
        last: int64 ``[n]``, the last rows of the prompts that end, whose draft states are wanted. Without any
            the draft state that :meth:`Drafter.prefill` returns has no meaning.
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
        """The slot behind the last row of each request, R of them."""
        return [segment.stop for segment in self.segments]

    @property
    def page_tables(self) -> torch.Tensor:
        """Page tables of the requests, int64 ``[R, P]``."""
        return torch.stack([segment.page_table for segment in self.segments])

    def requests_of_last(self) -> torch.Tensor:
        """The number of the request of each row of ``last``, int64 ``[n]``."""
        ends = list(accumulate(segment.stop - segment.start for segment in self.segments))
        return torch.searchsorted(to_device(ends, self.last.device), self.last, right=True)


class Drafter:
    """Draft model with its key-value store. Its methods change nothing but the store.

    Args:
        vocab_size: V of the target.
        layout: of the pool, shared with the target's store.
    """

    supports_deferred_draft = True
    """True if the draft need not run in plain cycles: one forward over their tokens can follow later."""
    has_any_shape = True
    """True if the shape can change from cycle to cycle, to any that :meth:`check_shape` allows."""
    has_spec_by_size = False
    """True if a batch size makes candidates for its own shapes only, and :meth:`widened` pads the others."""
    lookback = 0
    """Prompt tokens before a chunk that must be computed again with it."""
    verifiers: tuple[type, ...] = (TargetOnly, Relaxed)
    """Verifiers that are sound for these proposals, the default first."""

    def __init__(self, model: DraftModel, vocab_size: int, layout: PoolLayout) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.kv = open_store(
            model.cache,
            layout,
            model.variants,
            first_slot=model.first_slot,
            dtype=model.dtype,
            device=model.device,
        )
        self._make_constants(layout)

    def _make_constants(self, layout: PoolLayout) -> None:
        """Make the tensors that every cycle needs: numbers from 0 on, and the ancestor bits of a chain."""
        device = self.model.device
        self.numbers = torch.arange(max(layout.window + 1, layout.max_batch_size), device=device)
        self.chain_bits = chain_bits(MAX_WINDOW, device)

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """Steps of the longest draft."""
        return MAX_WINDOW - 1

    @classmethod
    def logits_bytes(cls, model: DraftModel, batch_size: int, spec: CandidateSpec) -> int:
        """Bytes of logits, in all their copies, that draft-extend holds at the same time for a batch."""
        own = 0 if model.dtype.itemsize == 4 else model.dtype.itemsize  # beside those in fp32
        return batch_size * model.draft_vocab_size * (own + 4)

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
    def candidate_spec(cls, shapes: Sequence[SpecShape], *, reads_confidence: bool = False) -> CandidateSpec:
        """Return the candidates that a draft state must hold, so that any of ``shapes`` can be proposed.

        Args:
            reads_confidence: :meth:`confidence` will be read. It needs two candidates, because a single one
                has no log-probability.
        """
        topk = max(1 + reads_confidence, *(shape.topk for shape in shapes))
        return CandidateSpec(1, topk, reads_confidence)

    def widened(
        self, made: tuple[torch.Tensor, ...], slots: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the draft state ``made``, padded to as many candidates as the states in ``slots`` have."""
        return made

    def num_appended(self, spec: CandidateSpec) -> int:
        """Return how many rows draft-extend appends behind the emitted tokens of a request."""
        return 0

    def max_pending_tokens(self, spec: CandidateSpec) -> int:
        """Return how many tokens of a request :meth:`extend` takes, a power of two that fits a window."""
        return 1 << ((MAX_WINDOW - self.num_appended(spec)).bit_length() - 1)

    @property
    def capture(self) -> tuple[int, ...]:
        """Ids of the target layers whose inputs the draft reads."""
        return self.model.capture

    def empty_state(self, count: int, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """Make the draft state of ``count`` requests that have not been prefilled."""
        device = self.model.device
        return DraftState(
            torch.zeros(count, spec.topk, dtype=torch.int64, device=device),
            torch.zeros(count, spec.topk, device=device),
            torch.zeros(count, self.model.feature_size, dtype=self.model.dtype, device=device),
        )

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Return the draft's confidence in the tokens that it will propose from a draft state.

        It depends on the text alone, not on tokens that will be drawn.

        Returns:
            fp32 ``[B]``, the probability of the first token. Heads that predict acceptance return ``[B, D]``,
            the probability that each depth and all before it are accepted. None if the state holds one
            candidate, which has no log-probability.
        """
        assert isinstance(state, DraftState)
        return state.scores[:, 0].exp() if state.scores.shape[1] > 1 else None

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Grow a draft behind the roots, and select its best nodes as the window.

        Args:
            num_columns: bound on the keys that a node attends to: tokens in the pool, then window nodes.
            sampling: sampling parameters of the requests; this drafter does not depend on them.
        """
        if shape.topk == 1:
            tree = self._grow_chain(state, shape, num_columns)
        else:
            tree = tree_build(state.roots, *self.grow_candidates(state, shape, num_columns), shape)
        return DraftOutput(tree, Deterministic())

    def grow_candidates(self, state: CycleState, shape: SpecShape, num_columns: int) -> Candidates:
        """Grow a tree behind the roots, K nodes a step, and return all of its candidates."""
        draft = state.draft
        seq_lens = state.seq_lens
        assert isinstance(draft, DraftState)
        b = len(seq_lens)
        topk = shape.topk

        # Depth 1 is in the draft state.
        beam, candidates = start_beam(draft.tokens[:, :topk], draft.scores[:, :topk], shape)
        features = draft.features

        # Positions of each later step, ``[S - 1, B, K]``. The root's entry is in the pool.
        prefix_lens = seq_lens + 1
        first = self.model.first_slot
        offsets = self.numbers[1 - first : shape.steps - first, None, None]
        positions = seq_lens[:, None] + offsets.expand(-1, b, topk)

        # A step runs the draft over the beam, and selects the next beam from K candidates of each node.
        for step in range(1, shape.steps):
            attend = self.kv.window_attend(
                state.page_table, prefix_lens, beam.ancestors, step * topk, num_columns
            )
            rows = StepRows(features, beam.tokens.reshape(-1), positions[step - 1].view(-1), beam.rows)
            out = self.model.step(rows, attend)
            beam = grow_beam(beam, candidates, *self._candidates(out.read, topk), step)
            features = self._fed_back(out)
        return candidates

    def _grow_chain(self, state: CycleState, shape: SpecShape, num_columns: int) -> Tree:
        """Take the best token of every step; a chain needs no log-probabilities."""
        draft = state.draft
        seq_lens = state.seq_lens
        assert isinstance(draft, DraftState)
        tokens = draft.tokens[:, :1]
        features = draft.features
        drafted = [tokens]
        prefix_lens = seq_lens + 1
        positions = self._positions(seq_lens, shape.steps)
        for step in range(1, shape.steps):
            bits = self.chain_bits[step - 1 : step].expand(tokens.shape[0], 1)
            attend = self.kv.window_attend(state.page_table, prefix_lens, bits, step, num_columns)
            out = self.model.step(StepRows(features, tokens[:, 0], positions[step]), attend)
            features = self._fed_back(out)
            tokens, _ = self._candidates(out.read, 1)
            drafted.append(tokens)
        return chain_build(state.roots, torch.cat(drafted, 1))

    def _positions(self, seq_lens: torch.Tensor, steps: int) -> dict[int, torch.Tensor]:
        """Return the positions int64 ``[B]`` of the tokens of a chain, by step from 1 on."""
        if steps == 1:
            return {}
        first = self.model.first_slot
        positions = seq_lens + self.numbers[1 - first : steps - first, None]
        return dict(enumerate(positions.unbind(), start=1))

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
        states = self.model.states(out, self._path_rows(out, accepted))
        pending = PendingTokens(states.unflatten(0, accepted.tokens.shape), accepted.tokens, num_committed)
        return self.extend(state, pending, accepted.num_accepted, spec, num_columns)

    def _path_rows(self, out: TargetOutput, accepted: Accepted) -> torch.Tensor:
        """Rows int64 ``[B * (S + 1)]`` of ``out`` that hold the accepted path."""
        b = len(accepted.path)
        first = self.numbers[:b, None]
        return torch.add(accepted.path, first, alpha=out.hidden.shape[0] // b).view(-1)

    def extend(
        self,
        state: CycleState,
        pending: "PendingTokens",
        last: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the draft over the tokens that follow ``state``, store its keys, and return its draft state.

        Args:
            pending: the tokens.
            last: int64 ``[B]``, index of the token behind which the draft state is made.
            spec: candidates that the result holds.
            num_columns: see :meth:`propose`.
        """
        b, length = pending.tokens.shape
        wanted = torch.add(last, self.numbers[:b], alpha=length)
        return self._state(self._read(state, pending, wanted, num_columns), spec)

    def store(self, state: CycleState, pending: "PendingTokens", num_columns: int) -> None:
        """Run the draft over the tokens that follow ``state`` to store its keys only: no draft state is made.

        Args:
            pending: the tokens, at most a window's.
            num_columns: see :meth:`propose`.
        """
        # One row of output, which nobody reads: some layers do not take an empty selection.
        self._read(state, pending, self.numbers[:1], num_columns)

    def _read(
        self, state: CycleState, pending: "PendingTokens", wanted: torch.Tensor, num_columns: int
    ) -> StepOutput:
        """Run the draft over the tokens that follow ``state``, and store its keys.

        Returns:
            Its output at the rows ``wanted``.
        """
        page_table = state.page_table
        seq_lens = state.seq_lens
        states, tokens, num_committed = pending
        b, length = tokens.shape

        # The tokens are a chain behind the root.
        prefix_lens = seq_lens + 1
        skipped = 1 - self.model.first_slot
        bits = self.chain_bits[:length].expand(b, length)
        attend = self.kv.window_attend(page_table, prefix_lens, bits, length, num_columns)
        positions = (seq_lens[:, None] + self.numbers[skipped : skipped + length]).view(-1)
        features = self.model.features(states.flatten(0, 1))
        out = self.model.step(StepRows(features, tokens.reshape(-1), positions), attend, wanted=wanted)
        self.kv.commit_window(page_table, self.numbers[:length].expand(b, length), prefix_lens, num_committed)
        return out

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """Run the draft over prompt rows, and store its keys.

        Returns:
            The draft states of the n prompts that end, with the candidates that ``spec`` asks for.
        """
        return self._state(self._read_prompt(batch), spec)

    def _read_prompt(self, batch: PromptBatch) -> StepOutput:
        """Run the draft over prompt rows, store its keys, and return its output at the rows ``last``."""
        features = self.model.features(self.model.states(batch.out))
        arange = partial(torch.arange, device=features.device)
        first_slot = self.model.first_slot

        # Rows of the draft: for each row of the target the token after it.
        rows = []
        tokens = []
        positions = []
        segments = []
        row_start = 0
        for table, start, stop, *_ in batch.segments:
            count = stop - start
            row_stop = row_start + count
            # A model whose entries begin at slot 0 has a row for the first token of the prompt as well.
            num_first = 1 if start == first_slot == 0 else 0
            first = start + 1 - num_first
            rows += [arange(row_start, row_start + num_first), arange(row_start, row_stop)]
            tokens += [batch.ids[row_start : row_start + num_first], batch.next_ids[row_start:row_stop]]
            positions.append(arange(first - first_slot, stop + 1 - first_slot))
            segments.append(Segment(table, first, stop + 1, first))
            row_start = row_stop

        # One forward. If no prompt ends, it returns a row that nobody reads: some layers do not take none.
        attend = self.kv.prefill_attend(segments)
        step_rows = StepRows(features, torch.cat(tokens), torch.cat(positions), torch.cat(rows))
        wanted = _row_of(segments, batch) if len(batch.last) else self.numbers[:1]
        return self.model.step(step_rows, attend, wanted=wanted)

    def _state(self, out: StepOutput, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        tokens, scores = self._candidates(out.read, spec.topk)
        return DraftState(tokens, scores, self._fed_back(out))

    def _fed_back(self, out: StepOutput) -> torch.Tensor:
        """Return the features that the next step reads; a whole model reads none."""
        return out.fed_back[:, : self.model.feature_size]

    def _candidates(self, read: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best tokens of ``read [T, H]`` as target ids, and their log-probabilities, ``[T, K]``.

        With K = 1 the log-probabilities are 0: a chain does not need them.
        """
        if uses_triton(read) and topk <= MAX_TOPK:
            states, weight, token_map = self.model.readout(read)
            return draft_topk(states, weight, topk, normalized=topk > 1, token_map=token_map)
        ids, scores = topk_of_logits(self.model.logits(read), topk, normalized=topk > 1)
        return self.model.to_target(ids), scores


def _row_of(draft_segments: Sequence[Segment], batch: PromptBatch) -> torch.Tensor:
    """Map rows ``last`` of the target to rows of the draft, which may have one more per request."""
    extra = 0
    shift = []
    for ours, segment in zip(draft_segments, batch.segments, strict=True):
        extra += (ours.stop - ours.start) - (segment.stop - segment.start)
        shift.append(extra)
    return batch.last + to_device(shift, batch.last.device)[batch.requests_of_last()]
