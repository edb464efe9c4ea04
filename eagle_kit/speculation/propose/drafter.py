"""Autoregressive drafting: chains (K = 1) and dynamic trees (EAGLE-2, arXiv 2406.16858; K > 1), and
draft-extend. EAGLE-3, EAGLE-1 and whole small models differ only in their `DraftModel`.

Legend: B requests, K top-k, S steps, N nodes, H hidden, F features, Vd draft vocabulary.

A draft's key-value entry lives at the slot of the token it embeds. Entries in the pool are made from target
states (or, in a whole model, from committed tokens) only; those of drafted nodes live in the scratch, for one
cycle.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.accept import Accepted
from eagle_kit.kernels.backend import uses_triton
from eagle_kit.kernels.draft_topk import MAX_TOPK, draft_topk
from eagle_kit.kernels.sampling import SamplingBatch
from eagle_kit.kernels.transfer import to_device
from eagle_kit.kernels.tree_build import Candidates, Tree, chain_build, grow_beam, start_beam, tree_build
from eagle_kit.kernels.window_attention import chain_bits
from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PoolLayout, Segment
from eagle_kit.models.targets.llama import TargetOutput
from eagle_kit.speculation.proposal import Deterministic, DraftOutput
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.speculation.state import CycleState
from eagle_kit.speculation.verify.verifiers import Relaxed, TargetOnly


class DraftState(NamedTuple):
    """Result of draft-extend: the candidates of depth 1 as target ids ``tokens`` int64 ``[B, K]``, their
    log-probabilities ``scores`` fp32 ``[B, K]``, and the ``features [B, F]`` that they were made from."""

    tokens: torch.Tensor
    scores: torch.Tensor
    features: torch.Tensor


class Missed(NamedTuple):
    """Tokens that the target has decoded and the draft has not read: ``features [B, L, F]`` of the states
    that predicted ``tokens`` int64 ``[B, L]``, of which the first ``counts [B]`` are there."""

    features: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


class Drafter:
    """Draft model with its key-value store. Mutates only the store.

    Args:
        vocab_size: V of the target.
        layout: of the pool, shared with the target's store.
    """

    can_wait = True
    """Whether tokens of plain cycles can be read later, all at once."""
    lookback = 0
    """Prompt tokens before those that the stores lack that must be computed again."""
    verifiers: tuple[type, ...] = (TargetOnly, Relaxed)
    """Verifiers that are sound for these proposals, the default first."""

    def __init__(self, model: DraftModel, vocab_size: int, layout: PoolLayout) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.kv = open_store(
            model.cache,
            layout,
            model.variants,
            first_slot=model.first_slot,
            dtype=model.dtype,
            device=model.device,
        )

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """Raise UserError when ``model`` cannot be drafted with in ``shape``."""
        if shape.topk > model.draft_vocab_size:
            raise UserError(
                f"The shape {shape} asks for more candidates than the draft's {model.draft_vocab_size} "
                "tokens.",
                "Lower topk.",
            )

    @property
    def capture(self) -> tuple[int, ...]:
        """Ids of the target layers whose inputs the draft reads."""
        return self.model.capture

    def empty_state(self, count: int, topk: int) -> tuple[torch.Tensor, ...]:
        """Make the draft state of ``count`` requests that have not been prefilled."""
        device = self.model.device
        return DraftState(
            torch.zeros(count, topk, dtype=torch.int64, device=device),
            torch.zeros(count, topk, device=device),
            torch.zeros(count, self.model.feature_size, dtype=self.model.dtype, device=device),
        )

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Probability of the first token to be proposed behind a draft state, fp32 ``[B]``; None where one
        candidate is kept, which is not weighed."""
        assert isinstance(state, DraftState)
        return state.scores[:, 0].exp() if state.scores.shape[1] > 1 else None

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Grow a draft behind the roots and keep its best nodes.

        Args:
            num_columns: bound on the columns of a window, the pool's included.
            sampling: of the requests; this drafter proposes the same for all.
        """
        if shape.topk == 1:
            tree = self._grow_chain(state, shape, num_columns)
        else:
            tree = tree_build(state.roots, *self.grow_candidates(state, shape, num_columns), shape)
        return DraftOutput(tree, Deterministic())

    def grow_candidates(self, state: CycleState, shape: SpecShape, num_columns: int) -> Candidates:
        """Grow a tree behind the roots, K nodes a step -> all of its candidates."""
        draft, seq_lens = state.draft, state.seq_lens
        assert isinstance(draft, DraftState)
        b, topk = len(seq_lens), shape.topk
        beam, candidates = start_beam(draft.tokens[:, :topk], draft.scores[:, :topk], shape)
        features = draft.features
        for step in range(1, shape.steps):
            attend = self.kv.window_attend(
                state.page_table, seq_lens + 1, beam.ancestors, step * topk, num_columns
            )
            slots = (seq_lens + step)[:, None].expand(b, topk).reshape(-1)
            out = self.model.step(features[beam.rows], beam.tokens.reshape(-1), slots, attend)
            beam = grow_beam(beam, candidates, *self._candidates(out, topk), step)
            features = self._fed_back(out)
        return candidates

    def _grow_chain(self, state: CycleState, shape: SpecShape, num_columns: int) -> Tree:
        """Take the best token of every step; a chain ranks nothing."""
        draft, seq_lens = state.draft, state.seq_lens
        assert isinstance(draft, DraftState)
        tokens, features = draft.tokens[:, :1], draft.features
        drafted = [tokens]
        for step in range(1, shape.steps):
            bits = chain_bits(step, tokens.device)[step - 1 :].expand(tokens.shape[0], 1)
            attend = self.kv.window_attend(state.page_table, seq_lens + 1, bits, step, num_columns)
            out = self.model.step(features, tokens[:, 0], seq_lens + step, attend)
            features = self._fed_back(out)
            tokens, _ = self._candidates(out, 1)
            drafted.append(tokens)
        return chain_build(state.roots, torch.cat(drafted, 1))

    def draft_extend(
        self,
        state: CycleState,
        out: TargetOutput,
        accepted: Accepted,
        num_committed: torch.Tensor,
        topk: int,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the draft over the emitted tokens and the target states that predicted them, and store its
        entries.

        Args:
            state: at the start of the cycle.
            out: the target's output over the window, ``[B * N]`` rows.
            accepted: the path and the emitted tokens ``[B, S + 1]``.
            num_committed: int64 ``[B]``, emitted tokens that are stored: all, or 0 for padding.
            topk: candidates of depth 1 to return.

        Returns:
            The draft state of the next cycle.
        """
        b = len(accepted.tokens)
        first = torch.arange(b, device=out.hidden.device)[:, None] * (out.hidden.shape[0] // b)
        rows = (first + accepted.path).view(-1)
        features = self.model.features(out.hidden[rows], out.aux[rows])
        missed = Missed(features.unflatten(0, accepted.tokens.shape), accepted.tokens, num_committed)
        return self.extend(state, missed, accepted.num_accepted, topk, num_columns)

    def extend(
        self, state: CycleState, missed: "Missed", last: torch.Tensor, topk: int, num_columns: int
    ) -> tuple[torch.Tensor, ...]:
        """Run the draft over tokens behind ``state``, and store its entries.

        Args:
            last: int64 ``[B]``, the token to return the draft state of.
        """
        page_table, seq_lens = state.page_table, state.seq_lens
        features, tokens, num_committed = missed
        b, length = tokens.shape
        bits = chain_bits(length, seq_lens.device).expand(b, length)
        attend = self.kv.window_attend(page_table, seq_lens + 1, bits, length, num_columns)
        offset = torch.arange(length, device=seq_lens.device)
        slots = (seq_lens[:, None] + 1 + offset).view(-1)
        states = self.model.step(features.flatten(0, 1), tokens.reshape(-1), slots, attend)
        self.kv.commit_window(page_table, offset.expand(b, length), seq_lens + 1, num_committed)
        rows = torch.arange(b, device=seq_lens.device) * length + last
        return self._state(states[rows], topk)

    def prefill(
        self,
        out: TargetOutput,
        ids: torch.Tensor,
        next_ids: torch.Tensor,
        segments: Sequence[Segment],
        last: torch.Tensor,
        topk: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the draft over prompt rows of one or several requests, and store its entries.

        Args:
            out: the target's output at the T rows.
            ids: int64 ``[T]``, their tokens.
            next_ids: int64 ``[T]``, the token after each.
            segments: requests of the rows, as the target computed them.
            last: int64 ``[n]``, rows to return the draft state of.
        """
        features = self.model.features(out.hidden, out.aux)
        rows, tokens, slots, mine = [], [], [], []
        arange = partial(torch.arange, device=features.device)
        at = 0
        for table, start, stop, _ in segments:
            count = stop - start
            # A model whose entries begin at slot 0 enters the first token as well; it has no row of its own.
            head = 1 if start == 0 and self.model.first_slot == 0 else 0
            first = start + 1 - head
            rows += [arange(at, at + head), arange(at, at + count)]
            tokens += [ids[at : at + head], next_ids[at : at + count]]
            slots.append(arange(first, stop + 1))
            mine.append(Segment(table, first, stop + 1, first))
            at += count
        attend = self.kv.prefill_attend(mine)
        states = self.model.step(features[torch.cat(rows)], torch.cat(tokens), torch.cat(slots), attend)
        return self._state(states[_row_of(mine, segments, last)], topk)

    def _state(self, out: torch.Tensor, topk: int) -> tuple[torch.Tensor, ...]:
        tokens, scores = self._candidates(out, topk)
        return DraftState(tokens, scores, self._fed_back(out))

    def _fed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Features of the next step, from the states of this one; a whole model has none."""
        return out[:, : self.model.feature_size]

    def _candidates(self, out: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Best tokens of states ``[T, H]``, as target ids, and their log-probabilities, ``[T, K]`` each.

        A chain ranks nothing, so with K = 1 the log-probabilities are left at 0.
        """
        if uses_triton(out) and topk <= MAX_TOPK:
            states, weight, token_map = self.model.readout(out)
            return draft_topk(states, weight, topk, normalized=topk > 1, token_map=token_map)
        logits = self.model.logits(out)
        if topk == 1:
            ids = logits.argmax(-1, keepdim=True)
            return self.model.to_target(ids), torch.zeros_like(ids, dtype=torch.float32)
        logits = logits.float()
        values, ids = logits.topk(topk, -1)
        return self.model.to_target(ids), values - logits.logsumexp(-1, keepdim=True)


def _row_of(mine: Sequence[Segment], theirs: Sequence[Segment], last: torch.Tensor) -> torch.Tensor:
    """Map rows ``last`` of the target to rows of the draft, which may have one more per request."""
    extra, shift, bounds = 0, [], []
    at = 0
    for own, segment in zip(mine, theirs, strict=True):
        extra += (own.stop - own.start) - (segment.stop - segment.start)
        at += segment.stop - segment.start
        shift.append(extra)
        bounds.append(at)
    segment_of = torch.searchsorted(to_device(bounds, last.device), last, right=True)
    return last + to_device(shift, last.device)[segment_of]
